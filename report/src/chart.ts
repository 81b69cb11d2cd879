// Step charts over time: memory, bounds.

import { chartWidth, el, legend, svg } from "./dom";
import * as show from "./format";
import { hideTip, showTip } from "./tip";

const [LEFT, RIGHT, TOP, BOTTOM] = [76, 16, 14, 26];

export interface Line {
  text: string;
  colour: string;
  dash?: string;
  /** Ascending. */
  times: number[];
  /** The value from each time until the next. */
  values: number[];
  /** Where the line ends. */
  until: number;
}

export interface Chart {
  label: string;
  lines: Line[];
  /** Horizontal limits, with their names. */
  limits: { value: number; text: string }[];
  end: number;
  /** The lowest value shown. */
  floor?: number;
  value: (value: number) => string;
}

/** At most one step per pixel: the highest of those that share it. */
function thinned(line: Line, end: number, most: number): [number, number][] {
  const points: [number, number][] = [];
  let slot = -1;
  line.times.forEach((time, at) => {
    const own = Math.floor((time / end) * most);
    const last = points[points.length - 1];
    const value = line.values[at]!;
    if (own === slot && last && at + 1 < line.times.length) last[1] = Math.max(last[1], value);
    else points.push([time, value]);
    slot = own;
  });
  return points;
}

/** The value at a time. */
function at(line: Line, time: number): number | null {
  let [low, high] = [0, line.times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.times[middle]! <= time) low = middle + 1;
    else high = middle;
  }
  return low > 0 ? line.values[low - 1]! : null;
}

export function chart({ label, lines, limits, end, floor = 0, value }: Chart): HTMLElement {
  const [width, height] = [chartWidth(), 260];
  const top = 1.06 * Math.max(...lines.flatMap((line) => line.values.reduce((a, b) => Math.max(a, b), floor)), ...limits.map((limit) => limit.value), floor + Number.MIN_VALUE);
  const x = (time: number) => LEFT + ((width - LEFT - RIGHT) * time) / end;
  const y = (own: number) => height - BOTTOM - ((height - TOP - BOTTOM) * (own - floor)) / (top - floor);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  for (const mark of show.ticks(floor, top, 5)) {
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
      svg("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, show.orZero(value)(mark)));
  }
  const marks = show.ticks(0, end, width < 900 ? 6 : 10);
  for (const mark of marks) {
    drawing.append(svg("text", { x: x(mark), y: height - 8, "text-anchor": "middle" }, show.tickSeconds(mark, marks.length > 1 ? marks[1]! - marks[0]! : end)));
  }
  for (const line of lines) {
    const points = thinned(line, end, width);
    let path = "";
    points.forEach(([time, own], i) => (path += i === 0 ? `M${x(time).toFixed(1)} ${y(own).toFixed(1)}` : `H${x(time).toFixed(1)}V${y(own).toFixed(1)}`));
    if (points.length) drawing.append(svg("path", { d: `${path}H${x(line.until).toFixed(1)}`, stroke: line.colour, "stroke-dasharray": line.dash }));
  }
  // The highest limit's name is above its line, those of the others below theirs; names lie over all lines.
  [...limits].sort((a, b) => b.value - a.value).forEach((limit, at) => {
    drawing.append(svg("line", { class: "limit", x1: LEFT, x2: width - RIGHT, y1: y(limit.value), y2: y(limit.value) }),
      svg("text", { class: "limit-text", x: width - RIGHT, y: at === 0 ? y(limit.value) - 5 : y(limit.value) + 14, "text-anchor": "end" }, limit.text));
  });
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const time = (((event.clientX - box.left) / box.width) * width - LEFT) * (end / (width - LEFT - RIGHT));
    if (time < 0 || time > end) return hideTip();
    const texts = lines.filter((line) => line.text && time <= line.until).map((line) => [line.text, at(line, time)] as const);
    showTip(event.clientX, event.clientY, show.seconds(time), ...texts.map(([text, own]) => `${text}: ${own === null ? "-" : value(own)}`));
  });
  drawing.addEventListener("pointerleave", hideTip);
  return el("div", {}, drawing, legend(lines.filter((line) => line.text)));
}
