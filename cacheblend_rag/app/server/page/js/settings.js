// Of the next answer: recompute ratio, selection rule, how many passages it reads, its length, what the model is told, and
// whether it is checked.

import { askAgain, isAsking } from "./asking.js";
import { $, button, el } from "./dom.js";
import { share } from "./format.js";
import { changed, model, on, selectedTurn, state } from "./store.js";
import { latestVerified } from "./verifying.js";

const RULES = {
  hkvd: "Recomputes the tokens whose KV deviates most at the check layer.",
  gradual: "Starts with more tokens and keeps fewer at each check layer.",
  query: "Recomputes the tokens that the question attends to most.",
  boundary: "Recomputes the first tokens of each passage.",
  none: "Recomputes nothing: full KV reuse.",
  all: "Recomputes everything: full KV recompute.",
};

// What can be chosen here; null is as the server has it.
const CHOSEN = ["ratio", "rule", "passages", "tokens", "temperature", "instructions", "verify", "reasoning"];
let parts = null;

const named = (rule) => (typeof rule === "string" ? rule : rule.name);

function build() {
  const slider = el("input", { type: "range", id: "ratio", min: 0, max: 100, step: 1, "aria-describedby": "ratio-help" });
  const shown = el("output", { for: "ratio", id: "ratio-shown" });
  const rule = el("select", { id: "rule", "aria-describedby": "rule-help" });
  const help = el("p", { class: "hint", id: "rule-help" });
  const passages = numberField("passages", "Passages", "How many passages an answer is made from.");
  const tokens = numberField("tokens", "Longest answer", "In tokens; about four letters each.");
  const temperature = temperatureField();
  const reset = button("As the server has it", () => set(Object.fromEntries(CHOSEN.map((name) => [name, null]))), { class: "link" });
  const told = el("textarea", { id: "instructions", rows: 3, "aria-describedby": "instructions-help" });
  told.addEventListener("change", () => set({ instructions: told.value.trim() || null }));
  const again = button("Ask again with these", () => askAgain(selectedTurn()), { id: "ask-with" });
  const verify = el("input", { type: "checkbox", role: "switch", id: "verify-switch", "aria-describedby": "verify-help" });
  verify.addEventListener("change", () => set({ verify: verify.checked ? null : false }));
  const reasoning = el("input", { type: "checkbox", role: "switch", id: "reasoning-switch", "aria-describedby": "reasoning-help" });
  reasoning.addEventListener("change", () => set({ reasoning: reasoning.checked === Boolean(state.server.settings.reasoning) ? null : reasoning.checked }));
  const thinking = el(
    "div",
    {},
    el("label", { class: "switch field" }, el("span", { text: "Think first" }), reasoning, el("span", { class: "track", "aria-hidden": "true" })),
    el("p", { class: "hint", id: "reasoning-help", text: "The model thinks before it answers. That can take minutes." }),
  );
  slider.addEventListener("input", () => set({ ratio: Number(slider.value) / 100 }));
  rule.addEventListener("change", () => set({ rule: rule.value }));
  $("settings").querySelector(".body").append(
    el("div", { class: "field" }, el("label", { for: "ratio", text: "Recompute ratio" }), shown, slider),
    el("p", { class: "hint", id: "ratio-help", text: "0% reuses all stored KV; 100% is a full recompute." }),
    el("div", { class: "field" }, el("label", { for: "rule", text: "Selection rule" }), rule),
    help,
    ...passages.nodes,
    ...tokens.nodes,
    ...temperature.nodes,
    el("div", { class: "field" }, el("label", { for: "instructions", text: "Instructions" }), told),
    el("p", { class: "hint", id: "instructions-help", text: "What the model is told before the passages. Empty: as shown." }),
    el("label", { class: "switch field" }, el("span", { text: "Check answers" }), verify, el("span", { class: "track", "aria-hidden": "true" })),
    el("p", { class: "hint", id: "verify-help", text: "Holds each answer against the full model when nothing else is asked, and corrects it." }),
    el("p", { class: "hint", id: "verified" }),
    thinking,
    el("div", { class: "row" }, again, reset),
  );
  return { slider, shown, rule, help, passages: passages.input, tokens: tokens.input, temperature: temperature.input, told, verify, reasoning, thinking, reset, again };
}

/** How freely words are chosen; 0 and nothing are the same. */
function temperatureField() {
  const input = el("input", { type: "number", id: "temperature", min: 0, max: 2, step: 0.1, inputmode: "decimal", "aria-describedby": "temperature-help" });
  input.addEventListener("change", () => {
    const given = Math.round(input.valueAsNumber * 100) / 100;
    set({ temperature: given > 0 ? Math.min(given, 2) : null });
  });
  const note = "0 takes the likeliest word each time. Above 0 answers vary; 2 is the most.";
  const field = el("div", { class: "field" }, el("label", { for: "temperature", text: "Temperature" }), input);
  return { input, nodes: [field, el("p", { class: "hint", id: "temperature-help", text: note })] };
}

/** A field for a whole number; what is outside of its bounds becomes the nearest that is within, which is said, and empty the default. */
function numberField(name, label, note) {
  const input = el("input", { type: "number", id: name, min: 1, step: 1, inputmode: "numeric", "aria-describedby": `${name}-help` });
  input.addEventListener("change", () => {
    const given = Math.round(input.valueAsNumber);
    const [least, most] = [Number(input.min), Number(input.max)];
    const taken = Number.isNaN(given) ? null : Math.min(Math.max(given, least), most);
    told.textContent = taken === null || taken === given ? note : `${note} From ${least} to ${most}: ${taken} is taken.`;
    set({ [name]: taken });
  });
  const field = el("div", { class: "field" }, el("label", { for: name, text: label }), input);
  const told = el("p", { class: "hint", id: `${name}-help`, role: "status", text: note });
  on("settings", () => state[name] === null && (told.textContent = note));
  return { input, nodes: [field, told] };
}

function set(values) {
  Object.assign(state, values);
  changed("settings");
}

function refresh() {
  const settings = state.server?.settings;
  if (!settings) return;
  const { limits } = state.server;
  const { slider, shown, rule, help, passages, tokens, temperature, told, verify, reasoning, thinking, reset, again } = parts;
  passages.max = limits.passages;
  passages.value = state.passages ?? settings.passages;
  tokens.max = limits.answer_tokens;
  tokens.value = state.tokens ?? settings.answer_tokens;
  temperature.value = state.temperature ?? 0;
  told.maxLength = limits.question_chars;
  told.placeholder = model().instructions;
  told.value = state.instructions ?? "";
  verify.checked = state.verify !== false;
  thinking.hidden = !model()?.thinks;
  reasoning.checked = state.reasoning ?? Boolean(settings.reasoning);
  const auto = typeof settings.ratio !== "number";
  const ratio = state.ratio ?? (auto ? 0.15 : settings.ratio);
  slider.value = Math.round(ratio * 100);
  const text = state.ratio !== null ? share(ratio) : auto ? "automatic" : `${share(ratio)}, default`;
  shown.textContent = text;
  slider.setAttribute("aria-valuetext", text);
  slider.style.setProperty("--at", `${ratio * 100}%`);
  slider.classList.toggle("unset", state.ratio === null && auto);
  if (rule.options.length !== settings.rules.length) {
    rule.replaceChildren(...settings.rules.map((one) => el("option", { value: named(one), text: named(one) })));
  }
  rule.value = state.rule ?? settings.rule;
  const found = settings.rules.find((one) => named(one) === rule.value);
  help.textContent = found?.description ?? RULES[rule.value] ?? "";
  reset.hidden = CHOSEN.every((name) => state[name] === null);
  again.disabled = !selectedTurn() || isAsking();
}

async function showVerified() {
  $("verified").textContent = await latestVerified().catch(() => ""); // the answer itself says what went wrong
}

export function startSettings() {
  parts = build();
  for (const name of ["server", "verified", "verifying"]) on(name, showVerified);
  for (const name of ["server", "settings", "conversation", "asking", "selected"]) on(name, refresh);
}
