// Where a question is written.

import { ask, isAsking, stop } from "./asking.js";
import { $, say } from "./dom.js";
import { count } from "./format.js";
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

/** What is said when a question is as long as it may be, and the browser takes no more of it; else nothing. */
export function fullNote(text) {
  const most = state.server?.limits.question_chars;
  return text.length >= most ? `Full: a question may have ${count(most, "character")}. What is more is cut off.` : "";
}

function limits() {
  const most = state.server?.limits.question_chars;
  if (most) $("question").maxLength = most;
}

function refresh() {
  const { ready, reason: why } = readiness();
  const reason = (ready && fullNote($("question").value)) || why;
  if (ready && reason && $("hint").textContent !== reason) say(reason);
  $("send").textContent = isAsking() ? "Stop" : "Ask";
  $("send").disabled = !isAsking() && !ready;
  const told = state.server ? reason : "";
  $("hint").textContent = told || HINT;
  $("hint").classList.toggle("reason", Boolean(told));
  $("composer").classList.toggle("asking", isAsking());
}

function submit(event) {
  event?.preventDefault();
  if (isAsking()) return stop();
  const question = $("question").value.trim();
  if (!question || $("send").disabled) return;
  $("question").value = "";
  state.draft = "";
  refresh();
  grow();
  ask(question);
}

export function startComposer() {
  const box = $("question");
  box.value = state.draft;
  $("composer").addEventListener("submit", submit);
  box.addEventListener("input", () => {
    if (box.maxLength > 0 && box.value.length > box.maxLength) box.value = box.value.slice(0, box.maxLength); // a saved prompt was added
    state.draft = box.value;
    refresh();
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
