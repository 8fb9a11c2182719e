// Read into the page by tests (driving.probe): what a person would notice, measured.

const visible = (one) => one.checkVisibility();

/** Every control and region that has no name for a screen reader. */
function unnamed() {
  const wanted = "button, input, select, textarea, a[href], [role=img], [role=region], dialog[open]";
  const nameOf = (one) => {
    const by = (one.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent);
    const labels = [...(one.labels ?? [])].map((label) => label.textContent);
    return [one.getAttribute("aria-label"), ...by, ...labels, one.matches("button, a") && one.textContent].find(Boolean);
  };
  const nameless = [...document.querySelectorAll(wanted)].filter(visible).filter((one) => !nameOf(one)?.trim());
  return nameless.map((one) => one.outerHTML.slice(0, 120));
}

const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
}

const over = (top, under) => [0, 1, 2].map((at) => top[at] * top[3] + under[at] * (1 - top[3])).concat(1);

function luminance(colour) {
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = colour.slice(0, 3).map((value) => linear(value / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

/** What is painted behind a node's text. */
function behind(node) {
  const layers = [];
  for (let one = node; one; one = one.parentElement) {
    layers.push(rgba(getComputedStyle(one).backgroundColor));
    if (one.matches("dialog")) break;
  }
  return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
}

/** Text that is too faint against what lies behind it (WCAG 1.4.3, AA). */
function faint() {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("dialog[open]") ?? document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const node = walker.currentNode.parentElement;
    if (!text || !visible(node) || node.closest(":disabled, .unseen, .skip, option, svg")) continue;
    const style = getComputedStyle(node);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const back = behind(node);
    const got = contrast(over(rgba(style.color), back), back);
    if (got < needed) found.push(`${got.toFixed(2)}: ${node.className} ${text.slice(0, 40)}`);
  }
  return found;
}

/** Contrast between two of the page's named colours. */
function contrastOf([one, other]) {
  const probe = document.body.appendChild(document.createElement("i"));
  const [first, second] = [one, other].map((name) => {
    probe.style.color = `var(${name})`;
    return rgba(getComputedStyle(probe).color);
  });
  probe.remove();
  return contrast(first, second);
}

/** What has the keyboard's focus, and how wide the ring around it is. */
function focused() {
  const one = document.activeElement;
  if (one === document.body) return { id: "", name: "", ring: 0 }; // the browser's own controls, beyond the page
  let ringed = one;
  if (one.matches(".switch input")) ringed = one.nextElementSibling;
  if (one.matches(".drop input")) ringed = one.parentElement;
  const style = getComputedStyle(ringed);
  const ring = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
  return { id: one.id, name: one.getAttribute("aria-label") ?? one.textContent.trim().slice(0, 60), ring };
}

const CONTROLS = "button, input, select, textarea, a[href], summary, [tabindex='0']";

/** Name every control that the keyboard should reach: `control 0`, and so on; how many there are. Of radio buttons it is one. */
function markControls() {
  const within = document.querySelector("dialog[open]") ?? document.body;
  const reached = (one) => visible(one) && !one.disabled && !one.matches("[type=radio]:not(:checked)");
  const found = [...within.querySelectorAll(CONTROLS)].filter(reached);
  found.forEach((one, at) => (one.dataset.control = at));
  return found.map((one) => one.outerHTML.slice(0, 120));
}

/** Which of them has the focus; null if it is beyond the page, -1 if it is another part of the page. */
function control() {
  const one = document.activeElement;
  return one === document.body ? null : Number(one.dataset.control ?? -1);
}

/** Note what is told to a screen reader, in `window.told`. */
function watchTold() {
  window.told = [];
  const said = document.getElementById("said");
  new MutationObserver(() => window.told.push(said.textContent)).observe(said, { childList: true });
}

/** Controls too low for a finger (WCAG 2.5.8). */
function low() {
  const controls = [...document.querySelectorAll("button, select, textarea")].filter(visible);
  return controls.filter((one) => one.getBoundingClientRect().height < 24).map((one) => one.textContent);
}

/** Levels of the headings that are seen, in order. */
function headings() {
  return [...document.querySelectorAll("h1, h2, h3, h4")].filter(visible).map((one) => Number(one.localName[1]));
}

/** Note every text that the first answer has had, in `window.grown`. */
function watchAnswer() {
  window.grown = [];
  const note = () => {
    const text = document.querySelector(".turn .words")?.textContent ?? "";
    if (text && text !== window.grown.at(-1)) window.grown.push(text);
  };
  const all = { childList: true, subtree: true, characterData: true };
  new MutationObserver(note).observe(document.querySelector("#turns"), all);
}

/** Answer what is sent to `path` with these events, some each time that `letGo` is called. */
function holdStream({ path, events }) {
  const fetched = window.fetch;
  window.held = { events };
  const start = (controller) => (window.held.controller = controller);
  const answer = new Response(new ReadableStream({ start }), { headers: { "Content-Type": "text/event-stream" } });
  window.fetch = async (address, how) => {
    if (!String(address).endsWith(path)) return fetched(address, how);
    how.signal?.addEventListener("abort", () => window.held.controller.error(new DOMException("stopped", "AbortError")));
    return answer;
  };
}

/** Send the next events of a held stream; it ends with the last. */
function letGo(count) {
  const { events, controller } = window.held;
  for (const one of events.splice(0, count)) controller.enqueue(new TextEncoder().encode(one));
  if (!events.length) controller.close();
}

/** A drag's files from their names and texts. */
function transferOf(files) {
  const transfer = new DataTransfer();
  for (const [name, text] of files) transfer.items.add(new File([text], name, { type: "text/markdown" }));
  return transfer;
}

/** Storage that refuses what is longer than `most`. */
function fillStorage(most) {
  const set = Storage.prototype.setItem;
  Storage.prototype.setItem = function (name, value) {
    if (value.length > most) throw new DOMException("full", "QuotaExceededError");
    set.call(this, name, value);
  };
}

/** Widths of a text at which one of its elements stands in another line than what is before it. */
function widthsThatPart(selector) {
  const parted = [];
  for (const one of document.querySelectorAll(selector)) {
    const text = one.closest(".words");
    for (let width = 120; width < 480; width += 6) {
      text.style.width = `${width}px`;
      const range = document.createRange();
      range.selectNodeContents(one.previousSibling);
      const before = [...range.getClientRects()].at(-1);
      const { top, bottom } = one.getBoundingClientRect();
      if (top > before.bottom || bottom < before.top) parted.push(width);
    }
    text.style.width = "";
  }
  return parted;
}

/** Where the texts of an element's children are drawn. */
function textBoxes(selector) {
  return [...document.querySelector(selector).children].map((one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    return range.getBoundingClientRect().toJSON();
  });
}
