// Elements and charts. Charts are SVG at the real width of their place and are drawn again when that changes.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: attributes, then children (strings become text, null is left out). */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const plain = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

/** Words and numbers beside bars; a screen reader hears the words and the numbers. */
export function bars(entries, best) {
  const rows = entries.map(([word, value]) => {
    const inner = el("i");
    inner.style.width = `${Math.max(0, Math.min(1, value)) * 100}%`;
    return el("li", { class: word === best ? "best" : null },
      el("span", { class: "word" }, word), el("span", { class: "bar", "aria-hidden": "true" }, inner),
      el("span", { class: "value" }, percent(value)));
  });
  return el("ul", { class: "bars" }, rows);
}

/** A table of words and numbers; `head[0]` names the column of row headings. */
export function table(head, rows, caption) {
  const first = el("tr", {}, head.map((word, i) => el("th", { scope: "col", class: i && rows[0]?.[i].length <= 24 ? "num" : null }, word)));
  const body = rows.map(([name, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell) => el("td", { class: cell.length > 24 ? "long" : "num" }, cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, first), el("tbody", {}, body)));
}

/** A chart with its title, what to read in it, and the same numbers as a table. */
export function figure(title, hint, said, draw, alternative) {
  const place = el("div", { class: "place" });
  responsive(place, (width) => draw(width, said));
  return el("figure", {}, el("figcaption", {}, title), hint, place,
    el("details", {}, el("summary", {}, `${title}: as a table`), alternative));
}

/** Draws into `place` now and whenever its width changes; returns a function that draws again. */
export function responsive(place, draw) {
  let last = 0;
  const again = () => last > 0 && place.replaceChildren(draw(last));
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== last) {
      last = width;
      again();
    }
  }).observe(place);
  return again;
}

function chart(width, height, said) {
  return svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said });
}

/** Names cut to what fits in `room` pixels. */
function cut(name, room) {
  const most = Math.max(3, Math.floor(room / 7));
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

const gutter = (names, width) => Math.min(Math.max(...names.map((name) => name.length)) * 7.2 + 12, width * 0.38, 200);

/** One horizontal bar per name, value from 0 to 1, null shown as a dash. */
export function barChart(width, said, names, values) {
  const left = gutter(names, width);
  const right = 58;
  const step = 26;
  const picture = chart(width, names.length * step, said);
  const room = width - left - right;
  names.forEach((name, i) => {
    const y = i * step;
    const value = values[i];
    picture.append(svg("text", { class: "name", x: 0, y: y + 17 }, cut(name, left)));
    picture.append(svg("rect", { class: value === null ? "none" : "track", x: left, y: y + 6, width: room, height: 14, rx: 4 }));
    if (value !== null) picture.append(svg("rect", { class: "more", x: left, y: y + 6, width: Math.max(0, Math.min(1, value)) * room, height: 14, rx: 4 }));
    picture.append(svg("text", { class: "tick", x: width, y: y + 17, "text-anchor": "end" }, percent(value)));
  });
  return picture;
}

/** Strips of cells around 1: blue above, red below, deeper the further away. */
export function stripChart(width, said, strips) {
  const narrow = width < 520;
  const left = narrow ? 0 : gutter(strips.map((strip) => strip.task), width);
  const step = narrow ? 42 : 26;
  const longest = Math.max(...strips.map((strip) => strip.values.length));
  const far = Math.max(...strips.flatMap((strip) => strip.values.map((value) => Math.abs(value - 1))), 1e-9);
  const cell = Math.min((width - left) / longest, 26);
  const gap = cell > 6 ? 1 : 0;
  const picture = chart(width, strips.length * step, said);
  strips.forEach((strip, i) => {
    const y = i * step + (narrow ? 18 : 2);
    picture.append(svg("text", { class: "name", x: 0, y: narrow ? y - 4 : y + 15 }, cut(strip.task, narrow ? width : left)));
    picture.append(svg("rect", { class: "track", x: left, y, width: cell * strip.values.length, height: 20, rx: 2 }));
    strip.values.forEach((value, j) => {
      picture.append(svg("rect", {
        class: value < 1 ? "less" : "above", x: (left + j * cell).toFixed(2), y, width: Math.max(cell - gap, 0.5).toFixed(2), height: 20,
        "fill-opacity": (Math.abs(value - 1) / far).toFixed(3),
      }, svg("title", {}, `${strip.task}, vector ${j + 1}: ${plain(value)}`)));
    });
  });
  return picture;
}

/** A square of cells between -1 and 1, with numbers where they fit; null cells stay empty. */
export function matrixChart(width, said, names, rows) {
  const left = gutter(names, width) + 18;
  const top = 20;
  const cell = Math.max(Math.min((width - left) / names.length, 52), 18);
  const high = Math.min(cell, 32);
  const picture = chart(Math.max(width, Math.ceil(left + names.length * cell)), top + names.length * high, said);
  names.forEach((name, i) => {
    const y = top + i * high;
    if (high >= 12) picture.append(svg("text", { class: "name", x: 0, y: y + high / 2 + 4 }, cut(`${i + 1} ${name}`, left)));
    if (cell >= 14) picture.append(svg("text", { class: "tick", x: left + (i + 0.5) * cell, y: top - 6, "text-anchor": "middle" }, `${i + 1}`));
    names.forEach((other, j) => {
      const value = rows[i]?.[j] ?? null;
      const box = { x: (left + j * cell + 0.5).toFixed(2), y: (y + 0.5).toFixed(2), width: (cell - 1).toFixed(2), height: (high - 1).toFixed(2), rx: 2 };
      if (value === null) {
        picture.append(svg("rect", { class: "none", ...box }, svg("title", {}, `${name} and ${other}: no key`)));
        return;
      }
      picture.append(svg("rect", { class: "track", ...box }));
      picture.append(svg("rect", { class: value < 0 ? "less" : "more", ...box, "fill-opacity": (Math.min(1, Math.abs(value)) * 0.45).toFixed(3) },
        svg("title", {}, `${name} and ${other}: ${plain(value)}`)));
      if (cell >= 32) picture.append(svg("text", { class: "in-cell", x: left + (j + 0.5) * cell, y: y + high / 2 + 4 }, plain(value)));
    });
  });
  return picture;
}

/** Validation over the epochs, from 0 to 100 %. */
export function curveChart(width, said, points, epochs) {
  const height = 120;
  const [left, bottom, top] = [40, 20, 8];
  const picture = chart(width, height, said);
  const last = Math.max(epochs, ...points.map(([epoch]) => epoch), 2);
  const x = (epoch) => left + ((width - left - 8) * (epoch - 1)) / (last - 1);
  const y = (value) => top + (height - top - bottom) * (1 - Math.max(0, Math.min(1, value)));
  for (const value of [0, 0.5, 1]) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - 8, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${100 * value} %`));
  }
  for (const epoch of new Set([1, Math.ceil(last / 2), last])) {
    picture.append(svg("text", { class: "tick", x: x(epoch), y: height - 4, "text-anchor": "middle" }, `${epoch}`));
  }
  picture.append(svg("polyline", { class: "curve-line", points: points.map(([epoch, value]) => `${x(epoch).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  for (const [epoch, value] of points) {
    picture.append(svg("circle", { class: "curve-dot", cx: x(epoch), cy: y(value), r: 3 }, svg("title", {}, `epoch ${epoch}: ${percent(value)}`)));
  }
  return picture;
}
