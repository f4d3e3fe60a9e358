// "Try it": texts on one task, on several, or on the one that the server finds.
import { classify, curlClassify } from "./api.js";
import { bars, byId, count, el, percent, plain } from "./draw.js";

const SHOWN_BARS = 6;
let tasks = [];
let touched = false; // nobody has chosen yet: a first choice is made for them

/** Draws the choice of tasks; what was ticked stays ticked. */
export function showChoices(found) {
  const before = new Set(chosen().map((task) => task.name));
  const find = wantsFinding();
  tasks = found;
  byId("try-empty").hidden = tasks.length > 0;
  byId("try-form").hidden = tasks.length === 0;
  const keyed = tasks.some((task) => task.has_key);
  const findTicked = keyed && (touched ? find : true);
  byId("choices").replaceChildren(
    keyed ? tick("find", "Find the task for me", findTicked, "find") : "",
    ...tasks.map((task, i) => tick(`task-${i}`, task.name, before.has(task.name) || (!touched && !keyed && i === 0))),
  );
  showSecond();
}

function tick(id, words, checked, extra = "") {
  const box = el("input", { type: "checkbox", id, checked, onchange: () => {
    touched = true;
    showSecond();
  } });
  return el("label", { class: `tick ${extra}`, for: id }, box, el("span", {}, words));
}

const wantsFinding = () => Boolean(byId("find")?.checked);
const chosen = () => tasks.filter((_, i) => byId(`task-${i}`)?.checked);

function showSecond() {
  const pairs = chosen().some((task) => task.is_pair) || (wantsFinding() && tasks.some((task) => task.is_pair && task.has_key));
  byId("second").hidden = !pairs;
}

export function startAsking() {
  const form = byId("try-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(form);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

async function ask(form) {
  if (form.ariaBusy === "true") return;
  byId("try-problem").textContent = "";
  byId("try-status").textContent = "";
  try {
    const lines = read();
    const bodies = requests(lines);
    form.ariaBusy = "true";
    const answers = await Promise.all(bodies.map((body) => classify(body)));
    showAnswers(lines, bodies, answers);
  } catch (error) {
    byId("try-problem").textContent = error.message;
  } finally {
    form.ariaBusy = "false";
  }
}

/** The lines of both fields; lines that are empty in both are left out. */
function read() {
  const first = byId("texts").value.split("\n").map((line) => line.trim());
  const second = byId("second").hidden ? [] : byId("second-texts").value.split("\n").map((line) => line.trim());
  const lines = Array.from({ length: Math.max(first.length, second.length) }, (_, i) => ({ number: i + 1, text: first[i] ?? "", second: second[i] ?? "" }))
    .filter((line) => line.text || line.second);
  if (!lines.length) throw new Error("Write a text first, one per line.");
  const missing = lines.find((line) => !line.text);
  if (missing) throw new Error(`Line ${missing.number} has a second text and no first one.`);
  return lines;
}

/** One request for the tasks that were ticked, each text on each of them, and one for "find it". */
function requests(lines) {
  const asked = chosen();
  const bodies = [];
  for (const task of asked.filter((one) => one.is_pair)) {
    const missing = lines.find((line) => !line.second);
    if (missing) throw new Error(`${task.name} compares two texts, and line ${missing.number} has no second one.`);
  }
  if (wantsFinding()) bodies.push({ inputs: lines.map((line) => (line.second ? [line.text, line.second] : line.text)), task: null });
  if (asked.length) {
    const inputs = lines.flatMap((line) => asked.map((task) => (task.is_pair ? [line.text, line.second] : line.text)));
    bodies.push({ inputs, task: asked.length === 1 ? asked[0].name : lines.flatMap(() => asked.map((task) => task.name)) });
  }
  if (!bodies.length) throw new Error("Tick a task, or let the task be found.");
  return bodies;
}

function showAnswers(lines, bodies, answers) {
  const groups = lines.map((line, i) => {
    const own = bodies.flatMap((body, k) => {
      const each = answers[k].length / lines.length;
      return answers[k].slice(i * each, (i + 1) * each).map((answer) => ({ ...answer, found: body.task === null }));
    });
    return { line, own };
  });
  byId("answers").replaceChildren(
    ...groups.map(({ line, own }) => el("div", { class: "answer-group" },
      el("p", { class: "said" }, `“${line.text}”`, line.second ? el("span", { class: "soft" }, ` with “${line.second}”`) : null),
      el("div", { class: "answer-row" }, own.map(card)))),
    el("details", {}, el("summary", {}, "The same with curl"), bodies.map((body) => el("pre", {}, curlClassify(body)))),
  );
  const all = groups.flatMap(({ own }) => own);
  byId("try-status").textContent = all.length > 4
    ? `${count(all.length, "answer")} for ${count(lines.length, "text")}. The first: ${spoken(all[0])}`
    : all.map(spoken).join(" ");
}

const spoken = (answer) => (answer.task === null
  ? "Unknown: unlike every task taught."
  : `${answer.found ? "Found " : ""}${answer.task}: ${answer.label}${answer.score === null ? "" : `, ${percent(answer.score)}`}.`);

function card(answer) {
  const similar = answer.similarity === null || answer.similarity === undefined ? "" : `similarity ${plain(answer.similarity)}`;
  if (answer.task === null) {
    return el("article", { class: "answer", "aria-label": "No task found" }, el("span", { class: "soft" }, "found no task"),
      el("p", { class: "label unknown" }, answer.label),
      el("span", { class: "soft" }, `Unlike every task taught${similar ? `: the nearest has ${similar}` : ""}. Tick a task to ask it all the same.`));
  }
  const entries = Object.entries(answer.probabilities ?? {}).sort((a, b) => b[1] - a[1]);
  const rest = entries.slice(SHOWN_BARS);
  return el("article", { class: "answer", "aria-label": `Answer of ${answer.task}` },
    el("span", { class: "soft" }, `${answer.found ? "found: " : ""}${answer.task}${similar ? `, ${similar}` : ""}`),
    el("p", { class: "label" }, answer.label),
    bars(entries.slice(0, SHOWN_BARS), answer.label),
    rest.length ? el("details", {}, el("summary", {}, `${rest.length} more labels`), bars(rest, answer.label)) : null);
}
