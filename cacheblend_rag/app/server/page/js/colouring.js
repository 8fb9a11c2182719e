// Colours of code: highlight.js finds what each part is, and tells it to an object that makes elements of it.

import highlighter from "../vendor/highlight.js";
import { el } from "./dom.js";

const LONGEST = 50_000; // characters; longer code stays plain

class Elements {
  root = document.createDocumentFragment();
  open = [this.root];

  addText(text) {
    this.open.at(-1).append(text);
  }

  openNode(scope) {
    const node = el("span", { class: `is-${scope.split(".")[0]}` });
    this.open.at(-1).append(node);
    this.open.push(node);
  }

  closeNode() {
    if (this.open.length > 1) this.open.pop();
  }

  startScope(scope) {
    this.openNode(scope);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage({ root }) {
    this.open.at(-1).append(root);
  }

  finalize() {}

  /** Of the result, the page takes the elements, and no HTML. */
  toHTML() {
    return "";
  }
}

highlighter.configure({ __emitter: Elements });

/** Code in coloured elements; null if the language is not known. */
export function coloured(code, language) {
  if (code.length > LONGEST || !highlighter.getLanguage(language)) return null;
  return highlighter.highlight(code, { language, ignoreIllegals: true })._emitter.root;
}
