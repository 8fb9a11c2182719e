// A question's way to its answer, and the same prompt by the other methods.

import { ApiError, stream } from "./api.js";
import { say } from "./dom.js";
import { notePace } from "./estimate.js";
import { count, time } from "./format.js";
import { takeVerification, verifyOf } from "./verifying.js";
import { addPoint, changed, comparing, conversationFor, model, modelName, newId, selectedTurn, state, turnOf } from "./store.js";

const FOLLOWED = 6; // turns of a conversation that a question is asked with
let running = null; // the AbortController of the answer being written

export const isAsking = () => running !== null;

export const stop = () => running?.abort();

const path = (collection, action) => `api/collections/${encodeURIComponent(collection)}/${action}`;

function request(turn) {
  const body = { question: turn.question, k: turn.passages };
  const history = turn.earlier.map(turnOf).filter(Boolean);
  if (history.length) body.history = history.map(historyOf);
  if (turn.ratio !== null) body.ratio = turn.ratio;
  if (turn.rule !== null) body.rule = turn.rule;
  if (turn.tokens !== null) body.max_tokens = turn.tokens;
  if (turn.instructions) body.instructions = turn.instructions;
  if (turn.model !== null) body.model = turn.model;
  return body;
}

/** A turn as the server takes it: with its passages, the next prompt can go on from the one that it had. */
function historyOf({ question, answer, sources, report }) {
  const refs = sources.map(({ document_id, chunk }) => ({ document_id, chunk }));
  return { question, answer, sources: refs, stands_alone: report?.stands_alone ?? true };
}

/** Ids of the turns that a question after this one follows: what it followed itself, and it, if it was answered. */
function upTo(turn) {
  if (!turn) return [];
  return turn.status === "done" && turn.answer.trim() ? [...turn.earlier, turn.id].slice(-FOLLOWED) : turn.earlier;
}

/**
 * Ask, show the answer as it comes, and compare methods where that is wanted.
 * By default it follows the latest turn, and is as long as the settings say.
 */
export async function ask(question, { earlier = null, tokens = state.tokens } = {}) {
  if (running || !state.collection) return;
  const { collection, ratio, rule, instructions } = state;
  const { turns } = conversationFor(collection);
  const turn = { id: newId(), question, collection, ratio, rule, tokens, instructions, at: Date.now(), status: "asking", answer: "" };
  turn.model = modelName();
  turn.reasoning = model()?.thinks ? state.reasoning : null;
  turn.passages = state.passages ?? state.server.settings.passages;
  Object.assign(turn, { earlier: earlier ?? upTo(turns.at(-1)), sources: [], report: null, rows: null, error: null });
  turns.push(turn);
  state.selected = turn.id;
  changed("conversation", { latest: turn });
  await answer(turn);
  if (turn.status === "done" && comparing()) await compare(turn);
}

/** Ask the same again, after the same turns, with model and settings as they are now, or a longer answer. */
export const askAgain = (turn, tokens = state.tokens) => ask(turn.question, { earlier: turn.earlier, tokens });

/** How long an answer may be that goes on where this one was cut off; null if none may be longer. */
export function longerAnswer(turn) {
  if (!state.server) return null;
  const { settings, limits } = state.server;
  const now = turn.tokens ?? settings.answer_tokens;
  return now < limits.answer_tokens ? Math.min(4 * now, limits.answer_tokens) : null;
}

async function answer(turn) {
  running = new AbortController();
  const began = performance.now();
  changed("asking", true);
  say("Looking for passages.");
  try {
    const verify = verifyOf(state);
    const body = { ...request(turn), stream: true, show_prompt: true, ...(verify && { verify }) };
    if (turn.reasoning !== null) body.reasoning = turn.reasoning;
    for await (const { event, data } of stream("POST", path(turn.collection, "ask"), body, running.signal)) {
      take(turn, event, data);
    }
    if (turn.status !== "done") throw new ApiError("The connection was lost before the answer ended.");
    turn.seconds = (performance.now() - began) / 1000;
    say(summary(turn));
    changed("verifying", turn);
  } catch (error) {
    fail(turn, error);
  } finally {
    running = null;
    changed("turn", turn);
    changed("asking", false);
  }
}

function take(turn, event, data) {
  if (event === "sources") turn.sources = data;
  else if (event === "thought") {
    turn.status = "thinking";
    turn.thought = (turn.thought ?? "") + data.text;
  } else if (event === "token") {
    turn.status = "streaming";
    turn.answer += data.text;
  } else if (event === "report") {
    turn.report = data;
    if (data.verification) takeVerification(turn, data.verification);
    addPoint(data);
  } else if (event === "error") throw new ApiError(data.message, { code: data.code });
  else if (event === "done") turn.status = "done";
  changed("turn", turn);
}

function fail(turn, error) {
  if (error.name === "AbortError") {
    turn.status = "stopped";
    say("Stopped.");
    return;
  }
  turn.status = "failed";
  turn.error = error.message;
  if (!(error instanceof ApiError)) throw error;
}

function summary({ report }) {
  if (!report) return "Answered.";
  return `Answered. First token after ${time(report.ttft_s)}, ${report.hits} of ${count(report.hits + report.misses, "passage")} from the store.`;
}

/** Take in a method's row, or what is known of it now. */
function takeRow(turn, row) {
  const at = turn.rows.findIndex((one) => one.method === row.method);
  turn.rows.splice(at < 0 ? turn.rows.length : at, 1, row);
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
  Object.assign(turn, { rows: [], comparing: true, compareError: null, cancelled: false, since: Date.now() });
  changed("rows", turn);
  let ended = false;
  try {
    for await (const { event, data } of stream("POST", path(turn.collection, "compare"), request(turn), controller.signal)) {
      if (event === "row") takeRow(turn, data);
      if (event === "error") throw new ApiError(data.message, { code: data.code });
      ended ||= event === "done";
      changed("rows", turn);
    }
    if (!ended) throw new ApiError("The connection was lost before all methods had answered.");
    notePace(turn);
  } catch (error) {
    turn.cancelled = error.name === "AbortError";
    if (!turn.cancelled) turn.compareError = error.message;
    if (!turn.cancelled && !(error instanceof ApiError)) throw error;
  } finally {
    comparisons.delete(turn.id);
    turn.comparing = false;
    changed("rows", turn);
  }
}

/** Switch the comparison on or off; on, it is run for the answer that is shown. */
export function setComparing(wanted) {
  state.compare = wanted;
  changed("comparing");
  if (!wanted) stopComparing();
  const turn = selectedTurn();
  if (wanted && turn?.status === "done" && !turn.rows?.length) compare(turn);
}
