// Colours that colour-blind readers can distinguish (Okabe and Ito), and their meaning.

import { AxisRole } from "./model";

/** How an op is split; each kind has a colour. */
export type SplitKind = "sample" | "attribute" | "parameter" | "reduction" | "several" | "repeated";

export const SPLIT_KINDS: { kind: SplitKind; colour: string; ink: string; text: string; short: string }[] = [
  { kind: "sample", colour: "#0072b2", ink: "#fff", text: "split along the batch", short: "batch" },
  { kind: "parameter", colour: "#d55e00", ink: "#000", text: "split along a dimension of a weight", short: "weight" },
  { kind: "attribute", colour: "#009e73", ink: "#000", text: "split along height, width, sequence, heads", short: "attribute" },
  { kind: "reduction", colour: "#cc79a7", ink: "#000", text: "split along a reduction (partial sums)", short: "reduction" },
  { kind: "several", colour: "#e69f00", ink: "#000", text: "split along several of these", short: "several" },
  { kind: "repeated", colour: "#8a8f98", ink: "#000", text: "replicated", short: "replicated" },
];

export const COMPUTING = { colour: "#0072b2", ink: "#fff", text: "computing" };
export const MOVE = { colour: "#56b4e9", ink: "#000", text: "communication" };

export function splitKindOf(split: string[]): SplitKind {
  if (split.length === 0) return "repeated";
  return split.length > 1 ? "several" : (split[0] as SplitKind);
}

export function colourOf(kind: SplitKind): (typeof SPLIT_KINDS)[number] {
  return SPLIT_KINDS.find((own) => own.kind === kind) ?? SPLIT_KINDS[SPLIT_KINDS.length - 1]!;
}

/** Colours of passes. */
export const PASSES: Record<string, { colour: string; ink: string; text: string }> = {
  forward: { colour: "#56b4e9", ink: "#000", text: "forward" },
  backward: { colour: "#e69f00", ink: "#000", text: "backward" },
  recompute: { colour: "#cc79a7", ink: "#000", text: "recompute" },
  update: { colour: "#009e73", ink: "#000", text: "update" },
  communication: { colour: "#6a3d9a", ink: "#fff", text: "waiting for communication" },
};

/** What a mesh axis does. */
export const ROLES: Record<AxisRole, { colour: string; text: string }> = {
  data: { colour: "#0072b2", text: "data parallelism" },
  tensor: { colour: "#d55e00", text: "tensor parallelism" },
  attribute: { colour: "#009e73", text: "sequence or spatial parallelism" },
  expert: { colour: "#cc79a7", text: "expert parallelism" },
  placement: { colour: "#e69f00", text: "whole layers placed" },
  pipeline: { colour: "#56b4e9", text: "pipeline parallelism" },
  replication: { colour: "#8a8f98", text: "replicated" },
};

/** Lines of a plot, distinguished by colour, dashes and marks. */
const LINES = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98"];
const DASHES = [undefined, "8 4", "2 3"];

export function lineOf(at: number): { colour: string; dash: string | undefined } {
  return { colour: LINES[at % LINES.length]!, dash: DASHES[Math.floor(at / LINES.length) % DASHES.length] };
}
