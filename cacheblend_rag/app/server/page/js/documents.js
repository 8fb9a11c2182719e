// The dialog of documents: add files, see what becomes of them, delete them, and choose which ones are asked.

import { ApiError, call } from "./api.js";
import { $, button, bytes, confirmInPlace, count, el, hint, say, showRows } from "./dom.js";
import { changed, choose, forgetDocument, on, state } from "./store.js";

const SHOWN = 200; // documents in the list; more are found by their names
const AGAIN = 1000; // milliseconds until documents on their way are asked for again
const COMING = { waiting: "Waiting to be read…", reading: "Being read…" };
const rows = el("ul", { class: "files", tabindex: 0, "aria-label": "Documents" });
let documents = null; // as the server lists them
let timer = null;

export async function refreshServer() {
  state.server = await call("GET", "api/state");
  changed("server");
}

/** What the next question is asked of, in a few words. */
const described = () => {
  if (state.documents) return state.documents.length === 1 ? `“${state.documents[0].name}”` : count(state.documents.length, "chosen document");
  return state.server.documents === 1 ? "one document" : `all ${count(state.server.documents, "document")}`;
};

/** Ask for the list, and again while something in it is on its way. */
async function look() {
  clearTimeout(timer);
  try {
    const before = new Map((documents ?? []).map((one) => [one.id, one.state]));
    ({ documents } = await call("GET", "api/documents"));
    for (const { id, name, state: now } of documents) {
      if (!(before.get(id) in COMING) || now in COMING) continue;
      say(`${name}: ${now === "ready" ? "ready to be asked about" : "could not be read"}.`);
      refreshServer();
    }
    if (documents.some((one) => one.state in COMING)) timer = setTimeout(look, AGAIN);
    const there = state.documents?.filter(({ id }) => documents.some((one) => one.id === id));
    if (there && there.length < state.documents.length) choose({ documents: there.length ? there : null });
    show();
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  $("documents-error").textContent = error.message;
  if (!(error instanceof ApiError)) throw error;
}

function documentView({ id, name, bytes: size, passages, state: how, reason, own }) {
  const ready = how === "ready";
  const text = COMING[how] ?? (ready ? `${count(passages, "passage")} · ${bytes(size)}` : (reason ?? "It could not be read."));
  const tick = () => {
    const others = (state.documents ?? []).filter((one) => one.id !== id);
    const now = box.checked ? [...others, { id, name }] : others;
    choose({ documents: now.length ? now : null });
  };
  const box = el("input", { type: "checkbox", data: { id }, disabled: !ready, on: { change: tick } });
  const remove = button("Delete", () => confirmInPlace(remove, "Delete it, and its stored KV?", async (back) => {
    try {
      await call("DELETE", `api/documents/${encodeURIComponent(id)}`);
      forgetDocument(id);
      changed("chat");
      await Promise.all([look(), refreshServer()]);
      rows.focus();
    } catch (error) {
      back();
      failed(error);
    }
  }), { class: "quiet", "aria-label": `Delete ${name}` });
  const facts = el("small", { class: ready ? "took" : how in COMING ? "took busy" : "error", text });
  return el("li", { class: how }, el("label", {}, box, el("span", { class: "name", text: name, title: name }), facts), own && remove);
}

function show() {
  if (!state.server) return;
  const { folder, limits } = state.server;
  $("open-chosen").textContent = `Asks ${described()}`;
  $("open-chosen").hidden = !state.server.documents;
  $("drop").hidden = !folder.writable;
  $("files").accept = limits.suffixes.join(",");
  $("drop-hint").textContent = `Into “${folder.name}”, up to ${bytes(limits.upload_bytes)} each`;
  $("fixed").hidden = folder.writable;
  if (!documents) return;
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = documents.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word)));
  $("find").hidden = documents.length < 9;
  showRows(rows, found.slice(0, SHOWN), documentView);
  const chosen = new Set(state.documents?.map(({ id }) => id));
  for (const box of rows.querySelectorAll("input")) box.checked = chosen.has(box.dataset.id);
  if (!rows.isConnected) $("files-list").replaceChildren(rows);
  $("more").textContent = found.length > SHOWN ? `${found.length - SHOWN} more; find them by name.` : documents.length && !found.length ? "No document has all of these words in its name." : "";
  $("chosen").textContent = documents.length < 2 ? "" : state.documents ? `Only ${described()} will be asked.` : "All documents are asked. Tick some to ask only those.";
  $("ask-all").hidden = !state.documents;
}

/** Send files, each by itself: one that is refused keeps no other back. */
async function sendFiles(files) {
  const refused = [];
  const { upload_bytes: most, suffixes } = state.server.limits;
  for (const [at, file] of files.entries()) {
    Object.assign($("sending"), { hidden: false, textContent: `Sending ${file.name}, ${at + 1} of ${files.length}…` });
    const form = new FormData();
    form.append("files", file, file.name);
    try {
      if (!suffixes.some((suffix) => file.name.toLowerCase().endsWith(suffix))) throw new ApiError(`Files of this kind cannot be read. These can: ${suffixes.join(", ")}.`);
      if (file.size > most) throw new ApiError(`It has ${bytes(file.size)}; at most ${bytes(most)} are taken.`);
      await call("POST", "api/documents", form);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      refused.push(`${file.name}: ${error.message}`);
    }
    await look();
    $("documents-error").textContent = refused.join("\n");
  }
  $("sending").hidden = true;
}

function open() {
  if (!$("documents").open) $("documents").showModal();
  $("documents-error").textContent = "";
  look();
  refreshServer().catch(failed);
}

export function startDocuments() {
  for (const id of ["open-documents", "open-chosen"]) $(id).addEventListener("click", open);
  $("find").addEventListener("input", show);
  $("ask-all").addEventListener("click", () => choose({ documents: null }));
  $("files").addEventListener("change", (event) => {
    sendFiles([...event.target.files]);
    event.target.value = ""; // the same file can be chosen again
  });
  let depth = 0; // enter and leave come for every element on the way
  const mark = (by) => {
    depth = by === null ? 0 : Math.max(0, depth + by);
    document.body.classList.toggle("dragging", depth > 0 && Boolean(state.server?.folder.writable));
  };
  const listen = (name, action) => addEventListener(name, (event) => event.dataTransfer?.types.includes("Files") && action(event));
  listen("dragenter", () => mark(1));
  listen("dragleave", () => mark(-1));
  listen("dragover", (event) => event.preventDefault());
  listen("drop", (event) => {
    event.preventDefault();
    mark(null);
    open();
    if (state.server?.folder.writable) sendFiles([...event.dataTransfer.files]);
  });
  on("server", show);
  on("choices", show);
}
