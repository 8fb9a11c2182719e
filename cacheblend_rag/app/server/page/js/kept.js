// Conversations that the server keeps for the key: listed, opened, begun and deleted there.

import { ApiError, call } from "./api.js";
import { changed, conversation, forget, isWaiting, scopeOf, state } from "./store.js";
import { takeVerification } from "./verification.js";

const STATES = { running: "asking" };
const MOST = 50; // collections of a conversation, as the server takes them

/** Whether the server keeps conversations. */
export const keeping = () => Boolean(state.server?.settings.keep_conversations);

const path = (id) => `api/conversations/${encodeURIComponent(id)}`;

/** A conversation as the page has it; its turns come when it is opened. */
function take(info) {
  let one = state.conversations.find(({ id }) => id === info.id);
  if (!one) state.conversations.push((one = { id: info.id, kept: true, turns: [], loaded: false }));
  const { title, opening, pinned, created, collections } = info;
  one.collection ??= collections[0];
  return Object.assign(one, { title, opening, pinned, created, collections, latest: info.changed, count: info.turns });
}

/** A turn as the page has it. */
function turnFrom({ id, collection }, told) {
  const { asked } = told;
  const { collections, documents = [] } = asked;
  const turn = { id: told.id, kept: id, question: told.question, collection: collections[0] ?? collection, at: told.at };
  turn.from = collections.length === 1 && !documents.length ? null : { collections, documents: documents.map((one) => ({ id: one })) };
  Object.assign(turn, { ratio: asked.ratio ?? null, rule: asked.rule ?? null, tokens: asked.max_tokens ?? null, temperature: asked.temperature ?? null });
  Object.assign(turn, { instructions: asked.instructions ?? null, model: asked.model ?? null, reasoning: asked.reasoning ?? null });
  Object.assign(turn, { passages: asked.k ?? state.server.settings.passages, earlier: asked.follows });
  Object.assign(turn, { status: STATES[told.state] ?? told.state, answerId: told.answer_id, answer: told.answer, thought: told.thought });
  Object.assign(turn, { sources: told.sources, report: told.report, rows: told.rows, error: told.error, rating: told.rating });
  if (told.verification && told.state !== "erased") takeVerification(turn, told.verification);
  return turn;
}

/** Ask for the list; those that hold all words, if any are given. */
export async function listKept(words = "") {
  const found = await call("GET", `api/conversations${words ? `?search=${encodeURIComponent(words)}` : ""}`);
  const ids = new Set(found.map(({ id }) => id));
  found.forEach(take);
  if (!words) state.conversations = state.conversations.filter((one) => !one.kept || ids.has(one.id));
  if (!conversation() && state.conversation) Object.assign(state, { conversation: null, selected: null });
  return ids;
}

/** Load what was said in a conversation that is kept. */
export async function loadKept(one) {
  const whole = await call("GET", path(one.id));
  take(whole);
  const read = new Map(one.turns.filter((turn) => isWaiting(turn) || turn.comparing).map((turn) => [turn.id, turn])); // they go on here
  one.turns = whole.all_turns.map((told) => (told.state !== "erased" && read.get(told.id)) || turnFrom(one, told));
  one.loaded = true;
}

/** Begin a conversation that is kept, with what its first question is asked of. */
export async function beginKept(collection) {
  const collections = scopeOf({ from: state.from, collection }).slice(0, MOST);
  const one = take(await call("POST", "api/conversations", { collections }));
  Object.assign(one, { collection, loaded: true });
  state.conversation = one.id;
  return one;
}

/** One turn as it stands on the server now. */
export async function turnKept(turn) {
  const one = state.conversations.find(({ id }) => id === turn.kept);
  const found = (await call("GET", path(turn.kept))).all_turns.find(({ id }) => id === turn.id);
  return found && one ? turnFrom(one, found) : null;
}

/** Delete one, or all. */
export async function deleteKept(id = null) {
  await call("DELETE", id === null ? "api/conversations" : path(id));
  state.conversations = state.conversations.filter((one) => !one.kept || (id !== null && one.id !== id));
  state.shares = state.shares.filter((one) => id !== null && one.conversation !== id);
  if (!conversation()) Object.assign(state, { conversation: null, selected: null });
  changed("conversation");
}

/** Change a conversation: its title, or whether it is pinned. */
export const changeKept = async (one, values) => take(await call("PATCH", path(one.id), values));

/** Add to an answer: a rating, or a comparison of methods. */
export const addKept = (turn, values) => call("PATCH", `${path(turn.kept)}/turns/${encodeURIComponent(turn.id)}`, values);

/** What was said may have changed on the server: load it again, if it is open. */
export async function renewKept() {
  for (const one of state.conversations) if (one.kept) one.loaded = false;
  const here = conversation();
  if (!here?.kept) return;
  try {
    await loadKept(here);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 404) forget(here.id);
  }
  if (!here.turns.some(({ id }) => id === state.selected)) state.selected = here.turns.at(-1)?.id ?? null;
  changed("conversation");
}

/** Load the open conversation again if it is otherwise on the server: answers were deleted or asked for elsewhere. */
export async function renewIfChanged() {
  const here = conversation();
  if (!here?.kept) return;
  try {
    const there = new Map((await call("GET", path(here.id))).all_turns.map((told) => [told.id, STATES[told.state] ?? told.state]));
    const mine = new Map(here.turns.map((turn) => [turn.id, turn]));
    const isGone = ({ id, status }) => status === "done" && !there.has(id);
    const isNew = ([id, status]) => !mine.has(id) || (mine.get(id).status !== status && !isWaiting(mine.get(id)));
    if (here.turns.some(isGone) || [...there].some(isNew)) await renewKept();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 404) await renewKept();
  }
}
