//! The zoo: published models as training graphs, by name and options.
//!
//! `build("gpt:layers=24,hidden=1024", ..)` gives forward pass, loss, backward pass and updates. Each family
//! has a file that says where its architecture comes from; `docs/models.md` lists them with their parameter
//! counts. Weights hold no data here: a model of any size is a few thousand ops.

mod alexnet;
mod bert;
mod densenet;
mod dlrm;
mod gpt;
mod inception;
mod lenet;
mod llama;
mod mlp;
mod moe;
mod nmt;
mod options;
mod resnet;
mod rnnlm;
mod rnntc;
mod transformer;
mod vgg;

pub use options::{Domain, OptionSpec, Options};

use crate::layers::Built;
use shardwright_graph::{BuildError, Graph, GraphBuilder, Optimizer, TensorId, train};

/// Why a model cannot be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ZooError {
    /// No model has this name.
    #[error("there is no model `{name}`; there are {known}")]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// The models that exist.
        known: String,
    },
    /// The model has no such option.
    #[error("model {model} has no option `{key}`; it has {valid}")]
    UnknownOption {
        /// The model.
        model: &'static str,
        /// What was asked for.
        key: String,
        /// The options that it has.
        valid: String,
    },
    /// An option has a value outside its domain.
    #[error("model {model}: {key}={value} is not allowed; {key} takes {expected}")]
    BadValue {
        /// The model.
        model: &'static str,
        /// The option.
        key: &'static str,
        /// What was given.
        value: String,
        /// What it takes.
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
    /// Something between the commas is not an option.
    #[error("model {model}: `{text}` is not of the form key=value")]
    NotAPair {
        /// The model.
        model: &'static str,
        /// What was given.
        text: String,
    },
    /// Options that do not go together.
    #[error("model {model}: {reason}")]
    Conflict {
        /// The model.
        model: &'static str,
        /// Which, and what to do.
        reason: String,
    },
    /// The sizes asked for make no graph.
    #[error("model {model}: {source}")]
    Build {
        /// The model.
        model: &'static str,
        /// What is wrong.
        source: BuildError,
    },
}

/// Why a family's builder stops: about its options, or about the graph.
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

/// A model's loss, or why there is none.
type Loss = Result<TensorId, Failure>;

/// A family of models: everything that a name with options can build.
pub struct Family {
    /// The name that users type.
    pub name: &'static str,
    /// What it is, in a line.
    pub summary: &'static str,
    /// Options that make a variant of the same structure that runs anywhere in no time.
    pub tiny: &'static str,
    /// What may be set.
    pub options: &'static [OptionSpec],
    /// Adds the forward pass; returns the loss.
    build: fn(&mut GraphBuilder, &Options) -> Loss,
}

/// All families, by kind and age.
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

/// What to build of a model.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Samples per step; `None`: what the model's own options say.
    pub batch: Option<u64>,
    /// How weights are updated.
    pub optimizer: Optimizer,
    /// Whether to add backward pass and updates; if not, the graph is forward pass and loss, without dropout.
    pub training: bool,
}

/// The learning rate if nobody says otherwise.
const LEARNING_RATE: f64 = 0.01;

impl Default for BuildOptions {
    fn default() -> Self {
        Self { batch: None, optimizer: Optimizer::sgd(LEARNING_RATE), training: true }
    }
}

/// The family of this name.
pub fn family(name: &str) -> Result<&'static Family, ZooError> {
    FAMILIES.iter().copied().find(|f| f.name == name).ok_or_else(|| ZooError::UnknownModel {
        name: options::shown(name),
        known: FAMILIES.iter().map(|f| f.name).collect::<Vec<_>>().join(", "),
    })
}

/// Builds the model that `spec` names: `vgg16`, `mlp:batch=400,hidden=300,layers=5`.
pub fn build(spec: &str, options: &BuildOptions) -> Result<Graph, ZooError> {
    let spec = spec.trim();
    let (name, text) = spec.split_once(':').unwrap_or((spec, ""));
    let family = family(name.trim())?;
    let mut values = Options::parse(family.name, family.options, text)?;
    if let Some(batch) = options.batch {
        values.set_batch(batch)?;
    }
    values.training = options.training;
    let wrap = |source| ZooError::Build { model: family.name, source };
    let mut builder = GraphBuilder::new(spec);
    let loss = (family.build)(&mut builder, &values).map_err(|failure| match failure {
        Failure::Options(error) => error,
        Failure::Build(error) => wrap(error),
    })?;
    builder.output(loss);
    if options.training {
        train(&mut builder, loss, &options.optimizer).map_err(wrap)?;
    }
    Ok(builder.finish())
}

/// Adds up two losses.
fn sum_of_losses(b: &mut GraphBuilder, first: TensorId, second: TensorId) -> Built {
    crate::layers::add(b, "loss", first, second)
}
