// Buttons that copy what a panel shows: text to the clipboard, pictures too, or as a file where the browser refuses.

import { el } from "./dom";

function save(name: string, blob: Blob): void {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A button that says for a moment what became of a click. */
function button(text: string, act: () => Promise<string>): HTMLButtonElement {
  const own = el("button", {
    type: "button",
    click: () => void act().then((done) => {
      own.textContent = done;
      setTimeout(() => (own.textContent = text), 1500);
    }),
  }, text);
  return own;
}

/** A field of a CSV file. */
function field(value: string | number): string {
  const text = String(value);
  return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

/** Copies rows, the titles first. */
export function copyRows(name: string, rows: () => (string | number)[][]): HTMLButtonElement {
  return button("copy CSV", async () => {
    const text = `${rows().map((row) => row.map(field).join(",")).join("\n")}\n`;
    try {
      await navigator.clipboard.writeText(text);
      return "copied";
    } catch {
      save(name, new Blob([text], { type: "text/csv" }));
      return "saved";
    }
  });
}

/** Copies a canvas, on the page's background. */
export function copyPicture(name: string, canvas: HTMLCanvasElement, background: () => string): HTMLButtonElement {
  return button("copy PNG", async () => {
    const whole = el("canvas", { width: canvas.width, height: canvas.height });
    const pen = whole.getContext("2d")!;
    pen.fillStyle = background();
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.drawImage(canvas, 0, 0);
    const blob = await new Promise<Blob | null>((done) => whole.toBlob(done, "image/png"));
    if (!blob) return "failed";
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      return "copied";
    } catch {
      save(name, blob);
      return "saved";
    }
  });
}
