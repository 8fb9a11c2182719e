// How an answer was held against the full model: asked for until it is known, taken in, and told below its words.

import { ApiError, call } from "./api.js";
import { button, el } from "./dom.js";
import { changed, chatOf, saveChat, state } from "./store.js";

const WAIT = 20; // seconds that the server may take to answer; less where several answers wait
const AGAIN = 4000; // milliseconds until it is asked again if it could not say
const FACTS = "This compares computations, not facts.";
const SAID = {
  exact: "Exact: nothing approximate was reused.",
  checked: "Checked: same answer as without reuse.",
  approximate: "Approximate: not compared with the answer without reuse.",
};

/** What is to be said of it, by how near it is to the answer without reuse, and by what becomes of its check. */
function told({ status, reason, fidelity }, { first, marked }) {
  if (status === "waiting") return `Approximate: being compared with the answer without reuse.${reason ? ` ${reason}` : ""}`;
  if (status === "given up") return `Approximate: could not be compared: ${reason}.`;
  if (status === "lost") return "Approximate: the check was lost: the server has perhaps been started again.";
  if (status !== "corrected") return SAID[fidelity] ?? "";
  if (first) return "This is the first text. The answer without reuse goes on differently where words are struck out.";
  return `Corrected: this is the answer without reuse. ${marked ? "Words that changed are underlined." : "Words were taken out."}`;
}

/** Take in how an answer was verified. A correction stands in the place of its text, and the first text stays at hand. */
export function takeVerification(turn, found) {
  turn.verification = found;
  if (found.status !== "corrected") return;
  const kept = [...turn.answer].slice(0, found.position).join(""); // the server counts characters, not UTF-16 units
  const [first, final] = [kept + found.before, kept + found.after];
  if (turn.answer === first || turn.answer === final) Object.assign(turn, { first, answer: final });
  else turn.verification = { ...found, status: "given up", fidelity: "approximate", reason: "the correction is of another text" };
}

/** Show it in a node; `shown` says whether the first text is on show, and whether words are marked; `turnOver` changes that. */
export function showVerification(node, turn, shown, turnOver) {
  const found = (turn.status === "done" && turn.verification) || {};
  const text = told(found, shown);
  if (node.dataset.text === text) return;
  Object.assign(node.dataset, { text, status: found.status ?? "" });
  const over = found.status === "corrected" && button(shown.first ? "Show the answer" : "Show the first text", turnOver, { class: "link" });
  node.replaceChildren(...(text ? [el("span", { text, title: FACTS }), over].filter(Boolean) : []));
}

const isWaiting = (turn) => turn.verification?.status === "waiting";

let following = false;

/** Ask for all that wait, one after the other: a browser has few connections to a server. */
export async function follow() {
  if (following) return;
  following = true;
  try {
    for (let waiting; (waiting = state.chats.flatMap((one) => one.turns).filter(isWaiting)).length; ) {
      for (const turn of waiting) {
        const { verification } = turn;
        const wait = waiting.length > 1 ? 1 : WAIT;
        try {
          takeVerification(turn, await call("GET", `api/answers/${encodeURIComponent(verification.id)}/verification?wait=${wait}`));
        } catch (error) {
          if (!(error instanceof ApiError)) throw error;
          // The server keeps checks in memory alone, so one that was started again knows none.
          turn.verification = error.status === 404 ? { ...verification, status: "lost" } : { ...verification, reason: error.message };
        }
        changed("turn", turn);
        if (!isWaiting(turn)) saveChat(chatOf(turn));
        else await new Promise((go) => setTimeout(go, turn.verification.reason ? AGAIN : 500)); // a server that stops does not wait
      }
    }
  } finally {
    following = false;
  }
}
