// Prompts that were saved: put into the question's place, saved from it, and deleted.

import { ApiError, call } from "./api.js";
import { $, button, confirmInPlace, el } from "./dom.js";
import { keeping } from "./kept.js";
import { changed, newId, on, state } from "./store.js";

const MOST = 200;

/** All of them: the server's where it keeps conversations, else this browser's. */
async function all() {
  const found = keeping() ? await call("GET", "api/prompts") : state.prompts;
  return [...found].sort((a, b) => a.title.localeCompare(b.title));
}

async function add(prompt) {
  if (keeping()) return call("POST", "api/prompts", prompt);
  if (state.prompts.length >= MOST) throw new ApiError(`There may be ${MOST} saved prompts; delete one first.`);
  state.prompts.push({ id: newId(), ...prompt });
  return changed("prompts");
}

async function remove({ id }) {
  if (keeping()) return call("DELETE", `api/prompts/${encodeURIComponent(id)}`);
  state.prompts = state.prompts.filter((one) => one.id !== id);
  return changed("prompts");
}

/** Do something, and show the list as it is then; what stood in the way is said. */
async function attempt(work) {
  $("prompts-error").textContent = "";
  try {
    await work();
    await show();
  } catch (error) {
    $("prompts-error").textContent = error.message;
    if (!(error instanceof ApiError)) throw error;
  }
}

function take({ text }) {
  const box = $("question");
  const before = box.value.trimEnd();
  box.value = before ? `${before}\n${text}` : text;
  box.dispatchEvent(new Event("input"));
  $("prompts").close();
  box.focus();
}

function itemView(one) {
  const use = el("button", { type: "button", class: "open", on: { click: () => take(one) } }, el("span", { class: "name", text: one.title }), el("small", { text: one.text }));
  const gone = button("Delete", () => {
    const sure = () => attempt(() => remove(one)).then(() => $("saved-title").focus());
    confirmInPlace(gone, "Delete this prompt?", sure, { busy: "Deleting…" });
  }, { class: "quiet", "aria-label": `Delete prompt ${one.title}` });
  return el("li", {}, use, gone);
}

async function show() {
  const found = await all();
  const none = el("li", { class: "hint", text: "None yet. Write a question, give it a title here and save it." });
  $("prompts-list").replaceChildren(...(found.length ? found.map(itemView) : [none]));
}

function refresh() {
  $("saved-text").textContent = $("question").value.trim() || "Nothing is written in the question's place.";
  $("saved-save").disabled = !$("question").value.trim();
}

export function startPrompts() {
  $("open-prompts").addEventListener("click", () => {
    refresh();
    $("prompts").showModal();
    attempt(async () => {});
  });
  $("saved-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const [title, text] = [$("saved-title").value.trim(), $("question").value.trim()];
    if (!title || !text) return;
    attempt(async () => {
      await add({ title, text });
      $("saved-title").value = "";
    });
  });
  on("server", () => ($("open-prompts").hidden = !state.server));
}
