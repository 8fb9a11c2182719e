// The dialog of collections and their files.

import { ApiError } from "./api.js";
import { $, button, confirmInPlace, el, showRows } from "./dom.js";
import { bytes, count } from "./format.js";
import { keeping } from "./kept.js";
import {
  chooseCollection,
  createCollection,
  deleteCollection,
  deleteDocument,
  documentsOf,
  estimateOf,
  isWritable,
  OWN,
  refreshServer,
} from "./server.js";
import { changed, collection, on, state } from "./store.js";
import { forgetDeleted } from "./forgetting.js";
import { isTold, startUploads } from "./uploads.js";

function report(error) {
  $("collections-error").textContent = error.message;
  if (!(error instanceof ApiError)) throw error;
}

function collectionView(one) {
  const radio = el("input", { type: "radio", name: "collection", value: one.id, id: `collection-${one.id}` });
  radio.addEventListener("change", () => chooseCollection(one.id));
  const facts = `${count(one.documents, "document")}, ${count(one.chunks, "passage")}`;
  const label = el("label", { for: radio.id }, el("span", { class: "name", text: one.name }), el("small", { text: facts }));
  const remove = button("Delete", () => {
    confirmInPlace(remove, `Delete “${one.name}” and its KV${keeping() ? ", and answers made from it" : ""}?`, (back) =>
      deleteCollection(one.id)
        .then(() => forgetDeleted([one.id]))
        .then(() => {
          changed("conversation");
          $("collections").querySelector(":checked")?.focus(); // the button that had the focus is gone
        })
        .catch((error) => {
          back();
          report(error);
        }),
    );
  }, { class: "quiet", "aria-label": `Delete collection ${one.name}` });
  return el("div", { class: "choice" }, radio, label, isWritable(one) ? remove : el("span", { class: "badge", text: one.bundled ? "bundled" : "fixed" }));
}

function showCollections() {
  const { server } = state;
  if (!server) return;
  const rows = $("collections");
  showRows(rows, server.collections, collectionView, (one) => [one, keeping()]);
  for (const radio of rows.querySelectorAll("input")) radio.checked = radio.value === state.collection;
  const select = $("collection");
  select.replaceChildren(...server.collections.map((one) => el("option", { value: one.id, text: one.name })));
  select.value = state.collection ?? "";
  select.disabled = server.collections.length < 2;
  const { disk } = server;
  $("room").textContent = `Your documents take ${bytes(disk.bytes)} of ${bytes(disk.limit_bytes)}.`;
  const here = collection();
  const into = here && isWritable(here) ? here.name : OWN;
  $("files").accept = server.limits.upload_suffixes.join(",");
  $("drop-hint").textContent = `${KINDS}, up to ${bytes(server.limits.upload_bytes)} each, into “${into}”`;
}

function documentView(one, here) {
  const facts = { ready: `${count(one.chunks, "passage")} · ${bytes(one.bytes)}`, indexing: "being indexed…" };
  const text = one.state === "failed" ? (one.error ?? "could not be read") : facts[one.state];
  const remove = button("Delete", () => {
    confirmInPlace(remove, keeping() ? "Delete with its KV, and answers made from it?" : "Delete with its KV?", (back) =>
      deleteDocument(here.id, one.id)
        .then(() => forgetDeleted([one.id]))
        .then(() => {
          changed("documents", here.id);
          $("files").focus();
        })
        .catch((error) => {
          back();
          report(error);
        }),
    );
  }, { class: "quiet", "aria-label": `Delete ${one.name}` });
  return el(
    "li",
    { class: one.state },
    el("p", { class: "name", text: one.name, title: one.name }),
    el("p", { class: `took${one.state === "failed" ? " error" : ""}`, text }),
    isWritable(here) && remove,
  );
}

/** How large the KV of a collection is beside the store that keeps it. */
function sizeOf({ passages, kv_bytes: size }) {
  if (!passages) return "";
  const { limit_bytes: limit } = state.server.store;
  const kept = size > limit ? ", what was used last" : "";
  return `KV of its passages takes about ${bytes(size)}. The store keeps ${bytes(limit)} in all${kept}.`;
}

const KINDS = "Text, Markdown, HTML, Word, Excel, PowerPoint, OpenDocument, EPUB, PDF, tables, JSON and code";

const loading = () => el("p", { class: "hint busy", text: "Loading the list…" });

let asked = 0; // only the answer to the latest request is shown

async function showDocuments() {
  const list = $("files-list");
  const here = collection();
  if (!here || !$("documents").open) return;
  const mine = ++asked;
  if (list.dataset.of !== here.id) list.replaceChildren(loading());
  if (list.dataset.of !== here.id) $("kv-size").textContent = "";
  list.dataset.of = here.id;
  try {
    const [found, size] = await Promise.all([documentsOf(here.id), estimateOf(here.id)]);
    if (mine !== asked) return;
    $("kv-size").textContent = sizeOf(size);
    const untold = found.filter((one) => one.state !== "failed" || !isTold(here.id, one.name));
    if (!untold.length) return list.replaceChildren(el("p", { class: "hint", text: "No files yet." }));
    const rows = list.querySelector("ul") ?? el("ul", { class: "files", tabindex: 0, "aria-label": `Files of ${here.name}` });
    showRows(rows, untold, (one) => documentView(one, here), (one) => [one, isWritable(here), keeping()]);
    if (rows.parentNode !== list) list.replaceChildren(rows);
  } catch (error) {
    if (mine !== asked) return;
    $("kv-size").textContent = "";
    list.replaceChildren(el("p", { class: "error", role: "alert", text: error.message }), button("Try again", showDocuments));
  }
}

function open() {
  if (!$("documents").open) $("documents").showModal();
  $("collections-error").textContent = "";
  if (!$("files-list").hasChildNodes()) $("files-list").append(loading());
  refreshServer().catch((error) => {
    showDocuments();
    report(error);
  });
}

async function create(event) {
  event.preventDefault();
  const name = $("create-name").value.trim();
  if (!name) return;
  $("collections-error").textContent = "";
  try {
    const made = await createCollection(name);
    $("create-name").value = "";
    await refreshServer();
    chooseCollection(made.id);
    $("files").focus();
  } catch (error) {
    report(error);
  }
}

export function startDocuments() {
  $("open-documents").addEventListener("click", open);
  $("create").addEventListener("submit", create);
  $("collection").addEventListener("change", (event) => chooseCollection(event.target.value));
  on("server", () => {
    showCollections();
    showDocuments();
  });
  on("documents", showDocuments);
  startUploads(open);
}
