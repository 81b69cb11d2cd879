// The summary: step time against the baselines, optimality, memory and traffic.

import { bars, BarRow, tile } from "./bars";
import { COMPUTING, MOVE } from "./colours";
import { el, legend, panel } from "./dom";
import * as show from "./format";
import { mesh } from "./mesh";
import { BaselineCost, Plan, Page } from "./model";

/** The proved quality of the plan: of its step where that has a bound, else of the step without overlap. */
export function verdict(plan: Plan): string {
  const overlapped = plan.overlap?.gap ?? null;
  // Rounded up, as in the headline: a proof claims nothing that it does not show.
  const up = (value: number) => (Math.ceil(value * 10) / 10).toFixed(1);
  if (overlapped !== null && overlapped <= 0) return "optimal";
  if (overlapped !== null) return overlapped <= 1 ? `within ${up(overlapped * 100)}%` : `at most ${up(overlapped + 1)} times`;
  if (plan.proved_optimal) return "proved optimal";
  if (plan.gap === null) return "no bound";
  return `at most ${show.percent(plan.gap)} above the ${plan.space.coarse ? "optimum on any axes" : "optimum"}`;
}

/** The size of the search. */
export function searched(plan: Plan): string {
  const { variables, choices, untied } = plan.space;
  return choices > 0 ? `searched ${show.number(variables)} variables (${untied ? "ops" : "layers"}) with ${show.number(choices)} configs` : "uniform plans searched";
}

/** A baseline's name, its micro-batches and recomputation, and whether it does not fit the memory. */
function described(name: string, cost: BaselineCost): string {
  const notes = [
    ...(cost.micro_batches > 1 ? [`${cost.micro_batches} micro-batches`] : []),
    ...(cost.recompute !== "off" ? [`recompute ${cost.recompute}`] : []),
    ...(!cost.fits ? ["does not fit"] : []),
  ];
  return notes.length > 0 ? `${name} (${notes.join(", ")})` : name;
}

function steps(report: Page): HTMLElement {
  const { plan } = report;
  const own = plan.simulated;
  const times = (value: number, base: number) => `${show.seconds(value)} (${(value / Math.max(base, 1e-300)).toFixed(2)}x)`;
  // Devices of a pipeline also wait for other stages.
  const waits = plan.pipeline !== null;
  const other = waits ? "exposed communication, and waiting for other stages" : "exposed communication";
  const simulated = (name: string, step: number, compute: number, mine: boolean): BarRow => ({
    name,
    own: mine,
    parts: [
      { value: compute, colour: COMPUTING.colour, text: `computing ${show.seconds(compute)}` },
      { value: Math.max(step - compute, 0), colour: MOVE.colour, text: `${mine ? other : "exposed communication"} ${show.seconds(step - compute)}` },
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
  const by = (key: (cost: BaselineCost) => number) => [...others].sort((a, b) => key(a[1]) - key(b[1]));
  return el("div", {},
    bars("Step time, simulated, with overlap of communication and computing", [
      simulated("this plan", own.step_seconds, own.compute_seconds, true),
      ...by((cost) => cost.step_seconds).map(([name, cost]) => simulated(described(name, cost), cost.step_seconds, cost.compute_seconds, false)),
    ], 3),
    legend([{ colour: COMPUTING.colour, text: "computing" }, { colour: MOVE.colour, text: other }]),
    // Of stages that run at the same time the sum says nothing.
    waits ? null : bars("Step time without overlap (the proved objective)", [
      sum("this plan", plan.objective, true),
      ...by((cost) => cost.objective).map(([name, cost]) => sum(described(name, cost), cost.objective, false)),
    ], 3));
}

function traffic(plan: Plan): HTMLElement {
  const row = (name: string, bytes: number, own: boolean): BarRow => ({
    name, own, parts: [{ value: bytes, colour: MOVE.colour, text: show.bytes(bytes) }], text: show.bytes(bytes),
  });
  const others = Object.entries(plan.baselines).sort((a, b) => a[1].traffic_bytes - b[1].traffic_bytes);
  return el("div", {},
    bars("Bytes sent per step by this plan, per level of links",
      plan.traffic_per_level.map((level) => row(`${level.level} links`, level.bytes, true))),
    bars("Bytes sent per step, all devices",
      [row("this plan", plan.traffic_bytes, true), ...others.map(([name, cost]) => row(name, cost.traffic_bytes, false))], 10));
}

/** Tiles of throughput, of the share of peak and of cost, as far as the plan has them. */
function rates(plan: Plan): HTMLElement[] {
  const { throughput: own, devices } = plan;
  if (!own) return [];
  const [unit, all] = own.tokens_per_second !== null ? ["tokens", own.tokens_per_second] : ["samples", own.samples_per_second];
  const cost = own.cost_per_million_tokens ?? own.cost_per_million_samples ?? null;
  return [
    ...(all === null ? [] : [tile("throughput per device", `${show.rate(all / Math.max(devices, 1))} ${unit}/s`,
      `${show.rate(all)} ${unit}/s on ${show.count(devices, "device")}`)]),
    ...(own.mfu === null ? [] : [tile("MFU", `${(own.mfu * 100).toFixed(1)}%`, "model flops, of the peak of matrix products")]),
    ...(cost === null ? [] : [tile("cost", cost.toFixed(4), `per million ${unit}, at the price per device-hour that was given`)]),
  ];
}

export function summary(report: Page): HTMLElement {
  const { plan } = report;
  const data = plan.baselines["data"];
  const limit = plan.memory_limit_bytes ?? report.usable_memory_bytes ?? report.device_memory_bytes;
  // The headline's comparison: the fastest baseline that fits and is not the plan itself, which may be the best uniform plan.
  const isRival = (name: string, cost: BaselineCost) =>
    cost.fits && name !== plan.parallelism.recipe && (name !== "expert" || cost.step_seconds !== plan.simulated.step_seconds);
  const best = Object.entries(plan.baselines).filter(([name, cost]) => isRival(name, cost)).reduce<[string, number] | null>(
    (least, [name, cost]) => (least && least[1] <= cost.step_seconds ? least : [name, cost.step_seconds]), null);
  const tiles = el("dl", { class: "tiles" },
    tile("step time", show.seconds(plan.simulated.step_seconds), plan.pipeline ? show.count(plan.pipeline.stages.length, "pipeline stage") : `without overlap: ${show.seconds(plan.objective / 1e12)}`),
    best ? tile(`speedup over ${best[0]}`, `${(best[1] / plan.simulated.step_seconds).toFixed(2)}x`, "the fastest other recipe that fits") : null,
    ...rates(plan),
    tile("optimality", verdict(plan), `${plan.overlap?.gap === null || plan.overlap === undefined ? "without overlap" : "of the best step of any plan, proved"}; ${searched(plan)}, ${plan.search_seconds.toFixed(2)} s`),
    tile("memory per device", show.bytes(plan.peak_memory_bytes),
      `${show.percent(plan.peak_memory_bytes / Math.max(limit, 1))} of the ${show.bytes(limit)} ${plan.memory_limit_bytes === null ? "usable" : "limit"}${!plan.fits ? ": does not fit" : ""}`),
    tile("bytes sent per step", show.bytes(plan.traffic_bytes), data ? `data parallelism: ${show.bytes(data.traffic_bytes)}` : "all devices"));
  const { costs } = plan;
  const notes = [...plan.warnings, ...(plan.search_notes ?? [])];
  const source = costs.measured_device
    ? `Operator times: ${costs.measured} measured on ${costs.measured_device}, ${costs.interpolated} interpolated, ${costs.roofline} from the data sheet.`
    : "Operator times: from the data sheet.";
  return panel("summary", "Summary", "",
    tiles,
    el("div", { class: "columns" }, steps(report), el("div", {}, mesh(report), traffic(plan))),
    el("details", {}, el("summary", {}, show.count(notes.length + 2, "note")),
      el("ul", {}, ...notes.map((text) => el("li", {}, text)), el("li", {}, source),
        el("li", {}, `Search space: ${plan.space.description}.`))));
}
