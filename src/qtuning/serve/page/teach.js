// "Teach a task": a file, a look at it, and progress while it is learnt.
import { cancel, curlTeach, follow, getTeachings, goOn, teach } from "./api.js";
import { byId, count, curveChart, el, percent, responsive } from "./draw.js";
import { readRows } from "./rows.js";

const SHOWN_ROWS = 5;
const ENDED = ["stopped", "done", "failed"];
const TRIES = 6;
const STATES = { waiting: "waiting for its turn", running: "learning", stopped: "stopped", done: "done", failed: "failed" };

let file = null;
let looked = 0; // numbers the looks at files, so that a slow one cannot overtake a later one
let named = ""; // the name we put in ourselves, so that a typed one is never overwritten
let taught = []; // tasks as the server last told them
let changed = async () => {}; // called when a task has been learnt
const cards = new Map();

export function startTeaching(afterwards) {
  changed = afterwards;
  const zone = byId("drop");
  const input = byId("file");
  zone.addEventListener("click", (event) => event.target !== input && input.click());
  input.addEventListener("change", () => input.files[0] && look(input.files[0]));
  for (const name of ["dragenter", "dragover"]) zone.addEventListener(name, () => zone.classList.add("over"));
  for (const name of ["dragleave", "drop"]) zone.addEventListener(name, () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => event.dataTransfer.files[0] && look(event.dataTransfer.files[0]));
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault()); // never leave the page for a file
  byId("name").addEventListener("input", showReplace);
  byId("teach-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit(event.currentTarget);
  });
}

/** What is taught, so that a name in use is noticed before anything is sent. */
export function knowTasks(tasks) {
  taught = tasks;
  showReplace();
}

function showReplace() {
  const exists = taught.some((task) => task.name === byId("name").value.trim());
  byId("replace-line").hidden = !exists;
  if (!exists) byId("replace").checked = false;
}

/** Reads the file here and shows what is in it. */
async function look(chosen) {
  looked += 1;
  const mine = looked;
  file = null;
  byId("file").value = ""; // the same file may be chosen again after it was mended
  byId("teach-problem").textContent = "";
  byId("preview").replaceChildren();
  try {
    const seen = await readRows(chosen);
    if (mine !== looked) return;
    file = chosen;
    byId("preview").replaceChildren(preview(chosen.name, seen));
    const field = byId("name");
    if (!field.value || field.value === named) {
      named = nameFrom(chosen.name);
      field.value = named;
    }
    showReplace();
    byId("teach-status").textContent = `${chosen.name}: ${count(seen.rows.length, "row")}, ${count(seen.labels.size, "label")}.`;
  } catch (error) {
    if (mine === looked) byId("teach-problem").textContent = error.message;
  }
}

/** A name that the server takes: letters, digits, dots, dashes and underlines. */
function nameFrom(fileName) {
  return fileName.replace(/\.[^.]+$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+|[.-]+$/g, "").slice(0, 64);
}

function preview(name, { rows, labels, pairs }) {
  const columns = ["text", ...(pairs ? ["text_b"] : []), "label"];
  const few = [...labels].filter(([, number]) => number < 4).map(([label]) => label);
  const head = el("tr", {}, columns.map((column) => el("th", { scope: "col" }, column)));
  const body = rows.slice(0, SHOWN_ROWS).map((row) => el("tr", {}, columns.map((column) => el("td", {}, short(row[column])))));
  return el("div", { class: "preview", role: "group", "aria-label": `Preview of ${name}` },
    el("table", {}, el("caption", {}, `${name}: ${count(rows.length, "row")}, ${count(labels.size, "label")}${rows.length > SHOWN_ROWS ? `; the first ${SHOWN_ROWS}` : ""}`),
      el("thead", {}, head), el("tbody", {}, body)),
    el("ul", { class: "counts", "aria-label": "Rows per label" }, [...labels].map(([label, number]) => el("li", {}, `${label}: ${number}`))),
    few.length ? el("p", { class: "soft" }, `Few rows for ${few.slice(0, 6).join(", ")}${few.length > 6 ? ", …" : ""}: some are set aside for validation, so expect rough scores.`) : null);
}

function short(value) {
  const text = String(value ?? "");
  return text.length > 140 ? `${text.slice(0, 139)}…` : text;
}

async function submit(form) {
  if (form.ariaBusy === "true") return;
  const problem = byId("teach-problem");
  const name = byId("name").value.trim();
  const replace = byId("replace").checked;
  problem.textContent = "";
  if (!file) problem.textContent = "Choose a file first.";
  else if (!name) problem.textContent = "Give the task a name.";
  else if (!byId("replace-line").hidden && !replace) problem.textContent = `There is a task ${name} already. Tick the box to replace it, or choose another name.`;
  if (problem.textContent) return;
  form.ariaBusy = "true";
  try {
    const begun = await teach(name, file, replace);
    byId("teach-command").replaceChildren(el("details", {}, el("summary", {}, "The same with curl"), el("pre", {}, curlTeach(name, file.name, replace))));
    form.reset();
    byId("preview").replaceChildren();
    showReplace();
    [file, named] = [null, ""];
    show(begun);
    watch();
  } catch (error) {
    problem.textContent = error.message;
  } finally {
    form.ariaBusy = "false";
  }
}

let watching = false;
let again = false;

/** Follows whatever is being taught, one stream at a time, until nothing is. */
export async function watch() {
  if (watching) {
    again = true;
    return;
  }
  watching = true;
  let failures = 0;
  do {
    again = false;
    try {
      const all = await getTeachings();
      for (const teaching of all) if (cards.has(teaching.id) || !["done", "failed"].includes(teaching.state)) show(teaching);
      const live = all.find((one) => one.state === "running") ?? all.find((one) => one.state === "waiting");
      if (live) {
        again = true;
        let last = null;
        for await (const progress of follow(live.id)) {
          last = progress;
          show(progress);
          if (ENDED.includes(progress.state)) break;
        }
        if (!last || !ENDED.includes(last.state)) await pause(1); // the stream broke off, or had nothing to say
      }
      failures = 0;
    } catch {
      failures += 1;
      again = failures < TRIES;
      byId("teach-problem").textContent = again ? "The connection is lost; trying again …" : "The server does not answer. Reload the page when it is back.";
      await pause(2);
      continue;
    }
    if (byId("teach-problem").textContent.startsWith("The connection is lost")) byId("teach-problem").textContent = "";
  } while (again);
  watching = false;
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

/** Makes the card of a teaching, or brings it up to date; what has the focus keeps it. */
function show(teaching) {
  let card = cards.get(teaching.id);
  if (!card) {
    card = newCard(teaching);
    cards.set(teaching.id, card);
    byId("teachings").prepend(card.node);
  }
  const { state, epoch, epochs, validation, best, loss } = teaching;
  const before = card.state;
  if (ENDED.includes(before) && before !== "stopped") return; // a late word about what has ended
  card.state = state;
  card.epochs = epochs;
  card.stopping &&= ["waiting", "running"].includes(state);
  card.said.textContent = card.stopping ? "stopping after this epoch" : STATES[state] ?? state;
  card.progress.max = epochs || 1;
  card.progress.value = state === "done" ? epochs || 1 : epoch || 0;
  card.facts.replaceChildren(...[
    ["epoch", epochs ? `${epoch ?? 0} of ${epochs}` : "–"], ["validation", percent(validation)], ["best", percent(best)],
    ["loss", loss === null || loss === undefined ? "–" : loss.toFixed(3)],
  ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  if (epoch && validation !== null && validation !== undefined) card.points.set(epoch, validation);
  card.curve.hidden = card.points.size === 0;
  card.draw();
  toggle(card, ["waiting", "running"].includes(state), state === "stopped");
  if (state !== before) enter(card, teaching);
}

function enter(card, { state, task, best, message, result }) {
  const scores = [`${percent(result?.validation_score ?? best)} on validation`];
  if (typeof result?.test_score === "number") scores.push(`${percent(result.test_score)} on test`);
  card.outcome.classList.toggle("bad", state === "failed");
  const said = {
    waiting: `${task} is waiting for its turn.`,
    running: `Learning ${task}.`,
    stopped: `${task} is stopped. What it has learnt so far is kept; go on when you like.`,
    done: `${task} is taught: ${scores.join(", ")}. Try it above.`,
    failed: `${task} could not be taught${message ? `: ${message}` : "."}`,
  }[state] ?? `${task}: ${state}.`;
  card.outcome.textContent = ["stopped", "done", "failed"].includes(state) ? said : message || "";
  byId("teach-status").textContent = said;
  if (state === "done") changed();
}

function toggle(card, stoppable, resumable) {
  const focused = [card.stop, card.resume].find((button) => button === document.activeElement);
  card.stop.hidden = !stoppable;
  card.resume.hidden = !resumable;
  if (focused?.hidden) [card.stop, card.resume, card.heading].find((place) => !place.hidden).focus();
}

function newCard(teaching) {
  const { id, task } = teaching;
  const card = { state: null, epochs: 0, points: new Map() };
  const act = (what) => async () => {
    byId("teach-problem").textContent = "";
    try {
      show(await what(id));
      watch();
    } catch (error) {
      card.stopping = false;
      byId("teach-problem").textContent = error.message;
    }
  };
  const stopIt = (which) => {
    card.stopping = true;
    return cancel(which);
  };
  card.said = el("span", { class: "state" });
  card.heading = el("h3", { tabindex: "-1" }, `${task} `, card.said);
  card.stop = el("button", { class: "small", type: "button", "aria-label": `Stop teaching ${task}`, onclick: act(stopIt) }, "Stop");
  card.resume = el("button", { class: "small", type: "button", "aria-label": `Go on teaching ${task}`, onclick: act(goOn), hidden: true }, "Go on");
  card.buttons = el("div", { class: "buttons" }, card.stop, card.resume);
  card.progress = el("progress", { "aria-label": `Progress of ${task}` });
  card.facts = el("dl", { class: "facts" });
  card.curve = el("div", { class: "curve", hidden: true });
  card.outcome = el("p", { class: "outcome" });
  card.draw = responsive(card.curve, (width) => {
    const points = [...card.points].sort((a, b) => a[0] - b[0]);
    const [epoch, value] = points.at(-1) ?? [0, null];
    return curveChart(width, `Validation score of ${task} by epoch; epoch ${epoch}: ${percent(value)}`, points, card.epochs);
  });
  card.node = el("li", { class: "teaching" }, el("div", { class: "top" }, card.heading, card.buttons), card.progress, card.facts, card.curve, card.outcome);
  return card;
}
