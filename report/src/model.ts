// The data inside the page, written by crates/report. Times that end in `_ps` are picoseconds.

export interface Baseline {
  step_seconds: number;
  compute_seconds: number;
  traffic_bytes: number;
  peak_memory_bytes: number;
  /** Whether it fits the device's memory; plans of older versions do not say. */
  fits?: boolean;
  /** Step time without overlap, in picoseconds. */
  objective: number;
}

/** Rates in a user's units; null where a model has no such unit. */
export interface Throughput {
  tokens_per_second: number | null;
  tokens_per_second_per_device: number | null;
  samples_per_second: number | null;
  mfu: number | null;
  cost_per_million_tokens?: number | null;
  cost_per_million_samples?: number | null;
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

export interface PlanPipeline {
  schedule: string;
  chunks: number;
  axes: string[];
  stages: { layers: string[]; group: number; devices: number; seconds: number; peak_memory_bytes: number }[];
  /** The share of the step without passes. */
  bubble: number;
}

export interface Plan {
  shardwright_version: string;
  model: string;
  machine: string;
  devices: number;
  solver: string;
  seed: number;
  space: { description: string; untied: boolean; variables: number; choices: number; coarse?: { axes: string; objective: number; gap: number | null } };
  objective: number;
  lower_bound: number;
  /** (objective - lower_bound) / lower_bound; null where nothing is proved. */
  gap: number | null;
  proved_optimal: boolean;
  search_seconds: number;
  simulated: { step_seconds: number; compute_seconds: number; exposed_comm_seconds: number };
  peak_memory_bytes: number;
  memory_limit_bytes: number | null;
  fits?: boolean;
  throughput?: Throughput;
  micro_batches?: number;
  pipeline?: PlanPipeline | null;
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
  /** An index into the plan's layers. */
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
  /** Passes of micro-batches, where there are several or ops are recomputed. */
  bands?: Band[];
}

export interface Band {
  pass: "forward" | "backward" | "recompute" | "update";
  /** The micro-batch, from 0; none for updates. */
  micro_batch: number | null;
  start_ps: number;
  end_ps: number;
}

/** The tensors that are held at the memory peak. */
export interface Peak {
  at_ps: number;
  op: number | null;
  kinds: { kind: string; bytes: number }[];
  largest: { tensor: string; kind: string; bytes: number }[];
  /** The number of tensors that are not listed. */
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
  /** The index of an op; if negative, `-1 - index` of a move. */
  what: number[];
  start: number[];
  duration: number[];
  /** Indices of the bars on the critical path. */
  critical: number[];
}

/** Passes of a pipeline, column by column. */
export interface Passes {
  group: number[];
  stage: number[];
  chunk: number[];
  pass: string[];
  micro_batch: number[];
  start: number[];
  duration: number[];
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
  /** Empty without a pipeline. */
  passes: Passes;
}

/** A config and its costs. */
export interface Choice {
  config: string;
  compute_ps: number;
  inside_ps: number;
  neighbours_ps: number;
  /** Increase of the objective if all other configs are reoptimised. */
  reoptimised_ps: number | null;
}

export interface Explanation {
  /** The op whose config determines the others. */
  op: number;
  ops: number[];
  /** The number of configs; zero if there are too many. */
  configs: number;
  /** Whether `reoptimised_ps` is exact or a bound; null if unknown. */
  reoptimised: "exact" | "at-least" | "at-most" | null;
  /** The plan's config, then the best alternatives. */
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
  /** Present if the page compares two plans; `plan` is the second. */
  difference?: Difference;
}

/** A layer (untied: an op) whose config differs. */
export interface Change {
  op: string;
  index: number;
  before: string;
  after: string;
  ops: number;
  alone_seconds: number;
  undone_seconds: number;
}

/** Two plans; each pair has the first plan's value first. */
export interface Difference {
  step_seconds: [number, number];
  /** Step time without overlap, in picoseconds. */
  objective: [number, number];
  peak_memory_bytes: [number, number];
  traffic_bytes: [number, number];
  solvers: [string, string];
  changes: Change[];
}

/** The cost of an op in the simulated step: computation, communication in seconds, bytes sent. */
export interface OpCost {
  compute: number;
  comm: number;
  bytes: number;
}

/** The costs of all ops. Communication counts for the first op that needs it. */
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

/** The title of a step. */
export function stepTitle(step: Step): string {
  const titles: Record<string, string> = { plan: "This plan", data: "Data parallelism", before: "First plan" };
  return titles[step.name] ?? step.name;
}

/** The device class with the largest memory peak. */
export function fullest(step: Step): DeviceClass {
  return step.classes.reduce((a, b) => (b.peak_memory_bytes > a.peak_memory_bytes ? b : a));
}

/** The title of a device class. */
export function classTitle(own: DeviceClass): string {
  return own.size > 1 ? `device ${own.device} and ${own.size - 1} equal ones` : `device ${own.device}`;
}

/** The result of a strategy, as in `compare --json`. */
export interface ComparisonRow {
  solver: string;
  step_seconds: number | null;
  speedup_over_data: number | null;
  traffic_bytes: number | null;
  peak_memory_bytes: number | null;
  search_seconds: number;
  /** Step time without overlap, in picoseconds. */
  objective: number | null;
  proved_optimal: boolean;
  micro_batches: number | null;
  recompute: string | null;
  failure?: string;
}

export interface MemoryLimitRow extends ComparisonRow {
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
  pareto?: MemoryLimitRow[];
  notes: string[];
}

/** A panel that is built later. */
export interface PanelSpec {
  id: string;
  title: string;
  make: () => HTMLElement;
}

export interface PageContent {
  title: string;
  about: string;
  parts: PanelSpec[];
  /** The drawer over the panels. */
  drawer?: HTMLElement;
}
