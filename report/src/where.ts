// Where time and memory go: by kind of work, and by module. Equal blocks count together.

import { bars } from "./bars";
import { COMPUTING, MOVE } from "./colours";
import { el, panel } from "./dom";
import * as show from "./format";
import { fullest, OpCost, Page } from "./model";
import { modules, treemap } from "./treemap";

const MOST = 8;

/** The largest sums by name; the rest together. */
function largest(sums: Map<string, number>): [string, number][] {
  const all = [...sums].filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const rest = all.slice(MOST).reduce((sum, [, value]) => sum + value, 0);
  return rest > 0 ? [...all.slice(0, MOST), [`${all.length - MOST} other kinds`, rest]] : all;
}

export function where(report: Page, costs: OpCost[], find: (text: string) => void): HTMLElement {
  const { plan } = report;
  const step = report.steps[0]!;
  const passes = plan.micro_batches;
  const add = (sums: Map<string, number>, name: string, value: number) => sums.set(name, (sums.get(name) ?? 0) + value);
  const [computing, moving] = [new Map<string, number>(), new Map<string, number>()];
  // Bars have every pass of every micro-batch; a collective is on several tracks and counts once.
  const seen = new Set<string>();
  const { bars: drawn, moves } = step;
  const own = step.tracks.map((track) => track.class === 0);
  drawn.what.forEach((what, at) => {
    if (!own[drawn.track[at]!]) return;
    const key = `${what} ${drawn.start[at]}`;
    if (seen.has(key)) return;
    seen.add(key);
    const seconds = drawn.duration[at]! / 1e12;
    if (what >= 0) add(computing, plan.ops[what]!.kind, seconds);
    else add(moving, moves[-1 - what]!.action, seconds);
  });
  const chart = (caption: string, sums: Map<string, number>, colour: string) =>
    bars(caption, largest(sums).map(([name, value]) => ({ name, parts: [{ value, colour, text: show.seconds(value) }], text: `${show.seconds(value)} (${show.percent((value * 1e12) / Math.max(step.step_ps, 1))})` })));
  const times = plan.layers.map((layer) => ({ name: layer.name, value: 0 }));
  report.ops.forEach((op, at) => (times[op.layer]!.value += costs[at]!.compute));
  const held = fullest(step).peak.layers.map((use) => ({ name: plan.layers[use.layer]?.name ?? "?", value: use.bytes }));
  const choose = (path: string) => find(path.replace(/\.?\*\.?/g, " "));
  const each = passes > 1 ? ", one micro-batch" : "";
  return panel("where", "Time and memory by part",
    "Equal blocks are summed. Percentages are of the step; communication overlaps with computing. A click on a module lists its ops.",
    el("div", { class: "columns" },
      chart("Computing, by kind of op", computing, COMPUTING.colour),
      moving.size ? chart("Communication, by collective", moving, MOVE.colour) : el("p", { class: "about" }, "Nothing is communicated.")),
    el("div", { class: "columns" },
      treemap(`Computing of one device, by module${each}`, modules(times), show.seconds, choose),
      treemap("Memory at the peak, by module", modules(held), show.bytes, choose, "")));
}
