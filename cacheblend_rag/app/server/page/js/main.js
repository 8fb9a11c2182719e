// Puts the parts together and loads what the server holds.

import { startComposer } from "./composer.js";
import { startConversation } from "./conversation.js";
import { startDocuments } from "./documents.js";
import { $, button, el } from "./dom.js";
import { startHistory } from "./history.js";
import { startKey } from "./key.js";
import { startPanel } from "./panel.js";
import { refreshServer } from "./server.js";
import { startSettings } from "./settings.js";
import { changed, on, restore, state, turns } from "./store.js";
import { startTheme } from "./theme.js";

function showModel() {
  const { model } = state.server;
  $("model").textContent = `${model.name.split("/").at(-1)} · ${model.layers} layers`;
  $("model").title = `${model.name}; embedder ${state.server.embedder}`;
}

function showLoading() {
  if (!turns().length) $("turns").replaceChildren(el("p", { class: "hint busy loading", role: "status", text: "Opening the documents…" }));
}

async function load() {
  showLoading();
  try {
    await refreshServer();
    changed("conversation", { latest: turns().at(-1) });
    document.body.dataset.ready = "true";
  } catch (error) {
    const box = el("div", { class: "empty", role: "alert" }, el("h2", { text: "The server does not answer" }));
    box.append(el("p", { text: error.message }), button("Try again", load, { class: "main" }));
    $("turns").replaceChildren(box);
  }
}

restore();
startTheme();
startKey();
startConversation();
startComposer();
startSettings();
startPanel();
startDocuments();
startHistory();
on("server", showModel);
load();
