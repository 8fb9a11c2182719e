// Files on their way into a collection: sent, then followed until they are indexed and their KV is stored.

import { ApiError, stream, upload } from "./api.js";
import { $, button, el, say } from "./dom.js";
import { forgetDeleted } from "./forgetting.js";
import { bytes, count, share } from "./format.js";
import { deleteDocument, documentsOf, isWritable, OWN, refreshServer, targetForFiles } from "./server.js";
import { changed, collection, newId, on, state } from "./store.js";

const STAGES = { reading: "Reading", splitting: "Splitting", embedding: "Embedding" };
const IN = ["ready", "warming"]; // stages of a document that is in its collection
const shown = new Map(); // local id: {text, part, state}

function put(id, values) {
  shown.set(id, { ...shown.get(id), ...values });
  render();
}

function render() {
  const items = [...shown].map(([id, { label, text, part, outcome }]) => {
    const bar = el("progress", { max: 1, value: part ?? null, "aria-label": `${label}: ${text}` });
    const away = button("✕", () => putAway(id), { class: "icon", "aria-label": `Put away: ${label}` });
    return el(
      "li",
      { class: outcome ?? "running" },
      el("p", { class: "name", text: label, title: label }),
      el("p", { class: "took", text, role: outcome === "failed" ? "alert" : null }),
      outcome ? away : bar,
    );
  });
  $("jobs").replaceChildren(...items);
}

/** Take a line away, and off the server's list the file that failed. */
async function putAway(id) {
  const { of, label } = shown.get(id);
  shown.delete(id);
  render();
  if (!of) return;
  try {
    const failed = (await documentsOf(of)).filter((one) => one.state === "failed" && one.name === label);
    await Promise.all(failed.map((one) => deleteDocument(of, one.id)));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // it stays in the list
  }
  changed("documents", of);
}

/** Whether a line says already that a file of a collection failed. */
export const isTold = (of, name) => [...shown.values()].some((one) => one.of === of && one.label === name);

/** Why a file need not be sent; empty if it may be. */
function refusal(file) {
  const { upload_bytes: limit, upload_suffixes: suffixes } = state.server.limits;
  if (!suffixes.some((suffix) => file.name.toLowerCase().endsWith(suffix))) {
    return `Files of this kind cannot be read. These can: ${suffixes.join(", ")}.`;
  }
  return file.size > limit ? `It has ${bytes(file.size)}; at most ${bytes(limit)} are taken.` : "";
}

/** What becomes of some files: one line for all, and one for each that is refused or cannot be read. */
class Batch {
  constructor(files) {
    Object.assign(this, { id: newId(), files, coming: [], cold: [], ready: 0, failed: 0 }); // cold: without KV yet
    this.label = files.length === 1 ? files[0].name : count(files.length, "file");
    put(this.id, { label: this.label, text: "Sending…", part: 0 });
  }

  say(text, part) {
    const at = this.files.length > 1 ? `${this.ready + this.failed + 1} of ${this.files.length}: ` : "";
    put(this.id, { text: at + text, part });
  }

  /** `of` is the collection in whose list the server has it. */
  fail(name, text, of = null) {
    this.failed += 1;
    put(this.files.length === 1 ? this.id : newId(), { label: name, text, outcome: "failed", of });
    say(`${name}: ${text}`);
  }

  /** The server knows nothing of one any more: it ended long ago. */
  forget() {
    this.files.pop();
  }

  /** What can be asked about. */
  get outcome() {
    return this.failed ? `${this.ready} of ${this.files.length} files are ready to be asked about.` : "Ready to be asked about.";
  }

  end() {
    if (!this.files.length) {
      shown.delete(this.id);
      return render();
    }
    if (this.files.length === 1 && this.failed) return;
    put(this.id, { text: this.outcome, outcome: this.ready ? "done" : "failed" });
  }

  /** Follow all that was sent: first until each can be asked about, then until its KV is stored. */
  async follow() {
    while (this.coming.length) await arrive(this.coming.shift(), this);
    if (this.ready) say(`${this.label}: ${this.outcome}`);
    for (const kept of this.cold) await warm(kept, this);
  }
}

/** Send files to the collection that is open, each by itself: one that is refused keeps no other back. */
export async function sendFiles(list) {
  if (!list.length || !state.server) return;
  const batch = new Batch([...list]);
  try {
    const fit = batch.files.filter((file) => {
      const reason = refusal(file);
      if (reason) batch.fail(file.name, reason);
      return !reason;
    });
    if (fit.length) {
      const target = await targetForFiles();
      const there = await documentsOf(target.id);
      for (const file of fit) await sendOne(file, target, batch, there.filter((one) => one.name === file.name).map((one) => one.id));
      await batch.follow();
    }
  } catch (error) {
    batch.fail(batch.label, error.message);
    if (!(error instanceof ApiError)) throw error;
  } finally {
    batch.end();
  }
  await refreshServer();
}

/** `replaces` are the ids of what has its name so far. */
async function sendOne(file, target, batch, replaces) {
  const path = `api/collections/${encodeURIComponent(target.id)}/documents`;
  try {
    const { job } = await upload(path, [file], (part) => batch.say(`sending ${file.name}, ${share(part)}`, part));
    const kept = { job, collection: target.id, label: file.name, replaces };
    batch.coming.push(kept);
    state.jobs.push(kept);
    changed("jobs");
  } catch (error) {
    if (error.status === 429 && batch.coming.length) {
      await arrive(batch.coming.shift(), batch); // there is room once this one is in
      return sendOne(file, target, batch, replaces);
    }
    batch.fail(file.name, error.message);
    if (!(error instanceof ApiError)) throw error;
  }
}

async function* progressOf({ job }) {
  for await (const { event, data } of stream("GET", `api/jobs/${encodeURIComponent(job)}/events`)) if (event === "progress") yield data;
}

const among = ({ done, total }) => (total > 1 ? ` (${Math.min(done + 1, total)} of ${total})` : "");

/** Nothing more is to be known of a job. */
function ended({ job }) {
  state.jobs = state.jobs.filter((one) => one.job !== job);
  changed("jobs");
}

/** Wait until a file's document is in its collection, or has failed. */
async function arrive(kept, batch) {
  let last = null;
  try {
    for await (const data of progressOf(kept)) {
      last = data;
      if (IN.includes(data.stage)) break;
      if (data.stage in STAGES) batch.say(`${STAGES[data.stage]} ${kept.label}${among(data)}`, data.total ? data.done / data.total : null);
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 404) {
      ended(kept);
      return batch.forget();
    }
    last = { stage: "failed", error: error.message };
  }
  if (IN.includes(last?.stage)) batch.cold.push(kept);
  else ended(kept);
  if (IN.includes(last?.stage) || (last?.stage === "done" && !last.error)) batch.ready += 1;
  else batch.fail(kept.label, last?.error?.replace(`${kept.label}: `, "") ?? "The server gave no reason.", kept.collection);
  const left = kept.replaces?.length ? (await documentsOf(kept.collection)).map((one) => one.id) : [];
  const gone = (kept.replaces ?? []).filter((id) => !left.includes(id));
  await (gone.length ? forgetDeleted(gone) : refreshServer());
  changed("documents", kept.collection);
}

/** Wait until the KV of a document is stored. It can be asked about meanwhile. */
async function warm(kept, batch) {
  try {
    for await (const data of progressOf(kept)) {
      if (data.stage === "warming") put(batch.id, { text: `${batch.outcome} Computing KV of ${kept.label}${among(data)}`, part: data.done / data.total });
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // what is not stored now is stored when it is used
  }
  ended(kept);
}

/** Follow again what was under way when the page was left. */
async function resume() {
  const known = [...state.jobs];
  if (!known.length) return;
  const batch = new Batch(known.map(({ label }) => ({ name: label })));
  batch.coming.push(...known);
  await batch.follow();
  batch.end();
}

function carriesFiles(event) {
  return event.dataTransfer?.types.includes("Files");
}

function startDropping(open) {
  let depth = 0; // enter and leave come for every element on the way
  const mark = (by) => {
    depth = Math.max(0, by === null ? 0 : depth + by);
    document.body.classList.toggle("dragging", depth > 0);
    const open = collection();
    $("dropping").firstElementChild.textContent = `Drop to add to “${open && isWritable(open) ? open.name : OWN}”`;
  };
  addEventListener("dragenter", (event) => carriesFiles(event) && mark(1));
  addEventListener("dragleave", (event) => carriesFiles(event) && mark(-1));
  addEventListener("dragover", (event) => carriesFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    mark(null);
    open();
    sendFiles(event.dataTransfer.files);
  });
}

export function startUploads(openDocuments) {
  $("files").addEventListener("change", (event) => {
    sendFiles(event.target.files);
    event.target.value = ""; // the same file can be chosen again
  });
  startDropping(openDocuments);
  let resumed = false;
  on("server", () => {
    if (!resumed) resume();
    resumed = true;
  });
}
