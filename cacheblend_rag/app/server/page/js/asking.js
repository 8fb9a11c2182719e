// A question's way to its answer, and the same prompt by the other methods.

import { ApiError, call, stream } from "./api.js";
import { say } from "./dom.js";
import { notePace } from "./estimate.js";
import { count, time } from "./format.js";
import { addKept, beginKept, keeping, renewKept, turnKept } from "./kept.js";
import { takeVerification } from "./verification.js";
import { verifyOf } from "./verifying.js";
import { refreshServer } from "./server.js";
import { readiness } from "./sources.js";
import { addPoint, changed, collectionsOf, comparing, conversation, conversationFor, model, modelName, newId, scopeOf, selectedTurn, state, turnOf } from "./store.js";

const FOLLOWED = 6; // turns of a conversation that a question is asked with
const AGAIN = 2; // seconds until an answer that another server gives is looked for again
const TRIES = 5; // to read on after the connection was lost
let running = null; // the AbortController of the answer being written
let written = null; // its turn
let reading = Promise.resolve(); // until it is read to its end, or left

export const isAsking = () => running !== null;

const answerPath = (turn) => `api/answers/${encodeURIComponent(turn.answerId ?? turn.id)}`;

/** Stop the answer being written, here and on the server. */
export function stop() {
  if (!running) return;
  running.abort();
  if (written?.resumes || written?.kept) call("DELETE", answerPath(written)).catch(() => {}); // an answer that cannot be stopped ends by itself
}

/** Read the answer being written no further; one that the server keeps goes on there. */
export async function leave() {
  const one = state.conversations.find(({ id }) => id === written?.kept);
  if (one) {
    one.loaded = false; // its end is read when it is opened again
    running.abort();
  } else stop();
  await reading;
}

const path = ({ from, collection }, action) => (from ? `api/${action}` : `api/collections/${encodeURIComponent(collection)}/${action}`);

function request(turn) {
  const body = { question: turn.question, k: turn.passages };
  if (turn.from) Object.assign(body, { collections: turn.from.collections, documents: turn.from.documents.map(({ id }) => id) });
  const history = turn.earlier.map(turnOf).filter((one) => one?.status === "done");
  if (history.length) body.history = history.map((one) => ({ ...historyOf(one), ...(one.kept && one.kept === turn.kept && { turn: one.id }) }));
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
export async function ask(question, { earlier = null, tokens = state.tokens, anew = false } = {}) {
  if (running || !state.collection) return;
  const { ready, reason } = readiness();
  if (!ready) return say(reason);
  running = new AbortController();
  state.lost = []; // it was said
  const { collection, ratio, rule, instructions } = state;
  const { one, unkept } = await conversationToAskIn(collection);
  const { turns } = one;
  const turn = { id: newId(), question, collection, ratio, rule, tokens, instructions, at: Date.now(), status: "asking", answer: "" };
  turn.temperature = state.temperature;
  turn.from = state.from === null ? null : structuredClone(state.from);
  turn.model = modelName();
  turn.reasoning = model()?.thinks ? state.reasoning : null;
  turn.passages = state.passages ?? state.server.settings.passages;
  Object.assign(turn, { earlier: earlier ?? upTo(turns.at(-1)), sources: [], report: null, rows: null, error: null });
  Object.assign(turn, { resumes: true, ...(one.kept && { kept: one.id }), ...(unkept && { unkept }) });
  turns.push(turn);
  one.count = turns.length;
  one.opening ??= question;
  state.selected = turn.id;
  changed("conversation", { latest: turn });
  await (reading = attend(turn, (signal) => asked(turn, signal)));
  if (turn.code === "history_erased" && !anew) {
    await renewKept(); // a document was deleted elsewhere: what was made from it is not followed
    await ask(question, { earlier, tokens, anew: true });
  } else if (turn.status === "done" && comparing()) await compare(turn);
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

/** The conversation for a question: the open one, or a new one, which the server keeps if it keeps any and has room. */
async function conversationToAskIn(collection) {
  const open = conversation();
  const about = open ? [open.collection, ...collectionsOf(open)] : [];
  if ([collection, ...scopeOf({ from: state.from, collection })].some((id) => about.includes(id))) return { one: open };
  if (!keeping()) return { one: conversationFor(collection) };
  try {
    return { one: await beginKept(collection) };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return { one: conversationFor(collection), unkept: error.message }; // the browser has it
  }
}

/** Events of an answer to a turn's question. */
async function* asked(turn, signal) {
  const verify = verifyOf(state);
  const body = { ...request(turn), stream: true, show_prompt: true, ...(verify && { verify }), turn: turn.id };
  if (turn.kept) body.conversation = turn.kept;
  else body.resume = true;
  if (turn.reasoning !== null) body.reasoning = turn.reasoning;
  if (turn.temperature) body.temperature = turn.temperature;
  try {
    yield* stream("POST", path(turn, "ask"), body, signal);
  } catch (error) {
    // It was deleted or replaced elsewhere: before it can be asked again, the page learns what is there.
    if (["no_document", "no_collection"].includes(error.code)) await refreshServer();
    throw error;
  }
}

/** Events of an answer that is under way on the server, from its first on. */
async function* again(turn, signal) {
  try {
    let first = true;
    for await (const one of stream("GET", `${answerPath(turn)}/events`, undefined, signal)) {
      if (first) Object.assign(turn, { answer: "", thought: "" });
      first = false;
      yield one;
    }
  } catch (error) {
    if (error.status !== 404) throw error;
    yield* looked(turn, signal);
  }
}

/** The same where another server gives it, or it has ended: the conversation has it by then. */
async function* looked(turn, signal) {
  for (;;) {
    const found = turn.kept ? await turnKept(turn) : null;
    if (signal.aborted) throw new DOMException("left", "AbortError");
    if (found?.status === "asking") {
      await new Promise((resolve) => setTimeout(resolve, AGAIN * 1000));
      continue;
    }
    Object.assign(turn, found ?? { status: "stopped" });
    yield { event: turn.status === "done" ? "done" : "stopped", data: {} };
    return;
  }
}

/** Go on reading an answer, after a reload or on another device. */
export async function resume(turn) {
  if (running || !turn) return;
  running = new AbortController();
  await (reading = attend(turn, (signal) => again(turn, signal)));
  if (turn.status === "done" && comparing() && !turn.rows?.length) await compare(turn);
}

/** Take in an answer as it comes; if the connection is lost, it is read again from its beginning. */
async function attend(turn, events) {
  const { signal } = running;
  written = turn;
  const began = performance.now();
  changed("asking", true);
  say("Looking for passages.");
  try {
    for (let tries = 0; ; tries += 1) {
      try {
        for await (const { event, data } of tries ? again(turn, signal) : events(signal)) take(turn, event, data);
        if (!["done", "stopped", "erased"].includes(turn.status)) throw new ApiError("The connection was lost before the answer ended.", { code: "lost" });
        break;
      } catch (error) {
        const lost = ["lost", "unreachable", "unauthorized"].includes(error.code); // with another key it is read on
        if (!lost || !turn.answerId || tries === TRIES) throw error;
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
    turn.seconds = (performance.now() - began) / 1000;
    if (turn.status === "done") say(summary(turn));
    changed("verifying", turn);
  } catch (error) {
    fail(turn, error);
  } finally {
    running = null;
    written = null;
    changed("turn", turn);
    changed("asking", false);
  }
}

function take(turn, event, data) {
  if (event === "answer") turn.answerId = data.id;
  else if (event === "sources") turn.sources = data;
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
  } else if (event === "not_kept") {
    turn.unkept = data.message;
    delete turn.kept; // the server knows nothing of it that could be followed or rated
  } else if (event === "done") turn.status = "done";
  else if (event === "stopped" && turn.status !== "erased") turn.status = "stopped";
  changed("turn", turn);
}

function fail(turn, error) {
  if (error.name === "AbortError") {
    turn.status = "stopped";
    say("Stopped.");
    return;
  }
  turn.status = "failed";
  Object.assign(turn, { error: error.message, code: error.code });
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
    for await (const { event, data } of stream("POST", path(turn, "compare"), request(turn), controller.signal)) {
      if (event === "row") takeRow(turn, data);
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
    if (turn.kept && turn.rows.length) addKept(turn, { rows: turn.rows }).catch(() => {}); // its answer may have been deleted
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
