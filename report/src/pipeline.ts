// The pipeline: when every group of devices runs which stage for which micro-batch, and every stage's work and memory.

import { bars } from "./bars";
import { chartWidth, el, figures, legend, panel, svg } from "./dom";
import * as show from "./format";
import { Passes, PlanPipeline, Page, StepView } from "./model";
import { isHeld } from "./rails";
import { hideTip, showTip } from "./tip";

const [LEFT, RIGHT, ROW, BOTTOM] = [76, 16, 30, 26];
/** More passes than this make the picture slow: the first ones are drawn. */
const MOST = 20000;

const COLOURS: Record<string, string> = {
  "forward": "#56b4e9", "backward": "#e69f00", "backward-input": "#e69f00", "backward-weight": "#009e73",
};
const NAMES: Record<string, string> = {
  "forward": "forward", "backward": "backward", "backward-input": "gradients of inputs", "backward-weight": "gradients of weights",
};

function picture(step: StepView, passes: Passes): HTMLElement {
  const groups = [...new Set(passes.group)].sort((a, b) => a - b);
  const chunks = Math.max(1, ...passes.chunk.map((chunk) => chunk + 1));
  const [width, height] = [chartWidth(), groups.length * ROW + BOTTOM];
  const end = step.step_ps;
  const x = (ps: number) => LEFT + ((width - LEFT - RIGHT) * ps) / end;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "passes of every group of devices over time" });
  groups.forEach((group, row) => {
    drawing.append(svg("rect", { x: LEFT, y: row * ROW + 2, width: width - LEFT - RIGHT, height: ROW - 4, fill: "#8a8f9822" }),
      svg("text", { x: LEFT - 8, y: row * ROW + ROW / 2 + 4, "text-anchor": "end" }, `group ${group}`));
  });
  const count = Math.min(passes.start.length, MOST);
  for (let at = 0; at < count; at++) {
    const row = groups.indexOf(passes.group[at]!);
    const [from, to] = [x(passes.start[at]!), x(passes.start[at]! + passes.duration[at]!)];
    const own = { x: from.toFixed(2), width: Math.max(to - from, 0.3).toFixed(2), y: row * ROW + 2, height: ROW - 4 };
    const bar = svg("rect", { ...own, fill: COLOURS[passes.pass[at]!] ?? "#8a8f98", stroke: to - from > 3 ? "#ffffff" : "none", "stroke-width": 0.4, "fill-opacity": 1 - (0.45 * passes.chunk[at]!) / chunks });
    const seconds = show.seconds(passes.duration[at]! / 1e12);
    bar.addEventListener("pointermove", (event) =>
      showTip(event.clientX, event.clientY, `stage ${passes.stage[at]}, micro-batch ${passes.micro_batch[at]}`, `${NAMES[passes.pass[at]!]}: ${seconds}`));
    bar.addEventListener("pointerleave", hideTip);
    drawing.append(bar);
    if (to - from > 18) drawing.append(svg("text", { x: (from + to) / 2, y: row * ROW + ROW / 2 + 4, "text-anchor": "middle", "pointer-events": "none", class: "on-bar" }, String(passes.micro_batch[at])));
  }
  const marks = show.ticks(0, end / 1e12, Math.min(10, width / 90));
  for (const mark of marks) {
    drawing.append(svg("text", { x: x(mark * 1e12), y: height - 8, "text-anchor": "middle" }, show.tickSeconds(mark, marks.length > 1 ? marks[1]! - marks[0]! : end / 1e12)));
  }
  const more = passes.start.length - count;
  return el("div", {}, drawing, more > 0 ? el("p", { class: "about" }, `and ${more} more passes`) : null);
}

/** Peak memory of the devices of every stage, or of every group of stages. */
function memoryOf(report: Page, own: PlanPipeline): HTMLElement {
  const limit = report.plan.memory_limit_bytes ?? report.usable_memory_bytes ?? report.device_memory_bytes;
  // A group's devices hold all of its stages at once.
  const several = new Set(own.stages.map((stage) => stage.group)).size < own.stages.length;
  const shown = own.stages.filter((stage, at) => own.stages.findIndex((other) => other.group === stage.group) === at);
  return bars(`Peak memory per device, by ${several ? "group" : "stage"} (of ${show.bytes(limit)})`, shown.map((stage, at) => ({
    name: several ? `group ${stage.group}` : `stage ${at}`, text: show.bytes(stage.peak_memory_bytes),
    parts: [{ value: stage.peak_memory_bytes, colour: stage.peak_memory_bytes > limit ? "#d55e00" : "#009e73", text: show.bytes(stage.peak_memory_bytes) }],
  })));
}

/** The layers of a stage: the first, the last and their number. Copies of weights for all micro-batches are no layers of the model. */
function layers(all: string[]): string {
  const names = all.filter((name) => !isHeld({ name }));
  if (names.length < 3) return names.join(", ");
  return `${names[0]} … ${names[names.length - 1]} (${names.length})`;
}

export function pipeline(report: Page, own: PlanPipeline): HTMLElement {
  const step = report.steps[0]!;
  const used = [...new Set(step.passes.pass)];
  return panel("pipeline", "Pipeline",
    `${own.stages.length} stages, ${own.schedule}, ${report.plan.micro_batches ?? 1} micro-batches. Groups of devices run no pass for ${show.percent(own.bubble)} of the step. Numbers are micro-batches; paler bars are later chunks of a group.`,
    picture(step, step.passes),
    legend([...used.map((pass) => ({ colour: COLOURS[pass] ?? "#8a8f98", text: NAMES[pass] ?? pass })), { colour: "#8a8f9855", text: "no pass: bubble, update, communication" }]),
    memoryOf(report, own),
    figures("Stages", ["stage", "group", "devices", "work per step", "peak memory", "layers"], own.stages.map((stage, at) => ({
      cells: [`stage ${at}`, String(stage.group), String(stage.devices), show.seconds(stage.seconds), show.bytes(stage.peak_memory_bytes), layers(stage.layers)],
    }))));
}
