// Elements are made here alone. Text always goes in as text: nothing parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key === "on") for (const [type, fn] of Object.entries(value)) node.addEventListener(type, fn);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "vars") for (const [name, set] of Object.entries(value)) node.style.setProperty(name, set);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element: `text`, `on` (listeners), `data`, `vars` (CSS properties), else attributes; then children. */
export const el = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

/** The same in SVG. */
export const svg = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** A button. */
export const button = (text, click, props = {}) => el("button", { type: "button", text, on: { click }, ...props });

/** Tell a screen reader something that is seen elsewhere. */
export function say(text) {
  $("said").textContent = text;
}

const DELETING = { yes: "Delete", no: "Keep", busy: "Deleting, once no answer is under way…", props: { class: "danger" } };

/** Ask once more before doing what cannot be undone: the button gives way to a question in its place; `words` are others than of deleting. */
export function confirmInPlace(trigger, question, action, words = {}) {
  const { yes, no, busy, props } = { ...DELETING, ...words };
  const back = () => {
    box.replaceWith(trigger);
    trigger.focus();
  };
  const sure = button(yes, () => {
    box.replaceChildren(el("span", { class: "hint busy", role: "status", text: busy }));
    action(back);
  }, props);
  const box = el("span", { class: "sure", role: "group", "aria-label": question }, el("span", { text: question }), sure, button(no, back));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the dialog around it stays open
    event.stopPropagation();
    back();
  });
  trigger.replaceWith(box);
  sure.focus();
}

const made = new WeakMap(); // by list: the rows that it holds by what they were made of

/**
 * Show a list anew. What is to be seen as before stays the same element: it keeps its focus, and a question whether to
 * delete it stays open. `facts` are all that `view` reads of an item.
 */
export function showRows(list, items, view, facts = (item) => item) {
  const before = made.get(list) ?? new Map();
  const rows = new Map(items.map((item) => [JSON.stringify(facts(item)), item]));
  for (const [key, item] of rows) rows.set(key, before.get(key) ?? view(item));
  for (const [key, row] of before) if (!rows.has(key)) row.remove();
  [...rows.values()].forEach((row, at) => {
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] ?? null);
  });
  made.set(list, rows);
}

/** Put text onto the clipboard; a page that was not sent securely has the older way only. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = el("textarea", { class: "unseen", readonly: true });
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    return done;
  }
}
