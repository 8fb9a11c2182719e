// The side: what happened while the chosen answer was made.

import { chartView } from "./chart.js";
import { chunksView } from "./chunks.js";
import { compareView } from "./compare.js";
import { setComparing } from "./asking.js";
import { $, el } from "./dom.js";
import { markSelected } from "./conversation.js";
import { promptView } from "./prompt.js";
import { changed, comparing, isWaiting, on, selectedTurn, state } from "./store.js";
import { ttftView } from "./ttft.js";

const body = (id) => $(id).querySelector(".body");

const hint = (text) => [el("p", { class: "hint", text })];

const put = (id, parts) => body(id).replaceChildren(...parts.flat().filter(Boolean));

let drawn = null; // the report on show: redrawing the prompt at every token would lose the reader's place

function showReport(force = false) {
  const turn = selectedTurn();
  $("panel-of").textContent = turn?.question ?? "";
  const report = turn?.report ?? null;
  const waitingFor = `${turn?.id}/${turn?.status}`;
  if (!force && report && drawn === report) return;
  if (!force && !report && drawn === waitingFor) return;
  drawn = report ?? waitingFor;
  if (report) {
    put("ttft", ttftView(report));
    put("chunks", chunksView(turn));
    put("prompt", promptView(turn));
    return;
  }
  const ended = turn?.status === "erased" ? "No figures: the answer was deleted with a document that it was made from." : "No figures: the answer did not end.";
  const told = turn ? (isWaiting(turn) ? "The figures come with the answer." : ended) : null;
  put("ttft", hint(told ?? "How long an answer's first token took: look-up, load, fuse and first token."));
  put("chunks", hint(told ?? "Which passages were in the store, on which device, and how large."));
  put("prompt", hint(told ?? "The whole prompt, with recomputed tokens shaded by their deviation."));
}

function showCompare() {
  $("compare-switch").checked = comparing();
  put("compare", compareView(selectedTurn(), comparing()));
}

/** On a narrow screen, conversation and panel are two views. */
function setView(view) {
  document.body.dataset.view = view;
  for (const one of document.querySelectorAll(".views button")) one.setAttribute("aria-pressed", String(one.dataset.view === view));
}

export function startPanel() {
  const all = () => {
    showReport();
    showCompare();
  };
  on("conversation", all);
  on("selected", all);
  on("server", showCompare);
  on("turn", (turn) => turn.id === state.selected && all());
  on("rows", (turn) => turn.id === state.selected && showCompare());
  on("comparing", showCompare);
  on("points", () => put("session", chartView(state.points)));
  $("compare-switch").addEventListener("change", (event) => setComparing(event.target.checked));
  $("clear-session").addEventListener("click", () => {
    state.points = [];
    changed("points");
  });
  for (const one of document.querySelectorAll(".views button")) one.addEventListener("click", () => setView(one.dataset.view));
  document.addEventListener("show-panel", () => {
    markSelected();
    setView("panel");
    changed("selected");
    $("panel").scrollTop = 0;
    $("panel-title").focus();
  });
  document.addEventListener("ask", () => setView("talk"));
  put("session", chartView(state.points));
  showReport(true);
  showCompare();
}
