// Markdown as elements: the part of it that models write. HTML in it stays text, and no picture is loaded.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEAD = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const CELLS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const BLANK = /^\s*$/;
const DEEPEST = 8; // quotes and lists within one another
const WIDEST = 40; // columns of a table

/** Whether a line ends the paragraph before it. */
const begins = (line) => [FENCE, HEAD, RULE, QUOTE].some((form) => form.test(line)) || /^ {0,3}(?:[-*+]|1[.)]) +\S/.test(line);

const isTable = (head, rule) => head.includes("|") && head.split("|").length <= WIDEST && rule.includes("|") && CELLS.test(rule);

/** The text in blocks, each `{kind, lines}` and what its kind needs. */
function blocksOf(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const from = at;
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (BLANK.test(line)) at += 1;
    else if (fence) {
      const close = lines.findIndex((one, place) => place > at && one.trim().startsWith(fence[1]) && /^\s*(`+|~+)\s*$/.test(one));
      at = close < 0 ? lines.length : close + 1;
      found.push({ kind: "code", lines: lines.slice(from + 1, close < 0 ? at : close), language: fence[2].trim() });
    } else if (HEAD.test(line) || RULE.test(line)) {
      at += 1;
      found.push({ kind: RULE.test(line) ? "rule" : "head", lines: [line] });
    } else if (QUOTE.test(line)) {
      while (at < lines.length && QUOTE.test(lines[at])) at += 1;
      found.push({ kind: "quote", lines: lines.slice(from, at).map((one) => QUOTE.exec(one)[1]) });
    } else if (ITEM.test(line)) {
      at = endOfList(lines, at);
      found.push({ kind: "list", lines: lines.slice(from, at) });
    } else if (isTable(line, lines[at + 1] ?? "")) {
      while (at < lines.length && lines[at].includes("|")) at += 1;
      found.push({ kind: "table", lines: lines.slice(from, at) });
    } else {
      at += 1;
      while (at < lines.length && !BLANK.test(lines[at]) && !begins(lines[at])) at += 1;
      found.push({ kind: "words", lines: lines.slice(from, at) });
    }
  }
  return found;
}

const isOrdered = (item) => /\d/.test(item[2]);

const indentOf = (line) => line.length - line.trimStart().length;

/** Where a list ends: at a line that is none of its items, nor belongs to one. */
function endOfList(lines, from) {
  const first = ITEM.exec(lines[from]);
  const belongs = (line, before) => {
    if (BLANK.test(line)) return null; // the line after it tells
    if (indentOf(line) >= first[1].length + 2) return true;
    const item = RULE.test(line) ? null : ITEM.exec(line);
    if (item) return isOrdered(item) === isOrdered(first);
    return !BLANK.test(before) && !begins(line);
  };
  let end = from + 1;
  for (let at = end; at < lines.length; at += 1) {
    const told = belongs(lines[at], lines[at - 1]);
    if (told === false) break;
    if (told) end = at + 1;
  }
  return end;
}

/** A list's items, each its lines without their indentation. */
function itemsOf(lines) {
  const most = indentOf(lines[0]) + 1;
  const items = [];
  let within = 0;
  for (const line of lines) {
    const item = indentOf(line) <= most ? ITEM.exec(line) : null;
    if (item) {
      within = item[1].length + item[2].length + 1;
      items.push([item[3]]);
    } else items.at(-1).push(line.slice(Math.min(within, indentOf(line))));
  }
  return items;
}

const VIEWS = {
  code: ({ lines, language }) =>
    el("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, el("code", { text: lines.join("\n") })),
  rule: () => el("hr"),
  // No headings of the page: its own structure stays what it is.
  head: ({ lines }) => el("p", { class: "head" }, inline(HEAD.exec(lines[0])[2])),
  quote: ({ lines }, deep) => el("blockquote", {}, within(lines, deep)),
  words: ({ lines }) => el("p", {}, inline(lines.map((line) => line.trim()).join("\n"))),
  list: ({ lines }, deep) => {
    const first = ITEM.exec(lines[0]);
    const start = isOrdered(first) ? parseInt(first[2], 10) : 1;
    return el(isOrdered(first) ? "ol" : "ul", { start: start === 1 ? null : start }, itemsOf(lines).map((item) => el("li", {}, within(item, deep))));
  },
  table: ({ lines }) => {
    const [head, , ...rows] = lines.map((line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/));
    const cells = (row, tag) => el("tr", {}, head.map((_, at) => el(tag, {}, inline((row[at] ?? "").trim().replaceAll("\\|", "|")))));
    const table = el("table", {}, el("thead", {}, cells(head, "th")), el("tbody", {}, rows.map((row) => cells(row, "td"))));
    return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table);
  },
};

function within(lines, deep) {
  const blocks = blocksOf(lines);
  if (deep >= DEEPEST) return [el("p", { text: lines.join("\n") })];
  if (blocks.length === 1 && blocks[0].kind === "words") return inline(lines.join("\n").trim());
  return blocks.map((block) => viewOf(block, deep + 1));
}

const viewOf = (block, deep = 0) => VIEWS[block.kind](block, deep);

// What is found first wins. Spans are bounded, so that text full of openings is read in good time.
const SPAN = new RegExp(
  [
    /\\([\\`*_{}[\]()#+\-.!~|<>])/, // 1: a sign by itself
    /(?<!`)(`{1,4})(?!`)(.{1,1000}?)(?<!`)\2(?!`)/, // 2, 3: code
    /\*\*(?=\S)(.{0,1000}?\S)\*\*/, // 4: strong
    /(?<!\w)__(?=\S)(.{0,1000}?\S)__(?!\w)/, // 5
    /~~(?=\S)(.{0,1000}?\S)~~/, // 6: struck out
    /\*(?=[^\s*])([^*]{0,1000}?[^\s*])\*(?!\*)/, // 7: emphasis
    /(?<!\w)_(?=[^\s_])([^_]{0,1000}?[^\s_])_(?!\w)/, // 8
    /!?\[([^\][]{1,500})\]\(\s*<?([^\s()<>]{1,2000})>?(?:\s+"[^"]{0,200}")?\s*\)/, // 9, 10: a link, or a picture
    /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/, // 11: an address
  ]
    .map((one) => one.source)
    .join("|"),
  "s",
);

/** The parts of a line: text and elements. */
function inline(text) {
  const parts = [];
  let rest = text;
  for (let found = SPAN.exec(rest); found; found = SPAN.exec(rest)) {
    parts.push(rest.slice(0, found.index), spanOf(found));
    rest = rest.slice(found.index + found[0].length);
  }
  return [...parts, rest].filter(Boolean);
}

function spanOf(found) {
  const [whole, sign, , code, strong, alsoStrong, struck, emphasis, alsoEmphasis, label, address, bare] = found;
  if (sign) return sign;
  if (code !== undefined) return el("code", { text: code.trim() || code });
  if (strong ?? alsoStrong) return el("strong", {}, inline(strong ?? alsoStrong));
  if (struck) return el("s", {}, inline(struck));
  if (emphasis ?? alsoEmphasis) return el("em", {}, inline(emphasis ?? alsoEmphasis));
  return linkOf(whole, label ?? bare, address ?? bare);
}

/** A link that shows where it leads; what leads nowhere that a link may lead stays text. */
function linkOf(whole, label, address) {
  let to = null;
  try {
    to = new URL(address);
  } catch {
    return whole;
  }
  if (whole.startsWith("!") || !["http:", "https:", "mailto:"].includes(to.protocol)) return whole;
  const where = to.host || to.pathname;
  const link = el("a", { href: to.href, target: "_blank", rel: "noopener noreferrer nofollow", title: to.href, text: label });
  return label.includes(where) ? link : el("span", {}, link, ` (${where})`);
}

const shown = new WeakMap(); // node: sources of its blocks

/** Show Markdown in a node; blocks that have not changed since stay the elements they are. */
export function showMarkdown(node, text) {
  const blocks = blocksOf(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"));
  const sources = blocks.map((block) => JSON.stringify(block));
  const before = shown.get(node) ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same += 1;
  if (same === sources.length && same === before.length) return;
  while (node.childNodes.length > same) node.lastChild.remove();
  node.append(...blocks.slice(same).map((block) => viewOf(block)));
  shown.set(node, sources);
}
