// The API key of a server that asks for one.

import { onKeyNeeded, setKey } from "./api.js";
import { $ } from "./dom.js";

let waiting = null; // calls that are refused meanwhile wait for the same answer

function ask(refused) {
  $("key-error").textContent = refused ? "The server did not accept this key." : "";
  waiting ??= new Promise((resolve) => {
    const dialog = $("key");
    dialog.addEventListener("close", () => {
      setKey($("key-value").value.trim());
      $("key-value").value = "";
      waiting = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}

export function startKey() {
  onKeyNeeded(ask);
  $("key").addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
}
