// The summary: what the plan takes, against the classics, how well it is proved, what it holds and sends.

import { bars, BarRow, tile } from "./bars";
import { COMPUTING, MOVE } from "./colours";
import { el, legend, panel } from "./dom";
import * as show from "./format";
import { Baseline, Plan, Report } from "./model";

/** How good the plan is known to be: always where nothing overlaps. */
export function verdict(plan: Plan): string {
  if (plan.proved_optimal) return "proved optimal";
  if (plan.lower_bound <= 0) return "nothing proved";
  const above = plan.space.coarse ? plan.gap / Math.max(1 - plan.gap, 1e-300) : plan.gap;
  return `at most ${show.percent(above)} above the ${plan.space.coarse ? "best on any axes" : "optimum"}`;
}

function steps(report: Report): HTMLElement {
  const { plan } = report;
  const own = plan.simulated;
  const times = (value: number, base: number) => `${show.seconds(value)} (${(value / Math.max(base, 1e-300)).toFixed(2)}x)`;
  const simulated = (name: string, step: number, compute: number, mine: boolean): BarRow => ({
    name,
    own: mine,
    parts: [
      { value: compute, colour: COMPUTING.colour, text: `computing ${show.seconds(compute)}` },
      { value: Math.max(step - compute, 0), colour: MOVE.colour, text: `waiting for communication ${show.seconds(step - compute)}` },
    ],
    text: mine ? show.seconds(step) : times(step, own.step_seconds),
  });
  const sum = (name: string, objective: number, mine: boolean): BarRow => ({
    name,
    own: mine,
    parts: [{ value: objective, colour: "#8a8f98", text: show.seconds(objective / 1e12) }],
    text: mine ? show.seconds(objective / 1e12) : times(objective / 1e12, plan.objective / 1e12),
  });
  const others = Object.entries(plan.baselines);
  const by = (key: (cost: Baseline) => number) => [...others].sort((a, b) => key(a[1]) - key(b[1]));
  return el("div", {},
    bars("Time of a step, simulated: communication hides behind computing", [
      simulated("this plan", own.step_seconds, own.compute_seconds, true),
      ...by((cost) => cost.step_seconds).map(([name, cost]) => simulated(name, cost.step_seconds, cost.compute_seconds, false)),
    ], 3),
    legend([{ colour: COMPUTING.colour, text: "computing" }, { colour: MOVE.colour, text: "waiting for communication" }]),
    bars("The same if nothing overlapped: what proofs speak of", [
      sum("this plan", plan.objective, true),
      ...by((cost) => cost.objective).map(([name, cost]) => sum(name, cost.objective, false)),
    ], 3));
}

function traffic(plan: Plan): HTMLElement {
  const row = (name: string, bytes: number, own: boolean): BarRow => ({
    name, own, parts: [{ value: bytes, colour: MOVE.colour, text: show.bytes(bytes) }], text: show.bytes(bytes),
  });
  const others = Object.entries(plan.baselines).sort((a, b) => a[1].traffic_bytes - b[1].traffic_bytes);
  return el("div", {},
    bars("Sent per step by this plan, by the level that it crosses",
      plan.traffic_per_level.map((level) => row(`${level.level} links`, level.bytes, true))),
    bars("Sent per step, all devices together",
      [row("this plan", plan.traffic_bytes, true), ...others.map(([name, cost]) => row(name, cost.traffic_bytes, false))], 10));
}

export function summary(report: Report): HTMLElement {
  const { plan } = report;
  const data = plan.baselines["data"];
  const limit = plan.memory_limit_bytes ?? report.device_memory_bytes;
  const best = Object.entries(plan.baselines).reduce<[string, number] | null>(
    (least, [name, cost]) => (least && least[1] <= cost.step_seconds ? least : [name, cost.step_seconds]), null);
  const tiles = el("dl", { class: "tiles" },
    tile("step", show.seconds(plan.simulated.step_seconds), `if nothing overlapped: ${show.seconds(plan.objective / 1e12)}`),
    data ? tile("against data parallelism", `${(data.step_seconds / plan.simulated.step_seconds).toFixed(2)}x as fast`,
      best ? `best of the classics: ${best[0]}, ${(best[1] / plan.simulated.step_seconds).toFixed(2)} times as long` : "") : el("span"),
    tile("proof", verdict(plan), `where nothing overlaps; ${plan.space.variables} ${plan.space.untied ? "ops" : "layers"}, ${plan.space.choices} configs, ${plan.search_seconds.toFixed(2)} s`),
    tile("memory per device", show.bytes(plan.peak_memory_bytes),
      `${show.percent(plan.peak_memory_bytes / Math.max(limit, 1))} of the ${show.bytes(limit)} ${plan.memory_limit_bytes === null ? "that a device has" : "allowed"}`),
    tile("sent per step", show.bytes(plan.traffic_bytes), data ? `data parallelism: ${show.bytes(data.traffic_bytes)}` : "all devices together"));
  const { costs } = plan;
  const source = costs.measured_device
    ? `Operator times: ${costs.measured} measured on ${costs.measured_device}, ${costs.interpolated} interpolated, ${costs.roofline} from the data sheet.`
    : "Operator times: from the data sheet.";
  return panel("summary", "Summary", "",
    tiles,
    el("div", { class: "columns" }, steps(report), traffic(plan)),
    el("details", { open: plan.warnings.length > 1 }, el("summary", {}, show.count(plan.warnings.length + 2, "note")),
      el("ul", {}, ...plan.warnings.map((text) => el("li", {}, text)), el("li", {}, source),
        el("li", {}, `Searched: ${plan.space.description}.`))));
}
