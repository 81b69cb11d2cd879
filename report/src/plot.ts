// Points and lines on two axes, linear or logarithmic (base 2).

import { lineOf } from "./colours";
import { el, svg } from "./dom";
import * as show from "./format";
import { hideTip, showTip } from "./tip";

const [WIDTH, HEIGHT] = [660, 400];
const [LEFT, RIGHT, TOP, BOTTOM] = [102, 18, 14, 46];

export interface Point {
  x: number;
  y: number;
  /** The tooltip. */
  text: string;
  hollow?: boolean;
}

export interface Series {
  text: string;
  /** The index of its colour, dashes and mark. */
  look: number;
  points: Point[];
  /** How points are connected: by straight lines, by steps (a value holds until the next point), or not at all. */
  line: "straight" | "steps" | "none";
}

export interface Axis {
  title: string;
  from: number;
  to: number;
  ticks: number[];
  powers?: boolean;
  text: (value: number) => string;
}

/** A logarithmic axis (base 2), in multiples of a unit, around these values. */
export function powersOfTwo(title: string, values: number[], text: (value: number) => string, unit = 1): Axis {
  const [low, high] = [Math.log2(Math.min(...values) / unit), Math.log2(Math.max(...values) / unit)];
  const room = Math.max(0.06 * (high - low), 0.1);
  const [first, last] = [Math.ceil(low - room), Math.floor(high + room)];
  let ticks = Array.from({ length: Math.max(last - first + 1, 0) }, (_, at) => unit * 2 ** (first + at));
  // A narrow range contains few powers: 1.5 times each power is added.
  if (ticks.length < 4) {
    const [least, most] = [unit * 2 ** (low - room), unit * 2 ** (high + room)];
    const between = [unit * 2 ** (first - 1), ...ticks].map((tick) => 1.5 * tick);
    ticks = [...ticks, ...between.filter((tick) => tick >= least && tick <= most)].sort((a, b) => a - b);
  }
  return { title, from: unit * 2 ** (low - room), to: unit * 2 ** (high + room), ticks, powers: true, text };
}

/** A linear axis around these values; it starts at zero if that is not far below. */
export function even(title: string, values: number[], text: (value: number, step: number) => string): Axis {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(high - low, high * 1e-3, Number.MIN_VALUE) * 0.12;
  const from = low < 0.4 * high ? 0 : low - room;
  const ticks = show.ticks(from, high + room, 6);
  const step = ticks.length > 1 ? ticks[1]! - ticks[0]! : room;
  return { title, from, to: high + room, ticks, text: (value) => text(value, step) };
}

/** The outlines of marks, around the origin. */
const MARKS = [
  "M5 0A5 5 0 1 1 -5 0A5 5 0 1 1 5 0Z", "M-4.5 -4.5H4.5V4.5H-4.5Z", "M0 -6L5.5 4H-5.5Z", "M0 -6.5L6 0L0 6.5L-6 0Z",
  "M0 6L5.5 -4H-5.5Z", "M-2 -6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z", "M-6 -2.5H6V2.5H-6Z",
];

function mark(look: number, x: number, y: number, hollow: boolean): SVGElement {
  const { colour } = lineOf(look);
  // If colours repeat, the marks differ.
  const outline = MARKS[(look + Math.floor(look / MARKS.length)) % MARKS.length];
  return svg("path", { class: "mark", d: outline, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, fill: hollow ? "var(--paper)" : colour, stroke: colour });
}

function path(points: [number, number][], line: Series["line"]): string {
  return points.map(([x, y], at) => {
    const to = `${x.toFixed(1)} ${y.toFixed(1)}`;
    if (at === 0) return `M${to}`;
    return line === "steps" ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `L${to}`;
  }).join("");
}

/** The legend of a plot: colour, dashes and mark of each line. */
function key(series: Series[]): HTMLElement {
  return el("ul", { class: "legend" }, ...series.map((own) => {
    const { colour, dash } = lineOf(own.look);
    const sample = svg("svg", { width: 34, height: 14, viewBox: "-17 -7 34 14", "aria-hidden": "true", class: "key" });
    if (own.line !== "none") sample.append(svg("path", { d: "M-17 0H17", stroke: colour, "stroke-dasharray": dash }));
    sample.append(mark(own.look, 0, 0, own.points.every((point) => point.hollow)));
    return el("li", {}, sample, own.text);
  }));
}

/** The plot; `ideal` is a thin reference line. */
export function plot(label: string, x: Axis, y: Axis, series: Series[], ideal?: { text: string; points: [number, number][] }): HTMLElement {
  const share = (axis: Axis, value: number) => {
    const at = (own: number) => (axis.powers ? Math.log2(own) : own);
    return (at(value) - at(axis.from)) / (at(axis.to) - at(axis.from));
  };
  const px = (value: number) => LEFT + (WIDTH - LEFT - RIGHT) * share(x, value);
  const py = (value: number) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(y, value);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart plot", role: "img", "aria-label": label });
  for (const tick of y.ticks) {
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(tick), y2: py(tick) }),
      svg("text", { x: LEFT - 8, y: py(tick) + 4, "text-anchor": "end" }, y.text(tick)));
  }
  let free = 0;
  for (const tick of x.ticks) {
    const text = x.text(tick);
    drawing.append(svg("line", { class: "grid", x1: px(tick), x2: px(tick), y1: TOP, y2: HEIGHT - BOTTOM }));
    // Labels do not overlap.
    if (px(tick) - 4 * text.length < free) continue;
    free = px(tick) + 4 * text.length + 6;
    drawing.append(svg("text", { x: px(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, text));
  }
  drawing.append(svg("text", { class: "axis", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, x.title));
  drawing.append(svg("text", { class: "axis", x: 0, y: 0, transform: `translate(14 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.title));
  if (ideal) {
    drawing.append(svg("path", { class: "ideal", d: path(ideal.points.map(([a, b]) => [px(a), py(b)]), "straight") }));
  }
  // The first series is drawn last, on top.
  const order = [...series].reverse();
  for (const own of order) {
    const { colour, dash } = lineOf(own.look);
    const places = own.points.map((point): [number, number] => [px(point.x), py(point.y)]);
    if (own.line !== "none" && places.length > 1) drawing.append(svg("path", { d: path(places, own.line), stroke: colour, "stroke-dasharray": dash }));
  }
  // Marks are drawn last, so that no line covers them. The hover area is larger than the mark.
  for (const own of order) {
    own.points.forEach((point) => {
      const [left, top] = [px(point.x), py(point.y)];
      drawing.append(svg("g", {
        pointermove: (event: PointerEvent) => showTip(event.clientX, event.clientY, own.text, point.text), pointerleave: hideTip,
      }, mark(own.look, left, top, point.hollow === true), svg("circle", { cx: left, cy: top, r: 10, fill: "transparent" })));
    });
  }
  return el("div", {}, drawing, key(series), ideal ? el("p", { class: "about" }, ideal.text) : null);
}
