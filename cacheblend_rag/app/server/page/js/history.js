// Earlier conversations: open one, delete one or all. They are kept in this browser alone.

import { isAsking, stop } from "./asking.js";
import { $, button, confirmInPlace, el } from "./dom.js";
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

function itemView(one) {
  const name = state.server?.collections.find(({ id }) => id === one.collection)?.name ?? "deleted collection";
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
  return el("li", {}, open, remove);
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
  body.replaceChildren(
    el("ul", { class: "past" }, found.map(itemView)),
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
