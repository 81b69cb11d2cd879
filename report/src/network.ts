// The network view: rows of layers on two rails, connected by their data flow.

import { colourOf, MOVE, splitKindOf, SPLIT_KINDS } from "./colours";
import { el, legend, oneStop, panel, svg } from "./dom";
import * as show from "./format";
import { OpCost, Page } from "./model";
import { Edge, edgesOf, foldsOf, isHeld, Layer, layersOf, rowsOf, Side } from "./rails";
import { tiles, tilesText } from "./tiles";
import { hideTip, showTip } from "./tip";

const ROW = 38;
const BOX = 28;
/** Room for arcs beside the rails. */
const MARGIN = 110;
const GAP = 70;
/** The share of a box that a name may take, and about the width of a character. */
const NAME_SHARE = 0.58;
const CHARACTER = 7.6;

export function network(report: Page, costs: OpCost[], select: (op: number) => void): HTMLElement {
  const layers = layersOf(report, costs);
  const folds = foldsOf(report, layers);
  const open = new Set<(typeof folds)[number]>();
  const slowest = Math.max(...layers.map((layer) => layer.seconds), Number.MIN_VALUE);
  let { rows, rowOf } = rowsOf(layers, folds, open);
  let edges = edgesOf(report, rowOf);
  const back = layers.some((layer) => layer.backward.length > 0);

  const inner = el("div", { class: "rails" });
  const view = el("div", { class: "scroll network", tabindex: 0, role: "region", "aria-label": "layers of the network", scroll: () => draw() }, inner);

  const refreshStops = oneStop(view, "button");

  function toggle(fold: (typeof folds)[number]): void {
    if (!open.delete(fold)) open.add(fold);
    ({ rows, rowOf } = rowsOf(layers, folds, open));
    edges = edgesOf(report, rowOf);
    draw();
  }

  /** What equal blocks are: the first and the last layer's names, and their time. */
  function foldText(fold: (typeof folds)[number]): string {
    const own = layers.slice(fold.first, fold.first + fold.length * fold.times);
    const spent = own.reduce((sum, layer) => sum + layer.seconds, 0);
    if (own.every(isHeld)) return `weights, held for all micro-batches: ${show.seconds(spent)}`;
    return `${own[0]!.name} … ${own[own.length - 1]!.name}: ${show.seconds(spent)}`;
  }

  function box(layer: Layer, ops: number[], side: Side, left: number, width: number, top: number): HTMLElement {
    const first = ops[0]!;
    const kinds = [...new Set(ops.map((op) => splitKindOf(report.ops[op]!.split)))].map(colourOf);
    const configs = [...new Set(ops.map((op) => report.plan.ops[op]!.config))];
    const name = side === "forward" ? show.shortened(layer.name, Math.floor((NAME_SHARE * width) / CHARACTER)) : show.count(ops.length, "op");
    const config = `${configs.length > 2 ? `${configs.slice(0, 2).join(", ")}, ...` : configs.join(", ")} · ${kinds.length > 2 ? "several" : kinds.map((kind) => kind.short).join(", ")}`;
    const strip = kinds.map((kind, at) => `${kind.colour} ${(100 * at) / kinds.length}% ${(100 * (at + 1)) / kinds.length}%`).join(",");
    const spent = ops.reduce((sum, op) => sum + costs[op]!.compute + costs[op]!.comm, 0);
    const tip = (x: number, y: number) => {
      const facts = report.ops[first]!;
      showTip(x, y, report.plan.ops[first]!.name, `${report.plan.ops[first]!.kind}: ${config}`, kinds.map((kind) => kind.text).join("; "), tiles(facts, 72), tilesText(facts), `${show.seconds(spent)} in total`);
    };
    const button = el("button", {
      type: "button", class: "layer", style: `left:${left}px;top:${top}px;width:${width}px;height:${BOX}px`,
      click: () => select(first),
      pointermove: (event: PointerEvent) => tip(event.clientX, event.clientY), pointerleave: hideTip, blur: hideTip,
      focus: () => { if (button.matches(":focus-visible")) { const at = button.getBoundingClientRect(); tip(at.right, at.top); } },
    }, el("span", { class: "strip", style: `background:linear-gradient(${strip})` }), el("span", { class: "name" }, name), el("span", { class: "config" }, config),
      el("span", { class: "unseen" }, side === "forward" ? "forward" : `${layer.name}, backward`),
      el("span", { class: "share", style: `width:${(100 * spent) / slowest}%` }));
    return button;
  }

  function arc(edge: Edge, rail: { left: number; right: number }, top: number): SVGElement {
    const outer = edge.side === "forward" ? rail.left : rail.right;
    const away = edge.side === "forward" ? -1 : 1;
    const middle = (row: number) => row * ROW + ROW / 2 - top;
    const next = Math.abs(edge.from - edge.to) === 1 && (edge.to > edge.from) === (edge.side === "forward");
    const wide = edge.bytes > 0 ? Math.min(2 + 1.6 * Math.log10(1 + edge.bytes / 1e5), 11) : 1.2;
    const text = edge.bytes > 0 ? `${show.bytes(edge.bytes)} sent` : "0 bytes sent";
    const look = { fill: "none", "stroke-width": wide.toFixed(1), class: edge.bytes > 0 ? "sent" : "kept" };
    const [a, b] = [middle(edge.from), middle(edge.to)];
    if (next) {
      const x = (rail.left + rail.right) / 2;
      const [from, to] = a < b ? [a + BOX / 2, b - BOX / 2] : [a - BOX / 2, b + BOX / 2];
      return svg("path", { ...look, d: `M${x} ${from}V${to}` }, svg("title", {}, text));
    }
    const reach = outer + away * Math.min(14 + 9 * Math.log2(1 + Math.abs(edge.from - edge.to)), MARGIN - 14);
    return svg("path", { ...look, d: `M${outer} ${a}C${reach} ${a} ${reach} ${b} ${outer} ${b}` }, svg("title", {}, text));
  }

  function draw(): void {
    const width = Math.max(view.clientWidth, 640);
    const room = width - 2 * MARGIN - (back ? GAP : 0);
    const wide = Math.min(back ? room / 2 : room, 460);
    const used = back ? 2 * wide + GAP : wide;
    const left = MARGIN + (room + (back ? GAP : 0) - used) / 2;
    const rails: Record<Side, { left: number; right: number }> = {
      forward: { left, right: left + wide },
      backward: { left: left + wide + GAP, right: left + used },
    };
    inner.style.height = `${rows.length * ROW + 10}px`;
    inner.style.width = `${width}px`;
    const first = Math.max(0, Math.floor(view.scrollTop / ROW) - 4);
    const last = Math.min(rows.length, first + Math.ceil(view.clientHeight / ROW) + 9);
    const top = first * ROW;
    const height = (last - first) * ROW;
    const lines = svg("svg", { width, height, style: `position:absolute;left:0;top:${top}px`, "aria-hidden": "true" });
    for (const edge of edges) {
      if (Math.max(edge.from, edge.to) < first || Math.min(edge.from, edge.to) >= last) continue;
      lines.append(arc(edge, rails[edge.side], top));
    }
    const boxes: Node[] = [lines];
    for (let at = first; at < last; at++) {
      const row = rows[at]!;
      const y = at * ROW + (ROW - BOX) / 2;
      if ("fold" in row) {
        const { fold } = row;
        boxes.push(el("button", { type: "button", class: "fold", "aria-expanded": String(row.open), style: `left:${left}px;top:${y}px;height:${BOX}px;width:${used}px`, click: () => toggle(fold) },
          el("strong", {}, `${row.open ? "▾" : "▸"} ${fold.times} × ${fold.length > 1 ? `block of ${fold.length} layers` : "layer"}`),
          el("span", { class: "config" }, foldText(fold))));
        continue;
      }
      const layer = layers[row.layer]!;
      if (layer.forward.length) boxes.push(box(layer, layer.forward, "forward", rails.forward.left, wide, y));
      if (layer.backward.length) boxes.push(box(layer, layer.backward, "backward", rails.backward.left, wide, y));
    }
    // The focused box keeps the focus when rows are redrawn.
    const focused = inner.contains(document.activeElement) ? document.activeElement?.getAttribute("style") : null;
    inner.replaceChildren(...boxes);
    refreshStops();
    if (focused) [...inner.querySelectorAll<HTMLElement>("button")].find((own) => own.getAttribute("style") === focused)?.focus({ preventScroll: true });
  }

  new ResizeObserver(() => draw()).observe(view);
  const folded = folds.length ? " Equal blocks are folded into one row; a click shows one of them." : "";
  return panel("network", "Network",
    `The layers from top to bottom: forward on the left${back ? ", backward and update on the right" : ""}. Lines are data flow; wider lines send more bytes. The bar below a name is the layer's time.${folded}`,
    legend([...SPLIT_KINDS, { colour: MOVE.colour, text: "sent between devices" }]), view);
}
