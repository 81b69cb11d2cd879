// Why an op is split as it is: what the alternatives would cost, alone and with everything else chosen anew.

import { el } from "./dom";
import * as show from "./format";
import { Choice, Explanation, Report } from "./model";

const total = (choice: Choice) => choice.compute_ps + choice.inside_ps + choice.neighbours_ps;

/** A difference in seconds, with its sign. */
function change(ps: number): string {
  return ps === 0 ? "0" : `${ps > 0 ? "+" : "−"}${show.seconds(Math.abs(ps) / 1e12)}`;
}

/** What makes most of a difference, in words. */
function because(chosen: Choice, other: Choice): string {
  const parts: [string, number][] = [
    ["computing", other.compute_ps - chosen.compute_ps],
    ["communication among its own ops (gradients on their way to the update, windows)", other.inside_ps - chosen.inside_ps],
    ["re-layouts from and to its neighbours", other.neighbours_ps - chosen.neighbours_ps],
  ];
  const sign = Math.sign(total(other) - total(chosen));
  const most = parts.reduce((a, b) => (sign * b[1] > sign * a[1] ? b : a));
  return most[1] === 0 ? "" : `, mostly by ${most[0]}`;
}

/** How much longer or shorter. */
function longer(ps: number): string {
  return ps === 0 ? "no longer" : `${show.seconds(Math.abs(ps) / 1e12)} ${ps > 0 ? "longer" : "shorter"}`;
}

/** How figures with everything else chosen anew are meant. */
const MEANT = { exact: "", "at-least": "at least ", "at-most": "at most " };

/** The choice in a sentence or two. */
export function sentence(name: string, explanation: Explanation): string {
  const [chosen, next] = explanation.options;
  if (!chosen) return "";
  if (!next) return explanation.configs > 0 ? `${name} has no other way to be split.` : `${name} has too many configs to list.`;
  const differs = total(next) - total(chosen);
  const own = `${name} as ${chosen.config} costs ${show.seconds(total(chosen) / 1e12)}.`;
  const alone = differs === 0 ? `As ${next.config} it would cost the same.` : `The best alternative, ${next.config}, would make the step ${longer(differs)}${because(chosen, next)}.`;
  if (explanation.reoptimised === null || next.reoptimised_ps === null) return `${own} ${alone}`;
  const anew = `With everything else chosen anew it would become ${MEANT[explanation.reoptimised]}${longer(next.reoptimised_ps)}.`;
  return `${own} ${alone} ${anew}`;
}

/** What the columns mean, and what is not known. */
function notes(report: Report, explanation: Explanation): string {
  const alone = "alone: everything else stays as it is.";
  const others = report.plan.space.untied ? "ops" : "layers";
  switch (explanation.reoptimised) {
    case "exact": {
      const gain = -(explanation.options[0]?.reoptimised_ps ?? 0);
      const kept = gain > 0 ? ` Kept as it is, with all others chosen anew, the sum would be ${show.seconds(gain / 1e12)} less.` : "";
      return `${alone} anew: all other ${others} are chosen anew, as well as can be.${kept}`;
    }
    case "at-least": return `${alone} anew: all other ${others} are chosen anew; at least, since limits of memory are not looked at.`;
    case "at-most": return `${alone} anew: all other ${others} are chosen anew; at most, since those with too many configs stay as they are.`;
    default: return `${alone} What choosing all others anew would change is not known${report.not_reoptimised ? `: ${report.not_reoptimised}` : ""}.`;
  }
}

/** Finds the explanation of an op, once for all. */
export function explainer(report: Report): (op: number) => HTMLElement | null {
  const of = new Map<number, Explanation>();
  for (const explanation of report.explanations) for (const op of explanation.ops) of.set(op, explanation);
  return (op) => {
    const explanation = of.get(op);
    if (!explanation) return null;
    const lead = report.plan.ops[explanation.op]!;
    const follows = explanation.op === op ? "" : `It is split as ${lead.name} decides. `;
    const chosen = explanation.options[0]!;
    const known = explanation.reoptimised !== null;
    const anew = (choice: Choice) => (choice.reoptimised_ps === null ? "-" : change(choice.reoptimised_ps));
    const titles = ["config", "computing", "its own", "neighbours", "alone", ...(known ? ["anew"] : [])];
    return el("div", { class: "explain" }, el("h3", {}, "Why so"),
      el("p", {}, follows + sentence(lead.name, explanation)),
      el("table", {},
        el("caption", {}, `The best of ${show.count(explanation.configs, "config")}, and what the step would become longer by if nothing overlapped`),
        el("thead", {}, el("tr", {}, ...titles.map((title, at) => el("th", { scope: "col", class: at ? "number" : "" }, title)))),
        el("tbody", {}, ...explanation.options.map((choice, at) => el("tr", at === 0 ? { class: "own" } : {},
          el("th", { scope: "row" }, choice.config),
          ...[choice.compute_ps, choice.inside_ps, choice.neighbours_ps].map((ps) => el("td", { class: "number" }, show.orZero(show.seconds)(ps / 1e12))),
          el("td", { class: "number" }, at === 0 ? "chosen" : change(total(choice) - total(chosen))),
          known ? el("td", { class: "number" }, anew(choice)) : null)))),
      el("p", { class: "about" }, notes(report, explanation)));
  };
}
