// Time to first token and hit rate over the session: two small charts above one another, one axis.

import { el, svg } from "./dom.js";
import { count, share, time } from "./format.js";

const [WIDE, LEFT, RIGHT] = [360, 44, 8];

const rate = ({ hits, misses }) => (hits + misses ? hits / (hits + misses) : 0);

function frame(top, high, ceiling, floor) {
  const line = (y) => svg("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y, y2: y });
  const tick = (y, text) => svg("text", { class: "tick", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, text);
  return [line(top), line(top + high), tick(top, ceiling), tick(top + high, floor)];
}

function lineOf(points, values, most, top, high, name) {
  const inner = WIDE - LEFT - RIGHT - 12;
  const x = (at) => LEFT + 6 + (points.length === 1 ? inner / 2 : (inner * at) / (points.length - 1));
  const y = (value) => top + high - (high * value) / most;
  const places = values.map((value, at) => [x(at).toFixed(1), y(value).toFixed(1)]);
  const dots = points.length <= 40 ? places : places.slice(-1);
  return [
    svg("polyline", { class: `line ${name}`, points: places.map((place) => place.join(",")).join(" ") }),
    dots.map(([cx, cy]) => svg("circle", { class: `dot ${name}`, cx, cy, r: 2.6 })),
  ];
}

/** A round number at or above the highest value. */
function ceilingOf(value) {
  const unit = 10 ** Math.floor(Math.log10(value || 1e-3));
  return [1, 2, 3, 5, 10].map((step) => step * unit).find((limit) => limit >= value * 0.999) ?? value;
}

function tableOf(points) {
  const rows = points.map((point, at) =>
    el("tr", {}, el("th", { scope: "row", text: at + 1 }), el("td", { text: time(point.ttft) }), el("td", { text: share(rate(point)) })),
  );
  const head = ["Answer", "TTFT", "Hit rate"].map((text) => el("th", { scope: "col", text }));
  return el("details", {}, el("summary", { text: "As a table" }), el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

export function chartView(points) {
  if (!points.length) return [el("p", { class: "hint", text: "Each answer adds a point: its time to first token and its hit rate." })];
  const most = ceilingOf(Math.max(...points.map((point) => point.ttft)));
  const last = points.at(-1);
  const label = `${count(points.length, "answer")}. Latest time to first token ${time(last.ttft)}, hit rate ${share(rate(last))}.`;
  const drawn = svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDE} 168`, role: "img", "aria-label": label },
    svg("text", { class: "name", x: LEFT, y: 11 }, "time to first token"),
    frame(20, 64, time(most), "0"),
    lineOf(points, points.map((point) => point.ttft), most, 20, 64, "ttft"),
    svg("text", { class: "name", x: LEFT, y: 107 }, "hit rate"),
    frame(116, 40, "100%", "0"),
    lineOf(points, points.map(rate), 1, 116, 40, "rate"),
  );
  return [drawn, el("p", { class: "hint", text: label }), tableOf(points)];
}
