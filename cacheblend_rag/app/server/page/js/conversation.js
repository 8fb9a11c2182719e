// The one column: questions, streamed answers, their sources.

import { ask, askAgain, isAsking, longerAnswer } from "./asking.js";
import { cite } from "./citations.js";
import { isTimed } from "./compare.js";
import { fullNote } from "./composer.js";
import { markChanges } from "./changes.js";
import { $, button, copy, el, say } from "./dom.js";
import { count, sooner, STOPPED, time } from "./format.js";
import { colourCode, showMarkdown } from "./markdown.js";
import { openPassage, titleOf } from "./passage.js";
import { ratingView } from "./rating.js";
import { describe } from "./sources.js";
import { collection, isWaiting, on, state, turnOf, turns } from "./store.js";
import { thoughtView } from "./thought.js";
import { showVerification } from "./verification.js";

const QUOTED = 120; // characters of another method's answer
const views = new Map(); // turn id: {root, update}

function turnView(turn) {
  const words = el("div", { class: "words", dir: "auto" });
  const answer = el("div", { class: "answer", "aria-live": "polite", "aria-busy": "true" }, words);
  const status = el("p", { class: "status" });
  const verification = el("p", { class: "verification", role: "status" });
  const sources = el("div", { class: "sources" });
  const verdict = el("p", { class: "verdict" });
  const foot = el("div", { class: "foot" });
  const question = el("h2", { class: "question", text: turn.question, dir: "auto" });
  const root = el("article", { class: "turn", data: { turn: turn.id }, "aria-label": turn.question }, question);
  const thought = thoughtView(turn);
  root.append(thought.fold, answer, status, verification, sources, verdict, foot);
  const shown = { text: null, first: false, marked: false }; // the finished text on show, which has its citations
  const turnOver = () => {
    shown.first = !shown.first;
    update();
    verification.querySelector("button").focus();
  };
  const update = () => {
    const waiting = isWaiting(turn);
    const text = (shown.first ? turn.first : turn.answer).trimStart();
    if (shown.text !== null && shown.text !== text) {
      showMarkdown(words, ""); // what stands there holds citations of another text
      answer.setAttribute("aria-live", "off"); // the line below says what became of it
    }
    showMarkdown(words, text);
    if (turn.status === "done" && shown.text !== text) {
      shown.text = text;
      finish(words, turn, shown);
    }
    words.hidden = !text;
    root.dataset.status = turn.status;
    answer.setAttribute("aria-busy", String(waiting));
    thought.update();
    showStatus(status, turn, shown);
    showVerification(verification, turn, shown, turnOver);
    showSources(sources, turn);
    showFoot(foot, turn);
    showVerdict(verdict, turn);
    root.classList.toggle("shown", turn.id === state.selected);
  };
  update();
  return { root, update };
}

/** Add to the words of an answer that has ended: citations, colours of code, and marks where it was corrected. */
function finish(words, turn, shown) {
  cite(words, turn.question, turn.sources, (at) => openPassage(turn, turn.sources[at]));
  shown.marked = false;
  if (turn.first !== undefined) {
    const other = el("div");
    showMarkdown(other, (shown.first ? turn.answer : turn.first).trimStart());
    shown.marked = markChanges(words, other, shown.first ? "del" : "ins");
  }
  colourCode(words);
}

/** What is to be said of an answer that has ended, if anything. */
const remark = (turn, shown) => [remarkOn(turn, shown), turn.unkept && `Not kept: ${turn.unkept}.`].filter(Boolean).join(" ");

function remarkOn(turn, shown) {
  const { answer, report } = turn;
  const isFirst = turn.first === undefined || shown.first; // the text that the report is of
  if (!answer.trim()) return "The model gave an empty answer.";
  if (report?.stopped_by === "repetition") return isFirst ? "Ended: the answer only repeated itself." : "";
  if (report?.finish_reason !== "length") return "";
  const most = turn.tokens ?? state.server?.settings.answer_tokens;
  return most ? `Cut off: an answer may have ${count(most, "token")}.` : "Cut off.";
}

function showStatus(node, turn, shown) {
  const said = {
    asking: turn.sources.length ? `Reading ${count(turn.sources.length, "passage")}…` : "Looking for passages…",
    thinking: "Thinking…",
    stopped: STOPPED,
    erased: "This answer was deleted with a document that it was made from.",
    failed: turn.error,
  }[turn.status];
  const text = said ?? (turn.status === "done" ? remark(turn, shown) : "");
  node.hidden = !text;
  node.classList.toggle("error", turn.status === "failed");
  if (node.firstChild?.textContent === text && node.dataset.status === turn.status) return;
  node.dataset.status = turn.status;
  const again = ["failed", "stopped", "erased"].includes(turn.status);
  node.replaceChildren(el("span", { text, role: again && turn.status !== "erased" ? "alert" : null }));
  if (again) node.append(button(turn.status === "erased" ? "Ask again" : "Try again", () => askAgain(turn), { class: "link" }));
  const more = turn.status === "done" && turn.report?.finish_reason === "length" ? longerAnswer(turn) : null;
  if (more) node.append(button(`Ask again with up to ${count(more, "token")}`, () => askAgain(turn, more), { class: "link" }));
}

function showSources(node, turn) {
  if (node.dataset.count === String(turn.sources.length)) return;
  node.dataset.count = String(turn.sources.length);
  if (!turn.sources.length) return node.replaceChildren();
  const items = turn.sources.map((source, at) =>
    el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          class: "source",
          title: titleOf(source),
          "aria-label": `Source ${at + 1}: ${titleOf(source)}, open the passage`,
          on: { click: () => openPassage(turn, source) },
        },
        el("span", { class: "number", text: at + 1 }),
        el("span", { class: "name", text: titleOf(source) }),
      ),
    ),
  );
  node.replaceChildren(el("h3", { text: "Sources" }), el("ol", {}, items));
}

function showFoot(node, turn) {
  const { report } = turn;
  const isChecked = turn.verification?.status !== "waiting"; // a rating is of a text that stays
  const now = [turn.status, Boolean(report), turn.rating ?? 0, isChecked, report && followedBy(turn)].join("/");
  if (node.dataset.now === now) return;
  node.dataset.now = now;
  node.replaceChildren();
  const copyAnswer = button("Copy", () => copy(turn.answer.trim()).then((done) => shortly(copyAnswer, done ? "Copied" : "Not copied")), {
    class: "link copy",
    "aria-label": "Copy the answer",
  });
  const ended = !isWaiting(turn);
  if (ended && turn.answer.trim()) node.append(copyAnswer);
  if (turn.status === "done" && isChecked && turn.answer.trim()) node.append(el("span", { class: "thumbs", role: "group", "aria-label": "Rate this answer" }, ratingView(turn)));
  if (!report) return;
  const chunks = report.hits + report.misses;
  const text = `First token ${time(report.ttft_s)} · ${report.hits} of ${chunks} from the store`;
  node.prepend(button(text, () => select(turn), { class: "link what", "aria-label": `What happened: ${text}` }));
  if (turn.status !== "streaming") node.append(button("Ask again", () => askAgain(turn), { class: "link" }));
  if (turn.status !== "streaming") node.append(button("Edit", () => edit(turn), { class: "link", "aria-label": "Edit the question and ask again" }));
  if (turn.model !== null) node.append(el("span", { class: "follows", text: turn.model.split("/").at(-1), title: turn.model }));
  if (turn.from) node.append(el("span", { class: "follows", text: `From ${describe(turn.from)}` }));
  if (turn.earlier.length) node.append(el("span", { class: "follows", text: followedBy(turn) }));
}

/** Write a question anew in its place; it is asked after the same turns, and what was answered stays. */
function edit(turn) {
  const { root } = views.get(turn.id);
  const heading = root.querySelector(".question");
  const box = el("textarea", { rows: 2, maxlength: state.server?.limits.question_chars, "aria-label": "The question, edited" });
  box.value = turn.question;
  const end = () => {
    form.remove();
    heading.classList.remove("unseen");
  };
  const back = () => {
    end();
    root.querySelector(".foot button[aria-label^=Edit]")?.focus();
  };
  const cancel = button("Cancel", back);
  const note = el("p", { class: "hint", role: "status", text: fullNote(turn.question) });
  box.addEventListener("input", () => (note.textContent = fullNote(box.value)));
  const form = el("form", { class: "editing" }, box, note, el("span", { class: "row" }, el("button", { type: "submit", class: "main", text: "Ask" }), cancel));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const question = box.value.trim();
    if (!question || isAsking()) return;
    end();
    ask(question, { earlier: turn.earlier });
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== box) return;
    event.preventDefault();
    form.requestSubmit();
  });
  heading.classList.add("unseen"); // it still names its part of the page
  heading.after(form);
  box.focus();
}

/** Show for a moment what a button has done. */
function shortly(button, text) {
  const before = button.textContent;
  button.textContent = text;
  say(text);
  setTimeout(() => (button.textContent = before), 1500);
}

/** What of the conversation the model was given. */
function followedBy({ earlier, report }) {
  const all = count(earlier.length, "question");
  if (report.turns === earlier.length) return `Follows ${all}`;
  const deleted = earlier.filter((id) => (turnOf(id)?.status ?? "erased") === "erased").length;
  const reasons = [
    deleted && (deleted === earlier.length ? `the ${deleted > 1 ? "answers were" : "answer was"} deleted` : `${count(deleted, "answer")} ${deleted > 1 ? "were" : "was"} deleted`),
    report.turns + deleted < earlier.length && "there was no room for more",
  ];
  return `Follows ${report.turns} of ${all}: ${reasons.filter(Boolean).join(", and ")}`;
}

/** How an answer begins; the whole of it stands at the side. */
function begin(answer) {
  const text = answer.trim();
  return text.length <= QUOTED ? text : `${text.slice(0, QUOTED).replace(/\s+\S*$/, "")} …`;
}

/** The comparison in a sentence, where the conversation is read. */
function showVerdict(node, turn) {
  const rows = Object.fromEntries((turn.rows ?? []).map((row) => [row.method, row]));
  const { blend, full, reuse } = rows;
  node.hidden = !(blend && full);
  if (node.hidden) return;
  const how = isTimed(turn) ? `, ${sooner(blend.ttft_s, full.ttft_s)}` : "";
  const same = blend.same_as_full ? "Blending answers as full recompute does" : "Blending answers unlike full recompute";
  const near = blend.kl === undefined ? "" : ` (KL ${blend.kl.toFixed(3)}${typeof blend.order_kl === "number" ? `; another order of the passages: ${blend.order_kl.toFixed(3)}` : ""})`;
  const parts = [el("span", { text: `${same}${how}${near}.` })];
  if (!blend.same_as_full && full.answer.trim() === turn.answer.trim()) {
    parts.push(" The answer above is that of full recompute.");
  } else if (!blend.same_as_full) {
    parts.push(" ", el("span", { class: "wrong" }, "Full recompute says: ", el("q", { text: begin(full.answer) })));
  }
  if (reuse && !reuse.same_as_full) {
    parts.push(" ", el("span", { class: "wrong" }, "Full KV reuse says: ", el("q", { text: begin(reuse.answer) })));
  }
  node.replaceChildren(...parts);
}

function select(turn) {
  state.selected = turn.id;
  document.dispatchEvent(new CustomEvent("show-panel"));
}

/** Refresh which turn is marked as the one that the panel shows. */
export function markSelected() {
  for (const [id, view] of views) view.root.classList.toggle("shown", id === state.selected);
}

function emptyState() {
  const here = collection();
  const title = here?.id === "documentation" ? "Ask the documentation" : here?.bundled ? "Ask the articles" : "Ask your documents";
  const lead = el("p", {
    text: "The KV cache of each passage is computed once and reused wherever the passage lands in a prompt. Only the tokens that depend most on other passages are computed again.",
  });
  const box = el("div", { class: "empty" }, el("h2", { text: here ? title : "No collection yet" }), lead);
  if (!here || here.documents === 0) {
    box.append(el("p", { text: here ? `“${here.name}” holds no documents yet.` : "Make one and add documents to it." }));
    box.append(button("Add documents", () => $("open-documents").click(), { class: "main" }));
  }
  return box;
}

function renderAll(detail) {
  views.clear();
  const shown = turns();
  for (const turn of shown) views.set(turn.id, turnView(turn));
  $("turns").replaceChildren(...(shown.length ? [...views.values()].map((view) => view.root) : [emptyState()]));
  showSuggestions();
  if (detail?.latest) views.get(detail.latest.id)?.root.scrollIntoView({ block: "start" });
}

/** Suggested questions: with notes while nothing was asked, then those not yet asked, in short. */
function showSuggestions() {
  const box = $("suggested");
  const asked = new Set(turns().map((turn) => turn.question));
  const all = collection()?.id === "archive" ? (state.server?.suggestions ?? []) : [];
  const open = all.filter((one) => !asked.has(one.question));
  box.hidden = !open.length || isAsking();
  if (box.hidden) return;
  const first = asked.size === 0;
  box.classList.toggle("first", first);
  const items = (first ? open : open.slice(0, 2)).map(({ question, note }) => {
    const ask = () => document.dispatchEvent(new CustomEvent("ask", { detail: question }));
    const parts = [el("span", { text: question }), first && note ? el("small", { text: note }) : null];
    return el("li", {}, el("button", { type: "button", class: "suggestion", on: { click: ask } }, parts));
  });
  box.replaceChildren(el("h3", { text: first ? "Try one of these" : "Try next" }), el("ul", {}, items));
}

function followDown(turn) {
  // New words scroll into sight only for a reader who is at the end already.
  const thread = $("thread");
  const last = views.get(turn.id)?.root;
  const gap = thread.scrollHeight - thread.scrollTop - thread.clientHeight;
  if (last && last === $("turns").lastElementChild && gap > 0 && gap < 160) thread.scrollTop = thread.scrollHeight;
}

export function startConversation() {
  on("conversation", renderAll);
  on("server", () => {
    if (!turns().length) return renderAll();
    for (const view of views.values()) view.update();
    showSuggestions();
  });
  on("asking", showSuggestions);
  on("rated", (turn) => {
    const held = document.activeElement?.dataset.rating;
    views.get(turn.id)?.update();
    if (held) views.get(turn.id)?.root.querySelector(`.thumb[data-rating="${held}"]`)?.focus();
  });
  on("rows", (turn) => views.get(turn.id)?.update());
  on("turn", (turn) => {
    views.get(turn.id)?.update();
    followDown(turn);
  });
  renderAll();
}

