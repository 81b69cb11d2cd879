// Rectangles whose areas are values, by module: squarified (Bruls, Huizing and van Wijk, 2000).

import { el, svg } from "./dom";
import { ofBlocks } from "./fold";
import { hideTip, showTip } from "./tip";

export interface Module {
  name: string;
  /** The whole name, from the outermost module on. */
  path: string;
  value: number;
  /** The part of the value that is no part's. */
  itself: number;
  /** The number of layers below it. */
  layers: number;
  parts: Map<string, Module>;
}

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

const [WIDTH, HEIGHT, HEAD] = [600, 330, 16];
const COLOURS = ["#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00", "#8a8f98"];
/** The ink of a name: black or white, whichever differs more from the colour. */
const INKS = ["#fff", "#000", "#000", "#000", "#000", "#000", "#000"];

/** Modules by the parts of their names; numbers of repeated blocks count as one name. */
export function modules(values: { name: string; value: number }[]): Module {
  const top: Module = { name: "", path: "", value: 0, itself: 0, layers: 0, parts: new Map() };
  for (const { name, value } of values) {
    if (!(value > 0)) continue;
    let own = top;
    own.value += value;
    own.layers++;
    for (const part of ofBlocks(name).split(".").map((part) => (/^\d+$/.test(part) ? "*" : part))) {
      let next = own.parts.get(part);
      if (!next) own.parts.set(part, (next = { name: part, path: own.path ? `${own.path}.${part}` : part, value: 0, itself: 0, layers: 0, parts: new Map() }));
      next.value += value;
      next.layers++;
      own = next;
    }
    own.itself += value;
  }
  return collapsed(top);
}

/** A module with a single part is shown as one: `blocks.*`. */
function collapsed(module: Module): Module {
  const parts = new Map([...module.parts].map(([name, part]) => [name, collapsed(part)]));
  if (module.path && parts.size === 1) {
    const [only] = [...parts.values()];
    if (only!.layers === module.layers) return { ...only!, name: `${module.name}.${only!.name}` };
  }
  // A layer that others are named after is a part beside them.
  if (module.itself > 0 && parts.size > 0) parts.set("", { name: module.name, path: module.path, value: module.itself, itself: module.itself, layers: 1, parts: new Map() });
  return { ...module, parts };
}

/** The boxes of values, largest first, in a box. */
export function squarified(values: number[], box: Box): Box[] {
  const total = values.reduce((a, b) => a + b, 0);
  const area = total > 0 ? (box.width * box.height) / total : 0;
  const boxes: Box[] = [];
  let rest = { ...box };
  let at = 0;
  while (at < values.length) {
    const side = Math.min(rest.width, rest.height);
    const worst = (from: number, to: number) => {
      const sum = values.slice(from, to).reduce((a, b) => a + b, 0) * area;
      return Math.max((side * side * values[from]! * area) / (sum * sum), (sum * sum) / (side * side * values[to - 1]! * area));
    };
    let end = at + 1;
    while (end < values.length && worst(at, end + 1) <= worst(at, end)) end++;
    const sum = values.slice(at, end).reduce((a, b) => a + b, 0) * area;
    const thick = side > 0 ? sum / side : 0;
    let along = 0;
    for (; at < end; at++) {
      const long = thick > 0 ? (values[at]! * area) / thick : 0;
      boxes.push(rest.width >= rest.height ? { x: rest.x, y: rest.y + along, width: thick, height: long } : { x: rest.x + along, y: rest.y, width: long, height: thick });
      along += long;
    }
    rest = rest.width >= rest.height ? { ...rest, x: rest.x + thick, width: Math.max(rest.width - thick, 0) } : { ...rest, y: rest.y + thick, height: Math.max(rest.height - thick, 0) };
  }
  return boxes;
}

export function treemap(title: string, top: Module, text: (value: number) => string, choose: (path: string) => void, total = text(top.value)): HTMLElement {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "treemap", role: "img", "aria-label": title });
  const sorted = (module: Module) => [...module.parts.values()].sort((a, b) => b.value - a.value);
  const label = (module: Module) => `${module.name}${module.layers > 1 && module.path.includes("*") ? ` (${module.layers} layers)` : ""}`;
  function draw(module: Module, box: Box, look: number, depth: number): void {
    const parts = sorted(module);
    const nested = parts.length > 0 && depth < 4 && box.width > 50 && box.height > HEAD + 24;
    const tip = (event: PointerEvent) => showTip(event.clientX, event.clientY, module.path, `${text(module.value)} (${((100 * module.value) / top.value).toFixed(1)}%)`, `${module.layers} layer${module.layers > 1 ? "s" : ""}`);
    drawing.append(svg("rect", {
      x: box.x.toFixed(1), y: box.y.toFixed(1), width: Math.max(box.width - 1, 0).toFixed(1), height: Math.max(box.height - 1, 0).toFixed(1),
      fill: COLOURS[look]!, "fill-opacity": (1 - 0.13 * (depth - 1)).toFixed(2), pointermove: tip, pointerleave: hideTip, click: () => choose(module.path),
    }));
    const room = Math.floor((box.width - 8) / 6.6);
    if (room > 3 && box.height > HEAD) {
      const words = label(module);
      drawing.append(svg("text", { x: box.x + 4, y: box.y + 12.5, fill: INKS[look]!, "pointer-events": "none" }, words.length > room ? `${words.slice(0, room - 1)}…` : words));
    }
    if (!nested) return;
    const inner = { x: box.x + 2, y: box.y + HEAD, width: box.width - 5, height: box.height - HEAD - 3 };
    // The parts of a module that fills most of the picture have colours of their own.
    const apart = depth === 1 && module.value > 0.6 * top.value;
    squarified(parts.map((part) => part.value), inner).forEach((own, at) => draw(parts[at]!, own, apart ? (look + 1 + at) % COLOURS.length : look, depth + 1));
  }
  const parts = sorted(top);
  squarified(parts.map((part) => part.value), { x: 0, y: 0, width: WIDTH, height: HEIGHT })
    .forEach((box, at) => draw(parts[at]!, box, Math.min(at, COLOURS.length - 1), 1));
  return el("figure", { class: "tree" }, el("figcaption", {}, total ? `${title}: ${total}` : title), drawing);
}
