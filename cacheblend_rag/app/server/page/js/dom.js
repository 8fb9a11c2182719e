// Elements, which are made here alone, and numbers as people read them. Text always goes in as text: nothing parses markup.

export const $ = (id) => document.getElementById(id);

/** An element: `text`, `on` (listeners), `data`, `vars` (CSS properties), else attributes; then children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
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

export const button = (text, click, props = {}) => el("button", { type: "button", text, on: { click }, ...props });

export const hint = (text, props = {}) => el("p", { class: "hint", text, ...props });

/** Tell a screen reader something that is seen elsewhere. */
export function say(text) {
  $("said").textContent = text;
}

/** Ask before something is deleted: the button gives way to a question; `action` is given the way back. */
export function confirmInPlace(trigger, question, action) {
  const back = () => {
    box.replaceWith(trigger);
    trigger.focus();
  };
  const sure = button("Delete", () => {
    box.replaceChildren(el("span", { class: "hint busy", role: "status", text: "Deleting…" }));
    action(back);
  }, { class: "danger" });
  const box = el("span", { class: "sure", role: "group", "aria-label": question }, el("span", { text: question }), sure, button("Keep", back));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the dialog around it stays open
    event.stopPropagation();
    back();
  });
  trigger.replaceWith(box);
  sure.focus();
}

const shownRows = new WeakMap(); // list: its rows by what they were made of

/** Show a list anew. An item that is as before stays the same element: it keeps its focus, and an open question. */
export function showRows(list, items, view) {
  const before = shownRows.get(list) ?? new Map();
  const rows = new Map(items.map((item) => [JSON.stringify(item), item]));
  for (const [key, item] of rows) rows.set(key, before.get(key) ?? view(item));
  for (const [key, row] of before) if (!rows.has(key)) row.remove();
  [...rows.values()].forEach((row, at) => {
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] ?? null);
  });
  shownRows.set(list, rows);
}

/** A button that copies a text. The label is drawn, so that it is neither selected nor copied with what is around it. */
export function copyButton(name, text, kind) {
  if (!navigator.clipboard) return null; // a page that was not sent securely has none
  const label = (said) => (made.dataset.label = said);
  const copy = () => navigator.clipboard.writeText(text()).then(() => "Copied", () => "Not copied").then((said) => {
    label(said);
    say(said);
    setTimeout(label, 1500, "Copy");
  });
  const made = button("", copy, { class: `copy ${kind}`, "aria-label": name, data: { label: "Copy" } });
  return made;
}

/** Seconds as milliseconds or seconds. */
export function time(seconds) {
  const ms = seconds * 1000;
  if (ms < 0.05) return "0 ms";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${seconds.toFixed(2)} s`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 999.5 && unit < units.length - 1; unit += 1) count /= 1000;
  return `${unit && count < 9.95 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export const share = (part) => (part > 0 && part < 0.01 ? "<1%" : `${Math.round(part * 100)}%`);

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

/** How much faster `seconds` is than `other`, in words. */
export function faster(seconds, other) {
  if (!seconds || !other) return "";
  const factor = other / seconds;
  if (factor >= 0.95 && factor <= 1.05) return "as fast";
  return factor > 1 ? `${factor.toFixed(1)}× faster` : `${(1 / factor).toFixed(1)}× slower`;
}
