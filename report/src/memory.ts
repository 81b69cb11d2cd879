// What a device holds over time, and what holds it at the peak: the fullest kind of device of the plan, and of data
// parallelism.

import { bars } from "./bars";
import { chart, Line } from "./chart";
import { el, figures, legend, panel } from "./dom";
import * as show from "./format";
import { classTitle, fullest, Report, Step, stepTitle } from "./model";

/** What memory is used for. */
const KINDS: Record<string, string> = {
  weights: "#0072b2", gradients: "#d55e00", "optimizer state": "#cc79a7", activations: "#009e73", data: "#8a8f98", copies: "#56b4e9",
};

function line(step: Step, colour: string, dash?: string): Line {
  const own = fullest(step);
  const of = step.classes.length > 1 ? `, ${classTitle(own)}` : "";
  return {
    text: `${stepTitle(step)}${of}: ${show.bytes(own.peak_memory_bytes)} at most`,
    colour, dash, times: own.memory_ps.map((ps) => ps / 1e12), values: own.memory_bytes, until: step.step_ps / 1e12,
  };
}

/** The largest tensors at a step's fullest moment. */
function largest(report: Report, step: Step): HTMLElement {
  const { peak, peak_memory_bytes } = fullest(step);
  const doing = peak.op === null ? "" : `, in ${report.plan.ops[peak.op]?.name ?? "?"}`;
  const share = (bytes: number) => show.percent(bytes / Math.max(peak_memory_bytes, 1));
  return el("div", {},
    figures(`${stepTitle(step)}, ${show.seconds(peak.at_ps / 1e12)} after its start${doing}: the largest`, ["tensor", "kind", "bytes", "share"],
      peak.largest.map((held) => ({ cells: [held.tensor, held.kind, show.bytes(held.bytes), share(held.bytes)] }))),
    peak.others ? el("p", { class: "about" }, `and ${peak.others} more`) : null);
}

export function memory(report: Report): HTMLElement {
  const lines = report.steps.map((step, at) => line(step, at === 0 ? "#d55e00" : "#0072b2", at === 0 ? undefined : "7 4"));
  const most = Math.max(...lines.flatMap((own) => own.values.reduce((a, b) => Math.max(a, b), 0)));
  const limits = [{ value: report.device_memory_bytes, text: `a device has ${show.bytes(report.device_memory_bytes)}` }];
  if (report.plan.memory_limit_bytes !== null) limits.push({ value: report.plan.memory_limit_bytes, text: `allowed: ${show.bytes(report.plan.memory_limit_bytes)}` });
  // A limit far above would flatten the lines; it is said instead.
  const shown = limits.filter((limit) => limit.value < 4 * most);
  const said = limits.filter((limit) => !shown.includes(limit)).map((limit) => `Out of the picture: ${limit.text}.`).join(" ");
  const used = Object.entries(KINDS).filter(([kind]) => report.steps.some((step) => fullest(step).peak.kinds.some((own) => own.kind === kind)));
  return panel("memory", "Memory",
    "What one device holds over the step, copies in other layouts included. Weights, optimizer state and data are held all step long.",
    chart({ label: "memory over time", lines, limits: shown, end: Math.max(...report.steps.map((step) => step.step_ps)) / 1e12, value: show.bytes }),
    said ? el("p", { class: "about" }, said) : null,
    bars("What holds it when it is fullest", report.steps.map((step, at) => ({
      name: stepTitle(step), own: at === 0, text: show.bytes(fullest(step).peak_memory_bytes),
      parts: fullest(step).peak.kinds.map(({ kind, bytes }) => ({ value: bytes, colour: KINDS[kind] ?? "#8a8f98", text: `${kind}: ${show.bytes(bytes)}` })),
    })), 4),
    legend(used.map(([kind, colour]) => ({ colour, text: kind === "copies" ? "copies that re-layouts made: gathered, added up, cut" : kind }))),
    el("div", { class: "columns" }, ...report.steps.map((step) => largest(report, step))));
}
