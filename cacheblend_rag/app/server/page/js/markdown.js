// Markdown as elements: markdown-it reads it, and each of its tokens becomes an element. HTML stays text, and no picture is loaded.

import MarkdownIt from "../vendor/markdown-it.js";
import { copyButton, el } from "./dom.js";

const DEEPEST = 20; // quotes and lists within one another
const reader = new MarkdownIt({ html: false, linkify: true, maxNesting: DEEPEST });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "notes.md" is a file, and no address
reader.validateLink = (address) => /^(?:https?|mailto):/i.test(address);

const TURNS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/; // characters that turn text around

const VIEWS = {
  text: ({ content }) => content,
  softbreak: () => "\n",
  code_inline: ({ content }) => el("code", { text: content }),
  fence: codeView,
  code_block: codeView,
  // No headings of the page: its own structure stays what it is.
  heading: (_, inside) => el("p", { class: "head" }, inside),
  paragraph: ({ hidden }, inside) => (hidden ? inside : el("p", {}, inside)),
  list_item: (_, inside) => el("li", {}, inside),
  ordered_list: (token, inside) => el("ol", { start: token.attrGet("start") }, inside),
  table: (_, inside) => el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, el("table", {}, inside)),
  th: cellView,
  td: cellView,
  link: (token, inside) => linkView(token.attrGet("href"), inside),
  image: (token) => linkView(token.attrGet("src"), token.content || "picture"),
};

function cellView(token, inside) {
  const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1];
  return el(token.tag, { data: align && { align } }, inside);
}

function codeView({ info, content }) {
  const language = info.trim().split(/\s+/)[0];
  const code = el("code", { text: content.replace(/\n$/, "") });
  const pre = el("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code);
  return el("div", { class: "code" }, pre, copyButton("Copy the code", () => code.textContent, "copy-code"));
}

/** A link that shows where it leads, unless its own text is that address. */
function linkView(address, inside) {
  const link = el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow", title: address }, inside);
  const where = placeOf(address);
  if (placeOf(link.textContent) === where && !TURNS.test(link.textContent)) return link;
  return el("span", {}, el("bdi", {}, link), el("bdi", { dir: "ltr", text: ` (${where})` }));
}

/** The host of an address, or to whom a letter goes; of other text, the text. */
function placeOf(text) {
  try {
    const { host, pathname, username } = new URL(text);
    return username ? `${username}@${host}` : host || pathname;
  } catch {
    return text;
  }
}

/** Elements and text of a list of tokens. */
function nodesOf(tokens) {
  const open = [{ inside: [] }];
  for (const token of tokens) {
    if (token.nesting > 0) open.push({ token, inside: [] });
    else if (token.nesting < 0) {
      const { token: begun, inside } = open.pop();
      open.at(-1).inside.push(viewOf(begun, inside));
    } else if (token.type === "inline") open.at(-1).inside.push(...nodesOf(token.children));
    else open.at(-1).inside.push(viewOf(token, []));
  }
  return open[0].inside;
}

function viewOf(token, inside) {
  const view = VIEWS[token.type.replace(/_open$/, "")];
  return view ? view(token, inside) : el(token.tag, {}, inside);
}

const shown = new WeakMap(); // node: sources of its blocks

/** Show Markdown in a node; blocks that have not changed since stay the elements they are. */
export function showMarkdown(node, text) {
  const lines = text.split(/\r\n?|\n/);
  const known = {};
  const blocks = [];
  for (const token of reader.parse(text, known)) {
    if (token.level === 0 && token.nesting >= 0) blocks.push({ tokens: [], lines: lines.slice(...token.map).join("\n") });
    blocks.at(-1).tokens.push(token);
  }
  const references = JSON.stringify(known.references ?? {}); // a line further down may change where a link leads
  for (const block of blocks) block.source = `${references}\n${block.lines}`;
  const before = shown.get(node) ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === before[same]) same += 1;
  if (same === blocks.length && same === before.length) return;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const { tokens, lines } of blocks.slice(same)) {
    // What lies too deep in a block would be left out, so that such a block stays as it was written.
    node.append(...(tokens.some(({ level }) => level >= DEEPEST - 1) ? [el("p", { text: lines })] : nodesOf(tokens)));
  }
  shown.set(node, blocks.map(({ source }) => source));
}
