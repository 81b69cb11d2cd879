// The tooltip that follows the pointer.

import { el } from "./dom";

const note = el("div", { class: "tip", role: "status", hidden: true });

export function mountTip(): void {
  document.body.append(note);
}

/** Shows lines of text or a drawing beside a point of the window. */
export function showTip(x: number, y: number, ...lines: (string | Node)[]): void {
  note.replaceChildren(...lines.map((line, at) => (typeof line === "string" ? el("div", at === 0 ? { class: "strong" } : {}, line) : line)));
  note.hidden = false;
  const box = note.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? Math.max(4, x - 14 - box.width) : x + 14;
  const top = y + 14 + box.height > innerHeight ? Math.max(4, y - 14 - box.height) : y + 14;
  note.style.left = `${left}px`;
  note.style.top = `${top}px`;
}

export function hideTip(): void {
  note.hidden = true;
}
