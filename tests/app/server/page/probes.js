// Read into the page by tests (driving.probe): what a person would notice, measured.

const visible = (one) => one.checkVisibility();

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

/** Name every control that the keyboard should reach: `control 0`, and so on; how many there are. */
function markControls() {
  const within = document.querySelector("dialog[open]") ?? document.body;
  const reached = (one) => visible(one) && !one.disabled;
  const found = [...within.querySelectorAll(CONTROLS)].filter(reached);
  found.forEach((one, at) => (one.dataset.control = at));
  return found.map((one) => one.outerHTML.slice(0, 120));
}

/** Which of them has the focus; null if it is beyond the page, -1 if it is another part of the page. */
function control() {
  const one = document.activeElement;
  return one === document.body ? null : Number(one.dataset.control ?? -1);
}

/** Controls too low for a finger (WCAG 2.5.8). */
function low() {
  const controls = [...document.querySelectorAll("button, select, textarea")].filter(visible);
  return controls.filter((one) => one.getBoundingClientRect().height < 24).map((one) => one.textContent);
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

/** Storage that has room for one more chat beside so many. */
function fillStorage(most) {
  const set = Storage.prototype.setItem;
  Storage.prototype.setItem = function (name, value) {
    const others = Object.keys(this).filter((one) => one.includes("/chat/") && one !== name);
    if (others.length > most) throw new DOMException("full", "QuotaExceededError");
    set.call(this, name, value);
  };
}
