// The next answer's settings: the dialog in which they are chosen. What is not chosen is as the server has it.

import { $, button, el, hint, share } from "./dom.js";
import { choose, model, on, state } from "./store.js";

const NAMES = ["top_k", "max_tokens", "recompute_ratio", "instructions", "verify", "reasoning"];
const AUTO = 0.15; // where the slider stands while the server chooses the ratio

/** A field with its note; `props` are its input's. */
function field(name, label, note, input) {
  input.id = name;
  input.setAttribute("aria-describedby", `${name}-help`);
  const isSwitch = input.type === "checkbox";
  const parts = isSwitch ? [el("span", { text: label }), input, el("span", { class: "track", "aria-hidden": "true" })] : [el("span", { text: label }), input];
  return el("div", { class: "setting" }, el("label", { class: isSwitch ? "switch field" : "field" }, parts), hint(note, { id: `${name}-help` }));
}

const numberInput = () => el("input", { type: "number", min: 1, step: 1, inputmode: "numeric" });
const toggle = () => el("input", { type: "checkbox", role: "switch" });

const inputs = {
  top_k: numberInput(),
  max_tokens: numberInput(),
  recompute_ratio: el("input", { type: "range", min: 0, max: 100, step: 1 }),
  instructions: el("textarea", { rows: 3 }),
  verify: toggle(),
  reasoning: toggle(),
};
const reset = button("Reset to the server's settings", () => choose(Object.fromEntries(NAMES.map((name) => [name, null]))), { class: "quiet" });

function refresh() {
  if (!state.server) return;
  const { settings, limits } = state.server;
  const { top_k, max_tokens, recompute_ratio, instructions, verify, reasoning } = inputs;
  top_k.max = limits.top_k;
  top_k.value = state.top_k ?? settings.top_k;
  max_tokens.max = limits.max_tokens;
  max_tokens.value = state.max_tokens ?? settings.max_new_tokens;
  const auto = typeof settings.recompute_ratio !== "number";
  const ratio = state.recompute_ratio ?? (auto ? AUTO : settings.recompute_ratio);
  const text = state.recompute_ratio !== null ? share(ratio) : auto ? "automatic" : `${share(ratio)}, default`;
  recompute_ratio.value = Math.round(ratio * 100);
  recompute_ratio.setAttribute("aria-valuetext", text);
  $("recompute_ratio-help").textContent = `Now ${text}. 0% reuses all stored KV; 100% is a full recompute.`;
  instructions.maxLength = limits.question_chars;
  instructions.placeholder = model().instructions;
  instructions.value = state.instructions ?? "";
  verify.checked = state.verify !== false;
  reasoning.checked = state.reasoning ?? Boolean(settings.reasoning);
  reasoning.closest(".setting").hidden = !model().thinks;
  reset.hidden = NAMES.every((name) => state[name] === null);
}

export function startSettings() {
  const { top_k, max_tokens, recompute_ratio, instructions, verify, reasoning } = inputs;
  $("settings").querySelector(".body").append(
    field("top_k", "Passages", "How many passages an answer is made from.", top_k),
    field("max_tokens", "Longest answer", "In tokens; about four letters each.", max_tokens),
    field("recompute_ratio", "Recompute ratio", "", recompute_ratio),
    field("instructions", "Instructions", "What the model is told before the passages. Empty: as shown.", instructions),
    field("verify", "Check answers", "Compares each answer with the one without reuse when nothing else is asked, and corrects it. This compares computations, not facts.", verify),
    field("reasoning", "Think first", "The model thinks before it answers. That can take minutes.", reasoning),
    el("div", { class: "row" }, hint("The next answer is made with these."), reset),
  );
  for (const input of [top_k, max_tokens]) {
    // What is outside of the bounds becomes the nearest that is within; empty, it is as the server has it.
    input.addEventListener("change", () => choose({ [input.id]: input.value ? Math.min(Math.max(Math.round(input.value), 1), input.max) : null }));
  }
  recompute_ratio.addEventListener("input", () => choose({ recompute_ratio: recompute_ratio.value / 100 }));
  instructions.addEventListener("change", () => choose({ instructions: instructions.value.trim() || null }));
  verify.addEventListener("change", () => choose({ verify: verify.checked ? null : false }));
  reasoning.addEventListener("change", () => choose({ reasoning: reasoning.checked }));
  on("server", refresh);
  on("choices", refresh);
  $("open-settings").addEventListener("click", () => $("settings").showModal());
}
