// Puts the parts together and loads what the server holds.

import { resume } from "./asking.js";
import { startComposer } from "./composer.js";
import { startConversation } from "./conversation.js";
import { startDocuments } from "./documents.js";
import { $, button, el } from "./dom.js";
import { startHistory } from "./history.js";
import { keeping, listKept, loadKept } from "./kept.js";
import { goOn, startKey } from "./key.js";
import { lookAgain } from "./looking.js";
import { startPanel } from "./panel.js";
import { chooseModel, refreshServer } from "./server.js";
import { startPrompts } from "./prompts.js";
import { startSettings } from "./settings.js";
import { changed, conversation, model, on, restore, state, turns, unreadAtFirst } from "./store.js";
import { openShared, startSharing } from "./sharing.js";
import { startSources } from "./sources.js";
import { openTenants, startTenants } from "./tenants.js";
import { startTheme } from "./theme.js";
import { startVerifying } from "./verifying.js";

function showModel() {
  const { models, embedder } = state.server;
  const { name, layers } = model();
  $("model").textContent = models.length > 1 ? "" : `${name.split("/").at(-1)} · ${layers} layers`;
  $("model").title = $("model-choice").title = `${name}, ${layers} layers; embedder ${embedder}`;
  $("models").hidden = models.length < 2;
  $("model-choice").replaceChildren(...models.map((one) => el("option", { value: one.name, text: one.name })));
  $("model-choice").value = name;
}

function showLoading() {
  if (!turns().length) $("turns").replaceChildren(el("p", { class: "hint busy loading", role: "status", text: "Opening the documents…" }));
}

async function load() {
  showLoading();
  try {
    await refreshServer();
    if (keeping()) await openKept();
    changed("conversation", { latest: turns().at(-1) });
    document.body.dataset.ready = "true";
    changed("from"); // now a question can be asked of it
    goOn();
    openShared();
    resume(unreadAtFirst());
  } catch (error) {
    if (error.code === "metrics_only") return openTenants();
    const box = el("div", { class: "empty", role: "alert" }, el("h2", { text: "The server does not answer" }));
    box.append(el("p", { text: error.message }), button("Try again", load, { class: "main" }));
    $("turns").replaceChildren(box);
  }
}

/** Load the list of what the server keeps, and the conversation that was open. */
async function openKept() {
  await listKept();
  const open = conversation();
  if (open?.kept) await loadKept(open);
  if (!turns().some(({ id }) => id === state.selected)) state.selected = turns().at(-1)?.id ?? null;
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
startSources();
startPrompts();
startVerifying();
startSharing();
startTenants();
on("server", showModel);
$("model-choice").addEventListener("change", (event) => chooseModel(event.target.value));
document.addEventListener("visibilitychange", lookAgain);
load();
