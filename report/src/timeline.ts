// The timeline: devices and links as tracks, the plan and data parallelism on one time axis.

import { colourOf, MOVE, PASSES, splitKindOf, SPLIT_KINDS } from "./colours";
import { copyPicture } from "./copy";
import { el, legend, panel, style } from "./dom";
import { ofBlocks } from "./fold";
import * as show from "./format";
import { BandView, Page, StepView, stepTitle } from "./model";
import { hideTip, showTip } from "./tip";
import { AXIS, BAND, BandRow, barAt, firstAfter, layOut, Row, TRACK } from "./tracks";

const GUTTER = 118;
const RIGHT = 12;

/** The name of a band: its pass, and its micro-batch from 1 where there are several. */
function bandTitle(band: BandView, several: boolean): string {
  const name = PASSES[band.pass]?.text ?? band.pass;
  return band.micro_batch === null || !several ? name : `${name} ${band.micro_batch + 1}`;
}

/** The name of a bar, and a line of description. */
function describe(report: Page, step: StepView, bar: number): [string, string] {
  const what = step.bars.what[bar]!;
  if (what >= 0) {
    const op = report.plan.ops[what]!;
    return step.name === "plan" ? [op.name, `${op.kind}, ${op.config}`] : [op.name, op.kind];
  }
  const move = step.moves[-1 - what]!;
  const more = move.tensors.length > 1 ? ` and ${move.tensors.length - 1} more` : "";
  const axes = move.axes.map((axis) => report.plan.axes[axis]?.name ?? "?").join(", ");
  return [`${move.action} ${move.tensors[0] ?? ""}${more}`, `${show.bytes(move.bytes)} sent over ${axes}`];
}

function criticalPath(report: Page, step: StepView): HTMLElement {
  // A collective is on several tracks, but its time counts once.
  const seen = new Set<string>();
  const parts = new Map<string, { name: string; duration: number; count: number }>();
  let computing = 0;
  let talking = 0;
  for (const bar of step.bars.critical) {
    const key = `${step.bars.what[bar]} ${step.bars.start[bar]}`;
    if (seen.has(key)) continue;
    seen.add(key);
    const duration = step.bars.duration[bar]! / 1e12;
    if (step.bars.what[bar]! >= 0) computing += duration;
    else talking += duration;
    const [name] = describe(report, step, bar);
    const part = parts.get(ofBlocks(name)) ?? { name, duration: 0, count: 0 };
    part.duration += duration;
    part.count++;
    parts.set(ofBlocks(name), part);
  }
  const idle = Math.max(step.step_ps / 1e12 - computing - talking, 0);
  const longest = [...parts.values()].sort((a, b) => b.duration - a.duration).slice(0, 6);
  const title = (part: (typeof longest)[number]) => (part.count > 1 ? `${part.count} × ${ofBlocks(part.name)}` : part.name);
  return el("div", { class: "critical" },
    el("h3", {}, `${stepTitle(step)}: ${show.seconds(step.step_ps / 1e12)}`),
    el("p", {}, `Critical path: ${show.seconds(computing)} computing, ${show.seconds(talking)} communicating${idle > 1e-9 ? `, ${show.seconds(idle)} waiting` : ""}. Its longest parts, equal blocks together:`),
    el("ol", {}, ...longest.map((part) =>
      el("li", {}, `${title(part)}: ${show.seconds(part.duration)} (${show.percent((part.duration * 1e12) / Math.max(step.step_ps, 1))})`))));
}

export function timeline(report: Page, select: (op: number) => void): HTMLElement {
  const { rows, bands, titles, height } = layOut(report);
  const end = Math.max(...report.steps.map((step) => step.step_ps), 1);
  const critical = new Map(report.steps.map((step) => [step, new Set(step.bars.critical)]));
  const kinds = report.ops.map((op) => colourOf(splitKindOf(op.split)));
  const view = { from: 0, to: end };
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-describedby": "timeline-keys", height });
  canvas.setAttribute("aria-label", `timeline: ${report.steps.map((s) => `${stepTitle(s)} takes ${show.seconds(s.step_ps / 1e12)}`).join(", ")}`);
  const ruler = el("span", { class: "count", role: "status" });
  const found = el("span", { class: "count", role: "status" });
  const range = el("span", { class: "count range", role: "status" });
  const several = report.plan.micro_batches > 1;
  const passOf = (band: BandView) => PASSES[band.pass] ?? MOVE;
  let onlyCritical = false;
  /** Words that highlighted bars contain; none: all bars. */
  let words: string[] = [];
  let measured: { from: number; to: number } | null = null;
  let width = 0;
  let pending = false;

  const scale = () => (width - GUTTER - RIGHT) / (view.to - view.from);
  const x = (time: number) => GUTTER + (time - view.from) * scale();
  const timeAt = (px: number) => view.from + (px - GUTTER) / scale();

  /** Shows a range of time, within the step and at least a nanosecond long. */
  function look(from: number, to: number): void {
    const length = Math.min(Math.max(to - from, 1000), end);
    view.from = Math.min(Math.max(from, 0), end - length);
    view.to = view.from + length;
    range.textContent = `${show.seconds(view.from / 1e12)} to ${show.seconds(view.to / 1e12)}`;
    ask();
  }

  function zoom(factor: number, around = (view.from + view.to) / 2): void {
    look(around - (around - view.from) * factor, around + (view.to - around) * factor);
  }

  function pan(share: number): void {
    const by = share * (view.to - view.from);
    look(view.from + by, view.to + by);
  }

  function matches(step: StepView, bar: number): boolean {
    const text = describe(report, step, bar).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  /** The bars of the plan that are searched, in the order of time. */
  function hits(): number[] {
    const step = report.steps[0]!;
    return step.bars.what.map((_, bar) => bar).filter((bar) => matches(step, bar)).sort((a, b) => step.bars.start[a]! - step.bars.start[b]!);
  }

  /** Shows the next bar after the middle of the view that is searched, or the first. */
  function next(): void {
    const { start, duration } = report.steps[0]!.bars;
    const all = words.length ? hits() : [];
    const middle = (view.from + view.to) / 2;
    const bar = all.find((own) => start[own]! + duration[own]! / 2 > middle * (1 + 1e-9)) ?? all[0];
    if (bar === undefined) return;
    const length = Math.min(view.to - view.from, Math.max(duration[bar]! * 20, end / 50));
    look(start[bar]! + duration[bar]! / 2 - length / 2, start[bar]! + duration[bar]! / 2 + length / 2);
  }

  /** What devices do in a measured time. */
  function measuredText(): string {
    if (!measured) return "";
    const [from, to] = [Math.min(measured.from, measured.to), Math.max(measured.from, measured.to)];
    const parts = rows.filter((row) => row.step === report.steps[0] && report.steps[0]!.tracks[row.track]!.class === 0).map((row) => {
      const { start, duration } = row.step.bars;
      let busy = 0;
      for (let bar = firstAfter(row, from); bar < row.last && start[bar]! < to; bar++) busy += Math.min(start[bar]! + duration[bar]!, to) - Math.max(start[bar]!, from);
      return `${row.label} ${show.percent(busy / Math.max(to - from, 1))}`;
    });
    return `measured: ${show.seconds((to - from) / 1e12)} (${parts.join(", ")})`;
  }

  function ask(): void {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      draw();
    });
  }

  function draw(): void {
    width = canvas.clientWidth;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    if (!pen || width <= GUTTER + RIGHT) return;
    const ink = style("--ink");
    const soft = style("--soft");
    const rule = style("--rule");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const marks = show.ticks(view.from / 1e12, view.to / 1e12, (width - GUTTER) / 110);
    const apart = marks.length > 1 ? marks[1]! - marks[0]! : (view.to - view.from) / 1e12;
    for (const mark of marks) {
      const at = x(mark * 1e12);
      pen.fillStyle = rule;
      pen.fillRect(Math.round(at), AXIS - 6, 1, height);
      pen.fillStyle = soft;
      pen.textAlign = at > width - 40 ? "right" : at < GUTTER + 20 ? "left" : "center";
      pen.fillText(show.tickSeconds(mark, apart), Math.min(at, width - 2), AXIS / 2 - 1);
    }
    pen.textAlign = "left";
    pen.fillStyle = ink;
    for (const title of titles) {
      pen.font = title.text.startsWith(" ") ? "12px system-ui, sans-serif" : "600 13px system-ui, sans-serif";
      pen.fillText(title.text.trim(), 4, title.y + 12);
    }
    pen.font = "12px system-ui, sans-serif";
    for (const row of bands) drawBands(pen, row, soft);
    for (const row of rows) drawRow(pen, row, ink, soft);
    if (measured) {
      const [left, right] = [x(Math.min(measured.from, measured.to)), x(Math.max(measured.from, measured.to))];
      pen.fillStyle = "#e69f0044";
      pen.fillRect(Math.max(left, GUTTER), 0, Math.max(Math.min(right, width - RIGHT) - Math.max(left, GUTTER), 1), height);
      pen.fillStyle = ink;
      pen.fillText(show.seconds(Math.abs(measured.to - measured.from) / 1e12), Math.max(left, GUTTER) + 4, AXIS + 6);
    }
    for (const step of report.steps) {
      const own = rows.filter((row) => row.step === step);
      const at = x(step.step_ps);
      if (!own.length || at < GUTTER || at > width) continue;
      pen.fillStyle = ink;
      pen.fillRect(Math.round(at), own[0]!.y - 2, 1.5, own[own.length - 1]!.y + TRACK - own[0]!.y);
    }
  }

  function drawBands(pen: CanvasRenderingContext2D, row: BandRow, soft: string): void {
    pen.fillStyle = soft;
    pen.fillText("passes", 14, row.y + BAND / 2 - 1);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, row.y, width - GUTTER - RIGHT + 1, BAND);
    pen.clip();
    for (const band of row.bands) {
      if (band.end_ps < view.from || band.start_ps > view.to) continue;
      const [left, right] = [x(band.start_ps), x(band.end_ps)];
      pen.fillStyle = passOf(band).colour;
      pen.fillRect(left, row.y + 1, Math.max(right - left, 0.7), BAND - 3);
    }
    for (const span of row.names) {
      const [left, right] = [Math.max(x(span.start_ps), GUTTER), Math.min(x(span.end_ps), width - RIGHT)];
      if (right - left < 46) continue;
      pen.fillStyle = passOf(span).ink;
      pen.fillText(fit(pen, bandTitle(span, several), right - left - 8), left + 4, row.y + BAND / 2);
    }
    pen.restore();
  }

  function drawRow(pen: CanvasRenderingContext2D, row: Row, ink: string, soft: string): void {
    const { start, duration, what } = row.step.bars;
    const path = critical.get(row.step)!;
    pen.fillStyle = soft;
    pen.fillText(row.label, 14, row.y + TRACK / 2 - 1);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, row.y, width - GUTTER - RIGHT + 1, TRACK);
    pen.clip();
    let drawn = -Infinity;
    for (let bar = firstAfter(row, view.from); bar < row.last && start[bar]! <= view.to; bar++) {
      const [left, right] = [x(start[bar]!), x(start[bar]! + duration[bar]!)];
      const on = path.has(bar);
      // A bar thinner than a pixel on an occupied pixel is invisible, unless it is searched.
      if (right < drawn + 0.5 && !(words.length && matches(row.step, bar))) continue;
      const from = Math.max(left, drawn);
      const wide = Math.max(right - from, 0.7);
      drawn = from + wide;
      const colours = what[bar]! < 0 ? MOVE : row.step.name === "plan" ? kinds[what[bar]!]! : { colour: "#0072b2", ink: "#fff" };
      pen.globalAlpha = (onlyCritical && !on) || (words.length && !matches(row.step, bar)) ? 0.15 : 1;
      pen.fillStyle = colours.colour;
      pen.fillRect(from, row.y + 1, wide > 3 ? wide - 0.5 : wide, TRACK - 6);
      if (on) {
        pen.fillStyle = ink;
        pen.fillRect(from, row.y + TRACK - 4, wide, 2.5);
      }
      const room = Math.min(right, width - RIGHT) - Math.max(left, GUTTER);
      if (room > 46) {
        pen.fillStyle = colours.ink;
        const text = describe(report, row.step, bar)[0];
        pen.fillText(fit(pen, text, room - 8), Math.max(left, GUTTER) + 4, row.y + TRACK / 2 - 2);
      }
    }
    pen.restore();
    pen.globalAlpha = 1;
  }

  function under(event: MouseEvent): { row: Row; bar: number } | null {
    const box = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const row = rows.find((own) => py >= own.y && py < own.y + TRACK);
    if (!row || px < GUTTER) return null;
    const bar = barAt(row, timeAt(px), 3 / scale());
    return bar === null ? null : { row, bar };
  }

  /** The band under the pointer. */
  function bandUnder(event: MouseEvent): BandView | undefined {
    const box = canvas.getBoundingClientRect();
    const [time, py] = [timeAt(event.clientX - box.left), event.clientY - box.top];
    const row = bands.find((own) => py >= own.y && py < own.y + BAND);
    return row?.bands.find((band) => band.start_ps <= time && time < band.end_ps);
  }

  function hover(event: MouseEvent): void {
    const band = bandUnder(event);
    if (band) {
      return showTip(event.clientX, event.clientY, bandTitle(band, several),
        `${show.seconds((band.end_ps - band.start_ps) / 1e12)}, from ${show.seconds(band.start_ps / 1e12)} on`);
    }
    const found = under(event);
    if (!found) return hideTip();
    const { row, bar } = found;
    const { bars } = row.step;
    const [name, about] = describe(report, row.step, bar);
    showTip(event.clientX, event.clientY, name, about,
      `${show.seconds(bars.duration[bar]! / 1e12)}, from ${show.seconds(bars.start[bar]! / 1e12)} on`,
      ...(critical.get(row.step)!.has(bar) ? ["on the critical path"] : []));
  }

  let dragged: { x: number; from: number; to: number; moved: boolean; measures: boolean } | null = null;
  canvas.addEventListener("pointerdown", (event) => {
    const box = canvas.getBoundingClientRect();
    // The ruler measures; so does any place with the Shift key.
    const measures = event.shiftKey || event.clientY - box.top < AXIS;
    dragged = { x: event.clientX, from: view.from, to: view.to, moved: false, measures };
    if (measures || measured) {
      const at = timeAt(event.clientX - box.left);
      measured = measures ? { from: at, to: at } : null;
      ruler.textContent = "";
      ask();
    }
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged) return hover(event);
    const by = event.clientX - dragged.x;
    if (Math.abs(by) > 3) dragged.moved = true;
    if (dragged.moved && dragged.measures && measured) {
      measured.to = Math.min(Math.max(timeAt(event.clientX - canvas.getBoundingClientRect().left), 0), end);
      ruler.textContent = measuredText();
      return ask();
    }
    if (dragged.moved) look(dragged.from - by / scale(), dragged.to - by / scale());
  });
  canvas.addEventListener("pointerup", (event) => {
    const click = dragged && !dragged.moved && !dragged.measures;
    if (dragged?.measures && !dragged.moved) measured = null;
    dragged = null;
    const found = click ? under(event) : null;
    if (!found) return;
    const what = found.row.step.bars.what[found.bar]!;
    select(what >= 0 ? what : found.row.step.moves[-1 - what]!.to);
  });
  canvas.addEventListener("pointercancel", () => (dragged = null));
  canvas.addEventListener("pointerleave", () => hideTip());
  canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("wheel", (event) => {
    // Without a modifier key, the wheel scrolls the page.
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    hideTip();
    const turned = event.deltaY || event.deltaX;
    if (event.shiftKey) pan(turned / 1000);
    else zoom(Math.exp(turned / 400), timeAt(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const actions: Record<string, () => void> = {
      a: () => pan(-0.15), d: () => pan(0.15), w: () => zoom(0.6), s: () => zoom(1 / 0.6), Escape: () => { measured = null; ruler.textContent = ""; ask(); },
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.6), "=": () => zoom(0.6),
      "-": () => zoom(1 / 0.6), "0": () => look(0, end), Home: () => look(0, view.to - view.from), End: () => look(end, end + view.to - view.from),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    action();
  });
  new ResizeObserver(ask).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  look(0, end);

  const button = (text: string, label: string, click: () => void) => el("button", { type: "button", "aria-label": label, title: label, click }, text);
  const box = el("input", {
    type: "search", id: "timeline-search", placeholder: "op, collective", autocomplete: "off",
    input: () => {
      words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      found.textContent = words.length ? show.count(hits().length, "bar") : "";
      ask();
    },
    keydown: (event: KeyboardEvent) => { if (event.key === "Enter") next(); },
  });
  const check = el("input", { type: "checkbox", id: "only-critical", change: () => { onlyCritical = check.checked; ask(); } });
  const hidden = report.steps.filter((step) => step.more_classes > 0)
    .map((step) => `${stepTitle(step)}: ${step.more_classes} more device classes are not drawn.`);
  return panel("timeline", "Timeline",
    "The simulated step, task by task. Devices with equal timelines are drawn once.",
    el("div", { class: "tools" },
      button("+", "zoom in", () => zoom(0.6)), button("−", "zoom out", () => zoom(1 / 0.6)), button("all", "show all of the step", () => look(0, end)),
      check, el("label", { for: "only-critical" }, "critical path only"),
      el("label", { for: "timeline-search" }, "search"), box, button("next", "next bar that is searched", next), found,
      copyPicture("timeline.png", canvas, () => style("--paper")), range, ruler),
    el("div", { class: "tracks" }, canvas),
    ...hidden.map((text) => el("p", { class: "about" }, text)),
    ...(bands.length ? [legend(Object.entries(PASSES).filter(([pass]) => bands.some((row) => row.bands.some((band) => band.pass === pass))).map(([, look]) => look))] : []),
    legend([...SPLIT_KINDS, MOVE, { colour: "var(--ink)", text: "line below a bar: critical path" }]),
    el("p", { class: "about", id: "timeline-keys" }, "Pan: drag, arrow keys, A and D. Zoom: Ctrl and wheel, + and −, W and S. Whole step: 0. Measure: drag on the ruler, or Shift and drag. Details of an op: click. Search: Enter goes to the next bar."),
    el("div", { class: "columns" }, ...report.steps.map((step) => criticalPath(report, step))));
}

/** The text, truncated to the room. */
function fit(pen: CanvasRenderingContext2D, text: string, room: number): string {
  if (pen.measureText(text).width <= room) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}
