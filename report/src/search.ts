// How the search went: the best plan and the bound over time.

import { chart, Line } from "./chart";
import { el, panel } from "./dom";
import * as show from "./format";
import { Improvement, Report } from "./model";

/**
 * One search after the other is in the log: a bound never falls within a search. The simulator proves nothing, so a later
 * search without any bound is a walk on the simulated step.
 */
function walks(log: Improvement[]): { proving: Improvement[]; walking: Improvement[] } {
  const searches: Improvement[][] = [];
  log.forEach((entry, at) => {
    if (at === 0 || entry.bound < log[at - 1]!.bound) searches.push([]);
    searches[searches.length - 1]!.push(entry);
  });
  const walks = (own: Improvement[], at: number) => at > 0 && own.every((entry) => entry.bound <= 0);
  return { proving: searches.filter((own, at) => !walks(own, at)).flat(), walking: searches.filter(walks).flat() };
}

export function search(report: Report): HTMLElement {
  const { plan, search: log } = report;
  const about = `${plan.solver}: ${plan.space.variables} ${plan.space.untied ? "ops" : "layers"} with ${plan.space.choices} configs, ${plan.search_seconds.toFixed(2)} s in all, reading and pricing included.`;
  if (!log.length) {
    return panel("search", "Search", about, el("p", {}, "Nothing was recorded: a recipe searches nothing, and only `plan --report` watches a search."));
  }
  const end = Math.max(plan.search_seconds, log[log.length - 1]!.seconds);
  const { proving, walking } = walks(log);
  const line = (text: string, colour: string, own: Improvement[], value: (entry: Improvement) => number, dash?: string): Line => ({
    text, colour, dash, times: own.map((entry) => entry.seconds), values: own.map((entry) => value(entry) / 1e12), until: end,
  });
  const best = (own: Improvement[]) => own.filter((entry) => entry.best !== null);
  const lines = [
    line("best plan, if nothing overlapped", "#d55e00", best(proving), (entry) => entry.best!),
    line("no plan is faster than this, if nothing overlapped", "#0072b2", proving.filter((entry) => entry.bound > 0), (entry) => entry.bound, "7 4"),
    line("best plan in the simulated step", "#009e73", best(walking), (entry) => entry.best!, "2 3"),
  ].filter((own) => own.values.length > 0);
  if (!lines.length) return panel("search", "Search", about);
  const least = Math.min(...lines.flatMap((own) => own.values));
  const most = Math.max(...lines.flatMap((own) => own.values));
  // Where best and bound are close, the difference is what one wants to see.
  const floor = least > 0.5 * most ? Math.max(0, least - 0.5 * (most - least) - 0.02 * most) : 0;
  return panel("search", "Search", about, chart({ label: "best plan and bound over time", lines, limits: [], end, floor, value: show.seconds }));
}
