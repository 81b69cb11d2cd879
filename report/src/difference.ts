// Two plans: their costs, the changed configs, and the effect of each change.

import { bars, tile } from "./bars";
import { COMPUTING, MOVE } from "./colours";
import { el, panel } from "./dom";
import * as show from "./format";
import { Change, Difference, Page } from "./model";

/** The most changes that are listed. */
const MOST = 300;

/** A difference in seconds, with its sign. */
function signed(seconds: number | null): string {
  if (seconds === null) return "-";
  return seconds === 0 ? "0" : `${seconds > 0 ? "+" : "−"}${show.seconds(Math.abs(seconds))}`;
}

function percent([before, after]: [number, number]): string {
  const change = (100 * (after - before)) / Math.max(Math.abs(before), Number.MIN_VALUE);
  return `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)}%`;
}

function table(changes: Change[], select: (op: number) => void): HTMLElement {
  const shown = changes.slice(0, MOST);
  const most = Math.max(...shown.map((own) => Math.abs(own.alone_seconds ?? 0)), Number.MIN_VALUE);
  const row = (own: Change) => {
    const alone = own.alone_seconds ?? 0;
    const wide = (50 * Math.abs(alone)) / most;
    const style = alone < 0 ? `right:50%;width:${wide}%;background:${COMPUTING.colour}` : `left:50%;width:${wide}%;background:#d55e00`;
    return el("tr", {},
      el("th", { scope: "row" }, el("button", { type: "button", class: "link", click: () => select(own.index) }, own.op)),
      el("td", {}, own.before), el("td", {}, own.after), el("td", { class: "number" }, String(own.ops)),
      el("td", { class: "number" }, signed(own.alone_seconds)),
      el("td", { class: "worth" }, el("div", { class: "middle" }, el("span", { style }))),
      el("td", { class: "number" }, signed(own.undone_seconds)));
  };
  const head = ["op", "first plan", "second plan", "ops", "alone", "", "undone"];
  return el("div", { class: "wide changes", tabindex: 0, role: "region", "aria-label": "changes" },
    el("table", { class: "figures" },
      el("thead", {}, el("tr", {}, ...head.map((title, at) => (title ? el("th", { scope: "col", class: [3, 4, 6].includes(at) ? "number" : "" }, title) : el("td"))))),
      el("tbody", {}, ...shown.map(row))),
    changes.length > MOST ? el("p", { class: "about" }, `and ${changes.length - MOST} more: \`diff --json\` lists all`) : null);
}

export function difference(report: Page, own: Difference, select: (op: number) => void): HTMLElement {
  const { solvers, changes } = own;
  const names = solvers.map((solver, at) => `${at === 0 ? "first" : "second"} plan (${solver})`);
  const sums = own.objective.map((ps) => ps / 1e12) as [number, number];
  const pair = (title: string, values: [number, number], text: (value: number) => string) =>
    tile(title, text(values[1]), `${percent(values)}; first plan: ${text(values[0])}`);
  const chart = (caption: string, colour: string, values: [number, number], text: (value: number) => string) =>
    bars(caption, values.map((value, at) => ({ name: names[at]!, own: at === 1, parts: [{ value, colour, text: text(value) }], text: text(value) })));
  const alone = changes.reduce((sum, change) => sum + (change.alone_seconds ?? 0), 0);
  const unit = report.plan.space.untied ? "op" : "layer";
  return panel("difference", "Difference",
    changes.length ? `${show.count(changes.length, unit)} of ${report.explanations.length} have another config.` : "All configs are equal.",
    el("dl", { class: "tiles" },
      pair("step time", own.step_seconds, show.seconds), pair("step time without overlap", sums, show.seconds),
      pair("memory per device", own.peak_memory_bytes, show.bytes), pair("bytes sent per step", own.traffic_bytes, show.bytes)),
    el("div", { class: "columns" },
      el("div", {}, chart("Step time, simulated", COMPUTING.colour, own.step_seconds, show.seconds), chart("Step time without overlap", "#8a8f98", sums, show.seconds)),
      el("div", {}, chart("Memory per device", "#e69f00", own.peak_memory_bytes, show.bytes), chart("Bytes sent per step, all devices", MOVE.colour, own.traffic_bytes, show.bytes))),
    changes.length ? el("p", { class: "about" },
      `alone: change of the first plan's step time without overlap if only this config changes. undone: change of the second plan's if only this config is reverted. Total of all changes together: ${signed(sums[1] - sums[0])}. Sum of the single changes: ${signed(alone)}. The rest is interaction between neighbours.`) : null,
    changes.length ? table(changes, select) : null);
}
