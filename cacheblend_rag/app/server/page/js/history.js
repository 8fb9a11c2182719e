// Earlier chats, which this browser alone has: open or delete one, or delete all.

import { stop, stopComparing } from "./asking.js";
import { $, button, confirmInPlace, count, el, hint } from "./dom.js";
import { changed, chat, choose, deleteChat, readChats, saveChat, state, turns } from "./store.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** Open a chat, or with none begin anew. The answer being written stops. */
function open(one) {
  stop();
  choose({ chat: one?.id ?? null });
  state.selected = turns().at(-1)?.id ?? null;
  $("history").close();
  changed("chat", { latest: turns().at(-1) });
  $("question").focus();
}

function remove(one) {
  if (!one || one === chat()) {
    stop();
    stopComparing();
  }
  deleteChat(one);
  if (!chat()) choose({ chat: null });
  changed("chat");
  render();
  $("history").querySelector("button").focus();
}

function chatView(one) {
  const facts = `${when.format(one.at)} · ${count(one.turns.length, "question")}`;
  const name = one.turns[0].question;
  const opens = el("button", { type: "button", class: "open", "aria-current": one.id === state.chat ? "true" : null, on: { click: () => open(one) } }, el("span", { class: "name", text: name }), el("small", { text: facts }));
  const erase = button("Delete", () => confirmInPlace(erase, "Delete this chat?", () => remove(one)), { class: "quiet", "aria-label": `Delete chat: ${name}` });
  return el("li", {}, opens, erase);
}

function render() {
  const body = $("history").querySelector(".body");
  const found = state.chats.filter((one) => one.turns.length);
  if (!found.length) return body.replaceChildren(hint("Nothing was asked yet."));
  const all = button("Delete all", () => confirmInPlace(all, "Delete all chats?", () => remove(null)), { class: "quiet" });
  body.replaceChildren(el("ul", { class: "past" }, found.map(chatView)), el("div", { class: "row" }, hint("Kept in this browser alone."), all));
}

export function startHistory() {
  $("open-history").addEventListener("click", () => {
    saveChat(chat());
    readChats(); // another tab may have asked meanwhile
    render();
    $("history").showModal();
  });
  $("new-chat").addEventListener("click", () => open(null));
}
