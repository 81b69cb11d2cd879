// Why an op has its config: the costs of the alternatives, alone and with all other configs reoptimised.

import { el } from "./dom";
import * as show from "./format";
import { Choice, Explanation, Page } from "./model";

const total = (choice: Choice) => choice.compute_ps + choice.inside_ps + choice.neighbours_ps;

/** A difference in seconds, with its sign. */
function change(ps: number): string {
  return ps === 0 ? "0" : `${ps > 0 ? "+" : "−"}${show.seconds(Math.abs(ps) / 1e12)}`;
}

/** The largest part of a cost difference. */
function mainReason(chosen: Choice, other: Choice): string {
  const parts: [string, number][] = [
    ["computing", other.compute_ps - chosen.compute_ps],
    ["communication within the layer (gradients for the update, halo exchanges)", other.inside_ps - chosen.inside_ps],
    ["reshards from and to its neighbours", other.neighbours_ps - chosen.neighbours_ps],
  ];
  const sign = Math.sign(total(other) - total(chosen));
  const most = parts.reduce((a, b) => (sign * b[1] > sign * a[1] ? b : a));
  return most[1] === 0 ? "" : `, mainly by ${most[0]}`;
}

/** How much longer or shorter. */
function longer(ps: number): string {
  return ps === 0 ? "no longer" : `${show.seconds(Math.abs(ps) / 1e12)} ${ps > 0 ? "longer" : "shorter"}`;
}

/** The prefix of reoptimised times: exact or a bound. */
const BOUND_PREFIX = { exact: "", "at-least": "at least ", "at-most": "at most " };

/** The choice in a sentence or two. */
export function sentence(name: string, explanation: Explanation): string {
  const [chosen, next] = explanation.options;
  if (!chosen) return "";
  if (!next) return explanation.configs > 0 ? `${name} has no other config.` : `${name} has too many configs to list.`;
  const differs = total(next) - total(chosen);
  const own = `${name} as ${chosen.config} costs ${show.seconds(total(chosen) / 1e12)}.`;
  const alone = differs === 0 ? `As ${next.config} it would cost the same.` : `The best alternative, ${next.config}, would make the step ${longer(differs)}${mainReason(chosen, next)}.`;
  if (explanation.reoptimised === null || next.reoptimised_ps === null) return `${own} ${alone}`;
  const anew = `With all other configs reoptimised it would be ${BOUND_PREFIX[explanation.reoptimised]}${longer(next.reoptimised_ps)}.`;
  return `${own} ${alone} ${anew}`;
}

/** The meaning of the columns, and what is unknown. */
function notes(report: Page, explanation: Explanation): string {
  const alone = "alone: all other configs stay.";
  const others = report.plan.space.untied ? "ops" : "layers";
  switch (explanation.reoptimised) {
    case "exact": {
      const gain = -(explanation.options[0]?.reoptimised_ps ?? 0);
      const kept = gain > 0 ? ` With this config kept and all others reoptimised, the step without overlap would be ${show.seconds(gain / 1e12)} shorter.` : "";
      return `${alone} reoptimised: all other ${others} are chosen optimally.${kept}`;
    }
    case "at-least": return `${alone} reoptimised: all other ${others} are chosen optimally; a lower bound, since memory limits are ignored.`;
    case "at-most": return `${alone} reoptimised: all other ${others} are chosen again; an upper bound, since those with too many configs stay.`;
    default: return `${alone} The effect of reoptimising all others is unknown${report.not_reoptimised ? `: ${report.not_reoptimised}` : ""}.`;
  }
}

/** A function from an op to its explanation. */
export function explainer(report: Page): (op: number) => HTMLElement | null {
  const of = new Map<number, Explanation>();
  for (const explanation of report.explanations) for (const op of explanation.ops) of.set(op, explanation);
  return (op) => {
    const explanation = of.get(op);
    if (!explanation) return null;
    const lead = report.plan.ops[explanation.op]!;
    const follows = explanation.op === op ? "" : `Its config follows ${lead.name}. `;
    const chosen = explanation.options[0];
    if (!chosen) return null;
    const known = explanation.reoptimised !== null;
    const anew = (choice: Choice) => (choice.reoptimised_ps === null ? "-" : change(choice.reoptimised_ps));
    const titles = ["config", "computing", "within layer", "neighbours", "alone", ...(known ? ["reoptimised"] : [])];
    return el("div", { class: "explain" }, el("h3", {}, "Why this config"),
      el("p", {}, follows + sentence(lead.name, explanation)),
      el("table", {},
        el("caption", {}, explanation.configs > 0 ? `The best of ${show.count(explanation.configs, "config")}: costs, and change of the step time without overlap` : "Costs of this config"),
        el("thead", {}, el("tr", {}, ...titles.map((title, at) => el("th", { scope: "col", class: at ? "number" : "" }, title)))),
        el("tbody", {}, ...explanation.options.map((choice, at) => el("tr", at === 0 ? { class: "own" } : {},
          el("th", { scope: "row" }, choice.config),
          ...[choice.compute_ps, choice.inside_ps, choice.neighbours_ps].map((ps) => el("td", { class: "number" }, show.orZero(show.seconds)(ps / 1e12))),
          el("td", { class: "number" }, at === 0 ? "chosen" : change(total(choice) - total(chosen))),
          known ? el("td", { class: "number" }, anew(choice)) : null)))),
      el("p", { class: "about" }, notes(report, explanation)));
  };
}
