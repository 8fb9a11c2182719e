// How an answer was held against the full model, below its words.

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
