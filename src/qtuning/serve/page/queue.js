// "What the queue remembers": what is kept of each task, its scale, and how alike the tasks are.
import { barChart, byId, count, el, figure, matrixChart, percent, plain, stripChart, table } from "./draw.js";

const FEW = 3; // similar pairs named in words
const WHOLE = 0.98; // the scale turns a prompt a little, so one that is there whole may show 0.99

export function showQueue({ tasks = [], queue_size: size, kept = [], scales = [], similarity = [] }, method) {
  const known = (list) => list.some((value) => value !== null && value !== undefined);
  const figures = [
    tasks.length && known(kept) ? keptFigure(tasks, kept, size) : null,
    scales.some((strip) => strip.values?.length) ? scaleFigure(scales.filter((strip) => strip.values?.length)) : null,
    tasks.length > 1 && known(similarity.flat()) ? similarityFigure(tasks, similarity) : null,
  ].filter(Boolean);
  const empty = byId("queue-empty");
  empty.hidden = figures.length > 0;
  byId("queue-hint").hidden = figures.length === 0;
  empty.textContent = tasks.length ? `The method ${method} keeps no queue.` : "The queue is empty. It fills as tasks are taught.";
  byId("queue-charts").replaceChildren(...figures);
}

const soft = (...children) => el("p", { class: "soft" }, ...children);

function keptFigure(tasks, kept, size) {
  const gone = kept.filter((value) => value !== null && value < WHOLE).length;
  const said = `${count(tasks.length, "task")}, room for ${count(size, "prompt")}; ${gone ? `${gone} no longer live in it whole` : "all live in it whole"}.`;
  return figure("What is left of each task", soft(`Share of a task's own prompt that the queue still holds, oldest task first. ${said}`),
    `Bars of what the queue holds: ${said}`, (width, words) => barChart(width, words, tasks, kept.map((value) => value ?? null)),
    table(["task", "kept"], tasks.map((task, i) => [task, percent(kept[i])]), "Share of each prompt that the queue holds"));
}

function scaleFigure(scales) {
  const all = scales.flatMap((strip) => strip.values);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const key = (kind, words) => el("span", { class: "key" }, el("i", { class: kind, "aria-hidden": "true" }), words);
  return figure("What each task draws on",
    el("div", {}, soft("One cell per prompt vector that a task reads, from the oldest in the queue to its own: the weight it gave it."),
      soft(key("above", `above 1, at most ${plain(high)}`), key("less", `below 1, at least ${plain(low)}`))),
    `Heat map of the weights of ${count(scales.length, "task")}, from ${plain(low)} to ${plain(high)}.`,
    (width, words) => stripChart(width, words, scales),
    table(["task", "vectors", "lowest", "mean", "highest", "all, in order"],
      scales.map(({ task, values }) => [task, String(values.length), plain(Math.min(...values)), plain(mean(values)), plain(Math.max(...values)), values.map(plain).join(" ")]),
      "Weights of each task"));
}

function similarityFigure(tasks, rows) {
  const pairs = [];
  tasks.forEach((task, i) => tasks.slice(0, i).forEach((other, j) => {
    const value = rows[i]?.[j];
    if (value !== null && value !== undefined) pairs.push([value, `${other} and ${task} (${plain(value)})`]);
  }));
  const nearest = pairs.sort((a, b) => b[0] - a[0]).slice(0, FEW).map(([, words]) => words).join(", ");
  return figure("How alike the tasks are", soft(`Similarity of the keys by which a text finds its task; 1 is the same. Most alike: ${nearest || "none"}.`),
    `Matrix of similarities. Most alike: ${nearest || "none"}.`, (width, words) => matrixChart(width, words, tasks, rows),
    table(["task", ...tasks], tasks.map((task, i) => [task, ...tasks.map((_, j) => plain(rows[i]?.[j]))]), "Similarity of tasks"));
}
