// Which passage a sentence of an answer comes from: the one that has most of its words.

import { el } from "./dom.js";

const LEAST = 4; // shorter words say nothing about where a sentence comes from
const SHARED = 0.6; // of a sentence's words, rare ones weighing more, that its passage must have
const BLOCKS = "p, li, td, th";

const wordsOf = (text) => (text.toLowerCase().match(/[\p{L}\p{N}]+(?:[.,:]\p{N}+)*/gu) ?? []).map((word) => word.replace(/(?<=\d),(?=\d{3})/g, ""));

/** Words that tell where a text comes from: long ones and numbers. */
const tellingWords = (text) => new Set(wordsOf(text).filter((word) => word.length >= LEAST || /\p{N}/u.test(word)));

/** A function from a sentence to the place of its passage among the sources; null where none has enough of its words. */
export function finder(question, sources) {
  const passages = sources.map(({ text }) => new Set(wordsOf(text ?? "")));
  const known = tellingWords(question);
  const weigh = (word) => Math.log(1 + passages.length / (1 + passages.filter((one) => one.has(word)).length));
  return (sentence) => {
    const words = [...tellingWords(sentence)].filter((word) => !known.has(word));
    const all = words.reduce((sum, word) => sum + weigh(word), 0);
    if (!all) return null;
    const shares = passages.map((one) => {
      if (words.some((word) => /\p{N}/u.test(word) && !one.has(word))) return 0; // a number that it lacks
      return words.filter((word) => one.has(word)).reduce((sum, word) => sum + weigh(word), 0) / all;
    });
    const best = shares.indexOf(Math.max(...shares));
    return shares[best] >= SHARED ? best : null;
  };
}

const sentences = new Intl.Segmenter(undefined, { granularity: "sentence" });

/** Put a mark behind each sentence that a passage is known for. `open` is called with that passage's place. */
export function cite(node, question, sources, open) {
  const find = finder(question, sources);
  for (const block of node.querySelectorAll(BLOCKS)) {
    if (block.querySelector(BLOCKS)) continue; // its blocks are looked at by themselves
    const marks = [...sentences.segment(block.textContent)]
      .map(({ segment, index }) => ({ end: index + segment.trimEnd().length, at: find(segment) }))
      .filter(({ at }) => at !== null);
    for (const { end, at } of marks.reverse()) markAt(block, end, markView(at, sources[at], open));
  }
}

function markView(at, source, open) {
  const label = `From passage ${at + 1}: ${source.document}, open it`;
  // The number is drawn, so that it is neither selected nor copied as part of the answer.
  return el("button", { type: "button", class: "cite", data: { number: at + 1 }, "aria-label": label, title: source.document, on: { click: () => open(at) } });
}

/** Insert an element behind so many characters of a block; not within a link or code. */
function markAt(block, characters, mark) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  let left = characters;
  while (walker.nextNode()) {
    const text = walker.currentNode;
    if (text.length < left) {
      left -= text.length;
      continue;
    }
    const around = text.parentElement.closest("a, code, strong, em");
    if (around && block.contains(around)) return around.after(mark);
    text.splitText(left);
    const begins = text.data.search(/\S{1,30}$/u); // a longer word may be broken, and its mark then, too
    const word = begins > 0 ? text.splitText(begins) : text;
    const together = el("span", { class: "together" });
    word.replaceWith(together);
    return together.append(word, mark);
  }
}
