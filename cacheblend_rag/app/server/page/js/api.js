// The server's HTTP interface: calls, errors, and server-sent events read from a response.

import { KEY } from "./store.js";

/** What the server refused, or what stood in the way of asking it. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", field = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, field, retryAfter });
  }
}

let askForKey = null;

/** Name the function that asks for an API key; it is given whether one was refused. */
export const onKeyNeeded = (ask) => (askForKey = ask);

const key = () => sessionStorage.getItem(KEY);

/** Whether a request can carry a key: a header has no characters outside Latin-1. */
export function canBeSent(value) {
  try {
    return Boolean(new Headers({ Authorization: `Bearer ${value}` }));
  } catch {
    return false;
  }
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value);
}

/** Forget the key, and begin anew. */
export function leaveKey() {
  sessionStorage.removeItem(KEY);
  location.reload();
}

function headers(body) {
  const set = { Accept: "application/json, text/event-stream" };
  if (body !== undefined) set["Content-Type"] = "application/json";
  if (key()) set.Authorization = `Bearer ${key()}`;
  return set;
}

/** The error that a response's status and body speak of. */
function refusal(status, text, retryAfter) {
  let told = {};
  try {
    const body = JSON.parse(text);
    told = body.error ?? {};
  } catch {
    // Not JSON: a proxy's page, say.
  }
  const wait = Number(retryAfter) || null;
  let message = told.message || `The server answered with status ${status}.`;
  if (status === 429) {
    // The server says which limit it is, and its header when to try again.
    const limit = (told.message || "the server is busy").replace(/; try again.*$/, "");
    message = `${limit[0].toUpperCase()}${limit.slice(1)}. Try again${wait ? ` in ${wait} s` : " shortly"}.`;
  }
  return new ApiError(message, { status, code: told.code, field: told.field, retryAfter: wait });
}

async function send(method, path, body, signal) {
  const asked = key();
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: headers(body),
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", { code: "unreachable" });
  }
  if (response.status === 401 && askForKey) {
    await askForKey(Boolean(asked));
    return send(method, path, body, signal);
  }
  if (!response.ok) throw refusal(response.status, await response.text(), response.headers.get("Retry-After"));
  return response;
}

/** Call the API; the JSON it answers with, or null. */
export async function call(method, path, body, signal) {
  const response = await send(method, path, body, signal);
  return response.status === 204 ? null : response.json();
}

/** The text of what the API answers with, and its headers. */
export async function text(path) {
  const response = await send("GET", path);
  return { text: await response.text(), headers: response.headers };
}

/** Events of a stream, each `{event, data}`, as they arrive; one that is an error is thrown. */
export async function* stream(method, path, body, signal) {
  const response = await send(method, path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      // A chunk may end between the two characters of a line end: the second waits for the next chunk.
      rest += value ?? "";
      const held = !done && rest.endsWith("\r") ? "\r" : "";
      const blocks = (held ? rest.slice(0, -1) : rest).replace(/\r\n?/g, "\n").split("\n\n");
      rest = (done ? "" : blocks.pop()) + held;
      for (const block of blocks) {
        const event = parse(block);
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
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const [, field, value] = /^([^:]*)(?:: ?(.*))?$/.exec(line) ?? [];
    if (field === "event") event = value ?? "";
    if (field === "data") data.push(value ?? "");
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}

/** Send files; `progress` is told the share sent. fetch cannot tell it, so this is the older way. */
export function upload(path, files, progress) {
  const attempt = () =>
    new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      const form = new FormData();
      for (const file of files) form.append("files", file, file.name);
      request.open("POST", path);
      if (key()) request.setRequestHeader("Authorization", `Bearer ${key()}`);
      request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
      request.onerror = () => reject(new ApiError("The files could not be sent. Is the server still running?"));
      request.onload = () => {
        const { status, responseText } = request;
        if (status >= 200 && status < 300) resolve(JSON.parse(responseText));
        else reject(refusal(status, responseText, request.getResponseHeader("Retry-After")));
      };
      request.send(form);
    });
  return attempt().catch(async (error) => {
    if (error.status !== 401 || !askForKey) throw error;
    await askForKey(Boolean(key()));
    return attempt();
  });
}
