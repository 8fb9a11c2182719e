// Marks in the words of an answer: which passage a sentence comes from, and which words a correction changed.

import { button, el } from "./dom.js";

const LEAST = 4; // letters; shorter words say nothing about where a sentence comes from
const SHARED = 0.6; // of a sentence's words, rare ones weighing more, that its passage must have
const BLOCKS = "p, li, td, th";
const sentences = new Intl.Segmenter(undefined, { granularity: "sentence" });

const wordsOf = (text) => (text.toLowerCase().match(/[\p{L}\p{N}]+(?:[.,:]\p{N}+)*/gu) ?? []).map((word) => word.replace(/(?<=\d),(?=\d{3})/g, ""));

/** Words that tell where a text comes from: long ones and numbers. */
const tellingWords = (text) => new Set(wordsOf(text).filter((word) => word.length >= LEAST || /\p{N}/u.test(word)));

/** A function from a sentence to the place of its passage among the sources; null where none has enough of its words. */
function finder(question, sources) {
  const passages = sources.map(({ text }) => new Set(wordsOf(text ?? "")));
  const known = tellingWords(question);
  const weigh = (word) => Math.log(1 + passages.length / (1 + passages.filter((one) => one.has(word)).length));
  const weight = (words) => words.reduce((sum, word) => sum + weigh(word), 0);
  return (sentence) => {
    const words = [...tellingWords(sentence)].filter((word) => !known.has(word));
    const all = weight(words);
    const shares = passages.map((one) => {
      const lacksNumber = words.some((word) => /\p{N}/u.test(word) && !one.has(word));
      return lacksNumber || !all ? 0 : weight(words.filter((word) => one.has(word))) / all;
    });
    const best = shares.indexOf(Math.max(...shares));
    return shares[best] >= SHARED ? best : null;
  };
}

/** Put a mark after each sentence that a passage is known for. `open` is called with that passage's place. */
export function cite(node, question, sources, open) {
  const find = finder(question, sources);
  for (const block of node.querySelectorAll(BLOCKS)) {
    if (block.querySelector(BLOCKS)) continue; // its blocks are looked at by themselves
    const marks = [...sentences.segment(block.textContent)].map(({ segment, index }) => ({ end: index + segment.trimEnd().length, at: find(segment) }));
    for (const { end, at } of marks.reverse().filter((one) => one.at !== null)) {
      const title = sources[at].document;
      // The number is drawn, so that it is neither selected nor copied as part of the answer.
      const props = { class: "cite", data: { number: at + 1 }, "aria-label": `From passage ${at + 1}: ${title}, open it`, title };
      markAt(block, end, button("", () => open(at), props));
    }
  }
}

function textsIn(node) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
}

/** Insert an element after so many characters of a block; not within a link or code. */
function markAt(block, characters, mark) {
  let left = characters;
  for (const text of textsIn(block)) {
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

/** Mark the words of a node that another does not have in their place, by elements such as `ins`; whether there are any. */
export function markChanges(node, other, tag) {
  const wordsIn = (one) => textsIn(one).flatMap((text) => [...text.data.matchAll(/\S+/gu)].map(({ 0: word, index }) => ({ text, word, start: index, end: index + word.length })));
  const [words, others] = [wordsIn(node), wordsIn(other)];
  const most = Math.min(words.length, others.length);
  let [same, after] = [0, 0]; // words that begin both texts, and that end both: all between them have changed
  while (same < most && words[same].word === others[same].word) same += 1;
  while (after < most - same && words.at(-1 - after).word === others.at(-1 - after).word) after += 1;
  const runs = [];
  for (const { text, start, end } of words.slice(same, words.length - after)) {
    if (runs.at(-1)?.text === text) runs.at(-1).end = end;
    else runs.push({ text, start, end });
  }
  for (const { text, start, end } of runs.reverse()) {
    const rest = text.splitText(start);
    rest.splitText(end - start);
    const mark = el(tag);
    rest.replaceWith(mark);
    mark.append(rest);
  }
  return runs.length > 0;
}
