// Tiles with a headline number, and bars on one scale.

import { el } from "./dom";

/** A headline number with its name and a note. */
export function tile(title: string, value: string, note: string): HTMLElement {
  return el("div", { class: "tile" }, el("dt", {}, title), el("dd", {}, el("strong", {}, value), el("span", {}, note)));
}

export interface BarRow {
  name: string;
  own?: boolean;
  parts: { value: number; colour: string; text: string }[];
  text: string;
}

/**
 * Horizontal bars on one scale, as a table for screen readers. A bar longer than `cap` times the plan's is cut off, so
 * that a bad baseline does not flatten all others.
 */
export function bars(caption: string, rows: BarRow[], cap = Infinity): HTMLElement {
  const total = (row: BarRow) => row.parts.reduce((sum, part) => sum + part.value, 0);
  const own = Math.max(...rows.filter((row) => row.own).map(total));
  const most = Math.max(Math.min(Math.max(...rows.map(total)), own > 0 ? cap * own : Infinity), Number.MIN_VALUE);
  return el("table", { class: "bars" }, el("caption", {}, caption), el("tbody", {}, ...rows.map((row) =>
    el("tr", row.own ? { class: "own" } : {},
      el("th", { scope: "row" }, row.name),
      el("td", { class: "track" }, el("div", { class: total(row) > most * 1.0001 ? "bar cut" : "bar" }, ...row.parts.map((part) =>
        el("span", { style: `width:${(100 * part.value) / most}%;background:${part.colour}`, title: part.text })))),
      el("td", { class: "value" }, row.text)))));
}
