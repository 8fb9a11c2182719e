// What the page knows, and what of it survives a reload.

const NAME = "cacheblend-rag/1";
const PROMPTS_KEPT = 6; // prompts are by far the largest part; of older answers only the figures stay
const CONVERSATIONS_KEPT = 40;
const POINTS_KEPT = 60;

/** `server` is the last /api/state; the rest is the user's and kept. */
export const state = {
  server: null,
  theme: "auto",
  collection: null,
  model: null, // name; null: the server's first
  conversations: [], // newest first: {id, collection, created, turns}
  conversation: null, // id
  selected: null, // id of the turn that the panel shows
  ratio: null, // null: the server's own
  rule: null,
  passages: null, // for each answer
  tokens: null, // of the longest answer
  instructions: null, // what the model is told before the passages
  verify: null, // whether answers are checked; null: yes
  reasoning: null, // whether the model thinks first; null: as the server has it
  compare: null, // null: on for the small starter model
  pace: null, // seconds that the latest comparison took, for each token of the prompt
  points: [], // {ttft, hits, misses}
  jobs: [], // {job, collection, files}
  draft: "",
};

const bus = new EventTarget();

/** Call `fn` when something of that name changes. */
export const on = (name, fn) => bus.addEventListener(name, (event) => fn(event.detail));

/** Say that something changed, and keep it. */
export function changed(name, detail) {
  bus.dispatchEvent(new CustomEvent(name, { detail }));
  keepSoon();
}

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).reduce((text, part) => text + part.toString(36), "");

export const conversation = () => state.conversations.find((one) => one.id === state.conversation) ?? null;

export const turns = () => conversation()?.turns ?? [];

/** A turn by its id, of whatever conversation. */
export const turnOf = (id) => state.conversations.flatMap((one) => one.turns).find((turn) => turn.id === id) ?? null;

/** Whether an answer is on its way. */
export const isWaiting = ({ status }) => status === "asking" || status === "thinking" || status === "streaming";

export const selectedTurn = () => turns().find((turn) => turn.id === state.selected) ?? null;

export const collection = () => state.server?.collections.find((one) => one.id === state.collection) ?? null;

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
  state.conversations.splice(CONVERSATIONS_KEPT);
  state.conversation = made.id;
  return made;
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
  const { server, conversations, ...rest } = state;
  return { ...rest, conversations: conversations.map((one) => ({ ...one, turns: one.turns.map(slim) })) };
}

let timer = null;

function keepSoon() {
  clearTimeout(timer);
  timer = setTimeout(keep, 250);
}

/** Write everything down; what does not fit is given up from the oldest on. */
export function keep() {
  clearTimeout(timer);
  for (const prompts of [PROMPTS_KEPT, 1, 0]) if (write(kept(prompts))) return;
  const small = kept(0);
  while (small.conversations.length > 1) {
    small.conversations.pop();
    if (write(small)) return;
  }
}

function write(value) {
  try {
    localStorage.setItem(NAME, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}

/** Whether a kept value is of the kind that is expected; what is null at first may be of any. */
const fits = (value, first) =>
  first === null || (typeof value === typeof first && Array.isArray(value) === Array.isArray(first));

export function restore() {
  let saved = {};
  try {
    saved = JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    // Unreadable: as if nothing had been kept.
  }
  for (const [name, value] of Object.entries(saved)) {
    if (name in state && name !== "server" && fits(value, state[name])) state[name] = value;
  }
  for (const turn of state.conversations.flatMap((one) => one.turns)) {
    if (isWaiting(turn)) turn.status = "stopped";
    if (turn.comparing) turn.comparing = false;
    turn.tokens ??= null;
    turn.instructions ??= null;
    turn.model ??= null;
    turn.reasoning ??= null;
    turn.passages ??= 6;
    turn.earlier ??= []; // kept by an older page, where each question was asked by itself
  }
  addEventListener("pagehide", keep);
}

/** Forget conversations: one, or all. */
export function forget(id = null) {
  state.conversations = id === null ? [] : state.conversations.filter((one) => one.id !== id);
  if (!conversation()) {
    state.conversation = null;
    state.selected = null;
  }
  changed("conversation");
}
