// A small drawing of a tensor's tiles. Rows and columns are its two most finely split dimensions.

import { svg } from "./dom";
import { OpFacts } from "./model";

const MOST = 16;

/** A description of the drawing. */
export function tilesText(facts: OpFacts): string {
  const tiles = facts.parts.reduce((a, b) => a * b, 1);
  const whole = `${facts.dtype}[${facts.shape.join(",")}]`;
  const cut = tiles > 1 ? `${whole} in ${tiles} tiles of [${facts.shape.map((size, at) => size / facts.parts[at]!).join(",")}]` : `${whole} not split`;
  return [cut, facts.copies > 1 ? `${facts.copies} copies of each` : "", facts.partial > 1 ? `${facts.partial} partial sums` : ""].filter(Boolean).join("; ");
}

export function tiles(facts: OpFacts, size = 96): SVGElement {
  const order = facts.parts.map((parts, dim) => ({ parts, dim })).filter((own) => own.parts > 1).sort((a, b) => b.parts - a.parts || a.dim - b.dim);
  const chosen = order.slice(0, 2).sort((a, b) => a.dim - b.dim);
  const rows = Math.min(chosen[0]?.parts ?? 1, MOST);
  const columns = Math.min(chosen[1]?.parts ?? 1, MOST);
  const layers = Math.min(Math.max(facts.copies, facts.partial), 4);
  const inset = (layers - 1) * 5;
  const [w, h] = [size - inset, size - inset];
  const drawing = svg("svg", { width: size, height: size, viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": tilesText(facts), class: facts.partial > 1 ? "tiles partial" : "tiles" });
  for (let layer = layers - 1; layer > 0; layer--) {
    drawing.append(svg("rect", { x: layer * 5 + 0.5, y: inset - layer * 5 + 0.5, width: w - 1, height: h - 1, class: "behind" }));
  }
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      drawing.append(svg("rect", {
        x: (column * w) / columns + 0.5, y: inset + (row * h) / rows + 0.5, width: w / columns - 1, height: h / rows - 1,
        class: (row + column) % 2 ? "odd" : "even",
      }));
    }
  }
  return drawing;
}
