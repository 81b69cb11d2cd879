// The table of ops: sortable by any column, searchable; only the visible rows are in the page.

import { copyRows } from "./copy";
import { el, oneStop, panel } from "./dom";
import { colourOf, splitKindOf } from "./colours";
import * as show from "./format";
import { OpCost, Page } from "./model";

const ROW = 28;

interface Column {
  title: string;
  /** The sort key. */
  key: (op: number) => string | number;
  text: (op: number) => string;
  number?: boolean;
  /** Left out where there is no room. */
  extra?: boolean;
}

export interface OpTable {
  panel: HTMLElement;
  /** Shows the ops that a text finds. */
  find: (text: string) => void;
}

/** The table; `select` opens the details of an op. */
export function table(report: Page, costs: OpCost[], select: (op: number) => void): OpTable {
  const { ops } = report.plan;
  const facts = report.ops;
  const spent = (op: number) => costs[op]!.compute + costs[op]!.comm;
  const look = (column: Column) => [column.number ? "number" : "", column.extra ? "extra" : ""].join(" ").trim();
  const columns: Column[] = [
    { title: "op", key: (op) => ops[op]!.name, text: (op) => ops[op]!.name },
    { title: "time", number: true, key: (op) => spent(op), text: (op) => show.seconds(spent(op)) },
    { title: "computing", number: true, key: (op) => costs[op]!.compute, text: (op) => show.seconds(costs[op]!.compute) },
    { title: "communicating", number: true, key: (op) => costs[op]!.comm, text: (op) => show.seconds(costs[op]!.comm) },
    { title: "config", key: (op) => ops[op]!.config, text: (op) => ops[op]!.config },
    { title: "bytes sent", number: true, key: (op) => costs[op]!.bytes, text: (op) => (costs[op]!.bytes ? show.bytes(costs[op]!.bytes) : "-") },
    { title: "kind", extra: true, key: (op) => ops[op]!.kind, text: (op) => ops[op]!.kind },
    { title: "pass", extra: true, key: (op) => facts[op]!.phase, text: (op) => facts[op]!.phase },
    { title: "result", extra: true, key: (op) => facts[op]!.shape.reduce((a, b) => a * b, 1), text: (op) => `${facts[op]!.dtype}[${facts[op]!.shape.join(",")}]` },
  ];
  const searchable = ops.map((op, at) => `${op.name} ${op.kind} ${op.layer} ${op.config} ${facts[at]!.phase}`.toLowerCase());
  let sorted: { column: number; down: boolean } | null = null;
  let rows = ops.map((_, at) => at);

  const status = el("span", { role: "status", class: "count" });
  const box = el("input", { type: "search", id: "op-search", placeholder: "name, kind, config", autocomplete: "off", input: () => refresh() });
  const buttons = columns.map((column, at) => el("button", { type: "button", click: () => sortBy(at) }, column.title));
  const headers = columns.map((column, at) => el("th", { scope: "col", class: look(column) }, buttons[at]));
  const body = el("tbody");
  const grid = el("table", { class: "ops" }, el("thead", {}, el("tr", {}, ...headers)), body);
  const view = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table of ops", scroll: () => draw() }, grid);

  // As in the style sheet.
  const narrow = matchMedia("(max-width: 70rem)");
  narrow.addEventListener("change", () => draw());
  const refreshStops = oneStop(view, ".link");

  function sortBy(column: number): void {
    const numeric = columns[column]!.number === true;
    // First the usual order: numbers descending, names ascending; then the reverse.
    sorted = { column, down: sorted?.column === column ? !sorted.down : numeric };
    headers.forEach((header, at) => {
      if (at === column) header.setAttribute("aria-sort", sorted!.down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    refresh();
  }

  function refresh(): void {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows = ops.map((_, at) => at).filter((at) => words.every((word) => searchable[at]!.includes(word)));
    if (sorted) {
      const { key } = columns[sorted.column]!;
      const sign = sorted.down ? -1 : 1;
      const keys = ops.map((_, at) => key(at));
      rows.sort((a, b) => sign * (keys[a]! < keys[b]! ? -1 : keys[a]! > keys[b]! ? 1 : 0) || a - b);
    }
    status.textContent = rows.length === ops.length ? show.count(ops.length, "op") : `${rows.length} of ${show.count(ops.length, "op")}`;
    view.scrollTop = 0;
    draw();
  }

  function line(at: number): HTMLElement {
    const op = rows[at]!;
    const kind = colourOf(splitKindOf(facts[op]!.split));
    return el("tr", { "aria-rowindex": at + 2 }, ...columns.map((column, own) =>
      el("td", { class: look(column), title: column.number ? undefined : column.text(op) },
        own === 0 ? el("button", { type: "button", class: "link", click: () => select(op) }, column.text(op))
          : column.title === "config" ? el("span", {}, el("span", { class: "swatch", style: `background:${kind.colour}`, title: kind.text }), column.text(op))
            : column.text(op))));
  }

  function draw(all = false): void {
    const first = all ? 0 : Math.max(0, Math.floor(view.scrollTop / ROW) - 5);
    const last = all ? Math.min(rows.length, 2000) : Math.min(rows.length, first + Math.ceil(view.clientHeight / ROW) + 12);
    const lines: HTMLElement[] = [];
    const spacer = (count: number) => el("tr", { "aria-hidden": "true" }, el("td", { colspan: columns.filter((column) => !column.extra || !narrow.matches).length, style: `height:${count * ROW}px;padding:0;border:0` }));
    if (first > 0) lines.push(spacer(first));
    for (let at = first; at < last; at++) lines.push(line(at));
    if (last < rows.length && !all) lines.push(spacer(rows.length - last));
    grid.setAttribute("aria-rowcount", String(rows.length + 1));
    body.replaceChildren(...lines);
    refreshStops();
  }

  // Printed pages do not scroll.
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw());
  new ResizeObserver(() => draw()).observe(view);
  // The longest ops first.
  sortBy(1);
  const csv = copyRows("ops.csv", () => [
    ["op", "kind", "pass", "layer", "config", "computing_seconds", "communicating_seconds", "bytes_sent"],
    ...rows.map((op) => [ops[op]!.name, ops[op]!.kind, facts[op]!.phase, ops[op]!.layer, ops[op]!.config, costs[op]!.compute, costs[op]!.comm, costs[op]!.bytes]),
  ]);
  const own = panel("ops", "Ops",
    "Every op of the step in the simulated plan, the longest first. A transfer counts for the op that needs it first.",
    el("div", { class: "tools" }, el("label", { for: "op-search" }, "search"), box, status, csv), view);
  return {
    panel: own,
    find: (text) => {
      box.value = text;
      refresh();
      own.scrollIntoView();
      box.focus();
    },
  };
}
