// Answers are held against the full model when the server has nothing else to do: what it found, asked for until it is known.

import { ApiError, call } from "./api.js";
import { turnKept } from "./kept.js";
import { changed, modelName, on, state, turnOf } from "./store.js";
import { takeVerification } from "./verification.js";

const WAIT = 20; // seconds that the server may take to answer; less where several answers wait
const AGAIN = 4; // seconds until it is asked again if it could not say

/** How the next answer is to be verified; null where the server's own way is as good. */
export function verifyOf({ verify, server }) {
  if (verify === false) return "off";
  return server?.settings.verify === "off" ? "idle" : null;
}

const isWaiting = (turn) => turn.verification?.status === "waiting";

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

/** Ask once for a turn's verification; whether the server could say something of it. */
async function askFor(turn, wait) {
  const { verification } = turn;
  try {
    const found = await call("GET", `api/answers/${encodeURIComponent(verification.id)}/verification?wait=${wait}`);
    if (isWaiting(turn)) takeVerification(turn, found);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 404) return missed(turn);
    if (isWaiting(turn)) turn.verification = { ...verification, reason: error.message };
    return false;
  }
  return !isWaiting(turn);
}

/** The server does not know of a check; whether it can be said why. An answer that was deleted has none any more. */
async function missed(turn) {
  try {
    const found = turn.kept ? await turnKept(turn) : turn;
    if (found !== turn) delete turn.verification;
    if (found !== turn) Object.assign(turn, found);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 404) delete turn.verification; // with its conversation
    else return false;
  }
  // It keeps them in memory alone, so one that was started again knows none.
  if (isWaiting(turn)) turn.verification = { ...turn.verification, status: "lost" };
  return true;
}

let following = false;

/** Ask for all that wait, one after the other: a browser has few connections to a server. */
async function follow() {
  if (following) return;
  following = true;
  try {
    for (let waiting; (waiting = state.conversations.flatMap((one) => one.turns).filter(isWaiting)).length; ) {
      for (const turn of waiting.filter(({ id }) => turnOf(id))) {
        const said = await askFor(turn, waiting.length > 1 ? 1 : WAIT);
        changed("turn", turn);
        if (said) changed("verified", turn);
        else if (turn.verification.reason) await pause(AGAIN);
        else await pause(0.5); // a server that stops does not wait
      }
    }
  } finally {
    following = false;
  }
}

/** The latest answers of the chosen model, in a sentence; empty while none was checked. */
export async function latestVerified() {
  const model = modelName();
  const { answers, same } = await call("GET", `api/verifications${model === null ? "" : `?model=${encodeURIComponent(model)}`}`);
  if (!answers) return "";
  if (answers === 1) return `The last answer was ${same ? "the full model's word for word" : "corrected"}.`;
  return `Of the last ${answers} answers, ${same} ${same === 1 ? "was" : "were"} the full model's word for word.`;
}

export function startVerifying() {
  on("server", follow);
  on("verifying", follow);
}
