// Light, dark, or as the system has it.

import { $, svg } from "./dom.js";
import { changed, state } from "./store.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const LABEL = { auto: "as the system", light: "light", dark: "dark" };
const DRAWN = {
  auto: [["circle", { cx: 12, cy: 12, r: 8, class: "stroke" }], ["path", { d: "M12 4a8 8 0 0 1 0 16z" }]],
  light: [
    ["circle", { cx: 12, cy: 12, r: 4.5 }],
    ["path", { class: "stroke", d: "M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2M17 7l2-2" }],
  ],
  dark: [["path", { d: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z" }]],
};

function show() {
  const { theme } = state;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const shapes = DRAWN[theme].map(([tag, props]) => svg(tag, props));
  $("theme").replaceChildren(svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, shapes));
  $("theme").setAttribute("aria-label", `Theme: ${LABEL[theme]}. Change to ${LABEL[NEXT[theme]]}`);
  $("theme").title = `Theme: ${LABEL[theme]}`;
}

export function startTheme() {
  if (!(state.theme in NEXT)) state.theme = "auto";
  show();
  $("theme").addEventListener("click", () => {
    state.theme = NEXT[state.theme];
    show();
    changed("theme");
  });
}
