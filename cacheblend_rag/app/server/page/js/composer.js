// Where a question is written.

import { ask, isAsking, stop } from "./asking.js";
import { $ } from "./dom.js";
import { readiness } from "./sources.js";
import { changed, on, state } from "./store.js";

const LINES = 7;
const HINT = $("hint").textContent;

function grow() {
  const box = $("question");
  box.style.setProperty("height", "auto");
  const line = parseFloat(getComputedStyle(box).lineHeight);
  box.style.setProperty("height", `${Math.min(box.scrollHeight, line * LINES)}px`);
}

function limits() {
  const most = state.server?.limits.question_chars;
  if (most) $("question").maxLength = most;
}

function refresh() {
  const { ready, reason } = readiness();
  $("send").textContent = isAsking() ? "Stop" : "Ask";
  $("send").disabled = !isAsking() && !ready;
  const told = ready || !state.server;
  $("hint").textContent = told ? HINT : reason;
  $("hint").classList.toggle("reason", !told);
  $("composer").classList.toggle("asking", isAsking());
}

function submit(event) {
  event?.preventDefault();
  if (isAsking()) return stop();
  const question = $("question").value.trim();
  if (!question || $("send").disabled) return;
  $("question").value = "";
  state.draft = "";
  grow();
  ask(question);
}

export function startComposer() {
  const box = $("question");
  box.value = state.draft;
  $("composer").addEventListener("submit", submit);
  box.addEventListener("input", () => {
    state.draft = box.value;
    grow();
    changed("draft");
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!isAsking()) submit();
  });
  document.addEventListener("ask", (event) => ask(event.detail));
  document.addEventListener("keydown", (event) => {
    const elsewhere = !event.target.closest("input, textarea, select, dialog");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || !elsewhere) return;
    event.preventDefault();
    box.focus();
  });
  on("asking", refresh);
  on("from", refresh);
  on("server", () => {
    limits();
    refresh();
  });
  refresh();
  grow();
}
