// The page: asks the server what there is, hands it to the sections, and asks for a token where one is needed.
import { getQueue, getTasks, onTokenWanted } from "./api.js";
import { showChoices, startAsking } from "./ask.js";
import { byId } from "./draw.js";
import { showQueue } from "./queue.js";
import { showTasks } from "./tasks.js";
import { knowTasks, startTeaching, watch } from "./teach.js";

let shown = { tasks: "", queue: "" }; // what is drawn, so that nothing is drawn twice under somebody's fingers

/** Brings tasks and queue up to date. */
async function refresh() {
  const [tasks, queue] = await Promise.allSettled([getTasks(), getQueue()]);
  const method = tasks.value?.method ?? "in use";
  if (tasks.status === "fulfilled" && differs("tasks", tasks.value)) {
    showTasks(tasks.value, refresh);
    showChoices(tasks.value.tasks);
    knowTasks(tasks.value.tasks);
  }
  if (queue.status === "fulfilled" && differs("queue", queue.value)) showQueue(queue.value, method);
  if (tasks.status === "rejected") byId("about").textContent = "";
  byId("tasks-problem").textContent = tasks.reason?.message ?? "";
  byId("queue-problem").textContent = queue.reason?.message ?? "";
}

function differs(what, value) {
  const now = JSON.stringify(value);
  if (shown[what] === now) return false;
  shown = { ...shown, [what]: now };
  return true;
}

onTokenWanted((refused) => new Promise((resolve) => {
  const form = byId("token-form");
  byId("token-problem").textContent = refused ? "That token was not accepted." : "";
  form.hidden = false;
  byId("token").focus();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.hidden = true;
    resolve(byId("token").value.trim());
    byId("token").value = "";
  }, { once: true });
}));

startAsking();
startTeaching(refresh);
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && refresh().then(watch));
refresh().then(watch);
