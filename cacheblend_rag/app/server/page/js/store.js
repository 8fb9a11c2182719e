// What the page knows, and what of it stays in the browser: the theme, the user's choices, and each chat by itself.

export const KEY = "cacheblend-rag/key"; // of this tab
export const THEME = "cacheblend-rag/theme";
const CHOICES = "cacheblend-rag/choices";
const CHAT = "cacheblend-rag/chat/";

/** The user's choices; null is as the server has it. `documents` are those to ask, `{id, name}`; null: all. */
const FIRST = { model: null, chat: null, compare: null, documents: null, top_k: null, max_tokens: null, recompute_ratio: null, instructions: null, verify: null, reasoning: null };

/** `server` is the last /api/state; `chats`, newest first, are `{id, at, turns}`; `selected` is the turn that the panel shows. */
export const state = { ...FIRST, server: null, chats: [], selected: null };

const bus = new EventTarget();

/** Call `fn` when something of that name changes. */
export const on = (name, fn) => bus.addEventListener(name, (event) => fn(event.detail));

/** Say that something changed. */
export const changed = (name, detail) => bus.dispatchEvent(new CustomEvent(name, { detail }));

/** Make choices, and keep them. */
export function choose(values) {
  Object.assign(state, values);
  keep(CHOICES, Object.fromEntries(Object.keys(FIRST).map((name) => [name, state[name]])));
  changed("choices");
}

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).reduce((text, part) => text + part.toString(36), "");

export const chat = () => state.chats.find(({ id }) => id === state.chat) ?? null;

export const turns = () => chat()?.turns ?? [];

export const chatOf = (turn) => state.chats.find((one) => one.turns.includes(turn));

export const selectedTurn = () => turns().find(({ id }) => id === state.selected) ?? null;

/** Whether an answer is on its way. */
export const isWaiting = ({ status }) => ["asking", "thinking", "streaming"].includes(status);

/** The model that the next question is for: the chosen one, if it is there, else the server's first. */
export const model = () => state.server?.models.find(({ name }) => name === state.model) ?? state.server?.models[0] ?? null;

export const comparing = () => state.compare ?? Boolean(model()?.starter);

/** What a key lets one read is kept with the key, for the tab; without keys all is kept in the browser. */
const place = () => (sessionStorage.getItem(KEY) ? sessionStorage : localStorage);

const chatKeys = () => Object.keys(place()).filter((name) => name.startsWith(CHAT));

function keep(name, value) {
  try {
    place().setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}

function read(name) {
  try {
    return JSON.parse(place().getItem(name)) ?? {};
  } catch {
    return {};
  }
}

/** Keep a chat, but not its prompts, which are the largest part. Where there is no room, the oldest chats make it. */
export function saveChat(one) {
  if (!one?.turns.length || !state.chats.includes(one)) return;
  const slim = { ...one, turns: one.turns.map((turn) => ({ ...turn, report: turn.report && { ...turn.report, prompt: [] } })) };
  const older = state.chats.filter((other) => other !== one && chatKeys().includes(CHAT + other.id));
  while (!keep(CHAT + one.id, slim) && older.length) deleteChat(older.pop());
}

/** Delete a chat, or all. */
export function deleteChat(one = null) {
  state.chats = one ? state.chats.filter((other) => other !== one) : [];
  for (const name of one ? [CHAT + one.id] : chatKeys()) place().removeItem(name);
}

const isText = (one) => typeof one === "string";
const isTurn = (one) => [one?.id, one?.question, one?.answer, one?.status].every(isText) && [one.sources, one.earlier].every(Array.isArray);

/** Read the chats that are kept; the open one stays as it is. */
export function readChats() {
  const open = chat();
  const found = chatKeys().map(read).filter((one) => isText(one.id) && Array.isArray(one.turns) && one.turns.every(isTurn));
  for (const turn of found.flatMap((one) => one.turns)) {
    if (isWaiting(turn)) turn.status = "stopped";
    turn.comparing = false;
  }
  state.chats = [...found.filter(({ id }) => id !== open?.id), open].filter(Boolean).sort((a, b) => b.at - a.at);
}

/** A document was deleted: no chat keeps its text. */
export function forgetDocument(id) {
  readChats();
  for (const one of state.chats) {
    const of = one.turns.filter(({ sources }) => sources.some(({ document_id: from }) => from === id));
    for (const turn of of) {
      for (const source of turn.sources) if (source.document_id === id) source.text = "";
      if (turn.report) turn.report.prompt = [];
    }
    if (of.length) saveChat(one);
  }
}

/** Nobody may read what is kept before the server has accepted a key. */
export function forgetAll() {
  deleteChat();
  Object.assign(state, FIRST);
  for (const one of [sessionStorage, localStorage]) for (const name of Object.keys(one)) if (name === CHOICES || name.startsWith(CHAT)) one.removeItem(name);
  changed("chat");
}

export function restore() {
  const kept = read(CHOICES);
  for (const name of Object.keys(FIRST)) state[name] = kept[name] ?? null;
  if (!Array.isArray(state.documents)) state.documents = null;
  readChats();
  state.selected = turns().at(-1)?.id ?? null;
  addEventListener("pagehide", () => saveChat(chat()));
}
