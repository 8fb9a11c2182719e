// The page is in sight again: what was changed elsewhere meanwhile is changed here, too.

import { ApiError } from "./api.js";
import { resume } from "./asking.js";
import { renewIfChanged } from "./kept.js";
import { refreshServer } from "./server.js";
import { state, unread } from "./store.js";

/** Ask for what the server holds, and for the open conversation. */
export async function lookAgain() {
  if (document.hidden || !state.server) return;
  try {
    await refreshServer();
    await renewIfChanged();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // what is done next says so
  }
  const turn = unread();
  if (turn?.kept) await resume(turn);
}
