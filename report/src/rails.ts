// The network as two rails: the layers from top to bottom, forward on the left, backward and update on the right.
// The rows and the edges between them. This file does not draw.

import { findFolds, Fold, pattern } from "./fold";
import { OpCost, Page } from "./model";

/** From this many layers on, equal blocks are folded. */
const FOLD_FROM = 24;

export interface Layer {
  name: string;
  forward: number[];
  backward: number[];
  seconds: number;
}

/** A layer, or the row that stands for equal blocks: closed it hides them, open it is above the first of them. */
export type Row = { layer: number } | { fold: Fold; open: boolean };

export type Side = "forward" | "backward";

/** The data flow from one row to another; `bytes` are sent for it. */
export interface Edge {
  from: number;
  to: number;
  side: Side;
  bytes: number;
}

export function layersOf(report: Page, costs: OpCost[]): Layer[] {
  const layers: Layer[] = report.plan.layers.map((layer) => ({ name: layer.name, forward: [], backward: [], seconds: 0 }));
  report.ops.forEach((op, at) => {
    const layer = layers[op.layer]!;
    (op.phase === "forward" ? layer.forward : layer.backward).push(at);
    layer.seconds += costs[at]!.compute + costs[at]!.comm;
  });
  return layers;
}

/** Whether a layer only holds a weight for all micro-batches. */
export function isHeld(layer: { name: string }): boolean {
  return layer.name.endsWith(".held");
}

export function foldsOf(report: Page, layers: Layer[]): Fold[] {
  if (layers.length < FOLD_FROM) return [];
  // Equal blocks have equal configs and equal work.
  const config = (ops: number[]) => ops.map((op) => `${report.plan.ops[op]!.config} ${report.ops[op]!.device_flops} ${report.ops[op]!.device_bytes}`).join(" ");
  return findFolds(layers.map((layer) => isHeld(layer) ? "held" : `${pattern(layer.name)} ${config(layer.forward)} ${config(layer.backward)}`));
}

/** The visible rows, and the row of every layer. */
export function rowsOf(layers: Layer[], folds: Fold[], open: Set<Fold>): { rows: Row[]; rowOf: number[] } {
  const rows: Row[] = [];
  const rowOf = new Array<number>(layers.length).fill(0);
  const starts = new Map(folds.map((fold) => [fold.first, fold]));
  for (let at = 0; at < layers.length; ) {
    const fold = starts.get(at);
    const shown = fold ? (open.has(fold) ? fold.length : 0) : 1;
    if (fold) rows.push({ fold, open: open.has(fold) });
    const closed = rows.length - 1;
    for (let i = 0; i < shown; i++) {
      rowOf[at + i] = rows.length;
      rows.push({ layer: at + i });
    }
    const all = fold ? fold.length * fold.times : 1;
    for (let i = shown; i < all; i++) rowOf[at + i] = shown ? rowOf[at + (i % fold!.length)]! : closed;
    at += all;
  }
  return { rows, rowOf };
}

/** The edges between rows, heaviest last so that it is drawn on top. */
export function edgesOf(report: Page, rowOf: number[]): Edge[] {
  const edges = new Map<string, Edge>();
  const add = (from: number, to: number, bytes: number) => {
    const [a, b] = [report.ops[from]!, report.ops[to]!];
    // Activations that the backward pass reads are in the same row.
    if ((a.phase === "forward") !== (b.phase === "forward")) return;
    const side: Side = b.phase === "forward" ? "forward" : "backward";
    const [x, y] = [rowOf[a.layer]!, rowOf[b.layer]!];
    if (x === y) return;
    const key = `${x} ${y} ${side}`;
    const edge = edges.get(key);
    if (edge) edge.bytes += bytes;
    else edges.set(key, { from: x, to: y, side, bytes });
  };
  report.ops.forEach((op, at) => op.after.forEach((from) => add(from, at, 0)));
  for (const move of report.steps[0]!.moves) if (move.from !== null) add(move.from, move.to, move.bytes);
  return [...edges.values()].sort((a, b) => a.bytes - b.bytes);
}
