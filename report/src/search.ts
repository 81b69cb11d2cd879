// The search log: best plan and lower bound over time.

import { chart, Line } from "./chart";
import { el, panel } from "./dom";
import * as show from "./format";
import { Improvement, Report } from "./model";

/**
 * Splits the log into searches with bounds and simulated searches. The log has one search after the other, and a bound
 * never falls within a search. The simulator gives no bounds, so a later search without a bound is a simulated one.
 */
function splitLog(log: Improvement[]): { bounded: Improvement[]; simulated: Improvement[] } {
  const searches: Improvement[][] = [];
  log.forEach((entry, at) => {
    if (at === 0 || entry.bound < log[at - 1]!.bound) searches.push([]);
    searches[searches.length - 1]!.push(entry);
  });
  const isSimulated = (own: Improvement[], at: number) => at > 0 && own.every((entry) => entry.bound <= 0);
  return { bounded: searches.filter((own, at) => !isSimulated(own, at)).flat(), simulated: searches.filter(isSimulated).flat() };
}

export function search(report: Report): HTMLElement {
  const { plan, search: log } = report;
  const about = `${plan.solver}: ${plan.space.variables} ${plan.space.untied ? "ops" : "layers"} with ${plan.space.choices} configs, ${plan.search_seconds.toFixed(2)} s in total, including reading and pricing.`;
  if (!log.length) {
    return panel("search", "Search", about, el("p", {}, "No search log: recipes do not search, and only `plan --report` records a search."));
  }
  const end = Math.max(plan.search_seconds, log[log.length - 1]!.seconds);
  const { bounded, simulated } = splitLog(log);
  const line = (text: string, colour: string, own: Improvement[], value: (entry: Improvement) => number, dash?: string): Line => ({
    text, colour, dash, times: own.map((entry) => entry.seconds), values: own.map((entry) => value(entry) / 1e12), until: end,
  });
  const best = (own: Improvement[]) => own.filter((entry) => entry.best !== null);
  const lines = [
    line("best plan: step time without overlap", "#d55e00", best(bounded), (entry) => entry.best!),
    line("lower bound of the step time without overlap", "#0072b2", bounded.filter((entry) => entry.bound > 0), (entry) => entry.bound, "7 4"),
    line("best plan: simulated step time", "#009e73", best(simulated), (entry) => entry.best!, "2 3"),
  ].filter((own) => own.values.length > 0);
  if (!lines.length) return panel("search", "Search", about);
  const least = Math.min(...lines.flatMap((own) => own.values));
  const most = Math.max(...lines.flatMap((own) => own.values));
  // If best and bound are close, the axis starts near them to show the difference.
  const floor = least > 0.5 * most ? Math.max(0, least - 0.5 * (most - least) - 0.02 * most) : 0;
  return panel("search", "Search", about, chart({ label: "best plan and lower bound over time", lines, limits: [], end, floor, value: show.seconds }));
}
