//! The plan: what was found, what it is predicted to cost, and everything that was assumed. Versioned JSON.

use crate::tilings::Moved;
use serde::{Deserialize, Serialize};
use shardwright_graph::{Optimizer, Role};
use std::collections::BTreeMap;

/// The version of the plan's JSON.
pub const FORMAT_VERSION: u32 = 1;

/// A plan for one model on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// The version of Shardwright that made it.
    pub shardwright_version: String,
    /// The model's name, with its options.
    pub model: String,
    /// How the model and the machine were asked for, so that they can be opened again; the command line's to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<PlanRequest>,
    /// FNV-1a of the graph's JSON: the model as it was planned.
    pub model_hash: String,
    /// The machine's name.
    pub machine: String,
    /// What of the machine the costs depend on.
    pub machine_fingerprint: String,
    /// How many devices it has.
    pub devices: u32,
    /// Where operator times come from.
    pub costs: CostSource,
    /// The strategy asked for.
    pub solver: String,
    /// What the search made as small as it could.
    #[serde(default)]
    pub optimised: Optimised,
    /// Seed of the search.
    pub seed: u64,
    /// What was searched: the objective, bound and gap speak of this space.
    pub space: SpaceUsed,
    /// Picoseconds per step, all ops and all communication in sequence: the network's objective.
    pub objective: i64,
    /// No plan in the space is faster than this, on its coarse axes where it has some; zero where nothing is proved.
    pub lower_bound: i64,
    /// How far the objective may be above the optimum, relative to the objective.
    pub gap: f64,
    /// Whether nothing in the space is faster.
    pub proved_optimal: bool,
    /// Time to build and solve the search problem.
    pub search_seconds: f64,
    /// The same, stage by stage.
    #[serde(default)]
    pub stages: StageTimes,
    /// The most memory that planning held at once, on the computer that planned; none where nobody could tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planning_memory_bytes: Option<u64>,
    /// Predicted times of a step.
    pub simulated: StepTimes,
    /// The most bytes that one device holds at once.
    pub peak_memory_bytes: u64,
    /// The most that one was allowed to hold.
    pub memory_limit_bytes: Option<u64>,
    /// Bytes sent per step, all devices together.
    pub traffic_bytes: u64,
    /// The same by the level that they cross, outermost first.
    pub traffic_per_level: Vec<LevelTraffic>,
    /// For SoyBean's plans: what they move by its own measure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soybean: Option<Moved>,
    /// For `place`: the plan's placement first, then those that it was compared with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<PlacementRow>,
    /// What the classics would cost.
    pub baselines: BTreeMap<String, BaselineCost>,
    /// The mesh axes that configs speak of, outermost first.
    pub axes: Vec<PlanAxis>,
    /// What each layer costs.
    pub layers: Vec<PlanLayer>,
    /// The config of every op, in the graph's order.
    pub ops: Vec<PlanOp>,
    /// What to keep in mind.
    pub warnings: Vec<String>,
}

/// What a search made as small as it could. Objective, bound and proof always speak of the sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimised {
    /// The cost model's sum: all ops and all communication one after the other.
    #[default]
    Sum,
    /// The simulated step, where communication hides behind computing.
    Simulated,
    /// What SoyBean's measure says is moved.
    Moves,
    /// A recipe: nothing was searched.
    Nothing,
}

/// How a plan's model and machine were asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanRequest {
    /// A built-in model with options, or a file; what to call [`PlanRequest::text`] where that is there.
    pub model: String,
    /// The model itself, where it was in no file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Samples per step, where that was said.
    pub batch: Option<u64>,
    /// How weights are updated.
    pub optimizer: Optimizer,
    /// A built-in machine, or a file.
    pub machine: String,
    /// Measured operator costs: a built-in device, or a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub costs: Option<String>,
    /// What arguments of a program were said to be for, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<(String, Role)>,
    /// Targets of custom calls that were said to be pure functions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub opaque: Vec<String>,
    /// Sizes of dimensions that the model leaves open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dims: Vec<(String, u64)>,
    /// What is trained, where that is not the usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<String>,
    /// Whether there is only the forward pass.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub inference: bool,
}

/// Where operator times come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostSource {
    /// The device that was measured; none: data sheets only.
    pub measured_device: Option<String>,
    /// Ops whose time was measured.
    pub measured: u64,
    /// Ops whose time was interpolated between measurements.
    pub interpolated: u64,
    /// Ops whose time comes from the data sheet.
    pub roofline: u64,
}

/// What was searched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpaceUsed {
    /// In words.
    pub description: String,
    /// Whether every prime axis was searched on its own.
    pub prime_axes: bool,
    /// Whether every op chose for itself, and not every layer.
    #[serde(default)]
    pub untied: bool,
    /// Variables: layers, or ops.
    pub variables: usize,
    /// Choices of all variables together.
    pub choices: usize,
    /// The space that was searched first, where the plan was refined on finer axes: what is proved holds for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coarse: Option<CoarseSpace>,
}

/// What was found on coarser axes before a plan was refined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoarseSpace {
    /// The axes, in words.
    pub axes: String,
    /// The best plan's cost there.
    pub objective: i64,
    /// No plan on these axes costs less.
    pub lower_bound: i64,
    /// (objective - lower_bound) / objective.
    pub gap: f64,
}

/// How long the stages of planning took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTimes {
    /// Reading the model and pricing every choice.
    pub build_seconds: f64,
    /// Searching, the baselines included.
    pub solve_seconds: f64,
    /// Searching on finer axes, where the first search was on glued ones.
    pub refine_seconds: f64,
    /// Pricing plan and baselines in detail.
    pub describe_seconds: f64,
    /// Simulating the step, and shortening it there.
    #[serde(default)]
    pub polish_seconds: f64,
}

impl StageTimes {
    /// To whole microseconds, which survive being written as JSON.
    #[must_use]
    pub fn rounded(self) -> Self {
        let round = |seconds: f64| (seconds * 1e6).round() / 1e6;
        Self {
            build_seconds: round(self.build_seconds),
            solve_seconds: round(self.solve_seconds),
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
    /// Communicating while nothing is computed.
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

/// What a baseline would cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BaselineCost {
    /// Predicted time of a step.
    pub step_seconds: f64,
    /// Of that, computing.
    pub compute_seconds: f64,
    /// Bytes sent per step.
    pub traffic_bytes: u64,
    /// The most bytes that one device holds at once.
    pub peak_memory_bytes: u64,
    /// The same time in the network's unit.
    pub objective: i64,
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
    /// How its first weight is stored: the config of the update. None for layers without weights.
    #[serde(default)]
    pub weights: Option<String>,
    /// Computing, on one device.
    pub compute_seconds: f64,
    /// Communicating: what it fetches, exchanges and reduces.
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
    /// For people: `n4·c4`.
    pub config: String,
    /// Into how many parts each split factor is cut.
    pub degrees: BTreeMap<String, u64>,
    /// Per mesh axis: the factor that it splits, `@` and the digit that it pins the op to, null where it repeats the op.
    pub axes: Vec<Option<String>>,
}

/// Whole layers on devices, in numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementRow {
    /// How it was made.
    pub name: String,
    /// Whether it is one of the plain ones that others are measured by.
    pub baseline: bool,
    /// Of the simulated step.
    pub step_seconds: f64,
    /// Bytes that flow between devices, there and back.
    pub cut_bytes: u64,
    /// The work of the device that has most of it, in relation to work shared without loss.
    pub imbalance: f64,
    /// The most that one device holds at once.
    pub peak_memory_bytes: u64,
}

impl Plan {
    /// The plan as JSON.
    pub fn to_json(&self) -> String {
        // A plan is plain data: numbers, texts, lists.
        serde_json::to_string_pretty(self).unwrap_or_default()
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
