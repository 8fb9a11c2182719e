// Per passage: from the store or not, from which device, how large; and rows recomputed per layer.

import { el, svg } from "./dom.js";
import { bytes, count, share } from "./format.js";

/** Recomputed tokens of each chunk, read off the prompt. */
function recomputedBy(report) {
  const found = new Map();
  for (const token of report.prompt) {
    if (token.segment === "chunk" && token.recomputed) found.set(token.chunk, (found.get(token.chunk) ?? 0) + 1);
  }
  return found;
}

function chunkView(chunk, at, source, recomputed) {
  const where = chunk.hit ? `hit${chunk.device ? ` · ${chunk.device}` : ""}` : "miss";
  const told = [chunk.bytes ? bytes(chunk.bytes) : null, count(chunk.tokens, "token")];
  if (chunk.hit && recomputed !== null) told.push(`${recomputed} recomputed`);
  else if (!chunk.hit) told.push("all computed");
  return el(
    "li",
    { class: chunk.hit ? "hit" : "miss" },
    el("span", { class: "number", text: at + 1 }),
    el("div", {}, el("p", { class: "name", text: source?.document ?? `Passage ${at + 1}`, title: source?.document }), el("p", { class: "took", text: told.join(" · ") })),
    el("span", { class: `badge ${chunk.hit ? "good" : "bad"}`, text: where }),
  );
}

function layersView(report) {
  const layers = report.recomputed ?? [];
  if (!layers.length) return null;
  const most = Math.max(...layers, 1);
  const [wide, high] = [240, 34];
  const step = wide / layers.length;
  const told = layers.map((rows, at) => `layer ${at} ${rows}`).join(", ");
  const drawn = layers.map((rows, at) => {
    const tall = Math.max((rows / most) * high, rows ? 1 : 0);
    return svg("rect", { x: at * step + 0.75, y: high - tall, width: Math.max(step - 1.5, 1), height: tall, rx: 1 });
  });
  const label = `Reused tokens recomputed on each layer: ${told}`;
  return el(
    "figure",
    { class: "layers" },
    svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": label, preserveAspectRatio: "none" }, drawn),
    el("figcaption", { class: "hint", text: `Reused tokens recomputed, layer 0 to ${layers.length - 1}: ${[...new Set([layers[0], layers.at(-1)])].join(" → ")}` }),
  );
}

export function chunksView(turn) {
  const { report, sources } = turn;
  const known = report.prompt.length > 0;
  const by = recomputedBy(report);
  const size = report.chunks.reduce((sum, chunk) => sum + (chunk.hit ? chunk.bytes : 0), 0);
  const { prefix, chunks, suffix, between = 0 } = report.tokens;
  const reused = report.reused / (prefix + chunks + between + suffix || 1);
  const items = report.chunks.map((chunk, at) => chunkView(chunk, at, sources[at], known ? (by.get(at) ?? 0) : null));
  const begun = report.reused ? `behind ${count(report.reused, "token")} that were kept of an earlier prompt` : "nothing was worth reusing";
  const why = report.plain_reason || begun;
  const plain = report.plain ? el("p", { class: "hint", text: `Answered by plain prefill: ${why}.` }) : null;
  return [
    plain,
    el("p", { class: "took", text: `${count(report.hits, "hit")}, ${count(report.misses, "miss", "misses")}; ${bytes(size)} of KV read; ${share(reused)} of the prompt's tokens came from the store.` }),
    el("ol", { class: "chunks" }, items),
    layersView(report),
  ];
}
