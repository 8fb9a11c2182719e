// The one column: questions, streamed answers, their sources, and the dialog of a passage.

import { call } from "./api.js";
import { ask, askAgain, isAsking } from "./asking.js";
import { $, button, copyButton, count, el, faster, hint, time } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { cite, markChanges } from "./marks.js";
import { isWaiting, on, state, turns } from "./store.js";
import { showVerification } from "./verification.js";

const views = new Map(); // turn id: {root, update}

function turnView(turn) {
  const words = el("div", { class: "words", dir: "auto" });
  const answer = el("div", { class: "answer", "aria-live": "polite" }, words);
  const label = el("summary");
  const thought = el("div", { class: "thought-words", dir: "auto" });
  const fold = el("details", { class: "thought" }, label, thought); // so that it is never taken for the answer
  const [status, verdict] = [el("p", { class: "status" }), el("p", { class: "verdict" })];
  const verification = el("p", { class: "verification", role: "status" });
  const [sources, foot] = [el("div", { class: "sources" }), el("div", { class: "foot" })];
  const question = el("h2", { class: "question", text: turn.question, dir: "auto" });
  const root = el("article", { class: "turn", data: { turn: turn.id }, "aria-label": turn.question }, question, fold, answer, status, verification, sources, verdict, foot);
  const shown = { text: null, first: false, marked: false }; // the finished text on show, which has its citations
  const turnOver = () => {
    shown.first = !shown.first;
    update();
    verification.querySelector("button").focus();
  };
  const update = () => {
    const text = (shown.first ? turn.first : turn.answer).trimStart();
    if (shown.text !== null && shown.text !== text) {
      showMarkdown(words, ""); // what stands there holds citations of another text
      answer.setAttribute("aria-live", "off"); // the line below says what became of it
    }
    showMarkdown(words, text);
    if (turn.status === "done" && shown.text !== text) {
      Object.assign(shown, { text, marked: false });
      cite(words, turn.question, turn.sources, (at) => openPassage(turn.sources[at]));
      if (turn.first !== undefined) {
        const other = el("div");
        showMarkdown(other, (shown.first ? turn.answer : turn.first).trimStart());
        shown.marked = markChanges(words, other, shown.first ? "del" : "ins");
      }
    }
    words.hidden = !text;
    fold.hidden = !turn.thought;
    setText(label, turn.report?.thought_tokens ? `Thought, ${count(turn.report.thought_tokens, "token")}` : "Thought");
    setText(thought, turn.thought ?? "");
    root.dataset.status = turn.status;
    answer.setAttribute("aria-busy", String(isWaiting(turn)));
    showStatus(status, turn, shown);
    showVerification(verification, turn, shown, turnOver);
    whenChanged(sources, turn.sources.length, () => sourcesView(turn));
    whenChanged(foot, [turn.status, Boolean(turn.report)].join(), () => footView(turn));
    // The comparison in a sentence, where the answer is read.
    const { blend, full, reuse } = Object.fromEntries(turn.rows.map((row) => [row.method, row]));
    verdict.hidden = turn.comparing || !(blend && full && reuse);
    const answers = (row) => (row.same_as_full ? "answers as full recompute does" : "answers unlike full recompute");
    if (!verdict.hidden) setText(verdict, `Blending ${answers(blend)}, ${faster(blend.ttft_s, full.ttft_s)}. Full KV reuse ${answers(reuse)}.`);
    root.classList.toggle("shown", turn.id === state.selected);
  };
  update();
  return { root, update };
}

const setText = (node, text) => node.textContent === text || (node.textContent = text);

/** Draw a node's children anew where what they depend on has changed. */
function whenChanged(node, facts, view) {
  if (node.dataset.facts === String(facts)) return;
  node.dataset.facts = facts;
  node.replaceChildren(...[view()].flat().filter(Boolean));
}

/** What is to be said of an answer that has ended, if anything. */
function remark({ answer, report, first, body }, shown) {
  if (!answer.trim()) return "The model gave an empty answer.";
  if (report?.stopped_by === "repetition") return first === undefined || shown.first ? "Ended: the answer only repeated itself." : "";
  if (report?.finish_reason !== "length") return "";
  const most = body?.max_tokens ?? state.server?.settings.max_new_tokens;
  return `Cut off${most ? ` after ${count(most, "token")}` : ""}. The settings say how long an answer may be.`;
}

function showStatus(node, turn, shown) {
  const { sources, progress } = turn;
  const reading = progress ? `the prompt: ${progress.processed.toLocaleString("en")} of ${count(progress.total, "token")}` : count(sources.length, "passage");
  const text = {
    asking: sources.length ? `Reading ${reading}…` : "Looking for passages…",
    thinking: "Thinking…",
    stopped: "Stopped before the end.",
    failed: turn.error ?? "The answer did not end.",
    done: turn.status === "done" ? remark(turn, shown) : "",
  }[turn.status];
  const again = ["failed", "stopped"].includes(turn.status);
  node.hidden = !text;
  node.classList.toggle("error", turn.status === "failed");
  node.classList.toggle("busy", ["asking", "thinking"].includes(turn.status));
  whenChanged(node, text, () => [el("span", { text, role: again ? "alert" : null }), again && button("Try again", () => askAgain(turn), { class: "link" })]);
}

function sourcesView(turn) {
  if (!turn.sources.length) return [];
  const items = turn.sources.map((source, at) => {
    const title = titleOf(source);
    const props = { type: "button", class: "source", title, "aria-label": `Source ${at + 1}: ${title}, open the passage`, on: { click: () => openPassage(source) } };
    return el("li", {}, el("button", props, el("span", { class: "number", text: at + 1 }), el("span", { class: "name", text: title })));
  });
  return [el("h3", { text: "Sources" }), el("ol", {}, items)];
}

function footView(turn) {
  const { report, status, body, earlier, from } = turn;
  const parts = [];
  if (report && report.finish_reason !== "no_documents") {
    const text = `First token ${time(report.ttft_s)} · ${report.hits} of ${report.hits + report.misses} from the store`;
    const show = () => document.dispatchEvent(new CustomEvent("show-panel", { detail: turn.id }));
    parts.push(button(text, show, { class: "link what", "aria-label": `What happened: ${text}` }));
  }
  if (!isWaiting(turn) && turn.answer.trim()) parts.push(copyButton("Copy the answer", () => turn.answer.trim(), "link"));
  if (status !== "done") return parts;
  parts.push(button("Ask again", () => askAgain(turn), { class: "link" }));
  const followed = report.turns ?? earlier.length;
  const notes = [
    body?.model?.split("/").at(-1),
    from && `From ${from}`,
    earlier.length && (followed === earlier.length ? `Follows ${count(followed, "question")}` : `Follows ${followed} of ${count(earlier.length, "question")}: there was no room for more`),
  ];
  return [...parts, ...notes.filter(Boolean).map((text) => el("span", { class: "follows", text }))];
}

/** What a source is called: its document, and the page of a PDF. */
const titleOf = ({ document, page }) => (page ? `${document}, page ${page}` : document);

function show({ text }, note) {
  const body = $("passage").querySelector(".body");
  body.replaceChildren(el("p", { class: "passage-text", dir: "auto", text }), note ? hint(note) : "");
  body.scrollTop = 0;
}

/** Open the passage of a source; what the answer was given stands there until the server's own text arrives. */
async function openPassage(source) {
  const text = source.text ?? "";
  $("passage-title").textContent = titleOf(source);
  show({ text });
  $("passage").showModal();
  try {
    show(await call("GET", `api/documents/${encodeURIComponent(source.document_id)}/passages/${source.chunk}`));
  } catch (error) {
    show({ text }, error.status !== 404 ? error.message : `The document has been deleted since${text.trim() ? "; this is the text that was read" : ", and its text with it"}.`);
  }
}

/** What stands there before anything was asked. */
function emptyState() {
  const { folder, documents } = state.server ?? {};
  if (!folder) return hint("Opening the documents…", { class: "hint busy loading", role: "status" });
  const lead = "The KV cache of each passage is computed once and reused wherever the passage lands in a prompt. Only the tokens that depend most on other passages are computed again.";
  const box = el("div", { class: "empty" }, el("h2", { text: folder.bundled ? "Ask the articles" : "Ask your documents" }), el("p", { text: lead }));
  if (!documents) box.append(el("p", { text: `“${folder.name}” holds no documents yet.` }), button("Add documents", () => $("open-documents").click(), { class: "main" }));
  return box;
}

function renderAll(detail) {
  views.clear();
  for (const turn of turns()) views.set(turn.id, turnView(turn));
  $("turns").replaceChildren(...(views.size ? [...views.values()].map(({ root }) => root) : [emptyState()]));
  showSuggestions();
  if (detail?.latest) views.get(detail.latest.id)?.root.scrollIntoView({ block: "start" });
}

/** Suggested questions: with notes while nothing was asked, then those not yet asked, in short. */
function showSuggestions() {
  const box = $("suggested");
  const asked = new Set(turns().map(({ question }) => question));
  const open = (state.server?.suggested ?? []).filter(({ question }) => !asked.has(question));
  const first = asked.size === 0;
  box.hidden = !open.length || isAsking();
  box.classList.toggle("first", first);
  const items = (first ? open : open.slice(0, 2)).map(({ question, note }) => {
    const parts = [el("span", { text: question }), first && note && el("small", { text: note })];
    return el("li", {}, el("button", { type: "button", class: "suggestion", on: { click: () => ask(question) } }, parts));
  });
  box.replaceChildren(el("h3", { text: first ? "Try one of these" : "Try next" }), el("ul", {}, items));
}

export function startConversation() {
  on("chat", renderAll);
  on("server", () => (turns().length ? showSuggestions() : renderAll()));
  on("asking", showSuggestions);
  on("selected", () => views.forEach(({ update }) => update()));
  on("turn", (turn) => {
    views.get(turn.id)?.update();
    // New words scroll into sight only for a reader who is at the end already.
    const thread = $("thread");
    const gap = thread.scrollHeight - thread.scrollTop - thread.clientHeight;
    if (views.get(turn.id)?.root === $("turns").lastElementChild && gap > 0 && gap < 160) thread.scrollTop = thread.scrollHeight;
  });
  renderAll();
}
