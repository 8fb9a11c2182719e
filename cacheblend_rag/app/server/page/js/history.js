// Earlier conversations: search them, open, save or delete one, or delete all. They are in this browser or on the server.

import { ApiError } from "./api.js";
import { isAsking, leave, resume } from "./asking.js";
import { $, button, confirmInPlace, el } from "./dom.js";
import { saveConversation } from "./exporting.js";
import { count } from "./format.js";
import { changeKept, deleteKept, keeping, listKept, loadKept } from "./kept.js";
import { saveRated } from "./rating.js";
import { refreshServer } from "./server.js";
import { listShares, shareButton, sharesView } from "./sharing.js";
import { choiceNow, choiceThen, choose } from "./sources.js";
import { changed, collectionsOf, forget, KEY, state, unread } from "./store.js";

const NAMED = 3; // collections; of more the number is told
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

async function show(one) {
  if (isAsking()) await leave();
  if (one?.kept && !(await attempt(() => loadKept(one)))) return;
  let choice = null; // goes on with what it was asked of, as far as that is there now
  if (one && one.id !== state.conversation) {
    const done = await attempt(async () => (await refreshServer(), (choice = await choiceNow(one))));
    if (!done && one.kept) return;
    choice ??= choiceThen(one); // it can be read without a server
  }
  state.conversation = one?.id ?? null;
  state.selected = one?.turns.at(-1)?.id ?? null;
  if (one) state.collection = [one.collection, ...collectionsOf(one)].find(collectionOf) ?? state.collection;
  if (choice) choose(choice.collections, choice.documents, choice.lost);
  $("history").close();
  changed("server");
  changed("conversation", { latest: one?.turns.at(-1) });
  $("question").focus();
  await resume(unread());
}

/** Do something on the server; whether that was done. What stood in the way is said in the dialog. */
async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const told = $("history").querySelector(".body .error");
    if (told) told.textContent = error.message;
    return false;
  }
}

const titleOf = (one) => one.title || (one.turns[0]?.question ?? one.opening ?? "");

const sizeOf = (one) => (one.kept && !one.loaded ? one.count : one.turns.length);

const collectionOf = (id) => state.server?.collections.find((one) => one.id === id);

/** The names of the collections that a conversation was asked of, or how many they are. */
function nameOf(one) {
  const found = collectionsOf(one);
  if (found.length > NAMED) return count(found.length, "collection");
  return found.map((id) => collectionOf(id)?.name ?? "deleted collection").join(", ");
}

/** Whether every word that is searched for stands somewhere in a conversation. */
function holds(one, words) {
  const text = [one.title ?? "", ...one.turns.map((turn) => `${turn.question}\n${turn.answer}`)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function itemView(one) {
  const name = nameOf(one);
  const facts = `${when.format(one.created)} · ${count(sizeOf(one), "question")} · ${name}`;
  const open = el(
    "button",
    { type: "button", class: "open", data: { of: one.id }, "aria-current": one.id === state.conversation ? "true" : null, on: { click: () => show(one) } },
    el("span", { class: "name", text: titleOf(one) }),
    el("small", { text: facts }),
  );
  const shared = state.shares.some(({ conversation }) => conversation === one.id);
  const remove = button("Delete", () => {
    confirmInPlace(remove, `Delete this conversation${shared ? ", and what is shared of it" : ""}?`, async (back) => {
      if (one.kept && !(await attempt(() => deleteKept(one.id)))) return back();
      if (!one.kept) forget(one.id);
      render();
      $("history").querySelector("button").focus();
    }, { busy: "Deleting…" });
  }, { class: "quiet", "aria-label": `Delete conversation: ${titleOf(one)}` });
  const save = button("Save", async () => {
    if (!one.kept || one.loaded || (await attempt(() => loadKept(one)))) saveConversation(one, name);
  }, { class: "quiet", "aria-label": `Save conversation: ${titleOf(one)}` });
  const pin = button(one.pinned ? "Unpin" : "Pin", () => change(one, { pinned: !one.pinned }), {
    class: "quiet",
    "aria-label": `${one.pinned ? "Unpin" : "Pin"} conversation: ${titleOf(one)}`,
  });
  const rename = button("Rename", () => renameIn(row, one), { class: "quiet", "aria-label": `Rename conversation: ${titleOf(one)}` });
  const row = el("li", { class: one.pinned ? "pinned" : null }, open, el("span", { class: "deeds" }, pin, rename, save, one.kept && shareButton(one, titleOf(one), attempt, render), remove));
  return row;
}

/** Give a conversation a title, or pin it. */
async function change(one, values) {
  if (one.kept && !(await attempt(() => changeKept(one, values)))) return;
  Object.assign(one, values);
  changed("titles");
  render();
  $("history").querySelector(`[data-of="${one.id}"]`)?.focus();
}

/** A field in the place of a conversation's name; empty, it is that of its first question again. */
function renameIn(row, one) {
  const box = el("input", { maxlength: 200, "aria-label": "Title of the conversation", placeholder: titleOf({ ...one, title: "" }) });
  box.value = titleOf(one).slice(0, box.maxLength);
  const before = box.value; // without its line ends
  const form = el("form", { class: "pair" }, box, el("button", { type: "submit", text: "Rename" }), button("Cancel", () => render()));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value === before) render();
    else change(one, { title: box.value.trim() });
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the dialog around it stays open
    event.stopPropagation();
    render();
  });
  row.replaceChildren(form);
  box.focus();
}

let searching = 0; // only what the latest search found is shown

/** The list, narrowed to what is searched for: here, and on the server. */
async function showList(list, all, searched) {
  const mine = (searching += 1);
  const words = searched.toLowerCase().split(/\s+/).filter(Boolean);
  let there = new Set();
  if (words.length && all.some((one) => one.kept)) await attempt(async () => (there = await listKept(searched)));
  if (mine !== searching) return;
  const found = all.filter((one) => (one.kept && words.length ? there.has(one.id) : holds(one, words)));
  list.replaceChildren(...found.map(itemView));
  if (!found.length) list.append(el("li", { class: "hint", text: "No conversation holds all of these words." }));
}

// The same one whenever the dialog is drawn anew, as someone may be typing into it.
const search = el("input", { type: "search", "aria-label": "Search questions and answers", placeholder: "Search questions and answers" });

function render() {
  const found = state.conversations.filter((one) => sizeOf(one)).sort((a, b) => Boolean(b.pinned) - Boolean(a.pinned) || (b.latest ?? b.created) - (a.latest ?? a.created));
  const body = $("history").querySelector(".body");
  const told = el("p", { class: "error", role: "alert" });
  if (!found.length) return body.replaceChildren(el("p", { class: "hint", text: "Nothing was asked yet." }), told);
  const all = button("Delete all", () => {
    confirmInPlace(all, "Delete all conversations?", async (back) => {
      if (keeping() && !(await attempt(() => deleteKept()))) return back();
      forget();
      render();
      $("history").querySelector("button").focus();
    });
  }, { class: "quiet" });
  const list = el("ul", { class: "past" });
  search.oninput = () => showList(list, found, search.value);
  search.oninput();
  const typing = document.activeElement === search;
  const rated = el("p", { class: "hint rated" }, "Rated answers, for the evaluation: ", [1, -1].map((rating) => button(rating > 0 ? "Save the good ones" : "Save the bad ones", () => saveAll(rating, told), { class: "link" })));
  body.replaceChildren(
    search,
    list,
    told,
    sharesView(attempt, render) ?? "",
    rated,
    el("div", { class: "row" }, el("p", { class: "hint", text: placeOf(found) }), all),
  );
  if (typing) search.focus();
}

async function saveAll(rating, told) {
  told.textContent = "";
  await attempt(async () => {
    const { many, left } = await saveRated(rating);
    const kind = rating > 0 ? "good" : "bad";
    const why = "their questions are only understood after others, or their documents are gone";
    if (left) told.textContent = `${count(many, "answer")} rated ${kind} ${many === 1 ? "was" : "were"} saved. ${left} more ${left === 1 ? "is" : "are"} left out: ${why}.`;
    else if (!many) told.textContent = `No answer was rated ${kind}.`;
  });
}

/** Where the conversations are kept, in a sentence. */
function placeOf(found) {
  const kept = found.filter((one) => one.kept).length;
  if (!kept) return "Kept in this browser alone.";
  const place = sessionStorage.getItem(KEY) ? "Kept on the server, for keys of your tenant" : "Kept on the server";
  return kept === found.length ? `${place}.` : `${place}; ${found.length - kept} in this browser.`;
}

/** All that the dialog shows of what the server may have otherwise by now. */
const facts = () => JSON.stringify([state.conversations.map((one) => [one.id, titleOf(one), one.pinned, one.latest, sizeOf(one), nameOf(one)]), state.shares]);

/** Whether something is being renamed or decided in the dialog: it is not drawn anew then. */
const isBusy = () => Boolean($("history").querySelector(".sure, form.pair"));

export function startHistory() {
  $("open-history").addEventListener("click", () => {
    search.value = "";
    render();
    $("history").showModal();
    const drawn = facts();
    attempt(async () => {
      await refreshServer();
      if (keeping()) await Promise.all([listKept(), listShares()]);
    }).then((done) => done && $("history").open && !isBusy() && drawn !== facts() && render());
  });
  $("new-conversation").addEventListener("click", () => show(null));
}
