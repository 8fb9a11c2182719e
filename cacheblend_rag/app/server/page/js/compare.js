// The same prompt by every method, side by side.

import { compare, stopComparing } from "./asking.js";
import { button, el } from "./dom.js";
import { estimate, left } from "./estimate.js";
import { sooner, time } from "./format.js";
import { isWaiting } from "./store.js";

const METHODS = {
  full: ["Full recompute", "no KV is reused"],
  prefix: ["Prefix caching", "reuses KV up to the first passage that differs"],
  reuse: ["Full KV reuse", "reuses every passage as stored"],
  blend: ["Blended", "reuses all, recomputes the tokens that need it"],
};
const KL_NOTE =
  "KL: mean divergence from full recompute, in nats a token of its answer; 0 if each token is as likely.";
const ORDER_NOTE = "How far full recompute over the same passages in another order moves its own answer.";
const ORDER = ["full", "prefix", "reuse", "blend"];

/** Rounds whose medians all rows show; 0 while any shows the one pass that gave its answer. */
export const roundsOf = (turn) => Math.min(...(turn.rows ?? []).map((row) => row.rounds ?? 0));

/** Whether the order of the bars may say something: not before the first round has ended. */
export const isTimed = (turn) => !turn.comparing || roundsOf(turn) > 0;

function barOf(row, slowest) {
  return el("div", { class: "thin", "aria-hidden": "true" }, el("span", { vars: { "--wide": `${(100 * row.ttft_s) / slowest}%` } }));
}

function rowView(row, slowest, full, timed) {
  const [name, note] = METHODS[row.method] ?? [row.method, ""];
  const yardstick = row.method === "full";
  const said = row.nearness ?? (row.same_as_full ? "same answer" : "differs"); // kept by an older page
  const mark = yardstick ? "the yardstick" : said;
  const kind = yardstick ? "" : row.same_as_full ? "good" : said.endsWith("further than another order") ? "bad" : "";
  const badge = el("span", { class: `badge ${kind}`, text: mark });
  const near = yardstick || row.kl === undefined ? "" : ` · KL ${row.kl.toFixed(3)}`;
  const how = yardstick || !full ? "" : ` · ${sooner(row.ttft_s, full.ttft_s)}`;
  const took = (timed ? `First token ${time(row.ttft_s)}${how}` : "First token: timed when all have answered") + near;
  return el(
    "li",
    { data: { method: row.method } },
    el("div", { class: "row" }, el("strong", { text: name, title: note }), badge),
    timed ? barOf(row, slowest) : null,
    el("p", { class: "took", text: took, title: yardstick ? "" : KL_NOTE }),
    el("p", { class: "said", dir: "auto", text: row.answer.trim() || "(nothing)" }),
  );
}

/** How far another order of the passages moves the answer, where that was measured. */
function orderView(rows) {
  const known = rows.find((row) => typeof row.order_kl === "number");
  if (!known) return [];
  return [el("p", { class: "took order", text: `Another order of the passages: KL ${known.order_kl.toFixed(3)}.`, title: ORDER_NOTE })];
}

/** How times were taken. */
function timesHint(rounds) {
  if (rounds === 0) return "Each method was timed once only; times differ from run to run.";
  const how = rounds === 1 ? "Times of 1 round" : `Times are the median of ${rounds} rounds`;
  return `${how}, the methods in turn, each run once before to warm up.`;
}

/** The section's content for a turn. */
export function compareView(turn, wanted) {
  if (!turn) return [el("p", { class: "hint", text: "Answers each question by four methods, for time and for the answer." })];
  const rows = turn.rows ?? [];
  const parts = [];
  if (rows.length) {
    const slowest = Math.max(...rows.map((row) => row.ttft_s)) || 1;
    const full = rows.find((row) => row.method === "full");
    const sorted = [...rows].sort((a, b) => ORDER.indexOf(a.method) - ORDER.indexOf(b.method));
    parts.push(el("ul", { class: "methods" }, sorted.map((row) => rowView(row, slowest, full, isTimed(turn)))), ...orderView(sorted));
  }
  if (turn.comparing) {
    const answered = `${rows.length} of ${ORDER.length} methods have answered…`;
    const text = rows.length < ORDER.length ? answered : `All have answered. Timing them, round ${roundsOf(turn) + 1}…`;
    parts.push(el("p", { class: "hint busy", role: "status", text }));
    parts.push(el("div", { class: "row" }, el("p", { class: "left", text: left(turn, roundsOf(turn)) }), button("Cancel", () => stopComparing(turn))));
  } else if (turn.cancelled) {
    parts.push(el("p", { class: "hint", role: "status", text: "Cancelled." }));
  } else if (turn.compareError) {
    parts.push(el("p", { class: "error", role: "alert", text: turn.compareError }));
  }
  if (!turn.comparing && turn.status === "done") {
    const text = rows.length ? "Run again" : "Compare this answer";
    if (rows.length === ORDER.length) parts.push(el("p", { class: "hint", text: timesHint(roundsOf(turn)) }));
    if (rows.length < ORDER.length && estimate(turn)) parts.push(el("p", { class: "hint", text: estimate(turn) }));
    parts.push(button(text, () => compare(turn), { class: rows.length ? "link" : "" }));
  } else if (!rows.length && !turn.comparing) {
    const waiting = wanted ? "Begins when the answer has ended." : "Off.";
    const text = isWaiting(turn) ? waiting : `Nothing to compare: the answer ${turn.status === "erased" ? "was deleted" : "did not end"}.`;
    parts.push(el("p", { class: "hint", text }));
  }
  return parts;
}
