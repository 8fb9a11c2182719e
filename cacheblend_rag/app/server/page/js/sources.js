// What the next question is asked of: the collection at the top, or several collections and single documents.

import { ApiError } from "./api.js";
import { $, el } from "./dom.js";
import { count } from "./format.js";
import { documentsOf } from "./server.js";
import { changed, collection, collectionsOf, on, state } from "./store.js";

const SHOWN = 200; // documents of one collection; more are found by their names
const MOST = { collections: 50, documents: 100 }; // of one question, as the server takes them

const byId = (id) => state.server?.collections.find((one) => one.id === id) ?? null;

/** The choice as it is now; without one it is the collection at the top. */
const chosen = () => state.from ?? { collections: collection() ? [collection().id] : [], documents: [] };

const isEmpty = ({ collections, documents }) => !collections.length && !documents.length;

/** Whether a question can be asked of the choice, and why not. */
export function readiness() {
  const from = chosen();
  if (from.collections.length > MOST.collections || from.documents.length > MOST.documents) {
    return { ready: false, reason: `A question may be asked of ${MOST.collections} collections and ${MOST.documents} documents.` };
  }
  const ready = from.documents.length > 0 || from.collections.some((id) => byId(id)?.documents);
  if (ready) return { ready, reason: "" };
  if (state.from) return { ready, reason: isEmpty(from) ? "Nothing is chosen to ask about." : "What is chosen holds no documents yet." };
  const here = collection();
  return { ready, reason: here ? `“${here.name}” holds no documents yet: add some to ask about.` : "There is no collection yet: add documents to ask about." };
}

/** A choice in a few words. */
export function describe({ collections, documents }) {
  const parts = [];
  if (collections.length === 1) parts.push(byId(collections[0]) ? `“${byId(collections[0]).name}”` : "1 collection");
  else if (collections.length) parts.push(count(collections.length, "collection"));
  if (documents.length === 1 && documents[0].name) parts.push(`“${documents[0].name}”`);
  else if (documents.length) parts.push(count(documents.length, "document"));
  return parts.join(" and ") || "nothing";
}

/** Take a choice; that of the collection at the top alone is none. */
export function choose(collections, documents) {
  const own = collection()?.id;
  const same = collections.length === 1 && collections[0] === own && !documents.length;
  state.from = same ? null : { collections, documents };
  changed("from");
}

function toggleCollection(id, wanted) {
  const { collections, documents } = chosen();
  const others = collections.filter((one) => one !== id);
  choose(wanted ? [...others, id] : others, wanted ? documents.filter((one) => one.collection !== id) : documents);
}

function toggleDocument(of, { id, name }, wanted) {
  const { collections, documents } = chosen();
  const others = documents.filter((one) => one.id !== id || one.collection !== of);
  choose(collections.filter((one) => one !== of), wanted ? [...others, { id, name, collection: of }] : others);
}

/** What the latest question of a conversation was asked of, as a choice. */
export async function choiceOf(one) {
  const latest = one.turns.at(-1);
  if (!latest) return { collections: collectionsOf(one), documents: [] };
  const { collections, documents } = latest.from ?? { collections: [latest.collection], documents: [] };
  if (documents.every((each) => each.collection)) return { collections, documents };
  // The server has only the ids of single documents.
  const lists = collectionsOf(one).filter(byId).map(async (of) => (await documentsOf(of)).map(({ id, name }) => ({ id, name, collection: of })));
  const there = (await Promise.all(lists)).flat();
  return { collections, documents: documents.map(({ id }) => there.find((each) => each.id === id)).filter(Boolean) };
}

/** The documents of a collection to choose from, loaded when they are first looked at. */
function documentsView(one) {
  const list = el("ul", { class: "singles" }, el("li", { class: "hint busy", text: "Loading the list…" }));
  const search = el("input", { type: "search", placeholder: "Find by name", "aria-label": `Find documents of ${one.name} by name`, hidden: true });
  let all = [];
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word)));
    const items = found.slice(0, SHOWN).map((each) => {
      const box = el("input", { type: "checkbox" });
      box.checked = chosen().documents.some(({ id, collection: of }) => id === each.id && of === one.id);
      box.addEventListener("change", () => toggleDocument(one.id, each, box.checked));
      return el("li", {}, el("label", {}, box, el("span", { text: each.name })));
    });
    if (found.length > SHOWN) items.push(el("li", { class: "hint", text: `${found.length - SHOWN} more; find them by name.` }));
    if (!found.length) items.push(el("li", { class: "hint", text: all.length ? "No document has all of these words in its name." : "No documents yet." }));
    list.replaceChildren(...items);
  };
  search.addEventListener("input", show);
  const fold = el("details", { data: { of: one.id } }, el("summary", { text: "Single documents", "aria-label": `Single documents of ${one.name}` }), search, list);
  fold.addEventListener("toggle", async () => {
    if (!fold.open || all.length) return;
    try {
      all = (await documentsOf(one.id)).filter(({ state: how }) => how === "ready");
      search.hidden = all.length < 9;
      show();
    } catch (error) {
      list.replaceChildren(el("li", { class: "error", role: "alert", text: error.message }));
      if (!(error instanceof ApiError)) throw error;
    }
  });
  fold.addEventListener("refresh", () => all.length && show());
  return fold;
}

function collectionView(one) {
  const box = el("input", { type: "checkbox", id: `from-${one.id}` });
  box.addEventListener("change", () => toggleCollection(one.id, box.checked));
  const facts = `${count(one.documents, "document")}, ${count(one.chunks, "passage")}`;
  const label = el("label", { for: box.id }, el("span", { class: "name", text: one.name }), el("small", { text: facts }));
  return el("div", { class: "from" }, el("div", { class: "choice" }, box, label), one.documents > 1 && documentsView(one));
}

function build() {
  $("sources-list").replaceChildren(...(state.server?.collections ?? []).map(collectionView));
  refresh();
}

function refresh() {
  const from = chosen();
  const { ready, reason } = readiness();
  $("open-sources").textContent = `From ${describe(from)}`;
  $("open-sources").hidden = !state.server || !state.server.collections.length;
  $("sources-said").textContent = reason || `The next question is asked of ${describe(from)}.`;
  $("sources-said").classList.toggle("error", !ready);
  $("sources-reset").hidden = !state.from || !collection();
  $("sources-reset").textContent = `Only “${collection()?.name ?? ""}”`;
  for (const one of state.server?.collections ?? []) {
    const box = $(`from-${one.id}`);
    if (!box) continue;
    const singles = from.documents.filter(({ collection: of }) => of === one.id).length;
    box.checked = from.collections.includes(one.id);
    box.indeterminate = singles > 0;
  }
}

/** Let go of what is not there any more. */
function prune() {
  if (!state.from) return;
  const there = ({ collection: of }) => byId(of);
  const { collections, documents } = state.from;
  if (!Array.isArray(collections) || !Array.isArray(documents)) state.from = null;
  else choose(collections.filter(byId), documents.filter((one) => one?.id && there(one) && !state.gone.includes(one.id)));
  if (state.from && isEmpty(state.from)) state.from = null;
}

export function startSources() {
  $("open-sources").addEventListener("click", () => {
    build();
    $("sources").showModal();
  });
  $("sources-reset").addEventListener("click", () => {
    state.from = null;
    changed("from");
    build();
    $("sources-list").querySelector("input")?.focus();
  });
  on("server", () => {
    prune();
    refresh();
  });
  on("from", () => {
    refresh();
    for (const one of $("sources-list").querySelectorAll("details")) one.dispatchEvent(new Event("refresh"));
  });
}
