// Puts the parts together: the composer, the theme, the key, and what the server holds.

import { onKeyNeeded } from "./api.js";
import { ask, isAsking, stop } from "./asking.js";
import { startConversation } from "./conversation.js";
import { refreshServer, startDocuments } from "./documents.js";
import { $, button, el } from "./dom.js";
import { startHistory } from "./history.js";
import { setView, startPanel } from "./panel.js";
import { startSettings } from "./settings.js";
import { changed, choose, forgetAll, KEY, model, on, restore, state, THEME } from "./store.js";
import { follow } from "./verification.js";

const LINES = 7; // of a question before it scrolls

/** Where the server wants an API key: ask for it, and begin anew with it, so that nothing of another's is left in the page. */
function startKey() {
  const dialog = $("key");
  onKeyNeeded((refused) => {
    sessionStorage.removeItem(KEY);
    forgetAll();
    $("key-error").textContent = refused ? "The server did not accept this key." : "";
    for (const open of document.querySelectorAll("dialog[open]")) open.close();
    dialog.showModal();
    return new Promise(() => {});
  });
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
  dialog.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = $("key-value").value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) return ($("key-error").textContent = "No key has such characters."); // no request could carry it
    sessionStorage.setItem(KEY, key);
    location.reload();
  });
}

function startComposer() {
  const box = $("question");
  const grow = () => {
    box.style.setProperty("height", "auto");
    box.style.setProperty("height", `${Math.min(box.scrollHeight, parseFloat(getComputedStyle(box).lineHeight) * LINES)}px`);
  };
  const refresh = () => {
    if (state.server) box.maxLength = state.server.limits.question_chars;
    $("send").textContent = isAsking() ? "Stop" : "Ask";
    $("send").disabled = !isAsking() && !state.server?.documents;
    $("composer").classList.toggle("asking", isAsking());
  };
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = box.value.trim();
    if (isAsking()) return stop();
    if (!question || $("send").disabled) return;
    box.value = "";
    grow();
    ask(question);
  });
  box.addEventListener("input", grow);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!isAsking()) $("composer").requestSubmit();
  });
  on("asking", refresh);
  on("server", refresh);
  refresh();
}

async function load() {
  try {
    await refreshServer();
    document.body.dataset.ready = "true";
    changed("chat", { latest: null });
    follow();
  } catch (error) {
    const box = el("div", { class: "empty", role: "alert" }, el("h2", { text: "The server does not answer" }), el("p", { text: error.message }));
    box.append(button("Try again", load, { class: "main" }));
    $("turns").replaceChildren(box);
  }
}

restore();
$("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement; // as the system has it until it is chosen here
  const isDark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem(THEME, dataset.theme);
});
startKey();
startConversation();
startComposer();
startSettings();
startPanel();
startDocuments();
startHistory();
on("server", () => {
  const { models, embedder } = state.server;
  const { name, layers } = model();
  $("model").textContent = models.length > 1 ? "" : `${name.split("/").at(-1)} · ${layers} layers`;
  $("model").title = `${name}, ${layers} layers${embedder ? `; embedder ${embedder}` : ""}`;
  $("models").hidden = models.length < 2;
  $("model-choice").replaceChildren(...models.map((one) => el("option", { value: one.name, text: one.name })));
  $("model-choice").value = name;
});
$("model-choice").addEventListener("change", (event) => choose({ model: event.target.value }));
document.addEventListener("visibilitychange", () => document.hidden || !state.server || refreshServer().catch(() => {})); // what is done next says so
document.addEventListener("show-panel", ({ detail }) => {
  state.selected = detail;
  setView("panel");
  changed("selected");
  $("panel").scrollTop = 0;
  $("panel-title").focus();
});
on("asking", () => isAsking() && setView("talk"));
load();
