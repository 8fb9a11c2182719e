// Earlier conversations: search them, open, save or delete one, or delete all. They are kept in this browser alone.

import { isAsking, stop } from "./asking.js";
import { $, button, confirmInPlace, el } from "./dom.js";
import { saveConversation } from "./exporting.js";
import { count } from "./format.js";
import { changed, forget, state } from "./store.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function show(one) {
  if (isAsking()) stop();
  state.conversation = one?.id ?? null;
  state.selected = one?.turns.at(-1)?.id ?? null;
  const there = state.server?.collections.some(({ id }) => id === one?.collection);
  if (there) state.collection = one.collection;
  $("history").close();
  changed("server");
  changed("conversation", { latest: one?.turns.at(-1) });
  $("question").focus();
}

const nameOf = (one) => state.server?.collections.find(({ id }) => id === one.collection)?.name ?? "deleted collection";

/** Whether every word that is searched for stands somewhere in a conversation. */
function holds(one, words) {
  const text = one.turns.map((turn) => `${turn.question}\n${turn.answer}`).join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function itemView(one) {
  const name = nameOf(one);
  const facts = `${when.format(one.created)} · ${count(one.turns.length, "question")} · ${name}`;
  const open = el(
    "button",
    { type: "button", class: "open", "aria-current": one.id === state.conversation ? "true" : null, on: { click: () => show(one) } },
    el("span", { class: "name", text: one.turns[0].question }),
    el("small", { text: facts }),
  );
  const remove = button("Delete", () => {
    forget(one.id);
    render();
    $("history").querySelector("button").focus();
  }, { class: "quiet", "aria-label": `Delete conversation: ${one.turns[0].question}` });
  const save = button("Save", () => saveConversation(one, name), { class: "quiet", "aria-label": `Save conversation: ${one.turns[0].question}` });
  return el("li", {}, open, save, remove);
}

/** The list, narrowed to what is searched for. */
function showList(list, all, searched) {
  const words = searched.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter((one) => holds(one, words));
  list.replaceChildren(...found.map(itemView));
  if (!found.length) list.append(el("li", { class: "hint", text: "No conversation holds all of these words." }));
}

function render() {
  const found = state.conversations.filter((one) => one.turns.length);
  const body = $("history").querySelector(".body");
  if (!found.length) return body.replaceChildren(el("p", { class: "hint", text: "Nothing was asked yet." }));
  const all = button("Delete all", () => {
    confirmInPlace(all, "Delete all conversations?", () => {
      forget();
      render();
      $("history").querySelector("button").focus();
    });
  }, { class: "quiet" });
  const list = el("ul", { class: "past" });
  const search = el("input", { type: "search", "aria-label": "Search questions and answers", placeholder: "Search questions and answers" });
  search.addEventListener("input", () => showList(list, found, search.value));
  showList(list, found, "");
  body.replaceChildren(
    search,
    list,
    el("div", { class: "row" }, el("p", { class: "hint", text: "Kept in this browser alone." }), all),
  );
}

export function startHistory() {
  $("open-history").addEventListener("click", () => {
    render();
    $("history").showModal();
  });
  $("new-conversation").addEventListener("click", () => show(null));
}
