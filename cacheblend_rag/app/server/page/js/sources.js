// What the next question is asked of: the collection at the top, or several collections and single documents.

import { ApiError } from "./api.js";
import { $, el, showRows } from "./dom.js";
import { count } from "./format.js";
import { documentsOf, listsOf, refreshServer } from "./server.js";
import { changed, collection, collectionsOf, on, state } from "./store.js";

const SHOWN = 200; // documents of one collection; more are found by their names
const MOST = { collections: 50, documents: 100 }; // of one question, as the server takes them

const byId = (id) => state.server?.collections.find((one) => one.id === id) ?? null;

/** The choice as it is now; without one it is the collection at the top. */
const chosen = () => state.from ?? { collections: collection() ? [collection().id] : [], documents: [] };

const isEmpty = ({ collections, documents }) => !collections.length && !documents.length;

const NAMED = 3; // of what was deleted; of more the number is told

/** What was deleted of the choice since it was made, as a sentence without its end; empty if nothing was. */
function lostOfIt() {
  const { lost } = state;
  if (!lost.length) return "";
  const said = lost.length > NAMED ? `${lost.length} documents or collections` : lost.join(" and ");
  return `${said[0].toUpperCase()}${said.slice(1)} ${lost.length > 1 ? "were" : "was"} deleted`;
}

/** Whether a question can be asked of the choice; why not, or what is to be known of it. */
export function readiness() {
  if (!document.body.dataset.ready) return { ready: false, reason: "" }; // an answer would have no conversation yet
  const from = chosen();
  if (from.collections.length > MOST.collections || from.documents.length > MOST.documents) {
    return { ready: false, reason: `A question may be asked of ${MOST.collections} collections and ${MOST.documents} documents.` };
  }
  const ready = from.documents.length > 0 || from.collections.some((id) => byId(id)?.documents);
  const lost = lostOfIt();
  if (ready) return { ready, reason: lost && `${lost}. The next question is asked of ${describe(from)}.` };
  if (state.from && lost) return { ready, reason: `${lost}: choose what to ask about.` };
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

/** Take a choice, and what it has lost; that of the collection at the top alone is none. */
export function choose(collections, documents, lost = []) {
  const own = collection()?.id;
  const same = collections.length === 1 && collections[0] === own && !documents.length;
  Object.assign(state, { from: same ? null : { collections, documents }, lost });
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

/**
 * A choice with what is still there, and what it has lost in words. A document takes the place of one of its name that
 * it has replaced. `lists` are the documents of collections, as far as they are known.
 */
function stillThere({ collections, documents }, lists, before = []) {
  const nameOf = (id) => before.find((one) => one.id === id)?.name;
  const lost = collections.filter((id) => !byId(id)).map((id) => (nameOf(id) ? `“${nameOf(id)}”` : "a collection"));
  const found = documents.map((one) => {
    if (byId(one.collection) && !lists.has(one.collection)) return one;
    const there = [...lists].filter(([of]) => one.collection === undefined || of === one.collection).flatMap(([of, all]) => all.map((each) => ({ ...each, of })));
    const now = there.find(({ id }) => id === one.id) ?? there.find(({ name, state: how }) => one.name && name === one.name && how === "ready");
    if (!now) lost.push(one.name ? `“${one.name}”` : "a document");
    return now && { id: now.id, name: now.name, collection: now.of };
  });
  const once = [...new Map(found.filter(Boolean).map((one) => [one.id, one])).values()];
  return { collections: collections.filter(byId), documents: once, lost };
}

/** What the latest question of a conversation was asked of, as a choice. */
export function choiceThen(one) {
  const latest = one.turns.at(-1);
  return latest?.from ?? { collections: latest ? [latest.collection] : collectionsOf(one), documents: [] };
}

/** The same as far as it is there now. */
export async function choiceNow(one) {
  const choice = choiceThen(one);
  // The server has only the ids of single documents.
  const of = choice.documents.length ? collectionsOf(one).filter(byId) : [];
  return stillThere(choice, await listsOf(of));
}

/** The documents of a collection to choose from, loaded when they are first looked at. */
function documentsView(one) {
  const list = el("ul", { class: "singles" });
  const note = el("p", { class: "hint busy", role: "status", text: "Loading the list…" });
  const search = el("input", { type: "search", placeholder: "Find by name", "aria-label": `Find documents of ${one.name} by name`, hidden: true });
  let all = [];
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word)));
    const few = found.slice(0, SHOWN);
    showRows(list, few, ({ id, name }) => {
      const box = el("input", { type: "checkbox" });
      box.addEventListener("change", () => toggleDocument(one.id, { id, name }, box.checked));
      return el("li", {}, el("label", {}, box, el("span", { text: name })));
    }, ({ id, name }) => [id, name]);
    const ticked = new Set(chosen().documents.filter(({ collection: of }) => of === one.id).map(({ id }) => id));
    few.forEach(({ id }, at) => (list.children[at].querySelector("input").checked = ticked.has(id)));
    const none = all.length ? "No document has all of these words in its name." : "No documents yet.";
    const more = found.length - few.length;
    note.textContent = more ? `${more} more; find them by name.` : found.length ? "" : none;
    note.className = "hint";
    note.hidden = !note.textContent;
  };
  const load = async () => {
    try {
      all = (await documentsOf(one.id)).filter(({ state: how }) => how === "ready");
      search.hidden = all.length < 9;
      show();
    } catch (error) {
      note.textContent = error.message;
      Object.assign(note, { className: "error", hidden: false });
      if (!(error instanceof ApiError)) throw error;
    }
  };
  search.addEventListener("input", show);
  const fold = el("details", { data: { of: one.id } }, el("summary", { text: "Single documents", "aria-label": `Single documents of ${one.name}` }), search, list, note);
  fold.addEventListener("toggle", () => fold.open && load());
  fold.addEventListener("load", () => fold.open && load());
  fold.addEventListener("refresh", () => all.length && show());
  return fold;
}

function collectionView(one) {
  const box = el("input", { type: "checkbox", id: `from-${one.id}` });
  box.addEventListener("change", () => toggleCollection(one.id, box.checked));
  const label = el("label", { for: box.id }, el("span", { class: "name", text: one.name }), el("small"));
  return el("div", { class: "from" }, el("div", { class: "choice" }, box, label), one.documents > 1 && documentsView(one));
}

function build() {
  const list = $("sources-list");
  const all = state.server?.collections ?? [];
  showRows(list, all, collectionView, ({ id, name, documents }) => [id, name, documents > 1]);
  all.forEach(({ documents, chunks }, at) => (list.children[at].querySelector("small").textContent = `${count(documents, "document")}, ${count(chunks, "passage")}`));
  for (const fold of list.querySelectorAll("details")) fold.dispatchEvent(new Event("load"));
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

/** Let go of what is not there any more, and remember its names until something is chosen. */
function prune({ before, lists }) {
  if (!state.from) return;
  const { collections, documents, lost } = stillThere(state.from, lists, before);
  choose(collections, documents, [...state.lost, ...lost]);
}

export function startSources() {
  $("open-sources").addEventListener("click", () => {
    build();
    $("sources").showModal();
    refreshServer().catch((error) => {
      if (!(error instanceof ApiError)) throw error;
      $("sources-said").textContent = error.message;
    });
  });
  $("sources-reset").addEventListener("click", () => {
    choose([collection().id], []);
    $("sources-list").querySelector("input")?.focus();
  });
  on("server", (told) => {
    if (told) prune(told);
    if ($("sources").open) build();
    else refresh();
  });
  on("from", () => {
    refresh();
    for (const one of $("sources-list").querySelectorAll("details")) one.dispatchEvent(new Event("refresh"));
  });
}
