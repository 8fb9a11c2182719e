// What each tenant has and uses: all that a key for metrics opens.

import { ApiError, call, leaveKey } from "./api.js";
import { $, el } from "./dom.js";
import { bytes } from "./format.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "short" });

const date = (text) => (text ? when.format(new Date(text)) : "never");

const number = (count) => (count === null ? "?" : count.toLocaleString("en"));

const COLUMNS = [
  ["Documents", (one) => number(one.documents)],
  ["Disk", (one) => (one.bytes === null ? "?" : `${bytes(one.bytes)} of ${bytes(one.limit_bytes)}`)],
  ["Conversations", (one) => number(one.conversations)],
  ["Requests", (one) => number(one.requests)],
  ["Prompt tokens", (one) => number(one.prompt_tokens)],
  ["Answer tokens", (one) => number(one.answer_tokens)],
  ["Left of the minute", (one) => (one.tokens_per_minute === null ? "no limit" : `${number(one.tokens_left)} of ${number(one.tokens_per_minute)}`)],
  ["Waiting", (one) => number(one.waiting)],
  ["Last asked", (one) => date(one.last_asked)],
];

const keyView = (key) => el("li", {}, el("span", { text: key.name }), el("small", { text: `made ${key.created ? date(key.created) : "in the environment"} · used ${date(key.last_used)}` }));

const rowView = (one) =>
  el(
    "tr",
    {},
    el("th", { scope: "row" }, one.tenant),
    COLUMNS.map(([, shown]) => el("td", { text: shown(one) })),
    el("td", {}, one.keys.length ? el("ul", { class: "keys" }, one.keys.map(keyView)) : "none any more"),
  );

async function show() {
  $("tenants-error").textContent = "";
  try {
    const found = await call("GET", "api/tenants");
    const head = el("tr", {}, ["Tenant", ...COLUMNS.map(([name]) => name), "Keys"].map((name) => el("th", { scope: "col", text: name })));
    $("tenants-table").replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, found.map(rowView))));
  } catch (error) {
    $("tenants-error").textContent = error.message;
    if (!(error instanceof ApiError)) throw error;
  }
}

/** Open the dialog; nothing else works with such a key. */
export async function openTenants() {
  await show();
  if (!$("tenants").open) $("tenants").showModal();
}

export function startTenants() {
  $("tenants").addEventListener("cancel", (event) => event.preventDefault());
  $("tenants-again").addEventListener("click", show);
  $("tenants-leave").addEventListener("click", leaveKey);
}
