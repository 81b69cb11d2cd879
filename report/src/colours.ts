// Colours that colour-blind readers can tell apart (Okabe and Ito), and what they stand for.

/** How an op is split, in one word: what colours stand for. */
export type Way = "sample" | "attribute" | "parameter" | "reduction" | "several" | "repeated";

export const WAYS: { way: Way; colour: string; ink: string; text: string }[] = [
  { way: "sample", colour: "#0072b2", ink: "#fff", text: "split along the batch" },
  { way: "parameter", colour: "#d55e00", ink: "#fff", text: "split along a weight's dimension" },
  { way: "attribute", colour: "#009e73", ink: "#fff", text: "split along height, width, sequence, heads" },
  { way: "reduction", colour: "#cc79a7", ink: "#000", text: "split along a sum (partial results)" },
  { way: "several", colour: "#e69f00", ink: "#000", text: "split in several ways" },
  { way: "repeated", colour: "#8a8f98", ink: "#000", text: "repeated on every device" },
];

export const COMPUTING = { colour: "#0072b2", ink: "#fff", text: "computing" };
export const MOVE = { colour: "#56b4e9", ink: "#000", text: "communication" };

export function wayOf(split: string[]): Way {
  if (split.length === 0) return "repeated";
  return split.length > 1 ? "several" : (split[0] as Way);
}

export function colourOf(way: Way): { colour: string; ink: string; text: string } {
  return WAYS.find((own) => own.way === way) ?? WAYS[WAYS.length - 1]!;
}

/** Lines of a plot, told apart by colour, dashes and marks together. */
const LINES = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98"];
const DASHES = [undefined, "8 4", "2 3"];

export function lineOf(at: number): { colour: string; dash: string | undefined } {
  return { colour: LINES[at % LINES.length]!, dash: DASHES[Math.floor(at / LINES.length) % DASHES.length] };
}
