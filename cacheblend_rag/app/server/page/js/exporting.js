// A conversation as a Markdown file.

import { el } from "./dom.js";

const asQuote = (text) => text.split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");

/** Text in which a reader of the file is not made to load anything: pictures become links, and HTML is text. */
const inert = (text) => text.replace(/!(?=\[)/g, "\\!").replace(/<(?=[a-z/!?])/gi, "&lt;");

/** Everything that was asked, answered and cited. */
export function asMarkdown(conversation, collectionName) {
  const day = new Date(conversation.created).toISOString().slice(0, 10);
  const parts = [`# ${inert(conversation.title || conversation.turns[0].question)}`, `${day}, from “${inert(collectionName)}”`];
  for (const turn of conversation.turns) {
    parts.push(`## ${inert(turn.question)}`, inert(turn.answer.trim()) || "(no answer)");
    turn.sources.forEach((source, at) => parts.push(`${at + 1}. ${inert(source.document)}, passage ${source.chunk + 1}`, asQuote(inert(source.text ?? ""))));
  }
  return `${parts.join("\n\n")}\n`;
}

/** Let the browser save a file. */
export function saveFile(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Let the browser save a conversation. */
export function saveConversation(conversation, collectionName) {
  const name = (conversation.title || conversation.turns[0].question).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  saveFile(`${name || "conversation"}.md`, asMarkdown(conversation, collectionName), "text/markdown");
}
