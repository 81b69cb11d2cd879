// The search log: best plan and lower bound over time.

import { chart, Line } from "./chart";
import { el, panel } from "./dom";
import * as show from "./format";
import { Improvement, Page } from "./model";
import { searched } from "./summary";

/** The log has one search after the other. A bound never falls within a search. */
function searches(log: Improvement[]): Improvement[][] {
  const found: Improvement[][] = [];
  log.forEach((entry, at) => {
    if (at === 0 || entry.bound < log[at - 1]!.bound) found.push([]);
    found[found.length - 1]!.push(entry);
  });
  return found;
}

/** The simulator gives no bounds: a later search without a bound is a simulated one. */
function isSimulated(own: Improvement[], at: number): boolean {
  return at > 0 && own.every((entry) => entry.bound <= 0);
}

/** The entries that are better than all before. */
function falling(own: Improvement[]): Improvement[] {
  let least = Infinity;
  return own.filter((entry) => entry.best !== null && entry.best < least && ((least = entry.best), true));
}

export function search(report: Page): HTMLElement {
  const { plan, search: log } = report;
  const about = `${plan.solver}: ${searched(plan)}, ${plan.search_seconds.toFixed(2)} s in total, including reading and pricing.${plan.parallelism.recipe ? ` The plan equals the recipe ${plan.parallelism.recipe}.` : ""}`;
  if (!log.length) {
    return panel("search", "Search", about, el("p", {}, "No search log: recipes do not search, and only `plan --report` records a search."));
  }
  const end = Math.max(plan.search_seconds, log[log.length - 1]!.seconds);
  // The answer may be a recipe, which no search has found: the line ends at the plan's own step.
  const answer: Improvement = { seconds: end, best: Math.round(plan.simulated.step_seconds * 1e12), bound: 0 };
  const all = searches(log);
  const bounded = all.filter((own, at) => !isSimulated(own, at));
  const simulated = all.filter(isSimulated);
  const line = (text: string, colour: string, own: Improvement[], value: (entry: Improvement) => number, dash?: string, until = end): Line => ({
    text, colour, dash, times: own.map((entry) => entry.seconds), values: own.map((entry) => value(entry) / 1e12), until,
  });
  // A bound holds in the space of its own search: each search has a line of its own.
  const bounds = bounded.map((own, at) => line(at === 0 ? "lower bound of the step time without overlap, per search" : "",
    "#0072b2", own.filter((entry) => entry.bound > 0), (entry) => entry.bound, "7 4", bounded[at + 1]?.[0]?.seconds ?? end));
  const lines = [
    line("best plan: step time without overlap", "#d55e00", falling(bounded.flat()), (entry) => entry.best!),
    ...bounds,
    line("best plan: simulated step time", "#009e73", simulated.length ? falling([...simulated.flat(), answer]) : [], (entry) => entry.best!, "2 3"),
  ].filter((own) => own.values.length > 0);
  if (!lines.length) return panel("search", "Search", about);
  const least = Math.min(...lines.flatMap((own) => own.values));
  const most = Math.max(...lines.flatMap((own) => own.values));
  // If best and bound are close, the axis starts near them to show the difference.
  const floor = least > 0.5 * most ? Math.max(0, least - 0.5 * (most - least) - 0.02 * most) : 0;
  return panel("search", "Search", about, chart({ label: "best plan and lower bound over time", lines, limits: [], end, floor, value: show.seconds }));
}
