// A question's way to its answer, and the same prompt by the other methods.

import { ApiError, stream } from "./api.js";
import { say } from "./dom.js";
import { count, time } from "./format.js";
import { addPoint, changed, comparing, conversationFor, newId, selectedTurn, state, turnOf } from "./store.js";

const PASSAGES = 6;
const FOLLOWED = 6; // turns of a conversation that a question is asked with
let running = null; // the AbortController of the answer being written

export const isAsking = () => running !== null;

export const stop = () => running?.abort();

const path = (collection, action) => `api/collections/${encodeURIComponent(collection)}/${action}`;

function request(turn) {
  const body = { question: turn.question, k: PASSAGES };
  const history = turn.earlier.map(turnOf).filter(Boolean);
  if (history.length) body.history = history.map(({ question, answer }) => ({ question, answer }));
  if (turn.ratio !== null) body.ratio = turn.ratio;
  if (turn.rule !== null) body.rule = turn.rule;
  return body;
}

/** Ids of the turns that a question after this one follows: what it followed itself, and it, if it was answered. */
function upTo(turn) {
  if (!turn) return [];
  return turn.status === "done" && turn.answer.trim() ? [...turn.earlier, turn.id].slice(-FOLLOWED) : turn.earlier;
}

/** Ask, show the answer as it comes, and compare methods where that is wanted; by default it follows the latest turn. */
export async function ask(question, earlier = null) {
  if (running || !state.collection) return;
  const { collection, ratio, rule } = state;
  const { turns } = conversationFor(collection);
  const turn = { id: newId(), question, collection, ratio, rule, at: Date.now(), status: "asking", answer: "" };
  Object.assign(turn, { earlier: earlier ?? upTo(turns.at(-1)), sources: [], report: null, rows: null, error: null });
  turns.push(turn);
  state.selected = turn.id;
  changed("conversation", { latest: turn });
  await answer(turn);
  if (turn.status === "done" && comparing()) await compare(turn);
}

/** Ask the same again, after the same turns, with the settings as they are now. */
export const askAgain = (turn) => ask(turn.question, turn.earlier);

async function answer(turn) {
  running = new AbortController();
  changed("asking", true);
  try {
    const body = { ...request(turn), stream: true };
    for await (const { event, data } of stream("POST", path(turn.collection, "ask"), body, running.signal)) {
      take(turn, event, data);
    }
    if (turn.status !== "done") throw new ApiError("The connection was lost before the answer ended.");
    say(summary(turn));
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
  else if (event === "token") {
    turn.status = "streaming";
    turn.answer += data.text;
  } else if (event === "report") {
    turn.report = data;
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

/** Answer a turn's question by every method, row by row; then rows come again with times of more rounds. */
export async function compare(turn) {
  if (turn.comparing) return;
  Object.assign(turn, { rows: [], comparing: true, compareError: null });
  changed("rows", turn);
  let ended = false;
  try {
    for await (const { event, data } of stream("POST", path(turn.collection, "compare"), request(turn))) {
      if (event === "row") takeRow(turn, data);
      if (event === "error") throw new ApiError(data.message, { code: data.code });
      ended ||= event === "done";
      changed("rows", turn);
    }
    if (!ended) throw new ApiError("The connection was lost before all methods had answered.");
  } catch (error) {
    turn.compareError = error.message;
    if (!(error instanceof ApiError)) throw error;
  } finally {
    turn.comparing = false;
    changed("rows", turn);
  }
}

/** Switch the comparison on or off; on, it is run for the answer that is shown. */
export function setComparing(wanted) {
  state.compare = wanted;
  changed("comparing");
  const turn = selectedTurn();
  if (wanted && turn?.status === "done" && !turn.rows?.length) compare(turn);
}
