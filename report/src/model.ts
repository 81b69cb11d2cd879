// The data inside the page, as crates/report writes them. Times ending in `_ps` are picoseconds.

export interface Baseline {
  step_seconds: number;
  compute_seconds: number;
  traffic_bytes: number;
  peak_memory_bytes: number;
  /** Picoseconds if nothing overlapped. */
  objective: number;
}

export interface PlanOp {
  name: string;
  kind: string;
  layer: string;
  config: string;
  degrees: Record<string, number>;
  axes: (string | null)[];
}

export interface PlanLayer {
  name: string;
  config: string;
  weights?: string | null;
  compute_seconds: number;
  comm_seconds: number;
}

export interface Plan {
  shardwright_version: string;
  model: string;
  machine: string;
  devices: number;
  solver: string;
  seed: number;
  space: { description: string; untied: boolean; variables: number; choices: number; coarse?: { axes: string; objective: number; gap: number } };
  objective: number;
  lower_bound: number;
  gap: number;
  proved_optimal: boolean;
  search_seconds: number;
  simulated: { step_seconds: number; compute_seconds: number; exposed_comm_seconds: number };
  peak_memory_bytes: number;
  memory_limit_bytes: number | null;
  traffic_bytes: number;
  traffic_per_level: { level: string; bytes: number }[];
  costs: { measured_device: string | null; measured: number; interpolated: number; roofline: number };
  baselines: Record<string, Baseline>;
  axes: { name: string; size: number }[];
  layers: PlanLayer[];
  ops: PlanOp[];
  warnings: string[];
}

export type Phase = "forward" | "backward" | "update";

export interface OpFacts {
  /** A position in the plan's layers. */
  layer: number;
  phase: Phase;
  flops: number;
  split: string[];
  dtype: string;
  shape: number[];
  parts: number[];
  copies: number;
  partial: number;
  after: number[];
}

export interface DeviceClass {
  device: number;
  size: number;
  busy_ps: number;
  communicating_ps: number;
  exposed_ps: number;
  idle_ps: number;
  peak_memory_bytes: number;
  memory_ps: number[];
  memory_bytes: number[];
  peak: Peak;
}

/** What holds the memory when it is fullest. */
export interface Peak {
  at_ps: number;
  op: number | null;
  kinds: { kind: string; bytes: number }[];
  largest: { tensor: string; kind: string; bytes: number }[];
  /** How many more tensors are held. */
  others: number;
}

export interface Move {
  action: string;
  tensors: string[];
  from: number | null;
  to: number;
  axes: number[];
  bytes: number;
  ps: number;
}

export interface Bars {
  track: number[];
  /** An op, or, where negative, the move -1 - this. */
  what: number[];
  start: number[];
  duration: number[];
  /** Positions in the columns. */
  critical: number[];
}

export interface Step {
  name: string;
  step_ps: number;
  classes: DeviceClass[];
  more_classes: number;
  tracks: { class: number; level: number | null }[];
  bars: Bars;
  moves: Move[];
  compute_ps: number[];
}

/** A config and what it costs. */
export interface Choice {
  config: string;
  compute_ps: number;
  inside_ps: number;
  neighbours_ps: number;
  /** What the plan's sum would become longer by with everything else chosen anew. */
  reoptimised_ps: number | null;
}

export interface Explanation {
  /** The op whose config decides. */
  op: number;
  ops: number[];
  /** How many configs there are; zero where they are too many. */
  configs: number;
  /** How `reoptimised_ps` is meant; none where it is not known. */
  reoptimised: "exact" | "at-least" | "at-most" | null;
  /** What the plan does, then the best of the others. */
  options: Choice[];
}

export interface Improvement {
  seconds: number;
  best: number | null;
  bound: number;
}

export interface Report {
  plan: Plan;
  device_memory_bytes: number;
  levels: string[];
  ops: OpFacts[];
  steps: Step[];
  explanations: Explanation[];
  not_reoptimised: string | null;
  search: Improvement[];
  /** Where the page is about two plans: this one is the second. */
  difference?: Difference;
}

/** A layer (untied: an op) that is split otherwise. */
export interface Change {
  op: string;
  index: number;
  before: string;
  after: string;
  ops: number;
  alone_seconds: number;
  undone_seconds: number;
}

/** Two plans, the first one's figures first. */
export interface Difference {
  step_seconds: [number, number];
  /** Picoseconds if nothing overlapped. */
  objective: [number, number];
  peak_memory_bytes: [number, number];
  traffic_bytes: [number, number];
  solvers: [string, string];
  changes: Change[];
}

/** What an op costs in the plan's simulated step: its own work, and what is moved for it. */
export interface OpCost {
  compute: number;
  comm: number;
  bytes: number;
}

/** The costs of all ops, in seconds and bytes. A move counts for the op that needs it first. */
export function opCosts(report: Report): OpCost[] {
  const step = report.steps[0]!;
  const costs = step.compute_ps.map((ps) => ({ compute: ps / 1e12, comm: 0, bytes: 0 }));
  for (const move of step.moves) {
    const cost = costs[move.to];
    if (cost) {
      cost.comm += move.ps / 1e12;
      cost.bytes += move.bytes;
    }
  }
  return costs;
}

/** Whom a step belongs to, in words. */
export function stepTitle(step: Step): string {
  const titles: Record<string, string> = { plan: "This plan", data: "Data parallelism", before: "The first plan" };
  return titles[step.name] ?? step.name;
}

/** The kind of device that holds most. */
export function fullest(step: Step): DeviceClass {
  return step.classes.reduce((a, b) => (b.peak_memory_bytes > a.peak_memory_bytes ? b : a));
}

/** Which devices a class stands for, in words. */
export function classTitle(own: DeviceClass): string {
  return own.size > 1 ? `device ${own.device} and ${own.size - 1} alike` : `device ${own.device}`;
}

/** What came of a strategy, as `compare --json` says it. */
export interface ComparisonRow {
  solver: string;
  step_seconds: number | null;
  speedup_over_data: number | null;
  traffic_bytes: number | null;
  peak_memory_bytes: number | null;
  search_seconds: number;
  /** Picoseconds if nothing overlapped. */
  objective: number | null;
  proved_optimal: boolean;
  failure?: string;
}

export interface Limited extends ComparisonRow {
  memory_limit_bytes: number | null;
  on_front: boolean;
}

/** The page of `compare`. */
export interface Comparison {
  model: string;
  machine: string;
  devices: number;
  device_memory_bytes: number;
  rows: ComparisonRow[];
  scaling?: { devices: number; batch: number | null; rows: ComparisonRow[] }[];
  pareto?: Limited[];
  notes: string[];
}

/** A panel before it is made. */
export interface Part {
  id: string;
  title: string;
  make: () => HTMLElement;
}

export interface Content {
  title: string;
  about: string;
  parts: Part[];
  /** What lies over the panels. */
  drawer?: HTMLElement;
}
