// Thumbs up and down: kept with the answer, and exported for the evaluation.

import { ApiError, text } from "./api.js";
import { el, say, svg } from "./dom.js";
import { saveFile } from "./exporting.js";
import { addKept, keeping } from "./kept.js";
import { changed, state } from "./store.js";

const THUMB = "M8 21H5a1 1 0 0 1-1-1v-8a1 1 0 0 1 1-1h3zm0 0V11l4-8a2.2 2.2 0 0 1 2.2 2.8L13.4 9h5.4a2 2 0 0 1 2 2.4l-1.4 8a2 2 0 0 1-2 1.6z";
const CHOICES = [
  [1, "up", "Good answer"],
  [-1, "down", "Bad answer"],
];

const thumb = () => svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: THUMB }));

async function rate(turn, rating) {
  const before = turn.rating ?? 0;
  turn.rating = before === rating ? 0 : rating;
  changed("rated", turn);
  try {
    if (turn.kept) await addKept(turn, { rating: turn.rating });
    say(turn.rating ? `Rated: ${rating > 0 ? "good" : "bad"}.` : "Not rated any more.");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    turn.rating = before;
    changed("rated", turn);
    say(error.message);
  }
}

/** The two buttons of an answer. */
export const ratingView = (turn) =>
  CHOICES.map(([rating, way, name]) => {
    const props = { type: "button", class: `link thumb ${way}`, "aria-label": name, title: name, "aria-pressed": String(turn.rating === rating) };
    return el("button", { ...props, data: { rating }, on: { click: () => rate(turn, rating) } }, thumb());
  });

/** An answer that this browser has, as a line for the evaluation; null if its question is not understood alone, or its passages are gone. */
function caseOf(one, turn, rating) {
  const passages = turn.sources.filter(({ text: said }) => said?.trim()).map(({ document: title, text: said }) => ({ title, text: said }));
  const alone = !turn.earlier.length || (turn.report?.stands_alone ?? true);
  const given = turn.answer.trim();
  if (!alone || !passages.length || !given) return null;
  const told = rating > 0 ? { answers: [given] } : { answers: [], given };
  return { id: `${one.id}/${turn.id}`, question: turn.question, ...told, passages, kind: rating > 0 ? "good" : "bad", group: one.id };
}

/** Let the browser save all answers that were rated so; how many they are, and how many others are left out. */
export async function saveRated(rating) {
  const own = state.conversations.filter((one) => !one.kept);
  const rated = own.flatMap((one) => one.turns.filter((turn) => turn.rating === rating).map((turn) => caseOf(one, turn, rating)));
  const cases = rated.filter(Boolean);
  const there = keeping() ? await text(`api/ratings?rating=${rating}`) : null;
  const lines = (there?.text ?? "") + cases.map((one) => `${JSON.stringify(one)}\n`).join("");
  const many = lines.split("\n").length - 1;
  if (many) saveFile(`${rating > 0 ? "good" : "bad"}-answers.jsonl`, lines, "application/x-ndjson");
  return { many, left: rated.length - cases.length + Number(there?.headers.get("X-Left-Out") ?? 0) };
}
