// Why an op is split as it is: what the alternatives would cost, everything else staying as it is.

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

/** The choice in a sentence. */
export function sentence(name: string, explanation: Explanation): string {
  const [chosen, next] = explanation.options;
  if (!chosen) return "";
  if (!next) return explanation.configs > 0 ? `${name} has no other way to be split.` : `${name} has too many configs to list.`;
  const differs = total(next) - total(chosen);
  const alone = `${name} as ${chosen.config} costs ${show.seconds(total(chosen) / 1e12)}.`;
  if (differs === 0) return `${alone} As ${next.config} it would cost the same.`;
  return `${alone} The best alternative, ${next.config}, would make the step ${show.seconds(Math.abs(differs) / 1e12)} ${differs > 0 ? "longer" : "shorter"}${because(chosen, next)}.`;
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
    return el("div", { class: "explain" }, el("h3", {}, "Why so"),
      el("p", {}, follows + sentence(lead.name, explanation)),
      el("table", {},
        el("caption", {}, `The best of ${show.count(explanation.configs, "config")}, all other ${report.plan.space.untied ? "ops" : "layers"} staying as they are`),
        el("thead", {}, el("tr", {}, ...["config", "computing", "its own", "neighbours", "step"].map((title, at) => el("th", { scope: "col", class: at ? "number" : "" }, title)))),
        el("tbody", {}, ...explanation.options.map((choice, at) => el("tr", at === 0 ? { class: "own" } : {},
          el("th", { scope: "row" }, choice.config),
          ...[choice.compute_ps, choice.inside_ps, choice.neighbours_ps].map((ps) => el("td", { class: "number" }, show.orZero(show.seconds)(ps / 1e12))),
          el("td", { class: "number" }, at === 0 ? "chosen" : change(total(choice) - total(chosen))))))));
  };
}
