// Recompute ratio and selection rule of the next answer.

import { askAgain, isAsking } from "./asking.js";
import { $, button, el } from "./dom.js";
import { share } from "./format.js";
import { changed, on, selectedTurn, state } from "./store.js";

const RULES = {
  hkvd: "Recomputes the tokens whose KV deviates most at the check layer.",
  gradual: "Starts with more tokens and keeps fewer at each check layer.",
  query: "Recomputes the tokens that the question attends to most.",
  boundary: "Recomputes the first tokens of each passage.",
  random: "Recomputes tokens at random: a yardstick.",
  none: "Recomputes nothing: full KV reuse.",
  all: "Recomputes everything: full KV recompute.",
};

let parts = null;

const named = (rule) => (typeof rule === "string" ? rule : rule.name);

function build() {
  const slider = el("input", { type: "range", id: "ratio", min: 0, max: 100, step: 1, "aria-describedby": "ratio-help" });
  const shown = el("output", { for: "ratio", id: "ratio-shown" });
  const rule = el("select", { id: "rule", "aria-describedby": "rule-help" });
  const help = el("p", { class: "hint", id: "rule-help" });
  const reset = button("As the server has it", () => set({ ratio: null, rule: null }), { class: "link" });
  const again = button("Ask again with these", () => askAgain(selectedTurn()), { id: "ask-with" });
  slider.addEventListener("input", () => set({ ratio: Number(slider.value) / 100 }));
  rule.addEventListener("change", () => set({ rule: rule.value }));
  $("settings").querySelector(".body").append(
    el("div", { class: "field" }, el("label", { for: "ratio", text: "Recompute ratio" }), shown, slider),
    el("p", { class: "hint", id: "ratio-help", text: "0% reuses all stored KV; 100% is a full recompute." }),
    el("div", { class: "field" }, el("label", { for: "rule", text: "Selection rule" }), rule),
    help,
    el("div", { class: "row" }, again, reset),
  );
  return { slider, shown, rule, help, reset, again };
}

function set(values) {
  Object.assign(state, values);
  changed("settings");
}

function refresh() {
  const settings = state.server?.settings;
  if (!settings) return;
  const { slider, shown, rule, help, reset, again } = parts;
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
  reset.hidden = state.ratio === null && state.rule === null;
  again.disabled = !selectedTurn() || isAsking();
}

export function startSettings() {
  parts = build();
  for (const name of ["server", "settings", "conversation", "asking", "selected"]) on(name, refresh);
}
