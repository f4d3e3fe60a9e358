// What the page says to the server: JSON there and back, a token where one is needed, progress as a stream.

const KEPT = "qtuning-token";
let askToken = null; // set by the page: shows the field, resolves with what was typed
let asking = null; // one question at a time, however many requests wait for it

/** An answer of the server that is not a success, in one line for people. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function onTokenWanted(ask) {
  askToken = ask;
}

const token = () => sessionStorage.getItem(KEPT);

/** One request; asks for a token and repeats when the server wants one. */
async function send(path, options = {}) {
  for (;;) {
    const used = token();
    const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch {
      throw new Refused(0, "The server does not answer. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status !== 401 || !askToken) throw await refusal(response);
    if (token() !== used) continue; // another request has got a new one meanwhile
    asking ??= askToken(Boolean(used)).then((typed) => {
      sessionStorage.setItem(KEPT, typed);
      asking = null;
    });
    await asking;
  }
}

async function refusal(response) {
  let detail = "";
  try {
    ({ detail } = await response.json());
  } catch {
    // not JSON: the status has to do
  }
  if (Array.isArray(detail)) detail = detail.map((entry) => entry.msg).join("; ");
  let message = detail || `The server answered with status ${response.status}.`;
  const wait = response.headers.get("Retry-After");
  if (response.status === 429 && wait) message += ` Try again in ${wait} s.`;
  return new Refused(response.status, message);
}

const asJson = (body) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
const read = async (path, options) => (await send(path, options)).json();
const teaching = (id) => `/v1/teachings/${encodeURIComponent(id)}`;

export const getTasks = () => read("/v1/tasks");
export const getQueue = () => read("/v1/queue");
export const getTeachings = async () => (await read("/v1/teachings")).teachings;
export const getTeaching = (id) => read(teaching(id));
export const cancel = (id) => read(`${teaching(id)}/cancel`, { method: "POST" });
export const goOn = (id) => read(`${teaching(id)}/continue`, { method: "POST" });
export const classify = async (body) => (await read("/v1/classify", asJson(body))).answers;
export const removeTask = (name) => read(`/v1/tasks/${encodeURIComponent(name)}`, { method: "DELETE" });

export function teach(name, file, replace) {
  const form = new FormData();
  form.set("name", name);
  form.set("replace", String(replace));
  form.set("file", file);
  return read("/v1/tasks", { method: "POST", body: form });
}

/** The progress of a teaching, as it comes, until the server ends the stream. */
export async function* follow(id) {
  const response = await send(`${teaching(id)}/events`, { headers: { Accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      kept = (kept + value).replaceAll("\r\n", "\n");
      const events = kept.split("\n\n");
      kept = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield JSON.parse(data.join("\n"));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever follows may leave early
  }
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const authorized = () => (token() ? ` \\\n  -H "Authorization: Bearer $TOKEN"` : "");

/** The same as `classify`, for a terminal. */
export function curlClassify(body) {
  return `curl ${location.origin}/v1/classify${authorized()} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;
}

/** The same as `teach`, for a terminal. */
export function curlTeach(name, file, replace) {
  return `curl ${location.origin}/v1/tasks${authorized()} \\\n  -F ${quoted(`name=${name}`)}${replace ? " -F replace=true" : ""} -F ${quoted(`file=@${file}`)}`;
}
