// The side: what happened while the chosen answer was made.

import { compare, setComparing, stopComparing } from "./asking.js";
import { $, button, bytes, count, el, faster, hint, share, time } from "./dom.js";
import { comparing, isWaiting, on, selectedTurn, state } from "./store.js";

const PARTS = [
  ["split_s", "split", "Split", "the prompt into tokens"],
  ["look_up_s", "look-up", "Look up", "what is stored"],
  ["load_s", "load", "Load", "waiting for stored KV"],
  ["fuse_s", "fuse", "Fuse", "recompute and blend"],
  ["first_token_s", "first", "First token", "from the logits"],
];
const METHODS = {
  full: ["Full recompute", "no KV is reused"],
  prefix: ["Prefix caching", "reuses KV up to the first passage that differs"],
  reuse: ["Full KV reuse", "reuses every passage as stored"],
  blend: ["Blended", "reuses all, recomputes the tokens that need it"],
};
const KL_NOTE = "KL: mean divergence from full recompute, in nats a token of its answer; 0 if each token is as likely.";

/** A bar of parts `[kind, size]`, and what a screen reader is told of it. */
function barView(parts, label) {
  const sum = parts.reduce((total, [, size]) => total + size, 0);
  const spans = parts.filter(([, size]) => size > 0).map(([kind, size]) => el("span", { class: `part ${kind}`, vars: { "--grow": String(size / sum) } }));
  return el("div", { class: "bar", role: "img", "aria-label": label }, spans);
}

/** The time to first token, split into its parts. */
function ttftView({ report }) {
  const parts = PARTS.map(([key, name, label, note]) => [name, report.parts[key] ?? 0, label, note]);
  const sum = parts.reduce((total, [, seconds]) => total + seconds, 0) || 1;
  const rows = parts.map(([name, seconds, label, note]) =>
    el("div", {},
      el("dt", {}, el("span", { class: `key ${name}`, "aria-hidden": "true" }), label, " ", el("small", { text: note })),
      el("dd", {}, time(seconds), " ", el("small", { text: share(seconds / sum) }))),
  );
  const told = parts.map(([, seconds, label]) => `${label} ${time(seconds)}`).join(", ");
  const total = time(report.ttft_s);
  return [el("p", { class: "figure" }, el("strong", { text: total })), barView(parts, `Time to first token ${total}: ${told}`), el("dl", { class: "legend" }, rows)];
}

function chunkView(chunk, at, source) {
  const computed = chunk.hit ? `${chunk.recomputed} recomputed` : "all computed";
  const facts = [count(chunk.tokens, "token"), computed, chunk.bytes ? bytes(chunk.bytes) : null].filter(Boolean).join(" · ");
  const name = source?.document ?? `Passage ${at + 1}`;
  return el(
    "li",
    { class: chunk.hit ? "hit" : "miss" },
    el("span", { class: "number", text: at + 1 }),
    el("div", {}, el("p", { class: "name", text: name, title: name }), el("p", { class: "took", text: facts })),
    el("span", { class: `badge ${chunk.hit ? "good" : "bad"}`, text: chunk.hit ? `hit${chunk.device ? ` · ${chunk.device}` : ""}` : "miss" }),
  );
}

/** Per passage: from the store or not, and how much of it was computed; a bar shows the same for the whole prompt. */
function chunksView({ report, sources }) {
  const { prefix, chunks, suffix, between = 0 } = report.tokens;
  const all = prefix + chunks + between + suffix || 1;
  const of = (chunk) => (chunk.hit ? [["kept", chunk.tokens - chunk.recomputed], ["again", chunk.recomputed]] : [["computed", chunk.tokens]]);
  const again = report.chunks.reduce((sum, chunk) => sum + (chunk.hit ? chunk.recomputed : 0), 0);
  const told = `${share(report.reused / all)} of the prompt's ${count(all, "token")} came from the store`;
  const keys = [["kept", "reused"], ["again", "recomputed"], ["computed", "computed"]].map(([kind, text]) => el("span", {}, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), text));
  const plain = report.resumed ? "Goes on from a prompt that was still in memory." : `Answered by plain prefill: ${report.plain_reason || "nothing was worth reusing"}.`;
  return [
    report.plain && hint(plain),
    el("p", { class: "took", text: `${count(report.hits, "hit")}, ${count(report.misses, "miss", "misses")}. ${told}.` }),
    barView([["kept prefix", prefix], ...report.chunks.flatMap(of), ["computed", between + suffix]], `${told}; ${count(again, "token")} of it recomputed`),
    el("p", { class: "hint keys" }, keys),
    el("ol", { class: "chunks" }, report.chunks.map((chunk, at) => chunkView(chunk, at, sources[at]))),
  ];
}

/** The prompt as the model read it; recomputed tokens are shaded. */
function promptView({ report, sources }) {
  if (!report.prompt?.length) return [hint("The prompt is shown until the page is loaded anew. Ask again to see it.")];
  const nodes = [];
  let segment = null;
  for (const token of report.prompt) {
    const here = `${token.segment}/${token.chunk}`;
    const begins = here !== segment;
    const head = token.segment === "chunk" ? `${token.chunk + 1} · ${sources[token.chunk]?.document ?? "Passage"}` : { prefix: "Prefix", suffix: "Question" }[token.segment];
    if (begins && head) nodes.push(el("h4", { text: head }));
    if (begins) nodes.push(el("p", { dir: "auto" }));
    segment = here;
    const isNew = token.segment === "chunk" ? !report.chunks[token.chunk].hit : token.segment !== "prefix";
    const again = token.recomputed && !isNew && token.segment === "chunk";
    const text = begins ? token.text.replace(/^\n+/, "") : token.text; // a line end there would only show as a gap
    nodes.at(-1).append(again || isNew ? el("span", { class: again ? "again" : "new", text }) : text);
  }
  const note = "Shaded: recomputed. Dotted: computed.";
  return [hint(note), el("div", { class: "prompt-text", tabindex: 0, role: "region", "aria-label": "The prompt's text" }, nodes)];
}

function rowView(row, slowest, full, timed) {
  const [name, note] = METHODS[row.method] ?? [row.method, ""];
  const isFull = row.method === "full";
  const kind = isFull ? "" : row.same_as_full ? "good" : row.nearness?.endsWith("further than another order") ? "bad" : "";
  const how = isFull || !full ? "" : ` · ${faster(row.ttft_s, full.ttft_s)}`;
  const near = isFull || row.kl === undefined ? "" : ` · KL ${row.kl.toFixed(3)}`;
  return el(
    "li",
    { data: { method: row.method } },
    el("div", { class: "row" }, el("strong", { text: name, title: note }), el("span", { class: `badge ${kind}`, text: isFull ? "the yardstick" : row.nearness })),
    timed && el("div", { class: "thin", "aria-hidden": "true" }, el("span", { vars: { "--wide": `${(100 * row.ttft_s) / slowest}%` } })),
    el("p", { class: "took", text: (timed ? `First token ${time(row.ttft_s)}${how}` : "First token: timed when all have answered") + near, title: near && KL_NOTE }),
    el("p", { class: "said", dir: "auto", text: row.answer.trim() || "(nothing)" }),
  );
}

/** The same prompt by every method. */
function compareView(turn) {
  if (!turn) return [hint("Answers each question by four methods, for time and for the answer.")];
  const { rows, status } = turn;
  const order = Object.keys(METHODS);
  const sorted = rows.toSorted((a, b) => order.indexOf(a.method) - order.indexOf(b.method));
  const rounds = rows.length ? Math.min(...rows.map((row) => row.rounds ?? 0)) : 0;
  const slowest = Math.max(...rows.map((row) => row.ttft_s)) || 1;
  const full = rows.find(({ method }) => method === "full");
  const list = rows.length > 0 && el("ul", { class: "methods" }, sorted.map((row) => rowView(row, slowest, full, !turn.comparing || rounds > 0)));
  if (turn.comparing) {
    const text = rows.length < order.length ? `${rows.length} of ${order.length} methods have answered…` : `All have answered. Timing them, round ${rounds + 1}…`;
    return [list, el("div", { class: "row" }, hint(text, { class: "hint busy", role: "status" }), button("Cancel", () => stopComparing(turn)))];
  }
  if (!rows.length && status !== "done") return [hint(isWaiting(turn) && comparing() ? "Begins when the answer has ended." : isWaiting(turn) ? "Off." : "Nothing to compare: the answer did not end.")];
  const times = rounds > 1 ? `Times are the median of ${rounds} rounds, after one to warm up.` : "Each method was timed once; times differ from run to run.";
  const again = button(rows.length ? "Run again" : "Compare this answer", () => compare(turn), { class: rows.length ? "link" : "" });
  return [list, turn.compareError ? el("p", { class: "error", role: "alert", text: turn.compareError }) : list && hint(times), again];
}

const put = (id, parts) => $(id).querySelector(".body").replaceChildren(...parts.flat().filter(Boolean));

let drawn = null; // the report on show: drawing the prompt anew at every token would lose the reader's place

function show() {
  const turn = selectedTurn();
  $("panel-of").textContent = turn?.question ?? "";
  $("compare-switch").checked = comparing();
  put("compare", compareView(turn));
  const facts = turn?.report ?? `${turn?.id}/${turn?.status}`;
  if (drawn === facts) return;
  drawn = facts;
  $("prompt").hidden = !turn?.report;
  if (turn?.report) {
    put("ttft", ttftView(turn));
    put("chunks", chunksView(turn));
    return put("prompt", promptView(turn));
  }
  const told = turn && (isWaiting(turn) ? "The figures come with the answer." : "No figures: the answer did not end.");
  put("ttft", [hint(told ?? "How long an answer's first token took, and what took the time.")]);
  put("chunks", [hint(told ?? "Which passages were in the store, and how much of each was computed again.")]);
}

/** On a narrow screen, conversation and panel are two views. */
export function setView(view) {
  document.body.dataset.view = view;
  for (const one of document.querySelectorAll(".views button")) one.setAttribute("aria-pressed", String(one.dataset.view === view));
}

export function startPanel() {
  for (const name of ["chat", "selected", "server", "choices"]) on(name, show);
  on("turn", (turn) => turn.id === state.selected && show());
  $("compare-switch").addEventListener("change", (event) => setComparing(event.target.checked));
  for (const one of document.querySelectorAll(".views button")) one.addEventListener("click", () => setView(one.dataset.view));
  show();
}
