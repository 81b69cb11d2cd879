// The device mesh: devices as squares, and what every axis does.

import { bars } from "./bars";
import { ROLES } from "./colours";
import { el, legend, svg } from "./dom";
import * as show from "./format";
import { AxisRole, AxisRoles, Page } from "./model";

/** More devices than these are summarised. */
const [MOST_ROWS, MOST_COLUMNS] = [8, 16];
const [CELL, GAP] = [15, 3];

/** The role with the largest share. */
function leading(axis: AxisRoles): AxisRole {
  return axis.roles[0]?.role ?? "replication";
}

/** What an axis does, in words. */
function words(axis: AxisRoles): string {
  return ROLES[leading(axis)].text + (axis.weights_sharded >= 0.5 ? "; weights sharded" : "");
}

/** The axes of each level together, outermost level first. */
function levels(axes: AxisRoles[]): { level: string; size: number; axes: AxisRoles[] }[] {
  const found: { level: string; size: number; axes: AxisRoles[] }[] = [];
  for (const axis of axes) {
    const last = found[found.length - 1];
    if (last?.level === axis.level) {
      last.size *= axis.size;
      last.axes.push(axis);
    } else found.push({ level: axis.level, size: axis.size, axes: [axis] });
  }
  return found;
}

export function mesh(report: Page): HTMLElement | null {
  const { parallelism } = report.plan;
  const axes = parallelism.axes.filter((axis) => axis.size > 1);
  if (!axes.length) return null;
  const all = levels(axes);
  const inner = all[all.length - 1]!;
  const outer = all.slice(0, -1);
  const rows = outer.reduce((product, level) => product * level.size, 1);
  const [shownRows, shownColumns] = [Math.min(rows, MOST_ROWS), Math.min(inner.size, MOST_COLUMNS)];
  const name = (level: { level: string; size: number }) => `${level.size} ${level.level === "gpu" ? "GPU" : level.level}${level.size > 1 ? "s" : ""}`;
  const title = all.map(name).join(" × ");
  const about = (level: (typeof all)[number]) => [...new Set(level.axes.map((axis) => words(axis)))].join(", ");
  const [width, height] = [shownColumns * (CELL + GAP) + (inner.size > shownColumns ? 16 : 0), shownRows * (CELL + GAP) + (rows > shownRows ? 16 : 0)];
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${all.map((level) => `${level.level}: ${about(level)}`).join("; ")}` });
  const colour = ROLES[leading(inner.axes[inner.axes.length - 1]!)].colour;
  for (let row = 0; row < shownRows; row++) {
    for (let column = 0; column < shownColumns; column++) {
      drawing.append(svg("rect", { x: column * (CELL + GAP), y: row * (CELL + GAP), width: CELL, height: CELL, rx: 2, fill: colour, "fill-opacity": 0.85 }));
    }
    if (inner.size > shownColumns) drawing.append(svg("text", { x: width - 14, y: row * (CELL + GAP) + 12, class: "more" }, "…"));
  }
  if (rows > shownRows) drawing.append(svg("text", { x: 0, y: height - 2, class: "more" }, "⋮"));
  const used = [...new Set(axes.flatMap((axis) => axis.roles.map((own) => own.role)))];
  return el("div", { class: "mesh" },
    el("h3", {}, `The device mesh: ${title}`),
    el("div", { class: "picture" }, drawing,
      el("dl", { class: "facts" }, ...[...outer, inner].flatMap((level, at) => [
        el("dt", {}, `${at < outer.length ? "down" : "across"}: ${name(level)}`), el("dd", {}, about(level)),
      ]))),
    bars("What every mesh axis does, by share of the computing time", axes.map((axis) => ({
      name: `${axis.axis} (${axis.size})`,
      parts: axis.roles.map(({ role, share }) => ({ value: share, colour: ROLES[role].colour, text: `${ROLES[role].text}: ${show.percent(share)}` })),
      text: axis.weights_sharded > 0.005 ? `${show.percent(axis.weights_sharded)} of weights sharded` : "",
    }))),
    legend(used.map((role) => ROLES[role])));
}
