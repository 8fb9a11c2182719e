// A cited passage, in full.

import { call } from "./api.js";
import { $, el } from "./dom.js";

const LEAST = 4; // shorter words say nothing about where an answer comes from

/** Words of an answer that are worth finding again: not the short ones. */
function tellingWords(answer) {
  return new Set((answer.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []).filter((word) => word.length >= LEAST));
}

/** The text in pieces, with words of the answer marked. */
function marked(text, answer) {
  const words = tellingWords(answer);
  return text
    .split(/([\p{L}\p{N}]+)/u)
    .map((piece) => (words.has(piece.toLowerCase()) ? el("mark", { text: piece }) : document.createTextNode(piece)));
}

function show(text, answer, note) {
  const parts = marked(text, answer);
  const found = parts.some((part) => part.nodeName === "MARK");
  $("passage").querySelector(".body").replaceChildren(
    el("p", { class: "passage-text", dir: "auto" }, parts),
    ...(found ? [el("p", { class: "hint", text: "Words that the answer shares are marked." })] : []),
    ...(note ? [el("p", { class: "hint", text: note })] : []),
  );
}

/** Open the passage of a source; what the answer was given stands there until the server's own text arrives. */
export async function openPassage(collection, source, answer) {
  const dialog = $("passage");
  $("passage-title").textContent = source.document;
  show(source.text ?? "", answer);
  dialog.showModal();
  const place = [collection, source.document_id].map(encodeURIComponent);
  try {
    const found = await call("GET", `api/collections/${place[0]}/documents/${place[1]}/chunks/${source.chunk}`);
    if (dialog.open) show(found.text, answer);
  } catch (error) {
    const gone = error.status === 404 ? "The document has been deleted since; this is the text that was read." : error.message;
    if (dialog.open) show(source.text ?? "", answer, gone);
  }
}
