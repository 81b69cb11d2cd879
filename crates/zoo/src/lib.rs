//! The zoo: published models as training graphs, built from a name and options.
//!
//! [`build`] returns forward pass, loss, backward pass and updates as one graph. Weights hold no data, so a model of
//! any size is a few thousand ops. Each family has a file that cites its architecture; `docs/models.md` lists the
//! families with their parameter counts. [`layers`] holds the building blocks, for users who build their own models.
//!
//! ```
//! use shardwright_zoo::{BuildOptions, build};
//!
//! let graph = build("gpt:layers=24,hidden=1024,heads=16", &BuildOptions::default())?;
//! let parameters: u64 = graph.parameters().map(|t| graph.tensor(t).ty.shape.elements()).sum();
//! assert_eq!(parameters, 354_823_168);
//!
//! let error = build("gpt:depth=24", &BuildOptions::default()).unwrap_err();
//! assert!(error.to_string().starts_with("model gpt has no option `depth`; it has batch, layers, "));
//! # Ok::<(), shardwright_zoo::ZooError>(())
//! ```

mod alexnet;
mod bert;
mod config;
mod decoder;
mod densenet;
mod dlrm;
mod gpt;
mod inception;
pub mod layers;
mod lenet;
mod llama;
mod mlp;
mod moe;
mod nmt;
mod options;
mod presets;
mod resnet;
mod rnnlm;
mod rnntc;
mod t5;
mod transformer;
mod vgg;
mod vit;

pub use config::{is_config, model_types};
pub use options::{Domain, OptionSpec, OptionValues};
pub use presets::{PRESETS, Preset};

use crate::{config::Config, layers::LayerResult};
use shardwright_graph::{
    BuildError, GradientPrecision, Graph, GraphBuilder, Optimizer, TensorId, train, train_mixed,
};
use shardwright_suggest::did_you_mean;

/// Why a model cannot be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ZooError {
    /// No model has this name.
    #[error("there is no model `{name}`; {known}{nearest}")]
    UnknownModel {
        /// The name that was given.
        name: String,
        /// The nearest known name, as the message's text; empty where none is near.
        nearest: String,
        /// The models that exist, as the message's text: where one is near, how to list them.
        known: String,
    },
    /// The model has no such option.
    #[error("model {model} has no option `{key}`; it has {valid}{nearest}")]
    UnknownOption {
        /// The model.
        model: &'static str,
        /// The key that was given.
        key: String,
        /// The options of the model.
        valid: String,
        /// The nearest of them, as the message's text; empty where none is near.
        nearest: String,
    },
    /// An option has a value outside its domain.
    #[error("model {model}: {key}={value} is not allowed; {key} takes {expected}")]
    BadValue {
        /// The model.
        model: &'static str,
        /// The option.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// The values that the option takes.
        expected: String,
    },
    /// An option is given twice.
    #[error("model {model}: {key} is given twice")]
    GivenTwice {
        /// The model.
        model: &'static str,
        /// The option.
        key: &'static str,
    },
    /// Text between two commas is not a `key=value` pair.
    #[error("model {model}: `{text}` is not of the form key=value")]
    NotAPair {
        /// The model.
        model: &'static str,
        /// The text that was given.
        text: String,
    },
    /// Options contradict each other.
    #[error("model {model}: {reason}")]
    Conflict {
        /// The model.
        model: &'static str,
        /// The options in conflict, and the remedy.
        reason: String,
    },
    /// A field of a config is missing, out of bounds or contradicts another.
    #[error("`{field}`: {reason}")]
    Config {
        /// The field.
        field: String,
        /// Its value, and what is wrong with it.
        reason: String,
    },
    /// The sizes give no valid graph.
    #[error("model {model}: {reason}")]
    Build {
        /// The model.
        model: &'static str,
        /// The op or tensor that failed, and the reason.
        reason: BuildError,
    },
}

/// Why a family's builder fails: on its options, or on the graph.
#[derive(Debug)]
enum Failure {
    Options(ZooError),
    Build(BuildError),
}

impl From<ZooError> for Failure {
    fn from(error: ZooError) -> Self {
        Self::Options(error)
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        Self::Build(error)
    }
}

/// A model's loss tensor, or why the family's builder failed.
type LossResult = Result<TensorId, Failure>;

/// A family of models: all variants of one architecture, selected by options.
pub struct Family {
    /// The name that users type.
    pub name: &'static str,
    /// One line of description.
    pub summary: &'static str,
    /// Options of a variant with the same structure that builds and runs in milliseconds.
    pub tiny: &'static str,
    /// Whether it is a transformer, usually trained with Adam.
    pub transformer: bool,
    /// The options that may be set.
    pub options: &'static [OptionSpec],
    /// Adds the forward pass; returns the loss.
    build: fn(&mut GraphBuilder, &OptionValues) -> LossResult,
}

/// All families, sorted by kind and age.
pub const FAMILIES: &[&Family] = &[
    &mlp::FAMILY,
    &lenet::FAMILY,
    &alexnet::FAMILY,
    &vgg::FAMILY,
    &resnet::FAMILY,
    &inception::FAMILY,
    &densenet::FAMILY,
    &rnntc::FAMILY,
    &rnnlm::FAMILY,
    &nmt::FAMILY,
    &transformer::FAMILY,
    &bert::FAMILY,
    &gpt::FAMILY,
    &llama::FAMILY,
    &moe::FAMILY,
    &dlrm::FAMILY,
];

/// How to build a model.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Samples per step. `None`: the model's `batch` option.
    pub batch: Option<u64>,
    /// Tokens per sample. `None`: the model's `seq` option.
    pub seq: Option<u64>,
    /// The precision. `None`: the model's `dtype` option.
    pub precision: Option<Precision>,
    /// What gradients are stored in, with f32 master weights.
    pub gradients: GradientPrecision,
    /// The optimizer that updates the weights.
    pub optimizer: Optimizer,
    /// Whether to add backward pass and updates. Without them the graph is forward pass and loss, without dropout.
    pub training: bool,
}

/// What a step computes in, and what weights and optimizer state are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32. Devices with TF32 use it for convolutions, as frameworks do.
    F32,
    /// As f32, with TF32 for matrix products too.
    Tf32,
    /// As f32, without TF32.
    Ieee,
    /// Everything in bf16, optimizer state too.
    Bf16,
    /// Computed in bf16; master copies of weights and optimizer state in f32.
    Mixed,
    /// As mixed, with the products of linear layers in 8-bit floats. Tensors are stored in bf16.
    Fp8,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Precision; 6] = [Self::F32, Self::Tf32, Self::Ieee, Self::Bf16, Self::Mixed, Self::Fp8];

    /// The name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Ieee => "ieee",
            Self::Bf16 => "bf16",
            Self::Mixed => "mixed",
            Self::Fp8 => "fp8",
        }
    }

    /// The value of models' `dtype` option.
    fn dtype(self) -> &'static str {
        match self {
            Self::F32 | Self::Tf32 | Self::Ieee => "f32",
            Self::Bf16 => "bf16",
            Self::Mixed => "mixed",
            Self::Fp8 => "fp8",
        }
    }

    /// Whether tensors are f32, and the precision only says how they are multiplied.
    pub fn is_single(self) -> bool {
        self.dtype() == "f32"
    }
}

/// Last parts of the names of linear layers that stay in 16 bits where others are in 8: logits, and gates that choose experts.
/// torchtitan filters the same layers (`output`, `router.gate`); so does DeepSeek-V3 (arXiv 2412.19437, section 3.3).
const WIDE_LAYERS: [&str; 5] = ["logits", "moe.gate", "router", "gate_weight", "classifier"];

fn is_wide(name: &str) -> bool {
    WIDE_LAYERS
        .iter()
        .any(|wide| name.strip_suffix(wide).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

/// The optimizer that a model is usually trained with: Adam for transformers, else plain gradient descent. `spec` may have
/// options; unknown names get the latter.
pub fn usual_optimizer(spec: &str) -> Optimizer {
    let name = spec.split(':').next().unwrap_or(spec).trim();
    let transformer = FAMILIES.iter().any(|family| family.name == name && family.transformer);
    if transformer || is_preset(name) { adam() } else { Optimizer::sgd(LEARNING_RATE) }
}

/// The usual optimizer of transformers.
pub fn adam() -> Optimizer {
    Optimizer::adam(ADAM_LEARNING_RATE)
}

/// Whether a name is that of a preset.
pub fn is_preset(name: &str) -> bool {
    PRESETS.iter().any(|preset| preset.name == name)
}

/// The learning rate of Adam, where nothing else is asked for.
const ADAM_LEARNING_RATE: f64 = 0.001;

/// The learning rate of the default optimizer.
const LEARNING_RATE: f64 = 0.01;

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            batch: None,
            seq: None,
            precision: None,
            gradients: GradientPrecision::default(),
            optimizer: Optimizer::sgd(LEARNING_RATE),
            training: true,
        }
    }
}

/// The names of all families and presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name).chain(PRESETS.iter().map(|preset| preset.name))
}

/// Finds a family by name.
pub fn family(name: &str) -> Result<&'static Family, ZooError> {
    FAMILIES.iter().copied().find(|f| f.name == name).ok_or_else(|| {
        let nearest = did_you_mean(name, names());
        let known = match nearest.is_empty() {
            true => format!("there are {}", names().collect::<Vec<_>>().join(", ")),
            false => "`shardwright models` lists them".into(),
        };
        ZooError::UnknownModel { name: options::printable(name), nearest, known }
    })
}

/// Builds the model that `spec` names: `vgg16`, `mlp:batch=400,hidden=300,layers=5`, `llama3-8b:seq=4096`.
pub fn build(spec: &str, options: &BuildOptions) -> Result<Graph, ZooError> {
    let spec = spec.trim();
    let (name, text) = spec.split_once(':').unwrap_or((spec, ""));
    if let Some(preset) = PRESETS.iter().find(|preset| preset.name == name.trim()) {
        let config = config::read(preset.config.as_bytes())?;
        return build_config_of(spec, preset.name, &config, preset.seq, text, options);
    }
    let family = family(name.trim())?;
    let values = OptionValues::parse(family.name, family.options, text)?.with(options)?;
    step(spec, options, &values, |b| (family.build)(b, &values))
}

/// Builds the model that a Hugging Face `config.json` describes.
///
/// # Errors
/// Where a field is missing, absurd or contradicts another, or the sequence is too long for the model.
pub fn build_config(name: &str, text: &[u8], options: &BuildOptions) -> Result<Graph, ZooError> {
    let config = config::read(text)?;
    let seq = config.positions.unwrap_or(CONFIG_SEQ).min(CONFIG_SEQ);
    build_config_of(name, "config", &config, seq, "", options)
}

/// The positions that a config names; none where it names none, or cannot be read.
pub fn config_positions(text: &[u8]) -> Option<u64> {
    config::read(text).ok().and_then(|config| config.positions)
}

/// Tokens per sample for a config, where nothing else is asked for and the model has as many positions.
const CONFIG_SEQ: u64 = 4096;

/// The options of presets and configs. Zeros stand for the model's own.
pub const PRESET_OPTIONS: &[OptionSpec] = &[
    options::batch(8),
    options::count_from("seq", (0, 0, 1 << 22), "tokens per sample; 0: the model's own"),
    options::count_from("layers", (0, 0, 1000), "number of layers, to try a part; 0: all"),
    options::MIXED,
];

fn build_config_of(
    name: &str,
    model: &'static str,
    config: &Config,
    seq: u64,
    text: &str,
    options: &BuildOptions,
) -> Result<Graph, ZooError> {
    let values = OptionValues::parse(model, PRESET_OPTIONS, text)?.with(options)?;
    let tokens = match (values.count("seq"), config.is_sequential()) {
        (0, _) => seq,
        (tokens, true) => tokens,
        (_, false) => return Err(values.conflict("samples are images, not sequences; leave seq out".into())),
    };
    let config = config.with_layers(values.count("layers"));
    step(name, options, &values, |b| config.build(b, values.dtype(), values.batch(), tokens))
}

/// A step named `name`: the forward pass that `forward` adds, and its training.
fn step(
    name: &str,
    options: &BuildOptions,
    values: &OptionValues,
    forward: impl FnOnce(&mut GraphBuilder) -> LossResult,
) -> Result<Graph, ZooError> {
    let wrap = |reason| ZooError::Build { model: values.model(), reason };
    let mut builder = GraphBuilder::new(name);
    let loss = forward(&mut builder).map_err(|failure| match failure {
        Failure::Options(error) => error,
        Failure::Build(error) => wrap(error),
    })?;
    builder.output(loss);
    if values.is_fp8() && builder.round_linear_layers(is_wide) == 0 {
        return Err(values.conflict("no linear layer can be computed in 8 bits; use dtype=mixed".into()));
    }
    let wide = options.gradients == GradientPrecision::F32;
    if wide && !values.is_mixed() {
        return Err(values.conflict("gradients in f32 need master weights in f32; use dtype=mixed".into()));
    }
    if options.training {
        match values.is_mixed() {
            true => train_mixed(&mut builder, loss, &options.optimizer, options.gradients).map_err(wrap)?,
            false => train(&mut builder, loss, &options.optimizer).map_err(wrap)?,
        }
    }
    Ok(builder.finish())
}

/// The sum of two losses.
fn sum_of_losses(b: &mut GraphBuilder, first: TensorId, second: TensorId) -> LayerResult {
    crate::layers::add(b, "loss", first, second)
}
