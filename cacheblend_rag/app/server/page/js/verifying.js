// Answers are held against the full model when the server has nothing else to do: what it found, asked for until it is known.

import { ApiError, call } from "./api.js";
import { changed, modelName, on, state, turnOf } from "./store.js";

const WAIT = 20; // seconds that the server may take to answer; less where several answers wait
const AGAIN = 4; // seconds until it is asked again if it could not say

/** How the next answer is to be verified; null where the server's own way is as good. */
export function verifyOf({ verify, server }) {
  if (verify === false) return "off";
  return server?.settings.verify === "off" ? "idle" : null;
}

/** Take in how an answer was verified. A correction stands in the place of its text, and the first text stays at hand. */
export function takeVerification(turn, found) {
  turn.verification = found;
  if (found.status !== "corrected") return;
  const kept = [...turn.answer].slice(0, found.position).join(""); // the server counts characters, not UTF-16 units
  const [first, final] = [kept + found.before, kept + found.after];
  if (turn.answer === first || turn.answer === final) Object.assign(turn, { first, answer: final });
  else turn.verification = { ...found, status: "given up", reason: "the correction is of another text" };
}

const isWaiting = (turn) => turn.verification?.status === "waiting";

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

/** Ask once for a turn's verification; whether the server could say something of it. */
async function askFor(turn, wait) {
  const { verification } = turn;
  try {
    takeVerification(turn, await call("GET", `api/answers/${encodeURIComponent(verification.id)}/verification?wait=${wait}`));
    return !isWaiting(turn);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    // It keeps them in memory alone, so one that was started again knows none.
    turn.verification = { ...verification, status: error.status === 404 ? "lost" : "waiting", reason: error.message };
    return error.status === 404;
  }
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
