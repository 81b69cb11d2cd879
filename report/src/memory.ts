// What a device holds over time: the fullest kind of device of the plan, and of data parallelism.

import { chart, Line } from "./chart";
import { el, panel } from "./dom";
import * as show from "./format";
import { classTitle, Report, Step, stepTitle } from "./model";

function line(step: Step, colour: string, dash?: string): Line {
  const fullest = step.classes.reduce((a, b) => (b.peak_memory_bytes > a.peak_memory_bytes ? b : a));
  const of = step.classes.length > 1 ? `, ${classTitle(fullest)}` : "";
  return {
    text: `${stepTitle(step)}${of}: ${show.bytes(fullest.peak_memory_bytes)} at most`,
    colour, dash, times: fullest.memory_ps.map((ps) => ps / 1e12), values: fullest.memory_bytes, until: step.step_ps / 1e12,
  };
}

export function memory(report: Report): HTMLElement {
  const lines = report.steps.map((step, at) => line(step, at === 0 ? "#d55e00" : "#0072b2", at === 0 ? undefined : "7 4"));
  const most = Math.max(...lines.flatMap((own) => own.values.reduce((a, b) => Math.max(a, b), 0)));
  const limits = [{ value: report.device_memory_bytes, text: `a device has ${show.bytes(report.device_memory_bytes)}` }];
  if (report.plan.memory_limit_bytes !== null) limits.push({ value: report.plan.memory_limit_bytes, text: `allowed: ${show.bytes(report.plan.memory_limit_bytes)}` });
  // A limit far above would flatten the lines; it is said instead.
  const shown = limits.filter((limit) => limit.value < 4 * most);
  const said = limits.filter((limit) => !shown.includes(limit)).map((limit) => `Out of the picture: ${limit.text}.`).join(" ");
  return panel("memory", "Memory",
    "What one device holds over the step, copies in other layouts included. Weights, optimizer state and data are held all step long.",
    chart({ label: "memory over time", lines, limits: shown, end: Math.max(...report.steps.map((step) => step.step_ps)) / 1e12, value: show.bytes }),
    said ? el("p", { class: "about" }, said) : null);
}
