// The thought before an answer: folded, so that it is never taken for the answer.

import { el } from "./dom.js";
import { count } from "./format.js";

/** A fold for a turn's thought, and what brings it up to date. */
export function thoughtView(turn) {
  const label = el("summary");
  const words = el("div", { class: "thought-words", dir: "auto" });
  const fold = el("details", { class: "thought" }, label, words);
  const update = () => {
    fold.hidden = !turn.thought;
    const tokens = turn.report?.thought_tokens;
    const text = tokens ? `Thought, ${count(tokens, "token")}` : "Thought";
    if (label.textContent !== text) label.textContent = text;
    if (words.textContent !== (turn.thought ?? "")) words.textContent = turn.thought ?? "";
  };
  return { fold, update };
}
