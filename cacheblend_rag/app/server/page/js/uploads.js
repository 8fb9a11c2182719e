// Files on their way into a collection: sent, then followed until they are indexed and their KV is stored.

import { ApiError, stream, upload } from "./api.js";
import { $, button, el, say } from "./dom.js";
import { bytes, count, share } from "./format.js";
import { isWritable, OWN, refreshServer, targetForFiles } from "./server.js";
import { changed, collection, newId, on, state } from "./store.js";

const STAGES = { reading: "Reading", splitting: "Splitting", embedding: "Embedding", warming: "Computing KV of" };
const shown = new Map(); // local id: {text, part, state}

function put(id, values) {
  shown.set(id, { ...shown.get(id), ...values });
  render();
}

function render() {
  const items = [...shown].map(([id, { label, text, part, outcome }]) => {
    const bar = el("progress", { max: 1, value: part ?? null, "aria-label": `${label}: ${text}` });
    const away = button("✕", () => (shown.delete(id), render()), { class: "icon", "aria-label": `Put away: ${label}` });
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

function nameOf(files) {
  return files.length === 1 ? files[0].name : count(files.length, "file");
}

/** Send files to the collection that is open. */
export async function sendFiles(list) {
  const files = [...list];
  if (!files.length || !state.server) return;
  const id = newId();
  const label = nameOf(files);
  const limit = state.server.limits.upload_bytes;
  const large = files.find((file) => file.size > limit);
  if (large) {
    put(id, { label, text: `${large.name} has ${bytes(large.size)}; at most ${bytes(limit)} are taken.`, outcome: "failed" });
    return;
  }
  put(id, { label, text: "Sending…", part: 0 });
  try {
    const target = await targetForFiles();
    const path = `api/collections/${encodeURIComponent(target.id)}/documents`;
    const { job } = await upload(path, files, (part) => put(id, { text: `Sending, ${share(part)}`, part }));
    const kept = { job, collection: target.id, label };
    state.jobs.push(kept);
    changed("jobs");
    await follow(kept, id);
  } catch (error) {
    put(id, { text: error.message, outcome: "failed" });
    if (!(error instanceof ApiError)) throw error;
  }
}

async function follow(kept, id) {
  let last = null;
  try {
    for await (const { event, data } of stream("GET", `api/jobs/${encodeURIComponent(kept.job)}/events`)) {
      if (event !== "progress") continue;
      last = data;
      if (data.stage in STAGES) {
        const of = data.total > 1 ? ` (${Math.min(data.done + 1, data.total)} of ${data.total})` : "";
        put(id, { text: `${STAGES[data.stage]} ${data.file ?? kept.label}${of}`, part: data.total ? data.done / data.total : null });
      }
    }
  } finally {
    state.jobs = state.jobs.filter((one) => one.job !== kept.job);
    changed("jobs");
  }
  if (last?.stage === "done") put(id, { text: last.error ?? "Ready to be asked about.", outcome: last.error ? "failed" : "done" });
  else put(id, { text: last?.error ?? "The server gave no reason.", outcome: "failed" });
  say(`${kept.label}: ${shown.get(id).text}`);
  await refreshServer();
  changed("documents", kept.collection);
}

/** Follow again what was under way when the page was left. */
function resume() {
  for (const kept of [...state.jobs]) {
    const id = newId();
    put(id, { label: kept.label, text: "Under way…" });
    follow(kept, id).catch(() => {
      shown.delete(id); // finished and forgotten by the server meanwhile
      render();
    });
  }
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
