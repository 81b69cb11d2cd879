//! ONNX models as training graphs.
//!
//! [`import`] reads a model exported by PyTorch, TensorFlow and others, folds what is constant, and turns the rest
//! into the ops of [`shardwright_graph`], with a loss, gradients and updates. `docs/onnx.md` says what is covered.
//!
//! The road: `model` decodes and checks the file and inlines functions; `importer` walks the nodes, `fold` carries
//! out those that are constant, `import/` holds one file per family of ops; `view` keeps reshapes and
//! transpositions from entering the graph. A model is walked twice: first for the shapes of all values, then, with
//! `hints` about what becomes of each, for the graph. `training` adds the step around it.

mod align;
mod attributes;
mod contraction;
mod entries;
mod error;
mod fold;
mod hints;
mod import;
mod importer;
mod inline;
mod inputs;
mod literal;
mod model;
mod patterns;
mod proto;
mod rebatch;
mod stored;
#[cfg(test)]
mod tests;
mod training;
mod view;

pub use entries::{Cut, Source};
pub use error::{OnnxError, UnsupportedOp};
pub use literal::{Literal, Numbers};
pub use model::{Model, OPSETS};
pub use stored::{ExternalData, ExternalPlace, NoExternalData, Stored};
pub use training::Loss;

use bytes::Bytes;
use hints::Hints;
use importer::Importer;
use shardwright_graph::{Graph, Optimizer, TensorId};

/// What to make of a model.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Samples per step; `None`: what the file says.
    pub batch: Option<u64>,
    /// Sizes of the file's named dimensions.
    pub dims: Vec<(String, u64)>,
    /// Inputs whose contents are given: constants of the graph.
    pub constants: Vec<(String, Literal)>,
    /// What is trained.
    pub loss: Loss,
    /// How weights are updated.
    pub optimizer: Optimizer,
    /// Whether to add loss, backward pass and updates; if not, the graph is the model as it is exported.
    pub training: bool,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self {
            batch: None,
            dims: Vec::new(),
            constants: Vec::new(),
            loss: Loss::CrossEntropy,
            optimizer: Optimizer::sgd(0.01),
            training: true,
        }
    }
}

/// A model as a graph.
pub struct Imported {
    /// The graph.
    pub graph: Graph,
    /// Weights and constants whose contents are the file's. The graph alone starts from seeded ones.
    pub sources: Vec<Source>,
    /// The model's inputs by their names in the file, in its order.
    pub inputs: Vec<(String, TensorId)>,
    /// The model's outputs by their names in the file, in its order.
    pub outputs: Vec<(String, TensorId)>,
    /// What a user should know: weights that are missing, contents that were assumed.
    pub notes: Vec<String>,
}

/// Reads a model and makes a graph of it.
pub fn import(
    bytes: &Bytes,
    options: &ImportOptions,
    external: &dyn ExternalData,
) -> Result<Imported, OnnxError> {
    let model = Model::read(bytes)?;
    let (inputs, rebatch) = inputs::bind(&model, options)?;
    let nothing = Hints::default();
    let mut first = Importer::new(&model, &nothing, rebatch, options.training, external);
    inputs::declare(&mut first, &inputs, options)?;
    walk(&mut first)?;
    let mut hints = Hints::new(&model.graph, first.shapes());
    hints.below = first.index_bounds();
    drop(first);
    let mut second = Importer::new(&model, &hints, rebatch, options.training, external);
    let inputs = inputs::declare(&mut second, &inputs, options)?;
    walk(&mut second)?;
    inputs::check_declared(&mut second, options);
    training::finish(second, inputs, options)
}

/// Reads a tensor that lies alone in a file, as ONNX's test data do; with its name.
pub fn read_tensor(bytes: &Bytes) -> Result<Stored, OnnxError> {
    use prost::Message;
    let tensor = proto::Tensor::decode(bytes.clone()).map_err(|e| OnnxError::Unreadable(e.to_string()))?;
    Stored::read(&tensor).map_err(|t| OnnxError::Model(t.reason()))
}

impl Source {
    /// The contents of the tensor, in its own shape, if the file (or those beside it) has them.
    pub fn load(&self, external: &dyn ExternalData) -> Result<Option<Literal>, String> {
        let Some(whole) = self.stored.load(external)? else { return Ok(None) };
        Ok(Some(self.cuts.iter().fold(whole, |left, cut| left.cut(cut))))
    }
}

fn walk(importer: &mut Importer<'_>) -> Result<(), OnnxError> {
    let graph = &importer.model.graph;
    importer.add_stored(graph)?;
    importer.import_nodes(&graph.node)?;
    importer.finish()
}
