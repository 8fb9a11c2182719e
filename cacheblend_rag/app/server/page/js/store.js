// What the page knows, and what of it survives a reload.

const NAME = "cacheblend-rag/1";
export const KEY = "cacheblend-rag/key"; // of this tab
const PROMPTS_KEPT = 6; // prompts are by far the largest part; of older answers only the figures stay
const CONVERSATIONS_KEPT = 40;
const POINTS_KEPT = 60;

/** `server` is the last /api/state; the rest is the user's and kept. */
export const state = {
  server: null,
  theme: "auto",
  collection: null,
  from: null, // {collections, documents} that the next question is asked of; null: the collection alone
  lost: [], // of the choice, in words, since it was made: what was deleted
  model: null, // name; null: the server's first
  conversations: [], // newest first: {id, collection, created, turns}; those with `kept` are on the server
  conversation: null, // id
  selected: null, // id of the turn that the panel shows
  ratio: null, // null: the server's own
  rule: null,
  passages: null, // for each answer
  tokens: null, // of the longest answer
  temperature: null, // null: 0, the likeliest words
  shares: [], // {id, conversation, title, created, turns} as the server has them
  prompts: [], // {id, title, text} that were saved here; where conversations are kept, the server has them
  instructions: null, // what the model is told before the passages
  verify: null, // whether answers are checked; null: yes
  reasoning: null, // whether the model thinks first; null: as the server has it
  compare: null, // null: on for the small starter model
  pace: null, // seconds that the latest comparison took, for each token of the prompt
  points: [], // {ttft, hits, misses}
  jobs: [], // {job, collection, files}
  draft: "",
  gone: [], // ids of what was deleted: conversations, documents, collections
};
const firsts = structuredClone(state);
const KINDS = { collection: "string", model: "string", conversation: "string", selected: "string", ratio: "number", rule: "string" };
Object.assign(KINDS, { passages: "number", tokens: "number", temperature: "number", instructions: "string", compare: "boolean", pace: "number" });
const GONE_KEPT = 1000;
const own = new Set(); // ids of turns that this tab has worked on; of others the kept ones are the latest

const bus = new EventTarget();

/** Call `fn` when something of that name changes. */
export const on = (name, fn) => bus.addEventListener(name, (event) => fn(event.detail));

/** Say that something changed, and keep it. */
export function changed(name, detail) {
  const turn = detail?.latest ?? detail;
  if (turn?.question) own.add(turn.id);
  bus.dispatchEvent(new CustomEvent(name, { detail }));
  keepSoon();
}

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).reduce((text, part) => text + part.toString(36), "");

/** Every turn that is known. */
const allTurns = () => state.conversations.flatMap((one) => one.turns);

export const conversation = () => state.conversations.find((one) => one.id === state.conversation) ?? null;

export const turns = () => conversation()?.turns ?? [];

/** A turn by its id, of whatever conversation. */
export const turnOf = (id) => allTurns().find((turn) => turn.id === id) ?? null;

/** The answer that is on its way on the server and that nobody here reads: after a reload, or from another device. */
export const unread = () => turns().filter(isWaiting).at(-1) ?? null;

/** The same when the page begins: of answers that this browser alone has, the latest goes on, wherever it stands. */
export function unreadAtFirst() {
  const waiting = allTurns().filter((turn) => isWaiting(turn) && !turn.kept).sort((a, b) => a.at - b.at);
  const latest = unread() ?? waiting.at(-1) ?? null;
  for (const turn of waiting) if (turn !== latest) turn.status = "stopped";
  return latest;
}

/** Whether an answer is on its way. */
export const isWaiting = ({ status }) => status === "asking" || status === "thinking" || status === "streaming";

export const selectedTurn = () => turns().find((turn) => turn.id === state.selected) ?? null;

export const collection = () => state.server?.collections.find((one) => one.id === state.collection) ?? null;

/** Ids of the collections that a question is asked of. */
export const scopeOf = ({ from, collection: own }) => [...new Set(from ? [...from.collections, ...from.documents.map((one) => one.collection)] : [own])].filter(Boolean);

/** Ids of the collections that a conversation was asked of: those it was begun with, then those of its questions. */
export const collectionsOf = (one) => [...new Set([...(one.collections ?? []), ...one.turns.flatMap(scopeOf)])];

/** The model that the next question is for: the chosen one, if it is there, else the server's first. */
export const model = () => state.server?.models.find((one) => one.name === state.model) ?? state.server?.models[0] ?? null;

/** Its name as requests give it; null where there is nothing to choose. */
export const modelName = () => (state.server?.models.length > 1 ? model().name : null);

export const comparing = () => state.compare ?? Boolean(model()?.starter);

/** The conversation that a question belongs to; a new one where the collection has changed. */
export function conversationFor(collectionId) {
  const current = conversation();
  if (current && current.collection === collectionId) return current;
  const made = { id: newId(), collection: collectionId, created: Date.now(), turns: [] };
  state.conversations.unshift(made);
  dropOldest();
  state.conversation = made.id;
  return made;
}

/** Let go of the oldest that this browser alone has. */
function dropOldest() {
  const own = state.conversations.filter((one) => !one.kept).slice(CONVERSATIONS_KEPT);
  state.conversations = state.conversations.filter((one) => !own.includes(one));
}

export function addPoint(report) {
  state.points.push({ ttft: report.ttft_s, hits: report.hits, misses: report.misses });
  state.points.splice(0, state.points.length - POINTS_KEPT);
  changed("points");
}

function kept(promptsKept) {
  const latest = state.conversations
    .flatMap((one) => one.turns)
    .sort((a, b) => b.at - a.at)
    .slice(0, promptsKept)
    .map((turn) => turn.id);
  const slim = (turn) =>
    turn.report && !latest.includes(turn.id) ? { ...turn, report: { ...turn.report, prompt: [] } } : turn;
  const { server, conversations, shares, ...rest } = state;
  const here = conversations.filter((one) => !one.kept); // the server has the others, and no browser shall
  return { ...rest, conversations: here.map((one) => ({ ...one, turns: one.turns.map(slim) })) };
}

let timer = null;

function keepSoon() {
  clearTimeout(timer);
  timer = setTimeout(keep, 250);
}

/** What a key lets one read is kept with the key, for the tab; without keys all is kept in the browser. */
const place = () => (sessionStorage.getItem(KEY) ? sessionStorage : localStorage);

/** What is kept, `{}` if it cannot be read. */
function read(from) {
  try {
    const saved = JSON.parse(from.getItem(NAME));
    return saved && typeof saved === "object" ? saved : {};
  } catch {
    return {};
  }
}

const isObject = (one) => one !== null && typeof one === "object";

const isTurn = (one) =>
  [one?.id, one?.question, one?.answer, one?.status].every((text) => typeof text === "string") &&
  Array.isArray(one.sources) && one.sources.every(isObject) && (one.report == null || isObject(one.report));

const isChoice = (one) => Array.isArray(one?.collections) && Array.isArray(one.documents) && one.documents.every((each) => each?.id && each.collection);

/** Conversations of those kept that are whole. */
function sound(kept) {
  const isOne = (one) => typeof one?.id === "string" && typeof one.collection === "string" && Array.isArray(one.turns);
  return (Array.isArray(kept) ? kept : []).filter(isOne).map((one) => ({ ...one, created: Number(one.created) || 0, turns: one.turns.filter(isTurn) }));
}

/** Take in what another tab has kept meanwhile. */
function absorb(saved) {
  if (Array.isArray(saved.gone)) state.gone = [...new Set([...saved.gone, ...state.gone])].slice(-GONE_KEPT);
  for (const other of sound(saved.conversations)) {
    const mine = state.conversations.find((one) => one.id === other.id);
    if (!mine) state.conversations.push(other);
    for (const turn of mine ? other.turns : []) {
      const known = mine.turns.find((one) => one.id === turn.id);
      if (!known) mine.turns.push(turn);
      else if (!own.has(turn.id)) Object.assign(known, turn);
    }
    mine?.turns.sort((a, b) => a.at - b.at);
  }
  state.conversations = state.conversations.filter((one) => !state.gone.includes(one.id)).sort((a, b) => b.created - a.created);
  dropOldest();
  for (const one of state.conversations) one.turns.forEach((turn) => dropTexts(turn, one.collection));
}

/** Let go of passages that were deleted, and of a prompt that held one. */
function dropTexts(turn, collection) {
  const deleted = turn.sources.filter((source) => state.gone.includes(source.collection || collection) || state.gone.includes(source.document_id));
  for (const source of deleted) source.text = "";
  if (deleted.length && turn.report) turn.report.prompt = [];
  if (deleted.length && ["waiting", "lost"].includes(turn.verification?.status)) delete turn.verification; // the server has dropped it, too
}

/** A document or a collection was deleted: nothing keeps its texts. */
export function forgetTexts(id) {
  state.gone.push(id);
  keep();
}

/** Nobody may read what is kept before the server has accepted a key. */
export function forgetAll() {
  for (const name of ["conversations", "shares", "conversation", "selected", "instructions", "from", "lost", "prompts", "points", "jobs", "draft", "gone"]) state[name] = structuredClone(firsts[name]);
  try {
    sessionStorage.removeItem(NAME);
    localStorage.setItem(NAME, JSON.stringify({ theme: state.theme }));
  } catch {
    // Forbidden: then nothing was kept.
  }
  changed("conversation");
}

/** Write everything down; what does not fit is given up from the oldest on. */
export function keep() {
  clearTimeout(timer);
  absorb(read(place()));
  for (const prompts of [PROMPTS_KEPT, 1, 0]) if (write(kept(prompts))) return;
  const small = kept(0);
  while (small.conversations.length > 1) {
    small.conversations.pop();
    if (write(small)) return;
  }
}

function write(value) {
  try {
    place().setItem(NAME, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}

/** Whether a kept value is of the kind that is expected; a choice that was never made may be null. */
function fits(name, value) {
  const first = firsts[name];
  if (name in KINDS) return value === null || typeof value === KINDS[name];
  return first === null || (typeof value === typeof first && Array.isArray(value) === Array.isArray(first));
}

export function restore() {
  for (const [name, value] of Object.entries({ ...read(localStorage), ...read(place()) })) {
    if (name in state && name !== "server" && name !== "shares" && fits(name, value)) state[name] = value;
  }
  state.conversations = sound(state.conversations);
  if (!isChoice(state.from)) state.from = null;
  for (const name of ["points", "jobs", "prompts"]) state[name] = state[name].filter(isObject);
  for (const turn of state.conversations.flatMap((one) => one.turns)) {
    if (isWaiting(turn) && !turn.resumes) turn.status = "stopped";
    if (turn.comparing) turn.comparing = false;
    turn.tokens ??= null;
    turn.instructions ??= null;
    turn.temperature ??= null;
    turn.model ??= null;
    turn.reasoning ??= null;
    turn.passages ??= 6;
    if (!Array.isArray(turn.earlier)) turn.earlier = []; // kept by an older page, where each question was asked by itself
    if (!Array.isArray(turn.rows)) turn.rows = null;
  }
  addEventListener("pagehide", keep);
  addEventListener("storage", (event) => event.key === NAME && absorb(read(place())));
}

/** Forget conversations: one, or all. */
export function forget(id = null) {
  absorb(read(place()));
  state.gone.push(...state.conversations.filter((one) => !one.kept).map((one) => one.id).filter((one) => id === null || one === id));
  state.conversations = state.conversations.filter((one) => (id === null ? one.kept : one.id !== id));
  if (!conversation()) {
    state.conversation = null;
    state.selected = null;
  }
  changed("conversation");
}
