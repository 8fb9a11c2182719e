// Documents and collections were deleted, or documents replaced: nothing of them stays on show.

import { renewKept } from "./kept.js";
import { refreshServer } from "./server.js";
import { forgetTexts } from "./store.js";

/** Let go of all that was made from what had these ids. */
export async function forgetDeleted(ids) {
  ids.forEach(forgetTexts);
  await refreshServer();
  await renewKept();
}
