//! A request: what is planned, for which machine, and what the search may take.
//!
//! One type for the command line, Python and plan files. The command line parses it; Python hands over the same options; a
//! plan file keeps model, machine and costs, so that the plan can be opened again.

use serde::{Deserialize, Serialize};
use shardwright_graph::{GradientPrecision, Optimizer, RecomputePolicy, Role};
use shardwright_machine::{Bytes, EngineName, Machine};
use shardwright_onnx::Loss;
use shardwright_plan::ConfigConstraint;
use shardwright_stages::schedule::{SCHEDULES, Schedule};
use shardwright_strategies::pipeline::UniformRequest;
use shardwright_suggest::{did_you_mean, unknown};
use shardwright_zoo::Precision;
use std::num::NonZeroU32;
use std::time::Duration;

/// The machine where none is named.
const DEFAULT_MACHINE: &str = "p100x16";
/// Seconds of search where no limit is given.
const DEFAULT_SECONDS: u64 = 60;
/// The gap at which a search stops where none is given.
const DEFAULT_GAP: f64 = 0.01;

/// A model, as a user names it.
#[derive(Clone, Debug, PartialEq, clap::Args, Serialize, Deserialize)]
pub struct ModelSpec {
    /// A published model (`llama3-8b`), a built-in one with options (`vgg16`, `mlp:batch=400,hidden=300`), or a file: .onnx, .mlir
    /// or .stablehlo (text as JAX prints it, also .gz), .json (a Hugging Face config.json, or our graph)
    #[arg(id = "model", value_name = "MODEL")]
    #[serde(rename = "model")]
    pub name: String,
    /// The StableHLO program itself, or a graph where the name ends in `.json`; the name is then only a name.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Samples per step, over all devices (global batch)
    #[arg(long)]
    pub batch: Option<u64>,
    /// Tokens per sample, for models of sequences
    #[arg(long, value_name = "TOKENS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    /// Precision: f32 (convolutions in TF32 where the device has it), tf32 (products too), ieee (f32 without TF32), bf16, mixed (bf16
    /// with f32 master weights and optimizer state), fp8 (mixed, with linear layers multiplied in 8 bits). Published models and
    /// configs are mixed by default, other built-in models f32. Files of steps state their own types
    #[arg(long, value_parser = parse_precision)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// What gradients are added up and stored in, with mixed and fp8: bf16 (16 bytes per parameter with Adam) or f32 (18)
    #[arg(long, default_value = "bf16", value_parser = parse_gradients)]
    #[serde(default, skip_serializing_if = "is_default")]
    pub gradients: GradientPrecision,
    /// Role of a StableHLO program's argument: `params.*=parameter`, `arg3=input`. Roles are parameter, state, input and
    /// constant. May be repeated
    #[arg(long = "role", value_name = "NAME=ROLE", value_parser = parse_role)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<(String, Role)>,
    /// Replicate custom calls to this target, which must be a pure function; may be repeated
    #[arg(long, value_name = "TARGET")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub opaque: Vec<String>,
    /// Rule of custom calls to a target: `my_kernel=b q _, b k _ -> b q _`. The call works on each block of the dimensions of
    /// one name separately, and needs `_` whole. May be repeated
    #[arg(long = "rule", value_name = "TARGET=RULE", value_parser = parse_rule)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<(String, String)>,
    /// Size of a symbolic dimension of an ONNX file; may be repeated
    #[arg(long = "dim", value_name = "NAME=N", value_parser = parse_size)]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dims: Vec<(String, u64)>,
    /// Loss of an ONNX model: cross-entropy, mse, or output (its first output)
    #[arg(long, default_value = "cross-entropy", value_parser = parse_loss)]
    #[serde(default, with = "loss", skip_serializing_if = "is_default")]
    pub loss: Loss,
    /// Plan only the forward pass, without loss and updates
    #[arg(long)]
    #[serde(default, skip_serializing_if = "is_default")]
    pub inference: bool,
    /// Keep attention of an ONNX or StableHLO file as products and softmax that store scores, instead of one fused op
    #[arg(long)]
    #[serde(default, skip_serializing_if = "is_default")]
    pub plain_attention: bool,
    /// Optimizer: sgd, momentum, adam, adamw. By default adam for transformers, else sgd
    #[arg(long, value_parser = parse_optimizer)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<Optimizer>,
}

/// The memory limit of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The device's memory less its reserve, where the machine's memory limits plans.
    #[default]
    Device,
    /// None.
    Unlimited,
    /// A number of bytes.
    Bytes(Bytes),
}

impl MemoryLimit {
    /// Parses `device`, `none` or a number of bytes with its unit.
    ///
    /// # Errors
    /// Where it is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "device" => Ok(Self::Device),
            "none" => Ok(Self::Unlimited),
            _ => Bytes::parse(text)
                .map(Self::Bytes)
                .map_err(|reason| format!("{reason}, or `none`{}", did_you_mean(text, ["none"]))),
        }
    }

    /// The most bytes that a plan may hold on each device of a machine.
    pub fn on(self, machine: &Machine) -> Option<Bytes> {
        match self {
            Self::Device => machine.memory_limit(),
            Self::Unlimited => None,
            Self::Bytes(bytes) => Some(bytes),
        }
    }
}

/// Which forward ops are recomputed in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecomputeChoice {
    /// None, unless the memory limit binds: then the policy with the shortest step.
    #[default]
    Auto,
    /// Those of one policy.
    Policy(RecomputePolicy),
}

impl RecomputeChoice {
    /// Parses `auto` or the name of a policy.
    ///
    /// # Errors
    /// Where it is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let found = RecomputePolicy::ALL.into_iter().find(|policy| policy.name() == text);
        found.map(Self::Policy).ok_or_else(|| {
            unknown("policy of recomputation", text, &["off", "auto", "elementwise", "selective", "full"])
        })
    }
}

/// What chooses between keeping and recomputing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecomputeUnit {
    /// All equal blocks, by one policy: what engines take.
    #[default]
    Blocks,
    /// Every op for itself.
    Ops,
}

impl RecomputeUnit {
    /// Parses `blocks` or `ops`.
    ///
    /// # Errors
    /// Where it is neither.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "blocks" => Ok(Self::Blocks),
            "ops" => Ok(Self::Ops),
            _ => Err(unknown("unit of recomputation", text, &["blocks", "ops"])),
        }
    }
}

/// Into how many micro-batches a step is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatchChoice {
    /// Any divisor of the batch: the one with the shortest step.
    Auto,
    /// This number.
    Count(NonZeroU32),
}

impl Default for MicroBatchChoice {
    fn default() -> Self {
        Self::Count(NonZeroU32::MIN)
    }
}

impl MicroBatchChoice {
    /// Parses `auto` or a number.
    ///
    /// # Errors
    /// Where it is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Count).map_err(|_| {
                let nearest = did_you_mean(text, ["auto"]);
                format!(
                    "give a number of micro-batches, one or more, that divides the batch, or auto{nearest}"
                )
            }),
        }
    }
}

/// Whether layers are divided among groups of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PipelineChoice {
    /// All devices run all layers.
    #[default]
    Off,
    /// The number of groups whose step is shortest; one where a pipeline gains nothing.
    Auto,
    /// So many groups, with stages of equal time.
    Groups(NonZeroU32),
}

impl PipelineChoice {
    /// Parses `off`, `auto` or a number of groups.
    ///
    /// # Errors
    /// Where it is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.parse::<u32>() {
            _ if text == "off" => Ok(Self::Off),
            _ if text == "auto" => Ok(Self::Auto),
            Ok(1) => Ok(Self::Off),
            Ok(groups) => {
                NonZeroU32::new(groups).map(Self::Groups).ok_or_else(|| "give at least one group".into())
            }
            Err(_) => {
                let nearest = did_you_mean(text, ["off", "auto"]);
                Err(format!(
                    "{text} is no number of groups of devices; give one such as 4, off or auto{nearest}"
                ))
            }
        }
    }
}

fn one_forward_one_backward() -> Schedule {
    Schedule::OneForwardOneBackward
}

fn parse_schedule(text: &str) -> Result<Schedule, String> {
    let (name, chunks) = match text.split_once(':') {
        None => (text, None),
        Some((name, chunks)) => {
            let chunks = chunks.parse().map_err(|_| format!("`{chunks}` is no number of chunks"))?;
            (name, Some(chunks))
        }
    };
    let names = SCHEDULES.map(|(name, _)| name);
    if !names.contains(&name) {
        return Err(unknown("schedule", name, &names));
    }
    Schedule::parse(name, chunks).map_err(|error| error.to_string())
}

/// A model on a machine, constraints of the plan, and limits of the search.
#[derive(Clone, Debug, clap::Args, Serialize, Deserialize)]
pub struct Request {
    /// The model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelSpec,
    /// GPUs (`8xh100`), a TPU slice (`tpu-v5p-256`), a built-in machine, `flat:N`, or a .toml file; `NAME:K` for its first K
    /// devices
    #[arg(long, default_value = DEFAULT_MACHINE)]
    pub machine: String,
    /// Measured op times: a .json file, or the name of a built-in measured device
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub costs: Option<String>,
    /// The engine that will run the step: torch-eager, torch-compile, torchtitan, torchtitan-eager, megatron, megatron-core, megatron-bridge, xla
    /// or embedded. Ops are then priced as its kernels run them: fused, in its number formats, with its host time and its own memory. By
    /// default every op is a kernel
    #[arg(long, value_name = "ENGINE", value_parser = parse_engine)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineName>,
    /// Memory limit per device: `16GiB`, `80GB`; `none` lifts it. By default the device's memory less its reserve
    #[arg(long, value_name = "LIMIT", default_value = "device", hide_default_value = true, value_parser = MemoryLimit::parse)]
    #[serde(skip)]
    pub memory: MemoryLimit,
    /// Equal passes over parts of the batch before one update: gradients are added up. A divisor of the batch, or auto
    /// (the fastest of all that fit)
    #[arg(long, value_name = "N|auto", default_value = "1", value_parser = MicroBatchChoice::parse, hide_default_value = true, allow_negative_numbers = true)]
    #[serde(skip)]
    pub micro_batches: MicroBatchChoice,
    /// Pipeline stages: the number of groups of devices that share the layers, units of the outermost levels; off by default; auto: the best
    /// number, with all blocks split alike
    #[arg(long, value_name = "P", default_value = "off", value_parser = PipelineChoice::parse, hide_default_value = true)]
    #[serde(skip)]
    pub pipeline: PipelineChoice,
    /// The order of a pipeline's passes: gpipe, 1f1b, interleaved (`interleaved:3` for three chunks per device), zb-h1, zb-v, dualpipe-v
    #[arg(long, value_name = "NAME", default_value = "1f1b", value_parser = parse_schedule)]
    #[serde(skip, default = "one_forward_one_backward")]
    pub schedule: Schedule,
    /// Price this plan: `tp=8,pp=8,vp=3,mbs=1,zero=1,sp,recompute=selective`. Degrees of tensor (tp), pipeline (pp, chunks vp), context
    /// (cp), expert (ep) and data parallelism (dp), samples per micro-batch (mbs), ZeRO level, sequence parallelism (sp),
    /// recompute=off|elementwise|selective|full, schedule=NAME. What is left out is 1 or off; mbs is then the fastest
    #[arg(long = "as", value_name = "DEGREES", value_parser = UniformRequest::parse, conflicts_with_all = ["uniform", "micro_batches"])]
    #[serde(skip)]
    pub as_plan: Option<UniformRequest>,
    /// Search the best plan that treats all blocks alike, with or without a pipeline: what trainers' options can express
    #[arg(long, conflicts_with = "micro_batches")]
    #[serde(skip)]
    pub uniform: bool,
    /// Recompute forward ops in the backward pass instead of keeping their results: off, elementwise (activations,
    /// norms and the like), selective (cheap ops and attention scores), full (whole blocks), auto (off where the plan fits
    /// easily, else the fastest)
    #[arg(long, value_name = "POLICY", default_value = "auto", value_parser = RecomputeChoice::parse, hide_default_value = true)]
    #[serde(skip)]
    pub recompute: RecomputeChoice,
    /// What chooses between keeping and recomputing: blocks (one policy for all equal blocks, as engines take it) or ops (every
    /// forward op for itself, as the memory limit allows; in models of many ops, the ops at one position of equal blocks)
    #[arg(long, value_name = "UNIT", default_value = "blocks", value_parser = RecomputeUnit::parse, conflicts_with_all = ["as_plan", "uniform"])]
    #[serde(skip)]
    pub recompute_policy: RecomputeUnit,
    /// Price of a device for an hour, in any currency: `2.5` or `2.5/gpu-hour`. The plan then says what a million tokens cost
    #[arg(long, value_name = "PRICE", value_parser = parse_price)]
    #[serde(skip)]
    pub price: Option<f64>,
    /// Choose a config per op instead of per layer: weights, gradients and optimizer state get their own layouts
    #[arg(long)]
    #[serde(skip)]
    pub untied: bool,
    /// Constrain layers to a config: `fc*=c4` for all layers whose name matches; may be repeated
    #[arg(long, value_name = "PATTERN=CONFIG", value_parser = ConfigConstraint::parse)]
    #[serde(skip)]
    pub fix: Vec<ConfigConstraint>,
    /// Stop the search after this many seconds with the best plan so far
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    #[serde(skip)]
    pub time: Duration,
    /// Stop the search when the plan is at most this share above the lower bound of the objective searched: `0.01` for 1%; `0`
    /// searches for a proof
    #[arg(long, value_name = "SHARE", default_value = "0.01", value_parser = parse_gap)]
    #[serde(skip)]
    pub gap: f64,
    /// For --solver place: allowed imbalance; `0.1` (the default) lets a device have 10% more than its share of the work
    #[arg(long, value_name = "SHARE", value_parser = parse_balance)]
    #[serde(skip)]
    pub balance: Option<f64>,
    /// One program for all devices, as JAX and PyTorch need: no pins. Always on for StableHLO
    #[arg(long)]
    #[serde(skip)]
    pub spmd: bool,
    /// For --solver mcmc and place: end every chain after this many proposals
    #[arg(long, value_name = "N")]
    #[serde(skip)]
    pub proposals: Option<u64>,
    /// Memory limit of the search's tables on this computer: `4GiB`; half of the free memory by default
    #[arg(long, value_parser = Bytes::parse)]
    #[serde(skip)]
    pub ram: Option<Bytes>,
    /// Number of threads; all cores by default
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    #[serde(skip)]
    pub threads: usize,
    /// Seed of all randomness
    #[arg(long, default_value_t = 0)]
    #[serde(skip)]
    pub seed: u64,
}

impl Request {
    /// A model on a machine, everything else by default.
    pub fn new(model: &str, machine: &str) -> Self {
        Self {
            model: ModelSpec {
                name: model.into(),
                text: None,
                batch: None,
                seq: None,
                precision: None,
                gradients: GradientPrecision::default(),
                roles: Vec::new(),
                opaque: Vec::new(),
                rules: Vec::new(),
                dims: Vec::new(),
                loss: Loss::default(),
                inference: false,
                plain_attention: false,
                optimizer: None,
            },
            machine: machine.into(),
            costs: None,
            engine: None,
            memory: MemoryLimit::Device,
            micro_batches: MicroBatchChoice::default(),
            pipeline: PipelineChoice::Off,
            schedule: one_forward_one_backward(),
            as_plan: None,
            uniform: false,
            recompute: RecomputeChoice::Auto,
            recompute_policy: RecomputeUnit::Blocks,
            price: None,
            untied: false,
            fix: Vec::new(),
            time: Duration::from_secs(DEFAULT_SECONDS),
            gap: DEFAULT_GAP,
            balance: None,
            spmd: false,
            proposals: None,
            ram: None,
            threads: 0,
            seed: 0,
        }
    }

    /// A model on the default machine.
    pub fn of_model(model: &str) -> Self {
        Self::new(model, DEFAULT_MACHINE)
    }

    /// Parses a request from the options of `shardwright plan`.
    ///
    /// # Errors
    /// Where an option is unknown or has a wrong value; the text names both.
    pub fn parse(options: &[String]) -> Result<Self, String> {
        let command = <Self as clap::Args>::augment_args(clap::Command::new("plan").no_binary_name(true));
        let matches = command.try_get_matches_from(options).map_err(|error| {
            let text = error.to_string();
            let first = text.split("\n\n").next().unwrap_or(&text);
            first.strip_prefix("error: ").unwrap_or(first).trim_end().to_string()
        })?;
        <Self as clap::FromArgMatches>::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    /// Model, machine, costs and engine of this request, everything else of another.
    #[must_use]
    pub fn with_limits_of(self, other: &Self) -> Self {
        let Self { model, machine, costs, engine, .. } = self;
        Self { model, machine, costs, engine, ..other.clone() }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A loss in a file: its name.
mod loss {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use shardwright_onnx::Loss;

    pub fn serialize<S: Serializer>(loss: &Loss, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(loss.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Loss, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// An optimizer by name.
///
/// # Errors
/// Where there is none of that name.
pub fn parse_optimizer(text: &str) -> Result<Optimizer, String> {
    match text {
        "sgd" => Ok(Optimizer::sgd(0.01)),
        "momentum" => Ok(Optimizer::momentum(0.01, 0.9)),
        "adam" => Ok(Optimizer::adam(0.001)),
        "adamw" => Ok(Optimizer::adamw(0.001)),
        _ => Err(unknown("optimizer", text, &["sgd", "momentum", "adam", "adamw"])),
    }
}

/// A loss by name.
///
/// # Errors
/// Where there is none of that name.
pub fn parse_loss(text: &str) -> Result<Loss, String> {
    text.parse().map_err(|_| unknown("loss", text, &Loss::ALL.map(Loss::name)))
}

/// An engine by name.
///
/// # Errors
/// Where there is none of that name.
pub fn parse_engine(text: &str) -> Result<EngineName, String> {
    let names = EngineName::ALL.map(EngineName::name);
    EngineName::parse(text).map_err(|_| unknown("engine", text, &names))
}

/// A precision by name.
///
/// # Errors
/// Where there is none of that name.
pub fn parse_precision(text: &str) -> Result<Precision, String> {
    Precision::ALL
        .into_iter()
        .find(|precision| precision.name() == text)
        .ok_or_else(|| unknown("precision", text, &Precision::ALL.map(Precision::name)))
}

/// A precision of gradients by name.
///
/// # Errors
/// Where there is none of that name.
pub fn parse_gradients(text: &str) -> Result<GradientPrecision, String> {
    match text {
        "bf16" => Ok(GradientPrecision::Bf16),
        "f32" => Ok(GradientPrecision::F32),
        _ => Err(unknown("precision of gradients", text, &["bf16", "f32"])),
    }
}

/// Parses `NAME=ROLE`.
///
/// # Errors
/// Where it is none.
pub fn parse_role(text: &str) -> Result<(String, Role), String> {
    let (name, role) = text.rsplit_once('=').ok_or("expected NAME=ROLE")?;
    let role = match role {
        "parameter" => Role::Parameter,
        "state" => Role::OptimizerState,
        "input" => Role::Input,
        "constant" => Role::Constant,
        _ => return Err(unknown("role", role, &["parameter", "state", "input", "constant"])),
    };
    Ok((name.into(), role))
}

/// Parses `TARGET=RULE`.
///
/// # Errors
/// Where it is none.
pub fn parse_rule(text: &str) -> Result<(String, String), String> {
    let (target, rule) =
        text.split_once('=').ok_or("expected TARGET=RULE, such as `my_kernel=b d -> b d`")?;
    Ok((target.trim().into(), rule.trim().into()))
}

/// Parses `NAME=N`.
///
/// # Errors
/// Where it is none.
pub fn parse_size(text: &str) -> Result<(String, u64), String> {
    let (name, size) = text.split_once('=').ok_or("expected NAME=N")?;
    let size = size
        .parse()
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| format!("{size} is not a size: give a positive integer"))?;
    Ok((name.into(), size))
}

/// Parses a number of seconds.
///
/// # Errors
/// Where it is none.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is not a duration"))
}

/// Parses a price per device and hour: `2.5`, `$2.5`, `2.5/hour`, `2.5/gpu-hour`.
///
/// # Errors
/// Where it is none.
pub fn parse_price(text: &str) -> Result<f64, String> {
    let (amount, per) = text.split_once('/').unwrap_or((text, "hour"));
    let known = ["hour", "h", "gpu-hour", "gpu-h", "device-hour", "chip-hour"];
    if !known.contains(&per) {
        return Err(format!("`{text}` is not per hour: write 2.5 or 2.5/gpu-hour"));
    }
    let price = amount.trim().trim_start_matches('$').parse::<f64>().ok();
    price
        .filter(|price| price.is_finite() && *price >= 0.0)
        .ok_or_else(|| format!("`{text}` is not a price: write 2.5 or 2.5/gpu-hour"))
}

/// Parses a gap: a share from 0 on.
///
/// # Errors
/// Where it is none.
pub fn parse_gap(text: &str) -> Result<f64, String> {
    let gap = text.parse::<f64>().ok().filter(|gap| gap.is_finite() && *gap >= 0.0);
    gap.ok_or_else(|| format!("`{text}` is not a gap: give 0.01 for 1%, or 0 for a proof"))
}

/// Parses the excess of a device's share of the work: a number from 0 on.
///
/// # Errors
/// Where it is none.
pub fn parse_balance(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text} is not a number"))?;
    if share.is_finite() && share >= 0.0 {
        Ok(share)
    } else {
        Err(format!("{text} is not a share: give 0.1 for a tenth"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_file_keeps_model_machine_and_costs() {
        let text = r#"{"model": "a.onnx", "batch": 4, "optimizer": {"sgd": {"lr": 0.5}}, "seq": 7, "precision": "mixed", "machine": "flat:2",
            "roles": [["x", "parameter"]], "opaque": ["f"], "dims": [["n", 3]], "loss": "mse", "inference": true}"#;
        let read: Request = serde_json::from_str(text).unwrap();
        let model = &read.model;
        assert_eq!((&model.name[..], &read.machine[..], model.batch), ("a.onnx", "flat:2", Some(4)));
        assert_eq!(model.roles, [("x".to_string(), Role::Parameter)]);
        assert_eq!((&model.dims[..], model.loss), (&[("n".to_string(), 3)][..], Loss::Mse));
        let given = Request { seed: 7, untied: true, ..Request::new("plan.json", "flat:8") };
        let both = read.clone().with_limits_of(&given);
        assert_eq!((&both.machine[..], both.seed, both.untied), ("flat:2", 7, true));
        let again: Request = serde_json::from_value(serde_json::to_value(&both).unwrap()).unwrap();
        assert_eq!((again.model, again.machine), (read.model, read.machine));
        let wrong = text.replace("mse", "luck");
        let error = serde_json::from_str::<Request>(&wrong).unwrap_err().to_string();
        assert!(error.contains("there is no loss `luck`"), "{error}");
    }

    #[test]
    fn defaults_are_those_of_the_command_line() {
        let parsed = Request::parse(&["vgg16".to_string()]).unwrap();
        let made = Request::of_model("vgg16");
        assert_eq!(format!("{parsed:?}"), format!("{made:?}"));
    }

    #[test]
    fn memory_and_price_are_read_as_people_write_them() {
        let parse = |options: &[&str]| {
            Request::parse(&options.iter().map(|o| o.to_string()).collect::<Vec<_>>()).unwrap()
        };
        let machine = shardwright_machine::builtin("8xh100").unwrap();
        let limit = |text: &str| parse(&["mlp", "--memory", text]).memory.on(&machine);
        assert_eq!(parse(&["mlp"]).memory.on(&machine), Some(Bytes(78 << 30)));
        assert_eq!(limit("none"), None);
        assert_eq!((limit("16GiB"), limit("16gb")), (Some(Bytes(16 << 30)), Some(Bytes(16_000_000_000))));
        for text in ["2.5", "2.5/gpu-hour", "$2.5/hour"] {
            assert_eq!(parse(&["mlp", "--price", text]).price, Some(2.5), "{text}");
        }
        assert_eq!((parse(&["mlp"]).gap, parse(&["mlp", "--gap", "0"]).gap), (0.01, 0.0));
        for text in ["tight", "-0.01", "inf", "NaN", "1%"] {
            assert!(parse_gap(text).unwrap_err().contains("is not a gap"), "{text}");
        }
        for text in ["free", "2.5/day", "-1", "inf"] {
            assert!(parse_price(text).is_err(), "{text}");
        }
    }

    #[test]
    fn wrong_options_are_named() {
        let parse = |options: &[&str]| {
            Request::parse(&options.iter().map(|o| o.to_string()).collect::<Vec<_>>()).unwrap_err()
        };
        assert!(parse(&["mlp", "--memory", "much"]).contains("--memory"));
        assert!(parse(&["mlp", "--wrong", "1"]).contains("--wrong"));
    }
}
