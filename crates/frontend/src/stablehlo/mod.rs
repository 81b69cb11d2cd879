//! StableHLO: training steps as JAX lowers them.
//!
//! [`import`] reads the text of `jax.jit(step).lower(...).as_text()` (short or generic form), inlines functions, and
//! gives the step as a graph: forward pass, backward pass and update as they are in the text. Roles of arguments are
//! inferred from their use; every op is a layer of its own, and the iterations of a loop share theirs.
//!
//! ```
//! use shardwright_frontend::stablehlo::{Options, import};
//!
//! let text = "module @step { func.func public @main(%w: tensor<8x4xf32>, %x: tensor<2x8xf32>) -> tensor<2x4xf32> {
//!     %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<2x8xf32>, tensor<8x4xf32>) -> tensor<2x4xf32>
//!     return %0 : tensor<2x4xf32>
//! } }";
//! let imported = import(text, "step.mlir", &Options::default()).unwrap();
//! assert_eq!(imported.graph.ops[0].op.kind(), "contract");
//! let error = import(&text.replace("2x4xf32>", "2x5xf32>"), "step.mlir", &Options::default()).unwrap_err();
//! assert_eq!((error.line, error.column), (2, 10));
//! ```

mod annotate;
mod attributes;
mod bodies;
mod error;
mod import;
mod lexer;
mod parser;
mod pretty;
mod print;
mod syntax;

pub use annotate::{Annotations, SiteAnnotation};
pub use error::StablehloError;

use shardwright_graph::{Graph, OpId, Role, TensorId};

/// What a text does not say.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Roles of arguments by name, in which `*` stands for anything; later ones win.
    pub roles: Vec<(String, Role)>,
    /// Targets of custom calls that may be planned as opaque ops, since they are pure functions; `*` for all.
    pub opaque: Vec<String>,
}

/// A program as a graph, and what is worth knowing about how it was read.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The step.
    pub graph: Graph,
    /// The program's arguments, in its order.
    pub arguments: Vec<TensorId>,
    /// The program's results, in its order.
    pub results: Vec<TensorId>,
    /// What was not taken literally: opaque ops, branches of which both sides are computed.
    pub notes: Vec<String>,
    /// What became of the program's operations, in the order of the text. Not of those in functions that are called
    /// from several places: they became several things.
    pub sites: Vec<Site>,
}

/// An operation of the text, and what it is in the graph.
#[derive(Clone, Debug)]
pub struct Site {
    /// Where it begins in the text, in bytes.
    pub at: usize,
    /// What its location calls it: `jit(f)/block/dot_general`, without the outermost function.
    pub name: Option<String>,
    /// Its operands, where an op of the graph reads them.
    pub operands: Vec<Option<Reader>>,
    /// Its results, where they are in the graph.
    pub results: Vec<Option<Place>>,
    /// Where it does nothing but show its operand in another way: the ops that read it so, if they are all known. Their
    /// places are the operand's.
    pub lookers: Vec<Reader>,
}

/// A value of the program as a tensor of the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The tensor.
    pub tensor: TensorId,
    /// For each dimension of the value, that of the tensor; none where the value repeats the tensor.
    pub dims: Vec<Option<usize>>,
}

/// An operand as an input of an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reader {
    /// What is read.
    pub place: Place,
    /// The op that reads it.
    pub op: OpId,
    /// Which of the op's inputs it is.
    pub input: usize,
}

/// Reads a text, called `file` in errors.
pub fn import(text: &str, file: &str, options: &Options) -> Result<Imported, StablehloError> {
    let imported = parser::parse(text).and_then(|program| import::import(&program, options));
    imported.map_err(|fault| fault.locate(file, text))
}

/// Writes a text's program in MLIR's generic form, which says the same.
pub fn normalise(text: &str, file: &str) -> Result<String, StablehloError> {
    parser::parse(text).map(|program| program.to_string()).map_err(|fault| fault.locate(file, text))
}

/// Writes shardings into a text, in Shardy's dialect.
pub fn annotate(text: &str, file: &str, known: &Annotations) -> Result<String, StablehloError> {
    annotate::annotate(text, known).map_err(|fault| fault.locate(file, text))
}
