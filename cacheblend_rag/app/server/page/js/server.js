// What the server holds, asked for again whenever it may have changed.

import { call } from "./api.js";
import { changed, collection, modelName, state } from "./store.js";

/** Where files go that are given while a collection is open that stays as it is. */
export const OWN = "My documents";

/**
 * Ask for /api/state, and for the documents beside those that are chosen singly. The chosen collection stays, or becomes
 * the first. What else was chosen and is gone leaves the choice once "server" is told with what was there before.
 */
export async function refreshServer() {
  const server = await call("GET", "api/state");
  const known = server.collections.map((one) => one.id);
  const lists = await listsOf((state.from?.documents ?? []).map((one) => one.collection).filter((id) => known.includes(id)));
  const [open, before] = [collection(), state.server?.collections ?? []];
  state.server = server;
  if (!known.includes(state.collection)) {
    if (open && !state.from) state.lost = [`“${open.name}”`];
    state.collection = known[0] ?? null;
  }
  changed("server", { before, lists });
}

/** The documents of some collections, by the id of each. */
export async function listsOf(ids) {
  return new Map(await Promise.all([...new Set(ids)].map(async (id) => [id, await documentsOf(id)])));
}

/** Choose a collection; the next question begins a conversation of its own there. */
export function chooseCollection(id) {
  if (id === state.collection) return;
  state.collection = id;
  Object.assign(state, { from: null, lost: [] });
  const latest = state.conversations.find((one) => one.collection === id && (!one.kept || one.loaded));
  state.conversation = latest?.id ?? null;
  state.selected = state.conversations.find((one) => one.id === state.conversation)?.turns.at(-1)?.id ?? null;
  changed("server");
  changed("conversation");
}

/** Choose the model that the next question is for. */
export function chooseModel(name) {
  state.model = name;
  state.pace = null; // that of another model
  changed("server");
}

/** Whether files can be put into a collection and deleted from it. */
export const isWritable = (one) => one.writable ?? !one.bundled;

/** The collection that new files go to: the open one, or one of the user's own, made if need be. */
export async function targetForFiles() {
  const open = collection();
  if (open && isWritable(open)) return open;
  let own = state.server.collections.find((one) => one.name === OWN && isWritable(one));
  if (!own) {
    own = await createCollection(OWN);
    await refreshServer();
  }
  chooseCollection(own.id);
  return own;
}

export const createCollection = (name) => call("POST", "api/collections", { name });

export const deleteCollection = (id) => call("DELETE", `api/collections/${encodeURIComponent(id)}`);

export const documentsOf = (id) => call("GET", `api/collections/${encodeURIComponent(id)}/documents`);

/** How large the KV of a collection's passages is with the chosen model, stored or not. */
export function estimateOf(id) {
  const name = modelName();
  const which = name === null ? "" : `?model=${encodeURIComponent(name)}`;
  return call("GET", `api/collections/${encodeURIComponent(id)}/estimate${which}`);
}

export const deleteDocument = (id, document) =>
  call("DELETE", `api/collections/${encodeURIComponent(id)}/documents/${encodeURIComponent(document)}`);
