// A cited passage in full, between those beside it in its document.

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

/** How much of the beginning of a text stands at the end of the one before it already. */
function shared(before, text) {
  for (let size = Math.min(before.length, text.length, 1000); size > 0; size -= 1) {
    if (before.endsWith(text.slice(0, size))) return size;
  }
  return 0;
}

const neighbour = (name, text) => (text?.trim() ? el("p", { class: "neighbour", dir: "auto", text, "aria-label": name }) : null);

function show({ text, before, after }, answer, note) {
  const parts = marked(text, answer);
  const found = parts.some((part) => part.nodeName === "MARK");
  const main = el("p", { class: "passage-text", dir: "auto" }, parts);
  const nodes = [
    neighbour("The passage before", before?.slice(0, before.length - shared(before, text))),
    main,
    neighbour("The passage after", after?.slice(shared(text, after))),
    found ? el("p", { class: "hint", text: "Words that the answer shares are marked." }) : null,
    note ? el("p", { class: "hint", text: note }) : null,
  ];
  const body = $("passage").querySelector(".body");
  body.replaceChildren(...nodes.filter(Boolean));
  body.scrollTop = before ? main.offsetTop - body.offsetTop : 0;
}

/** What a source is called: its document, and the page of a PDF. */
export const titleOf = ({ document, page }) => (page ? `${document}, page ${page}` : document);

/** Open the passage of a source; what the answer was given stands there until the server's own text arrives. */
export async function openPassage({ collection, answer }, source) {
  const dialog = $("passage");
  $("passage-title").textContent = titleOf(source);
  show({ text: source.text ?? "" }, answer);
  dialog.showModal();
  const place = [source.collection || collection, source.document_id].map(encodeURIComponent);
  try {
    const found = await call("GET", `api/collections/${place[0]}/documents/${place[1]}/chunks/${source.chunk}`);
    if (dialog.open) show(found, answer);
  } catch (error) {
    const gone = error.status !== 404 ? error.message : `The document has been deleted since${source.text?.trim() ? "; this is the text that was read" : ", and its text with it"}.`;
    if (dialog.open) show({ text: source.text ?? "" }, answer, gone);
  }
}
