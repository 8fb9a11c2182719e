// How an answer was held against the full model: taken in, and told below its words.

import { button, el } from "./dom.js";

const SIGNS = { waiting: "…", verified: "✓", corrected: "≠", "given up": "–", lost: "–" };

const SAME = "The same answer as without stored KV. Whether it is true was not checked.";

/** What is to be said of it, by its status; nothing of an answer that is not checked. */
function told({ status, reason }, { first, marked }) {
  if (status === "waiting") return reason ? `Being checked. ${reason}` : "Being checked";
  if (status === "verified") return "Checked: the full model answers the same.";
  if (status === "given up") return `Could not be checked: ${reason}.`;
  if (status === "lost") return "The check was lost: the server has perhaps been started again.";
  if (status !== "corrected") return "";
  if (first) return "This is the first text. The full model's goes on differently where words are struck out.";
  return `Corrected: this is the full model's answer. ${marked ? "Words that changed are underlined." : "Words were taken out."}`;
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

/** Show it in a node; `shown` says whether the first text is on show, and whether words are marked; `turnOver` changes that. */
export function showVerification(node, turn, shown, turnOver) {
  const found = (turn.status === "done" && turn.verification) || {};
  const text = told(found, shown);
  if (node.dataset.text === text) return;
  Object.assign(node.dataset, { text, status: found.status ?? "" });
  const over = found.status === "corrected" ? button(shown.first ? "Show the answer" : "Show the first text", turnOver, { class: "link" }) : null;
  const sign = el("span", { class: "sign", "aria-hidden": "true", text: SIGNS[found.status] });
  node.replaceChildren(...(text ? [sign, el("span", { text, title: found.status === "verified" ? SAME : null }), over].filter(Boolean) : []));
}
