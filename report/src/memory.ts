// Memory of a device over time, and its contents at the peak: the device class with the largest peak, for the plan and for
// data parallelism.

import { bars } from "./bars";
import { chart, Line } from "./chart";
import { el, figures, legend, panel } from "./dom";
import * as show from "./format";
import { classTitle, fullest, Page, StepView, stepTitle } from "./model";

/** Kinds of memory use, and their colours. */
const KINDS: Record<string, string> = {
  weights: "#0072b2", gradients: "#d55e00", "optimizer state": "#cc79a7", activations: "#009e73", data: "#8a8f98", copies: "#56b4e9", allowance: "#e69f00",
};

const NOTES: Record<string, string> = {
  copies: "copies made by reshards: gathered, summed, sliced",
  allowance: "allowance: the stated peak holds for any order of communication",
};

function line(step: StepView, colour: string, dash?: string): Line {
  const own = fullest(step);
  const of = step.classes.length > 1 ? `, ${classTitle(own)}` : "";
  return {
    text: `${stepTitle(step)}${of}`,
    colour, dash, times: own.memory_ps.map((ps) => ps / 1e12), values: own.memory_bytes, until: step.step_ps / 1e12,
  };
}

/** The peak that the plan, or a baseline, states: no order of its communication needs more. */
function stated(report: Page, step: StepView): number {
  const { plan, difference } = report;
  if (step.name === "plan") return plan.peak_memory_bytes;
  if (difference) return difference.peak_memory_bytes[0];
  return plan.baselines[step.name]?.peak_memory_bytes ?? fullest(step).peak_memory_bytes;
}

/** What fills the stated peak: kinds of tensors in the simulated step, and what other orders may need on top. */
function uses(report: Page, step: StepView): { kind: string; bytes: number }[] {
  const own = fullest(step);
  const more = stated(report, step) - own.peak_memory_bytes;
  return more > 0 ? [...own.peak.kinds, { kind: "allowance", bytes: more }] : own.peak.kinds;
}

/** The largest tensors at the memory peak of a step. */
function largest(report: Page, step: StepView): HTMLElement {
  const { peak } = fullest(step);
  const doing = peak.op === null ? "" : `, in ${report.plan.ops[peak.op]?.name ?? "?"}`;
  const share = (bytes: number) => show.percent(bytes / Math.max(stated(report, step), 1));
  return el("div", {},
    figures(`${stepTitle(step)}: largest tensors at the peak, ${show.seconds(peak.at_ps / 1e12)} into the step${doing}`, ["tensor", "kind", "bytes", "share"],
      peak.largest.map((held) => ({ cells: [held.tensor, held.kind, show.bytes(held.bytes), share(held.bytes)] }))),
    peak.others ? el("p", { class: "about" }, `and ${peak.others} more`) : null);
}

export function memory(report: Page): HTMLElement {
  const lines = report.steps.map((step, at) => line(step, at === 0 ? "#d55e00" : "#0072b2", at === 0 ? undefined : "7 4"));
  const most = Math.max(...lines.flatMap((own) => own.values.reduce((a, b) => Math.max(a, b), 0)));
  const limits = [{ value: report.device_memory_bytes, text: `memory of a device: ${show.bytes(report.device_memory_bytes)}` }];
  if (report.plan.memory_limit_bytes !== null) limits.push({ value: report.plan.memory_limit_bytes, text: `memory limit: ${show.bytes(report.plan.memory_limit_bytes)}` });
  // A distant limit would flatten the lines; it is given as text instead.
  const shown = limits.filter((limit) => limit.value < 4 * most);
  const said = limits.filter((limit) => !shown.includes(limit)).map((limit) => `Outside the plot: ${limit.text}.`).join(" ");
  const used = Object.entries(KINDS).filter(([kind]) => report.steps.some((step) => uses(report, step).some((own) => own.kind === kind)));
  return panel("memory", "Memory",
    "Memory of one device over the step, including resharded copies. Weights, optimizer state and data are held throughout the step.",
    chart({ label: "memory over time", lines, limits: shown, end: Math.max(...report.steps.map((step) => step.step_ps)) / 1e12, value: show.bytes }),
    said ? el("p", { class: "about" }, said) : null,
    bars("Memory at the peak, by kind", report.steps.map((step, at) => ({
      name: stepTitle(step), own: at === 0, text: show.bytes(stated(report, step)),
      parts: uses(report, step).map(({ kind, bytes }) => ({ value: bytes, colour: KINDS[kind] ?? "#8a8f98", text: `${kind}: ${show.bytes(bytes)}` })),
    })), 4),
    legend(used.map(([kind, colour]) => ({ colour, text: NOTES[kind] ?? kind }))),
    el("div", { class: "columns" }, ...report.steps.map((step) => largest(report, step))));
}
