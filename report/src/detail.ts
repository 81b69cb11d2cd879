// Details of one op: config, costs, and the communication before and after it.

import { colourOf, splitKindOf } from "./colours";
import { el } from "./dom";
import { explainer } from "./explain";
import * as show from "./format";
import { Move, OpCost, Page } from "./model";
import { tiles, tilesText } from "./tiles";

const MOST = 8;
/** What addresses of ops begin with. */
const ADDRESS = "#op=";

function moves(title: string, own: Move[], other: (move: Move) => string): HTMLElement | null {
  if (!own.length) return null;
  own.sort((a, b) => b.ps - a.ps);
  return el("div", {}, el("h3", {}, title), el("ul", {}, ...own.slice(0, MOST).map((move) =>
    el("li", {}, `${move.action} ${move.tensors[0] ?? ""}${move.tensors.length > 1 ? ` and ${move.tensors.length - 1} more` : ""}: ${show.bytes(move.bytes)}, ${show.seconds(move.ps / 1e12)}${other(move)}`)),
    own.length > MOST ? el("li", {}, `and ${own.length - MOST} more`) : null));
}

/** The drawer at the side of the page, and the function that opens it. */
export function detail(report: Page, costs: OpCost[]): { drawer: HTMLElement; select: (op: number) => void; fromAddress: () => void } {
  const body = el("div");
  const explain = explainer(report);
  const close = el("button", { type: "button", "aria-label": "close", class: "close", click: () => hide() }, "×");
  const title = el("h2", { id: "detail-title" });
  const drawer = el("aside", { class: "detail", "aria-labelledby": "detail-title", hidden: true }, close, title, body);
  let before: Element | null = null;

  function hide(): void {
    drawer.hidden = true;
    if (location.hash.startsWith(ADDRESS)) history.replaceState(null, "", location.pathname + location.search);
    if (before instanceof HTMLElement && before.isConnected) before.focus();
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !drawer.hidden) hide();
  });

  function select(op: number): void {
    const planned = report.plan.ops[op];
    const facts = report.ops[op];
    const cost = costs[op];
    if (!planned || !facts || !cost) return;
    if (drawer.hidden) before = document.activeElement;
    const step = report.steps[0]!;
    const name = (other: number | null) => (other === null ? "storage" : report.plan.ops[other]?.name ?? "?");
    const kind = colourOf(splitKindOf(facts.split));
    const degrees = Object.entries(planned.degrees).map(([factor, parts]) => `${factor} in ${parts} parts`).join(", ");
    const axes = planned.axes.map((use, at) => `${report.plan.axes[at]?.name ?? "?"}: ${use === null ? "replicates it" : use.startsWith("@") ? `pins it to ${use.slice(1)}` : `splits ${use}`}`);
    title.textContent = planned.name;
    const fact = (term: string, text: string) => [el("dt", {}, term), el("dd", {}, text)];
    body.replaceChildren(
      el("p", {}, el("span", { class: "swatch", style: `background:${kind.colour}` }), `${planned.kind}, ${facts.phase}, ${kind.text}${degrees ? `: ${degrees}` : ""}.`),
      el("dl", { class: "facts" },
        ...fact("config", planned.config || "-"), ...fact("layer", planned.layer),
        ...fact("computing", show.seconds(cost.compute)), ...fact("communicating", show.seconds(cost.comm)), ...fact("bytes sent", show.bytes(cost.bytes))),
      explain(op) ?? "",
      el("figure", {}, tiles(facts), el("figcaption", {}, tilesText(facts))),
      el("details", {}, el("summary", {}, "mesh axes"), el("ul", {}, ...axes.map((text) => el("li", {}, text)))),
      moves("Communication for its inputs", step.moves.filter((move) => move.to === op && move.bytes > 0), (move) => (move.from === op ? "" : `, from ${name(move.from)}`)) ?? "",
      moves("Communication of its results", step.moves.filter((move) => move.from === op && move.to !== op && move.bytes > 0), (move) => `, for ${name(move.to)}`) ?? "",
    );
    drawer.hidden = false;
    close.focus();
    history.replaceState(null, "", ADDRESS + encodeURIComponent(planned.name));
  }

  /** Opens the op that the page's address names. */
  function fromAddress(): void {
    if (!location.hash.startsWith(ADDRESS)) return;
    const name = decodeURIComponent(location.hash.slice(ADDRESS.length));
    const op = report.plan.ops.findIndex((own) => own.name === name);
    if (op >= 0) select(op);
  }
  addEventListener("hashchange", fromAddress);
  return { drawer, select, fromAddress };
}
