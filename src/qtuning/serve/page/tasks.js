// The list of tasks, and taking one away.
import { removeTask } from "./api.js";
import { byId, count, el, percent } from "./draw.js";

const SHOWN_LABELS = 8;

/** Draws the list; `afterwards` is called when a task has been removed. */
export function showTasks({ model, method, tasks }, afterwards) {
  byId("about").textContent = `Model ${model}, method ${method}, ${count(tasks.length, "task")} taught.`;
  byId("tasks-status").textContent = "";
  byId("tasks-empty").hidden = tasks.length > 0;
  byId("tasks-list").replaceChildren(...tasks.map((task) => card(task, afterwards)));
}

function card(task, afterwards) {
  const labels = el("ul", { class: "labels folded", "aria-label": `Labels of ${task.name}` }, task.labels.map((label) => el("li", {}, label)));
  const facts = [
    [`validation ${task.metric}`, percent(task.validation_score)],
    task.test_score === null ? null : ["test", percent(task.test_score)],
    task.seconds === null || task.seconds === undefined ? null : ["taught in", `${task.seconds.toFixed(1)} s`],
    task.version > 1 ? ["version", String(task.version)] : null,
  ].filter(Boolean);
  const more = task.labels.length - SHOWN_LABELS;
  return el("li", { class: "task" },
    el("div", { class: "top" }, el("h3", {}, task.name),
      el("button", { class: "small", type: "button", "aria-label": `Remove ${task.name}`, onclick: () => remove(task, afterwards) }, "Remove")),
    labels,
    more > 0 ? unfold(labels, more, task.name) : null,
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    task.is_pair || !task.has_key
      ? el("span", { class: "soft" }, [task.is_pair ? "Pairs of texts." : "", task.has_key ? "" : "No key: ask it by name."].join(" ").trim())
      : null);
}

function unfold(labels, more, name) {
  const button = el("button", { class: "more", type: "button", "aria-expanded": "false", "aria-label": `${more} more labels of ${name}` }, `${more} more`);
  button.addEventListener("click", () => {
    const folded = labels.classList.toggle("folded");
    button.textContent = folded ? `${more} more` : "fewer";
    button.setAttribute("aria-expanded", String(!folded));
  });
  return button;
}

async function remove(task, afterwards) {
  byId("tasks-problem").textContent = "";
  if (!(await confirmed(task.name))) return;
  try {
    const { removed, note } = await removeTask(task.name);
    await afterwards();
    byId("tasks-status").textContent = `${removed} is removed. ${note}`;
  } catch (error) {
    byId("tasks-problem").textContent = error.message;
  }
  const title = byId("tasks-title"); // the button that was pressed is gone
  title.tabIndex = -1;
  title.focus({ preventScroll: true });
}

function confirmed(name) {
  const dialog = byId("remove");
  byId("remove-title").textContent = `Remove ${name}?`;
  byId("remove-text").textContent = `${name} can then no longer be asked, and there is no way back but to teach it again. `
    + "The other tasks stay exactly as they are. What the queue and the shared prefix learnt from it stays in them.";
  dialog.returnValue = "keep";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "remove"), { once: true });
  });
}
