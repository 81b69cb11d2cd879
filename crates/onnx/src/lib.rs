//! ONNX models as training graphs.
//!
//! [`import`] reads a model exported by PyTorch, TensorFlow or another framework. It folds constants and converts the
//! remaining nodes to ops of [`shardwright_graph`], with a loss, gradients and updates. `docs/onnx.md` lists the
//! supported ops.
//!
//! - `model` decodes and checks the file and inlines functions.
//! - `importer` walks the nodes. `fold` evaluates constant nodes; `import/` has one file per family of ops.
//! - `view` keeps reshapes and transposes out of the graph.
//! - `training` adds loss, backward pass and updates. The losses are those of [`shardwright_zoo::layers`].
//!
//! A model is walked twice: the first walk infers the shapes of all values; the second builds the graph, guided by
//! `hints` about the readers of each value.
//!
//! ```
//! use bytes::Bytes;
//! use shardwright_onnx::{ImportOptions, NoExternalData, import};
//!
//! let text = Bytes::from_static(b"this is no model");
//! let Err(error) = import(&text, &ImportOptions::default(), &NoExternalData) else { panic!("not a model") };
//! assert!(error.to_string().starts_with("not a readable ONNX model: "));
//! ```

mod align;
mod attributes;
mod budget;
mod contraction;
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
mod pending;
mod proto;
mod rebatch;
mod storage;
#[cfg(test)]
mod tests;
mod training;
mod view;

pub use error::{OnnxError, UnsupportedOp};
pub use literal::{Literal, Numbers};
pub use model::{Model, OPSETS};
pub use pending::{AxisSelection, TensorSource};
pub use storage::{ExternalData, ExternalRange, NoExternalData, StoredTensor};
pub use training::Loss;

use bytes::Bytes;
use hints::Hints;
use importer::Importer;
use shardwright_graph::{Graph, Optimizer, TensorId};

/// How to import a model.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Samples per step. `None`: the batch of the file.
    pub batch: Option<u64>,
    /// Sizes of the file's named dimensions.
    pub dims: Vec<(String, u64)>,
    /// Inputs with fixed contents: they become constants of the graph.
    pub constants: Vec<(String, Literal)>,
    /// The loss that is trained.
    pub loss: Loss,
    /// The optimizer that updates the weights.
    pub optimizer: Optimizer,
    /// Whether to add loss, backward pass and updates. Without them the graph is the exported model.
    pub training: bool,
    /// Whether attention is one op that stores no scores.
    pub fuse_attention: bool,
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
            fuse_attention: true,
        }
    }
}

/// A model as a graph.
pub struct ImportedModel {
    /// The graph.
    pub graph: Graph,
    /// Weights and constants whose contents are in the file. The graph alone only has seeded initial values.
    pub sources: Vec<TensorSource>,
    /// The model's inputs by name, in file order.
    pub inputs: Vec<(String, TensorId)>,
    /// The model's outputs by name, in file order.
    pub outputs: Vec<(String, TensorId)>,
    /// Notes for the user: missing weights, assumed contents.
    pub notes: Vec<String>,
}

/// Reads a model and converts it to a graph.
///
/// # Errors
/// If the bytes are no ONNX model, a node is invalid or unsupported, or a dimension has no size.
pub fn import(
    bytes: &Bytes,
    options: &ImportOptions,
    external: &dyn ExternalData,
) -> Result<ImportedModel, OnnxError> {
    let model = Model::read(bytes)?;
    let (inputs, rebatch) = inputs::bind(&model, options)?;
    let nothing = Hints::default();
    let mut first = Importer::new(&model, &nothing, rebatch, options, external);
    inputs::declare(&mut first, &inputs, options)?;
    walk(&mut first)?;
    let mut hints = Hints::new(&model.graph, first.shapes());
    hints.below = first.index_bounds();
    drop(first);
    let mut second = Importer::new(&model, &hints, rebatch, options, external);
    let inputs = inputs::declare(&mut second, &inputs, options)?;
    walk(&mut second)?;
    inputs::check_declared(&mut second, options);
    training::finish(second, inputs, options)
}

/// Reads a file of a single tensor, such as ONNX's test data.
pub fn read_tensor(bytes: &Bytes) -> Result<StoredTensor, OnnxError> {
    use prost::Message;
    let tensor = proto::Tensor::decode(bytes.clone()).map_err(|e| OnnxError::Unreadable(e.to_string()))?;
    StoredTensor::read(&tensor).map_err(|t| OnnxError::Model(t.reason()))
}

impl TensorSource {
    /// The contents of the tensor in its shape, if the file or its external files have them.
    pub fn load(&self, external: &dyn ExternalData) -> Result<Option<Literal>, String> {
        let Some(whole) = self.stored.load(external)? else { return Ok(None) };
        Ok(Some(self.selections.iter().fold(whole, |left, selection| left.select(selection))))
    }
}

fn walk(importer: &mut Importer<'_>) -> Result<(), OnnxError> {
    let graph = &importer.model.graph;
    importer.add_stored(graph)?;
    importer.import_nodes(&graph.node)?;
    importer.finish()
}
