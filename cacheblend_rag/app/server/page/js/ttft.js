// The time to first token of one answer, split into its parts.

import { el } from "./dom.js";
import { count, share, time } from "./format.js";

const PARTS = [
  ["split_s", "split", "Split", "the prompt into tokens"],
  ["look_up_s", "look-up", "Look up", "what is stored"],
  ["load_s", "load", "Load", "waiting for stored KV"],
  ["fuse_s", "fuse", "Fuse", "recompute and blend"],
  ["first_token_s", "first", "First token", "from the logits"],
];

/** The parts of a report, in order: `[name, label, note, seconds]`. */
export const partsOf = (report) => PARTS.map(([key, name, label, note]) => [name, label, note, report.parts[key] ?? 0]);

export function ttftView(report) {
  const parts = partsOf(report);
  const sum = parts.reduce((total, part) => total + part[3], 0) || 1;
  const told = parts.map(([, label, , seconds]) => `${label} ${time(seconds)}`).join(", ");
  const bar = el(
    "div",
    { class: "bar", role: "img", "aria-label": `Time to first token ${time(report.ttft_s)}: ${told}` },
    parts.filter((part) => part[3] > 0).map(([name, , , seconds]) => el("span", { class: `part ${name}`, vars: { "--grow": String(seconds / sum) } })),
  );
  const legend = el(
    "dl",
    { class: "legend" },
    parts.map(([name, label, note, seconds]) =>
      el(
        "div",
        {},
        el("dt", {}, el("span", { class: `key ${name}`, "aria-hidden": "true" }), label, " ", el("small", { text: note })),
        el("dd", {}, time(seconds), " ", el("small", { text: share(seconds / sum) })),
      ),
    ),
  );
  return [
    el("p", { class: "figure" }, el("strong", { text: time(report.ttft_s) })),
    bar,
    legend,
    resumedView(report),
  ].filter(Boolean);
}

/** How much of the prompt is that of an earlier turn, whose KV was kept. */
function resumedView({ resumed = 0, tokens: { prefix, chunks, suffix, between = 0 } }) {
  if (!resumed) return null;
  const part = share(resumed / (prefix + chunks + suffix + between));
  return el("p", { class: "hint resumed", text: `Kept from an earlier prompt: the KV of ${count(resumed, "token")}, ${part} of the prompt.` });
}
