// The API key of a server that asks for one.

import { canBeSent, onKeyNeeded, setKey } from "./api.js";
import { $ } from "./dom.js";
import { forgetAll } from "./store.js";

let waiting = null; // for ever: with a key the page begins anew, and nothing of another's is left in it

const SIGNED_IN = "cacheblend-rag/signed-in"; // until the page has begun anew

const REFUSED = "The server did not accept this key.";

function ask(refused) {
  $("key-error").textContent = refused ? REFUSED : "";
  waiting ??= new Promise(() => {
    forgetAll();
    for (const open of document.querySelectorAll("dialog[open]")) open.close();
    const dialog = $("key");
    dialog.addEventListener("close", () => {
      setKey($("key-value").value.trim());
      sessionStorage.setItem(SIGNED_IN, "true");
      location.reload();
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}

/** The question is the next step of someone who has just given a key. */
export function goOn() {
  if (sessionStorage.getItem(SIGNED_IN)) $("question").focus();
  sessionStorage.removeItem(SIGNED_IN);
}

export function startKey() {
  onKeyNeeded(ask);
  $("key").addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
  $("key").querySelector("form").addEventListener("submit", (event) => {
    if (canBeSent($("key-value").value.trim())) return;
    event.preventDefault(); // no server has such a key, and no request could carry it
    $("key-error").textContent = REFUSED;
  });
}
