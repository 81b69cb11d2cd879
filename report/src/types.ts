// Generated from the Rust types by `UPDATE_TYPES=1 cargo test -p shardwright-report --test types`.

/** What an axis does to a layer. */
export type AxisRole = "data" | "attribute" | "tensor" | "expert" | "placement" | "pipeline" | "replication";

/** What one mesh axis does. */
export interface AxisRoles {
  /** The axis. */
  axis: string;
  /** The level whose links it crosses. */
  level: string;
  /** Its size. */
  size: number;
  /** Its roles, the largest share first. */
  roles: RoleShare[];
  /** The share of the weights' bytes that are stored in parts along this axis, while their layer computes with whole weights. */
  weights_sharded: number;
  /** The share of the weights' bytes whose layer computes with parts of them along this axis. */
  weights_parallel: number;
}

/** A time of computing in one pass of one micro-batch. */
export interface BandView {
  /** `forward`, `backward`, `recompute` or `update`. */
  pass: string;
  /** The micro-batch, from 0; none for updates. */
  micro_batch: number | null;
  /** Its start. */
  start_ps: number;
  /** Its end. */
  end_ps: number;
}

/** Pieces of time, column by column, by track and then by start. */
export interface Bars {
  /** On which track. */
  track: number[];
  /** An op, or, where negative, the move -1 - this. */
  what: number[];
  /** From when on. */
  start: number[];
  /** How long. */
  duration: number[];
  /** The bars that the step's length is made of, as positions in the columns. */
  critical: number[];
}

/** Costs of a baseline. */
export interface BaselineCost {
  /** Predicted time of a step. */
  step_seconds: number;
  /** The computing part of that time. */
  compute_seconds: number;
  /** Bytes sent per step. */
  traffic_bytes: number;
  /** The most bytes that one device holds at once. */
  peak_memory_bytes: number;
  /** Whether it keeps the plan's memory limit, or, without one, fits the usable memory of a device. */
  fits: boolean;
  /** The objective in picoseconds, without overlap. */
  objective: number;
  /** Its number of micro-batches: of those that a plan may have, the one that suits it best. */
  micro_batches: number;
  /** The name of its policy of recomputation, chosen in the same way. */
  recompute: string;
}

/** How a figure is meant. */
export type Certainty = "exact" | "at-least" | "at-most";

/** A layer (untied: an op) that is split otherwise. */
export interface Change {
  /** The deciding op's name. */
  op: string;
  /** Its place in the plan. */
  index: number;
  /** Its config in the first plan. */
  before: string;
  /** In the second. */
  after: string;
  /** Ops whose configs differ. */
  ops: number;
  /** What the first plan's sum would become longer by, were this the only change; none where it goes with others only. */
  alone_seconds: number | null;
  /** What the second plan's sum would become longer by, were this alone taken back; none where that is impossible. */
  undone_seconds: number | null;
}

/** A config and what it costs, in picoseconds. */
export interface Choice {
  /** The deciding op's config. */
  config: string;
  /** Computing, on one device. */
  compute_ps: number;
  /** Communication among its own ops. */
  inside_ps: number;
  /** Communication with its neighbours as they are. */
  neighbours_ps: number;
  /** What the plan's sum would become longer by with this config and everything else chosen anew; none where that is not known, or nothing goes with it. */
  reoptimised_ps: number | null;
}

/** The answer on coarser axes, before refinement. */
export interface CoarseSpace {
  /** The axes, in words. */
  axes: string;
  /** The best plan's objective there. */
  objective: number;
  /** No plan on these axes costs less. */
  lower_bound: number;
  /** (objective - lower_bound) / lower_bound; none where the bound is zero. */
  gap: number | null;
}

/** What `compare --json` prints, and what its page shows. */
export interface Comparison {
  /** The model's name. */
  model: string;
  /** The machine's. */
  machine: string;
  /** How many devices it has. */
  devices: number;
  /** What a device's memory holds. */
  device_memory_bytes: number;
  /** Every strategy on the whole machine. */
  rows: Row[];
  /** The same on its first devices; empty where nobody asked. */
  scaling?: Scale[];
  /** The best plan under several limits of memory, tightest first; empty where nobody asked. */
  pareto?: MemoryLimitRow[];
  /** What the command line says below its table. */
  notes: string[];
}

/** Where operator times come from. */
export interface CostSource {
  /** The measured device; none: data sheets only. */
  measured_device: string | null;
  /** Ops whose time was measured. */
  measured: number;
  /** Ops whose time was interpolated between measurements. */
  interpolated: number;
  /** Ops whose time comes from the data sheet. */
  roofline: number;
}

/** Devices that do the same at the same times. */
export interface DeviceClass {
  /** One of them. */
  device: number;
  /** How many they are. */
  size: number;
  /** Computing. */
  busy_ps: number;
  /** Communicating, whatever else goes on. */
  communicating_ps: number;
  /** Communicating while nothing is computed. */
  exposed_ps: number;
  /** Not computing. */
  idle_ps: number;
  /** The most that one of them holds. */
  peak_memory_bytes: number;
  /** When what it holds changes. */
  memory_ps: number[];
  /** What it holds from then on. */
  memory_bytes: number[];
  /** What holds the memory when it is fullest. */
  peak: Peak;
  /** Passes of micro-batches. */
  bands: BandView[];
}

/** A device's rates; of unequal devices the lowest of each. */
export interface DeviceRates {
  /** The device's name. */
  name: string;
  /** Bytes per second between the device and its memory. */
  bytes_per_second: number;
  /** Floating-point operations per second, by number format. */
  peaks: PeakRate[];
}

/** Two plans, the first one's figures first. */
export interface Difference {
  /** The simulated step. */
  step_seconds: [number, number];
  /** Picoseconds if nothing overlapped. */
  objective: [number, number];
  /** The most that a device holds. */
  peak_memory_bytes: [number, number];
  /** Bytes sent, all devices together. */
  traffic_bytes: [number, number];
  /** Who made them. */
  solvers: [string, string];
  /** Their pipelines in words: stages and schedule; none without stages. */
  pipelines: [string | null, string | null];
  /** Layers (untied: ops) that are split otherwise, those that are worth most first. */
  changes: Change[];
}

/** What ops that choose together could do. */
export interface Explanation {
  /** The op whose config decides: a layer's forward op. */
  op: number;
  /** All ops that follow it, itself among them. */
  ops: number[];
  /** How many configs there are; zero where they are too many to be looked at. */
  configs: number;
  /** How [`Choice::reoptimised_ps`] is meant; none where it is not known. */
  reoptimised: Certainty | null;
  /** What the plan does, then the best of what it could do instead, best first: with everything else chosen anew where that is known, else with everything staying as it is. */
  options: Choice[];
}

/** A tensor in memory. */
export interface HeldTensor {
  /** Its name. */
  tensor: string;
  /** What it is for: see [`KINDS`]. */
  kind: string;
  /** What one device holds of it. */
  bytes: number;
}

/** The search had something better. */
export interface Improvement {
  /** Since the start. */
  seconds: number;
  /** The best plan's cost in picoseconds, if there is one. */
  best: number | null;
  /** No plan costs less. */
  bound: number;
}

/** Bytes of a kind. */
export interface KindOfUse {
  /** See [`KINDS`]. */
  kind: string;
  /** How many. */
  bytes: number;
}

/** Bytes of a layer. */
export interface LayerUse {
  /** A position in the plan's layers. */
  layer: number;
  /** How many. */
  bytes: number;
}

/** Bytes over one level. */
export interface LevelTraffic {
  /** The level's name. */
  level: string;
  /** Bytes per step. */
  bytes: number;
}

/** The best plan under a limit of memory. */
export interface MemoryLimitRow extends Row {
  /** The most that a device may hold; none without a limit. */
  memory_limit_bytes: number | null;
  /** Whether no other of the plans is at least as fast and as lean, and better in one of the two. */
  on_front: boolean;
}

/** Something that moves between devices. */
export interface Move {
  /** How: `all-reduce`, `window`. */
  action: string;
  /** What: tensors that travel together. */
  tensors: string[];
  /** The op that made it; none for weights and data. */
  from: number | null;
  /** The op that needs it first; where none does, the one that made it. */
  to: number;
  /** The mesh axes that it crosses. */
  axes: number[];
  /** Bytes sent, all devices together. */
  bytes: number;
  /** How long. */
  ps: number;
}

/** Elements that a plan moves, by SoyBean's measure. */
export interface MoveCount {
  /** Elements that each cut moves within one of the device groups that it cuts, first cut first. */
  cuts: number[];
  /** Elements that all devices move: `Σ 2^(i-1) cuts[i]`. */
  total_elements: number;
  /** Whether every cut moves the fewest elements, given the cuts before it. */
  proved: boolean;
}

/** An op, beyond its config. */
export interface OpFacts {
  /** Its layer, as a position in the plan's layers. */
  layer: number;
  /** Forward, backward or update. */
  phase: Phase;
  /** Floating-point operations, all devices together, nothing repeated. */
  flops: number;
  /** Floating-point operations of one device, work that devices repeat included. */
  device_flops: number;
  /** Bytes that one device reads and writes, were every kernel perfect. */
  device_bytes: number;
  /** What is split: `sample`, `attribute`, `parameter`, `reduction`; empty where devices repeat each other's work. */
  split: string[];
  /** The whole first result: its type and its sizes. */
  dtype: string;
  /** Its sizes. */
  shape: number[];
  /** Into how many parts each dimension is cut. */
  parts: number[];
  /** How many devices hold the same part. */
  copies: number;
  /** How many partial results have to be added up. */
  partial: number;
  /** The ops that make what it reads, ascending. */
  after: number[];
}

/** The quantity that a search minimises. Objective, bound and proof always refer to the sum. */
export type Optimised = "sum" | "simulated" | "moves" | "nothing";

/** A proved lower bound on the overlapped step of any plan, on any axes. */
export interface OverlapBound {
  /** No plan's step is shorter. */
  lower_bound_seconds: number;
  /** How far this plan's step is above the bound, relative to the bound; none for a bound of zero. */
  gap: number | null;
}

/** What the page shows. */
export interface Page {
  /** The plan, as `plan --json` prints it. */
  plan: Plan;
  /** What a device's memory holds. */
  device_memory_bytes: number;
  /** What a plan may fill of it; none where the machine states no memory. */
  usable_memory_bytes: number | null;
  /** The rates of a device's data sheet. */
  device: DeviceRates;
  /** Names of the machine's levels, outermost first. */
  levels: string[];
  /** Per op of the plan: what the plan does not say. */
  ops: OpFacts[];
  /** The simulated steps: the plan's, then data parallelism's, or the other plan's. */
  steps: StepView[];
  /** Why the layers (untied: the ops) are split as they are. */
  explanations: Explanation[];
  /** Why nothing is said of what everything else chosen anew would change, where nothing is. */
  not_reoptimised: string | null;
  /** How the search went; empty where nobody watched. */
  search: Improvement[];
  /** What another plan does differently, where the page is about two. */
  difference?: Difference;
}

/** The kinds of parallelism of an assignment. */
export interface Parallelism {
  /** The same in words. */
  words: string;
  /** The recipe that the assignment equals. */
  recipe: string | null;
  /** Per mesh axis, outermost first. */
  axes: AxisRoles[];
}

/** Passes of a pipeline, column by column, by group and then by start. One device of every group stands for the others. */
export interface Passes {
  /** The group of devices. */
  group: number[];
  /** The stage. */
  stage: number[];
  /** The group's chunk that the stage is. */
  chunk: number[];
  /** `forward`, `backward`, `backward-input` or `backward-weight`. */
  pass: string[];
  /** The micro-batch. */
  micro_batch: number[];
  /** From when on. */
  start: number[];
  /** How long. */
  duration: number[];
}

/** The fullest moment of a device's step. */
export interface Peak {
  /** When it begins. */
  at_ps: number;
  /** The op that is computed then, if one is. */
  op: number | null;
  /** What the memory is used for; together all that is held. */
  kinds: KindOfUse[];
  /** Bytes by the layer that the tensor belongs to, in the order of layers; tensors without a layer are left out. */
  layers: LayerUse[];
  /** The largest tensors, largest first. */
  largest: HeldTensor[];
  /** How many more there are. */
  others: number;
}

/** The peak rate of a number format. */
export interface PeakRate {
  /** `f32`, `tf32`, `bf16` and so on. */
  format: string;
  /** Floating-point operations per second. */
  flops_per_second: number;
}

export type Phase = "forward" | "backward" | "update";

/** Figures of a placement of whole layers on devices. */
export interface PlacementRow {
  /** The method that built it. */
  name: string;
  /** Whether it is a baseline. */
  baseline: boolean;
  /** Time of the simulated step. */
  step_seconds: number;
  /** Bytes that flow between devices, in both directions. */
  cut_bytes: number;
  /** The work of the busiest device over the average work. */
  imbalance: number;
  /** The most bytes that one device holds at once. */
  peak_memory_bytes: number;
}

/** A plan for one model on one machine. */
export interface Plan {
  /** [`FORMAT_VERSION`]. */
  format_version: number;
  /** The version of Shardwright that wrote it. */
  shardwright_version: string;
  /** The model's name, with its options. */
  model: string;
  /** The request for the model and the machine, so that both can be opened again. The command line defines its format. */
  request?: Value;
  /** FNV-1a of the graph's JSON: the model as it was planned. */
  model_hash: string;
  /** The machine's name. */
  machine: string;
  /** A hash of the machine's properties that costs depend on. */
  machine_fingerprint: string;
  /** Number of devices of the machine. */
  devices: number;
  /** Where operator times come from. */
  costs: CostSource;
  /** The requested strategy. */
  solver: string;
  /** The quantity that the search minimised. */
  optimised: Optimised;
  /** Seed of the search. */
  seed: number;
  /** The searched space. Objective, bound and gap refer to it. */
  space: SearchSpace;
  /** Picoseconds per step, all ops and all communication in sequence: the network's objective. */
  objective: number;
  /** Lower bound on the objective of any plan in the space, on its coarse axes if it was refined; zero if none is proved. */
  lower_bound: number;
  /** How far the objective may be above the optimum: (objective - lower_bound) / lower_bound. None where nothing is proved. */
  gap: number | null;
  /** The gap at which the search was asked to stop; zero asks for a proof. */
  gap_limit: number;
  /** Whether no plan in the space is faster. */
  proved_optimal: boolean;
  /** A proved bound on the step of any plan, with overlap; none where the step was not simulated. */
  overlap?: OverlapBound;
  /** Time to build and solve the search problem. */
  search_seconds: number;
  /** The same time by stage. */
  stages: StageTimes;
  /** Peak memory of the planning process; none where the computer does not report it. */
  planning_memory_bytes?: number;
  /** Predicted times of a step. */
  simulated: StepTimes;
  /** The most bytes that one device holds at once. */
  peak_memory_bytes: number;
  /** The limit on the bytes that one device holds. */
  memory_limit_bytes: number | null;
  /** Whether the plan keeps the limit, or, without one, fits the usable memory of a device. */
  fits: boolean;
  /** The answer in tokens or samples per second. */
  throughput: Throughput;
  /** The answer in one line. */
  summary: string;
  /** The kinds of parallelism, axis by axis. */
  parallelism: Parallelism;
  /** Bytes sent per step, all devices together. */
  traffic_bytes: number;
  /** The same bytes by the level that they cross, outermost first. */
  traffic_per_level: LevelTraffic[];
  /** Equal passes over parts of the batch before one update. */
  micro_batches: number;
  /** The forward ops that are recomputed. */
  recompute: Recomputation;
  /** The pipeline; none: all devices run all layers. */
  pipeline: PlanPipeline | null;
  /** For uniform plans: the degrees, as trainers name them. */
  uniform?: PlanDegrees;
  /** For SoyBean's plans: the elements moved, by its measure. */
  soybean?: MoveCount;
  /** For `place`: the plan's placement first, then the placements that it was compared with. */
  placements?: PlacementRow[];
  /** Costs of the baselines, by name. */
  baselines: Record<string, BaselineCost>;
  /** The mesh axes of the configs, outermost first. */
  axes: PlanAxis[];
  /** Costs of each layer. */
  layers: PlanLayer[];
  /** The config of every op, in the graph's order. */
  ops: PlanOp[];
  /** Warnings for the user. */
  warnings: string[];
  /** How the search came to this plan. */
  search_notes?: string[];
}

/** A mesh axis. */
export interface PlanAxis {
  /** Its name. */
  name: string;
  /** Its size. */
  size: number;
}

/** The degrees of a uniform plan, as trainers name them. */
export interface PlanDegrees {
  /** Tensor parallelism. */
  tp: number;
  /** Pipeline stages: groups of devices. */
  pp: number;
  /** Chunks of layers per group. */
  vp: number;
  /** Context parallelism. */
  cp: number;
  /** Expert parallelism, a part of data parallelism. */
  ep: number;
  /** Data parallelism. */
  dp: number;
  /** Samples per micro-batch and replica. */
  mbs: number;
  /** ZeRO level: 0 to 3. */
  zero: number;
  /** Sequence parallelism. */
  sp: boolean;
  /** The recomputation policy. */
  recompute: string;
  /** The pipeline schedule. */
  schedule: string;
  /** Blocks of every stage along the layers. */
  blocks: number[];
}

/** A layer's costs. */
export interface PlanLayer {
  /** The forward op's name. */
  name: string;
  /** The forward op's config. */
  config: string;
  /** The stored layout of its first weight: the config of the update. None for layers without weights. */
  weights: string | null;
  /** Computing, on one device. */
  compute_seconds: number;
  /** Communication: fetches, halo exchanges and reductions. */
  comm_seconds: number;
}

/** An op's config. */
export interface PlanOp {
  /** The op's name. */
  name: string;
  /** Its kind. */
  kind: string;
  /** Its layer. */
  layer: string;
  /** The op that it recomputes. */
  recomputes?: string;
  /** The config in short form: `n4·c4`. */
  config: string;
  /** The number of parts of each split factor. */
  degrees: Record<string, number>;
  /** Per mesh axis: the factor that it splits, `@` and the digit of a pin, or null where it replicates the op. */
  axes: (string | null)[];
}

/** Stages of layers on groups of devices, and the schedule of their passes. */
export interface PlanPipeline {
  /** The schedule's name. */
  schedule: string;
  /** Chunks of layers per group. */
  chunks: number;
  /** Names of the mesh axes that number the groups, outermost first. */
  axes: string[];
  /** The stages along the layers. */
  stages: PlanStage[];
  /** The share of the step in which a group of devices runs no pass and no update, on average. */
  bubble: number;
}

/** A stage of a pipeline. */
export interface PlanStage {
  /** Its layers by name, in the graph's order. */
  layers: string[];
  /** The group that runs it. */
  group: number;
  /** Number of devices of the group. */
  devices: number;
  /** Computing and communication of its layers in a step, without overlap. */
  seconds: number;
  /** The most bytes that a device of the group holds at once. */
  peak_memory_bytes: number;
}

/** The forward ops whose results are dropped and computed again before their backward readers. */
export interface Recomputation {
  /** The policy that chose them: `off`, `elementwise`, `selective`, `full`, or `ops` where it is none of these. */
  policy: string;
  /** Their names, in the graph's order. */
  ops: string[];
}

/** A role with its share of the computing time. */
export interface RoleShare {
  /** The role. */
  role: AxisRole;
  /** Between 0 and 1. */
  share: number;
}

/** What came of a strategy. */
export interface Row {
  /** Its name. */
  solver: string;
  /** The simulated step. */
  step_seconds: number | null;
  /** How many times as long data parallelism's takes. */
  speedup_over_data: number | null;
  /** Bytes sent, all devices together. */
  traffic_bytes: number | null;
  /** The most that a device holds. */
  peak_memory_bytes: number | null;
  /** Whether that keeps the memory limit; without a limit, whether it fits the usable memory of a device. */
  fits: boolean | null;
  /** How long the search took. */
  search_seconds: number;
  /** Picoseconds if nothing overlapped. */
  objective: number | null;
  /** Whether nothing in the strategy's space has a smaller objective. */
  proved_optimal: boolean;
  /** Elements that all devices move by SoyBean's measure, where it can count the plan. */
  soybean_elements: number | null;
  /** Bytes that all devices are sent by OptCNN's counting: no collectives, weights through a parameter server. */
  optcnn_bytes: number | null;
  /** Passes over parts of the batch before one update. */
  micro_batches: number | null;
  /** The policy of recomputation. */
  recompute: string | null;
  /** Why there is no result, where there is none. */
  failure?: string;
}

/** Strategies on some devices of the machine. */
export interface Scale {
  /** How many devices. */
  devices: number;
  /** Samples per step, where they were asked for. */
  batch: number | null;
  /** What came of them. */
  rows: Row[];
}

/** The searched space. */
export interface SearchSpace {
  /** Description in words. */
  description: string;
  /** Whether every prime axis was searched separately. */
  prime_axes: boolean;
  /** Whether every op was a variable, rather than every layer. */
  untied: boolean;
  /** Number of variables: layers, or ops. */
  variables: number;
  /** Number of choices of all variables together. */
  choices: number;
  /** Where the plan was refined on finer axes: the space that was searched first. Proofs refer to it. */
  coarse?: CoarseSpace;
}

/** Durations of the stages of planning. */
export interface StageTimes {
  /** Reading the model and pricing every choice. */
  build_seconds: number;
  /** Searching, including the baselines. */
  solve_seconds: number;
  /** Bounding the objective on prime axes, where the first search was on merged axes. */
  bound_seconds: number;
  /** Refining on finer axes, where the first search was on merged axes. */
  refine_seconds: number;
  /** Pricing the plan and the baselines in detail. */
  describe_seconds: number;
  /** Simulating the step, and shortening the simulated step. */
  polish_seconds: number;
}

/** Predicted times of a step. */
export interface StepTimes {
  /** The whole step. */
  step_seconds: number;
  /** Computing. */
  compute_seconds: number;
  /** Communication while no op computes. */
  exposed_comm_seconds: number;
}

/** A step of the model under some configs. */
export interface StepView {
  /** The strategy's name; `plan` for the plan itself. */
  name: string;
  /** How long it takes. */
  step_ps: number;
  /** Classes of devices that nobody can tell apart; all that are shown. */
  classes: DeviceClass[];
  /** How many more there are. */
  more_classes: number;
  /** The tracks of these classes, class by class. */
  tracks: Track[];
  /** What is drawn on them. */
  bars: Bars;
  /** Everything that moves between devices, in the program's order. */
  moves: Move[];
  /** Per op: how long one device computes it. */
  compute_ps: number[];
  /** The passes of a pipeline; empty without one. */
  passes: Passes;
}

/** What a plan's step amounts to per second. */
export interface Throughput {
  /** Tokens per second, all devices together; none where samples are not sequences of tokens. */
  tokens_per_second: number | null;
  /** The same per device. */
  tokens_per_second_per_device: number | null;
  /** Samples per second, all devices together. */
  samples_per_second: number | null;
  /** Model flops utilisation: the time of the model's flops at the devices' peak, over the time of the step.  Model flops are those of all matrix products and convolutions, forwards and backwards, each once. Peak is the data sheet's dense rate in the precision of each product. */
  mfu: number | null;
  /** Cost of a million tokens, in the currency of the price. */
  cost_per_million_tokens?: number;
  /** Cost of a million samples, where samples are not sequences of tokens. */
  cost_per_million_samples?: number;
}

/** A device's compute units, or its port to a level's links. */
export interface Track {
  /** The class of devices. */
  class: number;
  /** The level; none for computing. */
  level: number | null;
}

export type Value = unknown;
