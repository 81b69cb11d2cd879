// The roofline: how fast ops compute, by their arithmetic per byte, under the rates of the device's data sheet.

import { lineOf } from "./colours";
import { chartWidth, el, legend, panel, svg } from "./dom";
import { ofBlocks } from "./fold";
import * as show from "./format";
import { Page } from "./model";
import { hideTip, showTip } from "./tip";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [384, 92, 150, 16, 50];
/** The largest circle's radius: labels on the right keep clear of it. */
const RADIUS = 20;
/** Kinds with a colour of their own. */
const MOST_KINDS = 6;

/** Equal ops of all blocks. */
interface Group {
  name: string;
  kind: string;
  op: number;
  count: number;
  seconds: number;
  intensity: number;
  rate: number;
}

/** Ops with equal names, but for numbers, and equal work. */
export function groups(report: Page): Group[] {
  const found = new Map<string, Group>();
  const times = report.steps[0]!.compute_ps;
  report.plan.ops.forEach((op, at) => {
    const { device_flops: flops, device_bytes: bytes } = report.ops[at]!;
    const seconds = times[at]! / 1e12;
    if (!(flops > 0) || !(bytes > 0) || !(seconds > 0)) return;
    const key = `${ofBlocks(op.name)} ${op.config} ${flops} ${bytes}`;
    const own = found.get(key);
    if (own) {
      own.count++;
      own.seconds += seconds;
    } else found.set(key, { name: op.name, kind: op.kind, op: at, count: 1, seconds, intensity: flops / bytes, rate: flops / seconds });
  });
  return [...found.values()].sort((a, b) => b.seconds - a.seconds);
}

/** The powers of ten that cover some values. */
function decades(values: number[]): [number, number] {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  return [Math.floor(Math.min(...logs)), Math.ceil(Math.max(...logs) + 0.05)];
}

export function roofline(report: Page, select: (op: number) => void): HTMLElement {
  const all = groups(report);
  const about = "Every circle is an op (equal ops of all blocks are one); its area is their time. The sloping line is the memory's bandwidth, the others are peak rates of arithmetic, by the data sheet.";
  if (!all.length) return panel("roofline", "Roofline", "No op computes.");
  const { peaks, bytes_per_second: bandwidth, name } = report.device;
  const used = new Set(report.ops.map((op) => op.dtype));
  const roofs = peaks.filter((peak) => used.has(peak.format) || (peak.format === "tf32" && used.has("f32")) || peak.format === "f8" && all.some((own) => own.rate > Math.max(...peaks.filter((other) => other.format !== "f8").map((other) => other.flops_per_second))));
  const top = Math.max(...roofs.map((roof) => roof.flops_per_second), ...all.map((own) => own.rate));
  const [xFrom, xTo] = decades([...all.map((own) => own.intensity), top / bandwidth]);
  // Ops far below the others take no time worth looking at.
  const [yFrom, yTo] = [Math.max(decades(all.map((own) => own.rate))[0], Math.log10(top) - 7), decades([top])[1]];
  const width = chartWidth();
  const x = (value: number) => LEFT + ((width - LEFT - RIGHT) * (Math.log10(value) - xFrom)) / (xTo - xFrom);
  const y = (value: number) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (Math.log10(Math.max(value, 10 ** yFrom)) - yFrom)) / (yTo - yFrom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "chart", role: "img", "aria-label": `ops by arithmetic per byte and rate of arithmetic on ${name}` });
  for (let power = xFrom; power <= xTo; power++) {
    drawing.append(svg("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: TOP, y2: HEIGHT - BOTTOM }),
      svg("text", { x: x(10 ** power), y: HEIGHT - BOTTOM + 21, "text-anchor": "middle" }, power < 0 ? (10 ** power).toFixed(-power) : String(10 ** power)));
  }
  for (let power = Math.ceil(yFrom); power <= yTo; power++) {
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(10 ** power), y2: y(10 ** power) }),
      svg("text", { x: LEFT - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, show.flops(10 ** power)));
  }
  drawing.append(svg("text", { class: "axis", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "flops per byte of memory traffic"));
  const highest = Math.max(...roofs.map((roof) => roof.flops_per_second), 1);
  const start = Math.max(10 ** xFrom, (10 ** yFrom) / bandwidth);
  const knee = Math.min(highest / bandwidth, 10 ** xTo);
  drawing.append(svg("line", { class: "limit", x1: x(start), x2: x(knee), y1: y(start * bandwidth), y2: y(knee * bandwidth) }));
  let free = -Infinity;
  for (const roof of [...roofs].sort((a, b) => b.flops_per_second - a.flops_per_second)) {
    const at = y(roof.flops_per_second);
    drawing.append(svg("line", { class: "limit", x1: x(Math.min(Math.max(roof.flops_per_second / bandwidth, 10 ** xFrom), 10 ** xTo)), x2: width - RIGHT, y1: at, y2: at }));
    free = Math.max(at + 4, free + 15);
    drawing.append(svg("text", { class: "limit-text", x: width - RIGHT + RADIUS + 4, y: free }, `${roof.format} ${show.flops(roof.flops_per_second)}`));
  }
  const sums = new Map<string, number>();
  all.forEach((own) => sums.set(own.kind, (sums.get(own.kind) ?? 0) + own.seconds));
  const kinds = [...sums].sort((a, b) => b[1] - a[1]).map(([kind]) => kind);
  const colour = (kind: string) => lineOf(Math.min(kinds.indexOf(kind), MOST_KINDS)).colour;
  const longest = all[0]!.seconds;
  // The largest circles first, so that small ones lie on top.
  for (const own of all.slice(0, 600)) {
    drawing.append(svg("circle", {
      cx: x(own.intensity).toFixed(1), cy: y(own.rate).toFixed(1), r: Math.max(2, RADIUS * Math.sqrt(own.seconds / longest)).toFixed(1), fill: colour(own.kind), "fill-opacity": 0.6, stroke: colour(own.kind), class: "op",
      pointermove: (event: PointerEvent) => showTip(event.clientX, event.clientY, own.count > 1 ? `${own.count} × ${ofBlocks(own.name)}` : own.name,
        `${own.kind}: ${show.seconds(own.seconds)}`, `${show.flops(own.rate)}, ${Number(own.intensity.toPrecision(3))} flops per byte`),
      pointerleave: hideTip, click: () => select(own.op),
    }));
  }
  const shown = kinds.slice(0, MOST_KINDS).map((kind) => ({ colour: colour(kind), text: kind }));
  const above = all.some((own) => own.kind.startsWith("conv") && own.rate > highest) ? " Winograd convolutions lie above the peak: they multiply less than is counted." : "";
  return panel("roofline", "Roofline", `${about}${above} Device: ${name}, ${show.bytes(bandwidth)}/s.`, el("div", {}, drawing),
    legend(kinds.length > MOST_KINDS ? [...shown, { colour: lineOf(MOST_KINDS).colour, text: "other kinds" }] : shown));
}
