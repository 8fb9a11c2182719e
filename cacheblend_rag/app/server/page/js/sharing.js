// Conversations that are shared: made and ended in the history, and read by their link.

import { ApiError, call } from "./api.js";
import { cite } from "./citations.js";
import { $, button, confirmInPlace, copy, el, say } from "./dom.js";
import { count, STOPPED } from "./format.js";
import { colourCode, showMarkdown } from "./markdown.js";
import { titleOf } from "./passage.js";
import { state } from "./store.js";

const LINK = /^#shared=([\w-]{1,64})$/;
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

const linkTo = (id) => `${location.origin}${location.pathname}#shared=${id}`;

/** Share a conversation as it is now. */
const share = async (one) => state.shares.unshift(await call("POST", `api/conversations/${encodeURIComponent(one.id)}/shares`));

async function end({ id }) {
  await call("DELETE", `api/shares/${encodeURIComponent(id)}`);
  state.shares = state.shares.filter((one) => one.id !== id);
}

/** Ask for those that are shared with this key. */
export const listShares = async () => (state.shares = await call("GET", "api/shares"));

const SHARING = { yes: "Share", no: "Cancel", busy: "Sharing…", props: { class: "main" } };
const READERS = "Share it as it is now, with its passages? Whoever has a key of this server and the link reads it.";

/** The button that shares a conversation; `attempt` does something and says what stood in the way, `done` draws anew. */
export function shareButton(one, name, attempt, done) {
  const trigger = button("Share", () => {
    confirmInPlace(trigger, READERS, async (back) => {
      if (!(await attempt(() => share(one)))) return back();
      done();
      const link = $("history").querySelector(".shares button");
      link.focus();
      link.scrollIntoView({ block: "nearest" });
    }, SHARING);
  }, { class: "quiet", "aria-label": `Share conversation: ${name}` });
  return trigger;
}

function itemView(one, attempt, done) {
  const link = button("Copy link", async () => {
    const copied = await copy(linkTo(one.id));
    link.textContent = copied ? "Copied" : "Not copied";
    say(link.textContent);
  }, { class: "quiet", "aria-label": `Copy the link to: ${one.title}` });
  const ending = button("End", () => {
    confirmInPlace(ending, "End it? Nobody can read it by its link any more.", async (back) => {
      if (!(await attempt(() => end(one)))) return back();
      done();
      $("history").querySelector("button").focus();
    }, { yes: "End", busy: "Ending…" });
  }, { class: "quiet", "aria-label": `Share no longer: ${one.title}` });
  const open = el("a", { class: "open", href: linkTo(one.id) }, el("span", { class: "name", text: one.title }), el("small", { text: `${when.format(one.created)} · ${count(one.turns, "question")}` }));
  return el("li", {}, open, el("span", { class: "deeds" }, link, ending));
}

/** What is shared, to copy its link and to end it; nothing where nothing is. */
export function sharesView(attempt, done) {
  if (!state.shares.length) return null;
  const items = state.shares.map((one) => itemView(one, attempt, done));
  return el("section", { "aria-labelledby": "shares-title" }, el("h3", { id: "shares-title", text: "Shared" }), el("ul", { class: "past shares" }, items));
}

// Reading -------------------------------------------------------------------------------------

function sourceView(source) {
  const name = el("summary", { text: titleOf(source) });
  return el("li", {}, el("details", {}, name, el("p", { class: "passage-text", dir: "auto", text: source.text })));
}

function turnView({ question, answer, state: end, sources }) {
  const words = el("div", { class: "words", dir: "auto" });
  showMarkdown(words, answer.trimStart());
  const passages = el("ol", {}, sources.map(sourceView));
  cite(words, question, sources, (at) => {
    const fold = passages.children[at].querySelector("details");
    fold.open = true;
    fold.querySelector("summary").focus();
  });
  colourCode(words);
  const said = el("div", { class: "answer" }, words, end === "stopped" ? el("p", { class: "status", text: STOPPED }) : null);
  return el("article", { class: "turn", "aria-label": question }, el("h3", { class: "question", text: question, dir: "auto" }), said, sources.length ? el("div", { class: "passages" }, el("h4", { text: "Sources" }), passages) : null);
}

/** Show the conversation that the address names, if it names one. */
export async function openShared() {
  const [, id] = LINK.exec(location.hash) ?? [];
  if (!id) return;
  const body = $("shared").querySelector(".body");
  try {
    const found = await call("GET", `api/shared/${id}`);
    $("shared-title").textContent = found.title;
    body.replaceChildren(el("p", { class: "hint", text: `As it stood on ${when.format(found.created)}. Nothing that is asked later comes here.` }), ...found.all_turns.map(turnView));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("shared-title").textContent = "Shared conversation";
    body.replaceChildren(el("p", { class: "error", role: "alert", text: error.message }));
  }
  for (const open of document.querySelectorAll("dialog[open]")) open.close();
  $("shared").showModal();
  body.scrollTop = 0;
}

export function startSharing() {
  addEventListener("hashchange", openShared);
  $("shared").addEventListener("close", () => {
    if (LINK.test(location.hash)) history.replaceState(null, "", location.pathname + location.search);
    $("shared").querySelector(".body").replaceChildren(); // it is another's
  });
}
