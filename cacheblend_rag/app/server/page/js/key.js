// The API key of a server that asks for one.

import { onKeyNeeded, setKey } from "./api.js";
import { $ } from "./dom.js";
import { forgetAll } from "./store.js";

let waiting = null; // for ever: with a key the page begins anew, and nothing of another's is left in it

function ask(refused) {
  $("key-error").textContent = refused ? "The server did not accept this key." : "";
  waiting ??= new Promise(() => {
    forgetAll();
    for (const open of document.querySelectorAll("dialog[open]")) open.close();
    const dialog = $("key");
    dialog.addEventListener("close", () => {
      setKey($("key-value").value.trim());
      location.reload();
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}

export function startKey() {
  onKeyNeeded(ask);
  $("key").addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
}
