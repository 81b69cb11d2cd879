//! The plan file: an assignment, its predicted cost, and all assumptions. Versioned JSON.

use crate::error::PlanError;
use crate::parallelism::Parallelism;
use crate::throughput::Throughput;
use serde::{Deserialize, Serialize};
use shardwright_search::gap;
use std::collections::BTreeMap;

/// The version of the plan's JSON.
pub const FORMAT_VERSION: u32 = 1;

/// A plan for one model on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The version of Shardwright that wrote it.
    pub shardwright_version: String,
    /// The model's name, with its options.
    pub model: String,
    /// The request for the model and the machine, so that both can be opened again. The command line defines its
    /// format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<serde_json::Value>,
    /// FNV-1a of the graph's JSON: the model as it was planned.
    pub model_hash: String,
    /// The machine's name.
    pub machine: String,
    /// A hash of the machine's properties that costs depend on.
    pub machine_fingerprint: String,
    /// Number of devices of the machine.
    pub devices: u32,
    /// Where operator times come from.
    pub costs: CostSource,
    /// The requested strategy.
    pub solver: String,
    /// The quantity that the search minimised.
    #[serde(default)]
    pub optimised: Optimised,
    /// Seed of the search.
    pub seed: u64,
    /// The searched space. Objective, bound and gap refer to it.
    pub space: SearchSpace,
    /// Picoseconds per step, all ops and all communication in sequence: the network's objective.
    pub objective: i64,
    /// Lower bound on the objective of any plan in the space, on its coarse axes if it was refined; zero if none is
    /// proved.
    pub lower_bound: i64,
    /// How far the objective may be above the optimum: (objective - lower_bound) / lower_bound. None where nothing is
    /// proved.
    pub gap: Option<f64>,
    /// The gap at which the search was asked to stop; zero asks for a proof.
    #[serde(default)]
    pub gap_limit: f64,
    /// Whether no plan in the space is faster.
    pub proved_optimal: bool,
    /// A proved bound on the step of any plan, with overlap; none where the step was not simulated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<OverlapBound>,
    /// Time to build and solve the search problem.
    pub search_seconds: f64,
    /// The same time by stage.
    #[serde(default)]
    pub stages: StageTimes,
    /// Peak memory of the planning process; none where the computer does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planning_memory_bytes: Option<u64>,
    /// Predicted times of a step.
    pub simulated: StepTimes,
    /// The most bytes that one device holds at once.
    pub peak_memory_bytes: u64,
    /// The limit on the bytes that one device holds.
    pub memory_limit_bytes: Option<u64>,
    /// Whether the plan keeps the limit, or, without one, fits the usable memory of a device.
    #[serde(default = "yes")]
    pub fits: bool,
    /// The answer in tokens or samples per second.
    #[serde(default)]
    pub throughput: Throughput,
    /// The answer in one line.
    #[serde(default)]
    pub summary: String,
    /// The kinds of parallelism, axis by axis.
    #[serde(default)]
    pub parallelism: Parallelism,
    /// Bytes sent per step, all devices together.
    pub traffic_bytes: u64,
    /// The same bytes by the level that they cross, outermost first.
    pub traffic_per_level: Vec<LevelTraffic>,
    /// Equal passes over parts of the batch before one update.
    #[serde(default = "one")]
    pub micro_batches: u32,
    /// The forward ops that are recomputed.
    #[serde(default)]
    pub recompute: Recomputation,
    /// The pipeline; none: all devices run all layers.
    #[serde(default)]
    pub pipeline: Option<PlanPipeline>,
    /// For uniform plans: the degrees, as trainers name them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uniform: Option<PlanDegrees>,
    /// For SoyBean's plans: the elements moved, by its measure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soybean: Option<MoveCount>,
    /// For `place`: the plan's placement first, then the placements that it was compared with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<PlacementRow>,
    /// Costs of the baselines, by name.
    pub baselines: BTreeMap<String, BaselineCost>,
    /// The mesh axes of the configs, outermost first.
    pub axes: Vec<PlanAxis>,
    /// Costs of each layer.
    pub layers: Vec<PlanLayer>,
    /// The config of every op, in the graph's order.
    pub ops: Vec<PlanOp>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// How the search came to this plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search_notes: Vec<String>,
}

fn yes() -> bool {
    true
}

/// A proved lower bound on the overlapped step of any plan, on any axes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverlapBound {
    /// No plan's step is shorter.
    pub lower_bound_seconds: f64,
    /// How far this plan's step is above the bound, relative to the bound; none for a bound of zero.
    pub gap: Option<f64>,
}

impl OverlapBound {
    /// The bound of a simulated step, both in picoseconds.
    pub fn of(step: u64, lower_bound: i64) -> Self {
        Self {
            lower_bound_seconds: lower_bound as f64 / 1e12,
            gap: gap(i64::try_from(step).unwrap_or(i64::MAX), lower_bound),
        }
    }

    /// The same step, held against a lower bound of more plans.
    #[must_use]
    pub fn weakened_to(self, lower_bound_seconds: f64) -> Self {
        let step = self.gap.map(|gap| (1.0 + gap) * self.lower_bound_seconds);
        if lower_bound_seconds >= self.lower_bound_seconds {
            return self;
        }
        let gap = step.filter(|_| lower_bound_seconds > 0.0).map(|step| step / lower_bound_seconds - 1.0);
        Self { lower_bound_seconds, gap }
    }

    /// A step of so many seconds, held against the better of its bound and another one.
    #[must_use]
    pub fn raised_to(self, lower_bound_seconds: f64, step_seconds: f64) -> Self {
        if lower_bound_seconds <= self.lower_bound_seconds {
            return self;
        }
        Self { lower_bound_seconds, gap: Some(step_seconds / lower_bound_seconds - 1.0) }
    }
}

fn off() -> String {
    "off".into()
}

fn one() -> u32 {
    1
}

/// The forward ops whose results are dropped and computed again before their backward readers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recomputation {
    /// The policy that chose them: `off`, `elementwise`, `selective`, `full`, or `ops` where it is none of these.
    pub policy: String,
    /// Their names, in the graph's order.
    pub ops: Vec<String>,
}

impl Default for Recomputation {
    fn default() -> Self {
        Self { policy: "off".into(), ops: Vec::new() }
    }
}

/// The degrees of a uniform plan, as trainers name them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanDegrees {
    /// Tensor parallelism.
    pub tp: u32,
    /// Pipeline stages: groups of devices.
    pub pp: u32,
    /// Chunks of layers per group.
    pub vp: u32,
    /// Context parallelism.
    pub cp: u32,
    /// Expert parallelism, a part of data parallelism.
    pub ep: u32,
    /// Data parallelism.
    pub dp: u32,
    /// Samples per micro-batch and replica.
    pub mbs: u64,
    /// ZeRO level: 0 to 3.
    pub zero: u32,
    /// Sequence parallelism.
    pub sp: bool,
    /// The recomputation policy.
    pub recompute: String,
    /// The pipeline schedule.
    pub schedule: String,
    /// Blocks of every stage along the layers.
    pub blocks: Vec<u32>,
}

/// Stages of layers on groups of devices, and the schedule of their passes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanPipeline {
    /// The schedule's name.
    pub schedule: String,
    /// Chunks of layers per group.
    pub chunks: u32,
    /// Names of the mesh axes that number the groups, outermost first.
    pub axes: Vec<String>,
    /// The stages along the layers.
    pub stages: Vec<PlanStage>,
    /// The share of the step in which a group of devices runs no pass and no update, on average.
    pub bubble: f64,
}

/// A stage of a pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanStage {
    /// Its layers by name, in the graph's order.
    pub layers: Vec<String>,
    /// The group that runs it.
    pub group: u32,
    /// Number of devices of the group.
    pub devices: u32,
    /// Computing and communication of its layers in a step, without overlap.
    pub seconds: f64,
    /// The most bytes that a device of the group holds at once.
    pub peak_memory_bytes: u64,
}

/// The quantity that a search minimises. Objective, bound and proof always refer to the sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimised {
    /// The cost model's sum: all ops and all communication one after the other.
    #[default]
    Sum,
    /// The simulated step, where communication overlaps with computing.
    Simulated,
    /// Elements moved by SoyBean's measure.
    Moves,
    /// None: a recipe.
    Nothing,
}

/// Where operator times come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostSource {
    /// The measured device; none: data sheets only.
    pub measured_device: Option<String>,
    /// Ops whose time was measured.
    pub measured: u64,
    /// Ops whose time was interpolated between measurements.
    pub interpolated: u64,
    /// Ops whose time comes from the data sheet.
    pub roofline: u64,
}

/// The searched space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SearchSpace {
    /// Description in words.
    pub description: String,
    /// Whether every prime axis was searched separately.
    pub prime_axes: bool,
    /// Whether every op was a variable, rather than every layer.
    #[serde(default)]
    pub untied: bool,
    /// Number of variables: layers, or ops.
    pub variables: usize,
    /// Number of choices of all variables together.
    pub choices: usize,
    /// Where the plan was refined on finer axes: the space that was searched first. Proofs refer to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coarse: Option<CoarseSpace>,
}

/// The answer on coarser axes, before refinement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoarseSpace {
    /// The axes, in words.
    pub axes: String,
    /// The best plan's objective there.
    pub objective: i64,
    /// No plan on these axes costs less.
    pub lower_bound: i64,
    /// (objective - lower_bound) / lower_bound; none where the bound is zero.
    pub gap: Option<f64>,
}

/// Durations of the stages of planning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTimes {
    /// Reading the model and pricing every choice.
    pub build_seconds: f64,
    /// Searching, including the baselines.
    pub solve_seconds: f64,
    /// Bounding the objective on prime axes, where the first search was on merged axes.
    #[serde(default)]
    pub bound_seconds: f64,
    /// Refining on finer axes, where the first search was on merged axes.
    pub refine_seconds: f64,
    /// Pricing the plan and the baselines in detail.
    pub describe_seconds: f64,
    /// Simulating the step, and shortening the simulated step.
    #[serde(default)]
    pub polish_seconds: f64,
}

impl StageTimes {
    /// Rounds to whole microseconds, which JSON preserves.
    #[must_use]
    pub fn rounded(self) -> Self {
        let round = |seconds: f64| (seconds * 1e6).round() / 1e6;
        Self {
            build_seconds: round(self.build_seconds),
            solve_seconds: round(self.solve_seconds),
            bound_seconds: round(self.bound_seconds),
            refine_seconds: round(self.refine_seconds),
            describe_seconds: round(self.describe_seconds),
            polish_seconds: round(self.polish_seconds),
        }
    }
}

/// Predicted times of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// The whole step.
    pub step_seconds: f64,
    /// Computing.
    pub compute_seconds: f64,
    /// Communication while no op computes.
    pub exposed_comm_seconds: f64,
}

/// Bytes over one level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelTraffic {
    /// The level's name.
    pub level: String,
    /// Bytes per step.
    pub bytes: u64,
}

/// Costs of a baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BaselineCost {
    /// Predicted time of a step.
    pub step_seconds: f64,
    /// The computing part of that time.
    pub compute_seconds: f64,
    /// Bytes sent per step.
    pub traffic_bytes: u64,
    /// The most bytes that one device holds at once.
    pub peak_memory_bytes: u64,
    /// Whether it keeps the plan's memory limit, or, without one, fits the usable memory of a device.
    #[serde(default = "yes")]
    pub fits: bool,
    /// The objective in picoseconds, without overlap.
    pub objective: i64,
    /// Its number of micro-batches: of those that a plan may have, the one that suits it best.
    #[serde(default = "one")]
    pub micro_batches: u32,
    /// The name of its policy of recomputation, chosen in the same way.
    #[serde(default = "off")]
    pub recompute: String,
}

impl BaselineCost {
    /// Its micro-batches and recomputation in words; none for a whole batch that recomputes nothing.
    pub fn variant(&self) -> Option<String> {
        let count = (self.micro_batches > 1).then(|| format!("{} micro-batches", self.micro_batches));
        let policy = (self.recompute != "off").then(|| format!("recompute {}", self.recompute));
        let words: Vec<String> = count.into_iter().chain(policy).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// Whether it is a better answer than another cost of the same recipe: it fits where the other does not, or its step is
    /// shorter.
    pub fn is_better_than(&self, other: &Self) -> bool {
        match (self.fits, other.fits) {
            (true, true) => self.step_seconds < other.step_seconds,
            (fits, other) => fits && !other,
        }
    }
}

/// A mesh axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanAxis {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size: u32,
}

/// A layer's costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanLayer {
    /// The forward op's name.
    pub name: String,
    /// The forward op's config.
    pub config: String,
    /// The stored layout of its first weight: the config of the update. None for layers without weights.
    #[serde(default)]
    pub weights: Option<String>,
    /// Computing, on one device.
    pub compute_seconds: f64,
    /// Communication: fetches, halo exchanges and reductions.
    pub comm_seconds: f64,
}

/// An op's config.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanOp {
    /// The op's name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// Its layer.
    pub layer: String,
    /// The op that it recomputes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recomputes: Option<String>,
    /// The config in short form: `n4·c4`.
    pub config: String,
    /// The number of parts of each split factor.
    pub degrees: BTreeMap<String, u64>,
    /// Per mesh axis: the factor that it splits, `@` and the digit of a pin, or null where it replicates the op.
    pub axes: Vec<Option<String>>,
}

/// Figures of a placement of whole layers on devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementRow {
    /// The method that built it.
    pub name: String,
    /// Whether it is a baseline.
    pub baseline: bool,
    /// Time of the simulated step.
    pub step_seconds: f64,
    /// Bytes that flow between devices, in both directions.
    pub cut_bytes: u64,
    /// The work of the busiest device over the average work.
    pub imbalance: f64,
    /// The most bytes that one device holds at once.
    pub peak_memory_bytes: u64,
}

/// Elements that a plan moves, by SoyBean's measure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveCount {
    /// Elements that each cut moves within one of the device groups that it cuts, first cut first.
    pub cuts: Vec<u64>,
    /// Elements that all devices move: `Σ 2^(i-1) cuts[i]`.
    pub total_elements: u64,
    /// Whether every cut moves the fewest elements, given the cuts before it.
    pub proved: bool,
}

impl Plan {
    /// The plan as JSON.
    ///
    /// # Errors
    /// A broken invariant: a plan is plain data with text keys.
    pub fn to_json(&self) -> Result<String, PlanError> {
        let json = serde_json::to_string_pretty(self);
        debug_assert!(json.is_ok(), "a plan is plain data with text keys");
        json.map_err(|error| PlanError::Internal { reason: error.to_string() })
    }

    /// Reads a plan back.
    ///
    /// # Errors
    /// Where the JSON is not a plan of this version.
    pub fn from_json(json: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let version: Version = serde_json::from_slice(json).map_err(|e| format!("not a plan: {e}"))?;
        if version.format_version != FORMAT_VERSION {
            return Err(format!(
                "the plan has format version {}, this program reads version {FORMAT_VERSION}; plan again",
                version.format_version
            ));
        }
        serde_json::from_slice(json).map_err(|e| format!("not a plan: {e}"))
    }
}
