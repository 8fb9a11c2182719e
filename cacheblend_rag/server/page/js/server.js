// What the server holds, asked for again whenever it may have changed.

import { call } from "./api.js";
import { changed, state } from "./store.js";

/** Ask for /api/state; the chosen collection stays, or becomes the first. */
export async function refreshServer() {
  state.server = await call("GET", "api/state");
  const known = state.server.collections.map((one) => one.id);
  if (!known.includes(state.collection)) state.collection = known[0] ?? null;
  changed("server");
}

/** Choose a collection; the next question begins a conversation of its own there. */
export function chooseCollection(id) {
  if (id === state.collection) return;
  state.collection = id;
  state.conversation = state.conversations.find((one) => one.collection === id)?.id ?? null;
  state.selected = state.conversations.find((one) => one.id === state.conversation)?.turns.at(-1)?.id ?? null;
  changed("server");
  changed("conversation");
}

export const createCollection = (name) => call("POST", "api/collections", { name });

export const deleteCollection = (id) => call("DELETE", `api/collections/${encodeURIComponent(id)}`);

export const documentsOf = (id) => call("GET", `api/collections/${encodeURIComponent(id)}/documents`);

export const deleteDocument = (id, document) =>
  call("DELETE", `api/collections/${encodeURIComponent(id)}/documents/${encodeURIComponent(document)}`);
