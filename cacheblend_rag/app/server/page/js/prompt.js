// The prompt as the model read it, recomputed tokens shaded by how far their KV deviated.

import { el } from "./dom.js";
import { count, share } from "./format.js";

const LEVELS = 5;
const HEADS = { prefix: "Prefix", suffix: "Question" };

/** A function from deviation to a level from 1 to `LEVELS`: by rank, so one outlier does not pale the rest. */
function levels(prompt) {
  const seen = prompt.filter((token) => token.recomputed && token.deviation !== null).map((token) => token.deviation);
  seen.sort((a, b) => a - b);
  return (deviation) => {
    if (deviation === null || !seen.length) return 1;
    const below = seen.findIndex((value) => value >= deviation);
    return 1 + Math.min(LEVELS - 1, Math.floor((below / seen.length) * LEVELS));
  };
}

/** What became of a token: `new` (question, text between passages, missed passage), `again` (recomputed) or `kept`. */
function fate(token, report) {
  if (token.resumed) return "kept";
  if (token.segment === "suffix" || token.segment === "between") return "new";
  if (token.segment === "chunk" && token.chunk !== null && report.chunks[token.chunk]?.hit === false) return "new";
  return token.recomputed ? "again" : "kept";
}

function tokenView(token, kind, level) {
  if (kind === "kept") return document.createTextNode(token.text);
  const deviation = token.deviation === null ? "" : `, deviation ${token.deviation.toPrecision(3)}`;
  const title = kind === "again" ? `recomputed, position ${token.position}${deviation}` : null;
  return el("span", { class: kind === "again" ? `again d${level}` : "new", text: token.text, title });
}

function segments(prompt) {
  const found = [];
  for (const token of prompt) {
    const name = `${token.segment}/${token.chunk ?? ""}`;
    if (found.at(-1)?.name !== name) found.push({ name, first: token, tokens: [] });
    found.at(-1).tokens.push(token);
  }
  return found;
}

function legend(measured) {
  const shades = Array.from({ length: LEVELS }, (_, at) => el("span", { class: `again d${at + 1}`, text: "\u2002" }));
  return el(
    "p",
    { class: "hint keys" },
    el("span", {}, "reused"),
    el("span", {}, measured ? "recomputed, by deviation " : "recomputed ", el("span", { class: "shades", "aria-hidden": "true" }, measured ? shades : shades[0])),
    el("span", {}, el("span", { class: "new", text: "computed" }), " (question, misses)"),
  );
}

export function promptView(turn) {
  const { report, sources } = turn;
  if (!report.prompt.length) return [el("p", { class: "hint", text: "The prompt is kept for the latest answers only. Ask again to see it." })];
  const level = levels(report.prompt);
  const chunkTokens = report.prompt.filter((token) => token.segment === "chunk");
  const again = chunkTokens.filter((token) => fate(token, report) === "again").length;
  const parts = segments(report.prompt).flatMap(({ first, tokens }, place) => {
    const named = first.segment === "chunk" && first.chunk !== null;
    const head = named ? `${first.chunk + 1} · ${sources[first.chunk]?.document ?? "Passage"}` : HEADS[first.segment];
    // A line end that opens a segment would only show as a gap beneath its heading.
    const shown = tokens.map((token, at) => (at ? token : { ...token, text: token.text.replace(/^\n+/, "") }));
    const words = shown.map((token) => tokenView(token, fate(token, report), level(token.deviation)));
    const glue = first.segment === "between"; // what stands between passages needs no heading
    return [glue || !head ? null : el("h4", { text: head }), el("p", { dir: "auto" }, words)].filter(Boolean);
  });
  const { prefix, chunks, suffix, between = 0 } = report.tokens;
  return [
    el("p", { class: "took", text: `${count(prefix + chunks + between + suffix, "token")}: ${again} of ${chunkTokens.length} passage tokens recomputed (${share(again / (chunkTokens.length || 1))}).` }),
    legend(report.prompt.some((token) => token.recomputed && token.deviation !== null)),
    el("div", { class: "prompt-text", tabindex: 0, role: "region", "aria-label": "The prompt's text" }, parts),
  ];
}
