// Words in which two texts differ, marked where one of them stands.

import { el } from "./dom.js";

const MOST = 4_000_000; // pairs of words that are compared; in longer texts all between the first and the last change is marked

/** The words within a node: `{text, start, end, word}`, each with the text node that it stands in. */
function wordsIn(node) {
  const found = [];
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode;
    for (const { 0: word, index } of text.data.matchAll(/\S+/gu)) found.push({ text, word, start: index, end: index + word.length });
  }
  return found;
}

/** Which of `words` are not in `others`: all but their longest common subsequence. */
function changedWords(words, others) {
  let begin = 0;
  while (begin < words.length && words[begin] === others[begin]) begin += 1;
  let end = 0;
  const most = Math.min(words.length, others.length) - begin;
  while (end < most && words.at(-1 - end) === others.at(-1 - end)) end += 1;
  const [ours, theirs] = [words, others].map((all) => all.slice(begin, all.length - end));
  const changed = words.map((_, at) => at >= begin && at < words.length - end);
  if (ours.length * theirs.length > MOST) return changed;
  // lengths[i][j]: of the longest common subsequence of ours from i on and theirs from j on.
  const lengths = Array.from({ length: ours.length + 1 }, () => new Uint16Array(theirs.length + 1));
  for (let i = ours.length - 1; i >= 0; i -= 1) {
    for (let j = theirs.length - 1; j >= 0; j -= 1) {
      lengths[i][j] = ours[i] === theirs[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < ours.length && j < theirs.length; ) {
    if (ours[i] === theirs[j]) {
      changed[begin + i] = false;
      i += 1;
      j += 1;
    } else if (lengths[i + 1][j] >= lengths[i][j + 1]) i += 1;
    else j += 1;
  }
  return changed;
}

/** Mark the words of a node that another does not have in their place, by elements such as `ins`; whether there are any. */
export function markChanges(node, other, tag) {
  const words = wordsIn(node);
  const changed = changedWords(words.map(({ word }) => word), wordsIn(other).map(({ word }) => word));
  const runs = [];
  for (const { text, start, end } of words.filter((_, at) => changed[at])) {
    const last = runs.at(-1);
    if (last?.text === text && !/\S/.test(text.data.slice(last.end, start))) last.end = end;
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
