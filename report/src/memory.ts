// Memory of a device over time, and its contents at the peak: the device class with the largest peak, for the plan and for
// data parallelism.

import { bars } from "./bars";
import { chart, Line } from "./chart";
import { el, figures, legend, panel } from "./dom";
import * as show from "./format";
import { classTitle, fullest, Report, Step, stepTitle } from "./model";

/** Kinds of memory use, and their colours. */
const KINDS: Record<string, string> = {
  weights: "#0072b2", gradients: "#d55e00", "optimizer state": "#cc79a7", activations: "#009e73", data: "#8a8f98", copies: "#56b4e9",
};

function line(step: Step, colour: string, dash?: string): Line {
  const own = fullest(step);
  const of = step.classes.length > 1 ? `, ${classTitle(own)}` : "";
  return {
    text: `${stepTitle(step)}${of}: peak ${show.bytes(own.peak_memory_bytes)}`,
    colour, dash, times: own.memory_ps.map((ps) => ps / 1e12), values: own.memory_bytes, until: step.step_ps / 1e12,
  };
}

/** The largest tensors at the memory peak of a step. */
function largest(report: Report, step: Step): HTMLElement {
  const { peak, peak_memory_bytes } = fullest(step);
  const doing = peak.op === null ? "" : `, in ${report.plan.ops[peak.op]?.name ?? "?"}`;
  const share = (bytes: number) => show.percent(bytes / Math.max(peak_memory_bytes, 1));
  return el("div", {},
    figures(`${stepTitle(step)}: largest tensors at the peak, ${show.seconds(peak.at_ps / 1e12)} into the step${doing}`, ["tensor", "kind", "bytes", "share"],
      peak.largest.map((held) => ({ cells: [held.tensor, held.kind, show.bytes(held.bytes), share(held.bytes)] }))),
    peak.others ? el("p", { class: "about" }, `and ${peak.others} more`) : null);
}

export function memory(report: Report): HTMLElement {
  const lines = report.steps.map((step, at) => line(step, at === 0 ? "#d55e00" : "#0072b2", at === 0 ? undefined : "7 4"));
  const most = Math.max(...lines.flatMap((own) => own.values.reduce((a, b) => Math.max(a, b), 0)));
  const limits = [{ value: report.device_memory_bytes, text: `memory of a device: ${show.bytes(report.device_memory_bytes)}` }];
  if (report.plan.memory_limit_bytes !== null) limits.push({ value: report.plan.memory_limit_bytes, text: `memory limit: ${show.bytes(report.plan.memory_limit_bytes)}` });
  // A distant limit would flatten the lines; it is given as text instead.
  const shown = limits.filter((limit) => limit.value < 4 * most);
  const said = limits.filter((limit) => !shown.includes(limit)).map((limit) => `Outside the plot: ${limit.text}.`).join(" ");
  const used = Object.entries(KINDS).filter(([kind]) => report.steps.some((step) => fullest(step).peak.kinds.some((own) => own.kind === kind)));
  return panel("memory", "Memory",
    "Memory of one device over the step, including resharded copies. Weights, optimizer state and data are held throughout the step.",
    chart({ label: "memory over time", lines, limits: shown, end: Math.max(...report.steps.map((step) => step.step_ps)) / 1e12, value: show.bytes }),
    said ? el("p", { class: "about" }, said) : null,
    bars("Memory at the peak, by kind", report.steps.map((step, at) => ({
      name: stepTitle(step), own: at === 0, text: show.bytes(fullest(step).peak_memory_bytes),
      parts: fullest(step).peak.kinds.map(({ kind, bytes }) => ({ value: bytes, colour: KINDS[kind] ?? "#8a8f98", text: `${kind}: ${show.bytes(bytes)}` })),
    })), 4),
    legend(used.map(([kind, colour]) => ({ colour, text: kind === "copies" ? "copies made by reshards: gathered, summed, sliced" : kind }))),
    el("div", { class: "columns" }, ...report.steps.map((step) => largest(report, step))));
}
