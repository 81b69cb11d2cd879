// Builds elements in one expression. Text is only set as text: nothing from a model's file becomes markup.

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | ((event: never) => void) | undefined>;

const SVG = "http://www.w3.org/2000/svg";

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

/** The width of wide charts: that of the page, so that their text is as large as the page's on narrow screens too. */
export const chartWidth = (): number => Math.min(1200, Math.max(600, document.documentElement.clientWidth - 48));

export function el<K extends keyof HTMLElementTagNameMap>(name: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  return fill(document.createElement(name), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(name: K, attributes: Attributes = {}, ...children: Child[]): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** A panel of the page, with a heading and an anchor for the menu. */
export function panel(id: string, title: string, about: string, ...children: Child[]): HTMLElement {
  return el("section", { id, tabindex: -1, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), about ? el("p", { class: "about" }, about) : null, ...children);
}

/** The value of a style sheet variable, for canvases. */
export function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A legend of colours. */
export function legend(entries: { colour: string; text: string }[]): HTMLElement {
  return el("ul", { class: "legend" }, ...entries.map((entry) =>
    el("li", {}, el("span", { class: "swatch", style: `background:${entry.colour}` }), entry.text)));
}

/** A table of numbers; the first column has the names of the rows. */
export function figures(caption: string, head: string[], rows: { own?: boolean; cells: string[] }[]): HTMLElement {
  const table = el("table", { class: "figures" }, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head.map((title, at) => el("th", { scope: "col", class: at ? "number" : "" }, title)))),
    el("tbody", {}, ...rows.map((row) => el("tr", row.own ? { class: "own" } : {}, ...row.cells.map((text, at) =>
      at ? el("td", { class: "number" }, text) : el("th", { scope: "row" }, text))))));
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption }, table);
}

/**
 * Makes a list of buttons one stop of the Tab key: arrow keys move among them. Only the first, or the one that has the focus, can be
 * reached by Tab. The
 * function that is returned is called after buttons were drawn anew.
 */
export function oneStop(view: HTMLElement, selector: string): () => void {
  const all = () => [...view.querySelectorAll<HTMLElement>(selector)];
  view.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const own = all();
    const at = own.indexOf(document.activeElement as HTMLElement);
    if (by === undefined || at < 0) return;
    const next = own[at + by];
    if (!next) return;
    event.preventDefault();
    own[at]!.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return () => {
    const own = all();
    const focused = own.find((button) => button === document.activeElement);
    own.forEach((button) => (button.tabIndex = button === (focused ?? own[0]) ? 0 : -1));
  };
}
