// The server's HTTP interface: calls, errors, and server-sent events read from a response.

import { KEY } from "./store.js";

/** What the server refused, or what stood in the way of asking it. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    Object.assign(this, { status, code });
  }
}

let askForKey = null;

/** Name the function that asks for an API key; it is given whether one was refused, and never returns. */
export const onKeyNeeded = (ask) => (askForKey = ask);

/** The error that a response's status and body speak of. */
function refusal(status, text, retryAfter) {
  let told = {};
  try {
    told = JSON.parse(text).error ?? {};
  } catch {
    // Not JSON: a proxy's page, say.
  }
  let message = told.message || `The server answered with status ${status}.`;
  if (status === 429) {
    // The server says which limit it is, and its header when to try again.
    const limit = (told.message || "the server is busy").replace(/; try again.*$/, "");
    message = `${limit[0].toUpperCase()}${limit.slice(1)}. Try again ${Number(retryAfter) ? `in ${retryAfter} s` : "shortly"}.`;
  }
  return new ApiError(message, { status, code: told.code });
}

async function send(method, path, body, signal) {
  const headers = { Accept: "application/json, text/event-stream" };
  const key = sessionStorage.getItem(KEY);
  const isForm = body instanceof FormData;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body && !isForm) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, signal, headers, body: body && !isForm ? JSON.stringify(body) : body });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", { code: "unreachable" });
  }
  if (response.status === 401) await askForKey(Boolean(key));
  if (!response.ok) throw refusal(response.status, await response.text(), response.headers.get("Retry-After"));
  return response;
}

/** Call the API with an object or a form; the JSON it answers with, or null. */
export async function call(method, path, body) {
  const response = await send(method, path, body);
  return response.status === 204 ? null : response.json();
}

/** Events of a stream, each `{event, data}`, as they arrive; one that is an error is thrown. */
export async function* stream(path, body, signal) {
  const response = await send("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const blocks = (rest + (value ?? "")).split(/\r?\n\r?\n/);
      rest = done ? "" : blocks.pop();
      for (const event of blocks.map(parse)) {
        if (event?.event === "error") throw new ApiError(event.data.message, { code: event.data.code });
        if (event) yield event;
      }
      if (done) return;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection was lost before the answer ended.", { code: "lost" });
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const fields = block.split(/\r?\n/).map((line) => /^(event|data): ?(.*)$/.exec(line)).filter(Boolean);
  const of = (name) => fields.filter((one) => one[1] === name).map((one) => one[2]).join("\n");
  return of("data") ? { event: of("event") || "message", data: JSON.parse(of("data")) } : null;
}
