// A question's way to its answer, and the same prompt by the other methods.

import { ApiError, stream } from "./api.js";
import { count, say, time } from "./dom.js";
import { changed, chat, chatOf, choose, comparing, newId, saveChat, selectedTurn, state, turns } from "./store.js";
import { follow, takeVerification } from "./verification.js";

const FOLLOWED = 6; // turns of a chat that a question is asked with
let running = null; // the AbortController of the answer being written

export const isAsking = () => running !== null;

/** Stop the answer being written. */
export const stop = () => running?.abort();

/** What a question is asked with, as the settings are now. */
function body(question) {
  const { documents, model, top_k, max_tokens, recompute_ratio, instructions } = state;
  const ids = documents?.map(({ id }) => id);
  const chosen = { question, documents: ids, model: state.server.models.length > 1 ? model : null, top_k, max_tokens, recompute_ratio, instructions };
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== null && value !== undefined));
}

/** A turn's request with its history. */
function request(turn) {
  const known = (chatOf(turn)?.turns ?? []).filter(({ id, status }) => turn.earlier.includes(id) && status === "done");
  return { ...turn.body, history: known.map(({ question, answer }) => ({ question, answer })) };
}

/** Ids of the turns that a question after this one follows: what it followed itself, and it, if it was answered. */
function upTo(turn) {
  if (!turn) return [];
  return turn.status === "done" && turn.answer.trim() ? [...turn.earlier, turn.id].slice(-FOLLOWED) : turn.earlier;
}

/** Ask, show the answer as it comes, and compare methods where that is wanted. By default it follows the latest turn. */
export async function ask(question, earlier = upTo(turns().at(-1))) {
  if (running || !state.server?.documents) return;
  running = new AbortController();
  if (!chat()) {
    const begun = { id: newId(), at: Date.now(), turns: [] };
    state.chats.unshift(begun);
    choose({ chat: begun.id });
  }
  const from = state.documents && count(state.documents.length, "document");
  const turn = { id: newId(), question, body: body(question), from, earlier, status: "asking", answer: "", thought: "", sources: [], report: null, rows: [] };
  chat().turns.push(turn);
  state.selected = turn.id;
  changed("chat", { latest: turn });
  await answer(turn);
  if (turn.status === "done" && comparing()) await compare(turn);
}

/** Ask the same again, after the same turns, with the settings as they are now. */
export const askAgain = (turn) => ask(turn.question, turn.earlier);

async function answer(turn) {
  const { verify, reasoning, server } = state;
  const how = { stream: true, show_prompt: true, return_progress: true };
  if (verify === false) how.verify = "off";
  else if (server.settings.verify === "off") how.verify = "idle";
  if (reasoning !== null) how.reasoning = reasoning;
  changed("asking");
  say("Looking for passages.");
  try {
    for await (const { event, data } of stream("api/ask", { ...request(turn), ...how }, running.signal)) take(turn, event, data);
    if (turn.status !== "done") throw new ApiError("The connection was lost before the answer ended.");
    const { ttft_s: ttft, hits, misses } = turn.report;
    say(`Answered. First token after ${time(ttft)}, ${hits} of ${count(hits + misses, "passage")} from the store.`);
    follow();
  } catch (error) {
    turn.status = error.name === "AbortError" ? "stopped" : "failed";
    if (turn.status === "stopped") return say("Stopped.");
    turn.error = error.message;
    if (!(error instanceof ApiError)) throw error;
    if (error.code !== "no_document") return;
    choose({ documents: null });
    turn.error = "A chosen document is not there any more. Now all documents are asked.";
  } finally {
    running = null;
    saveChat(chatOf(turn));
    changed("turn", turn);
    changed("asking");
  }
}

function take(turn, event, data) {
  if (["sources", "progress"].includes(event)) turn[event] = data;
  else if (event === "thought") {
    turn.status = "thinking";
    turn.thought += data.text;
  } else if (event === "token") {
    turn.status = "streaming";
    turn.answer += data.text;
  } else if (event === "report") {
    turn.report = data;
    // Counted while the prompt is at hand, which is not kept.
    data.chunks.forEach((chunk, at) => (chunk.recomputed = data.prompt.filter((token) => token.chunk === at && token.recomputed).length));
    if (data.verification) takeVerification(turn, data.verification);
  } else if (event === "done") turn.status = turn.report ? "done" : "failed";
  changed("turn", turn);
}

const comparisons = new Map(); // turn id: AbortController

/** Stop comparing methods for a turn, or for all; what has answered stays. */
export function stopComparing(turn = null) {
  for (const [id, controller] of comparisons) if (!turn || turn.id === id) controller.abort();
}

/** Answer a turn's question by every method, row by row; then rows come again with times of more rounds. */
export async function compare(turn) {
  if (turn.comparing) return;
  const controller = new AbortController();
  comparisons.set(turn.id, controller);
  Object.assign(turn, { rows: [], comparing: true, compareError: null });
  changed("turn", turn);
  try {
    let ended = false;
    for await (const { event, data } of stream("api/compare", request(turn), controller.signal)) {
      if (event === "row") turn.rows = [...turn.rows.filter(({ method }) => method !== data.method), data];
      ended ||= event === "done";
      changed("turn", turn);
    }
    if (!ended) throw new ApiError("The connection was lost before all methods had answered.");
  } catch (error) {
    turn.compareError = error.name === "AbortError" ? "Cancelled." : error.message;
    if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
  } finally {
    comparisons.delete(turn.id);
    turn.comparing = false;
    saveChat(chatOf(turn));
    changed("turn", turn);
  }
}

/** Switch the comparison on or off; on, it is run for the answer that is shown. */
export function setComparing(wanted) {
  choose({ compare: wanted });
  if (!wanted) stopComparing();
  const turn = selectedTurn();
  if (wanted && turn?.status === "done" && !turn.rows.length) compare(turn);
}
