//! StableHLO programs, as JAX lowers them, as training graphs.
//!
//! [`import`] reads the text of `jax.jit(step).lower(...).as_text()` in short or generic form and inlines its functions.
//! The graph has the forward pass, backward pass and update of the text. The roles of arguments are inferred from their
//! use. Every op is its own layer; the iterations of a loop share their layers.
//!
//! - `lexer`, `parser`, `attributes`, `pretty` and `bodies` parse the text into operations (`syntax`); `print` writes them.
//! - `import/` converts operations to ops, with one file per family of operations.
//! - [`annotate`] writes shardings back into the text.
//!
//! ```
//! use shardwright_stablehlo::{ImportOptions, import};
//!
//! let text = "module @step { func.func public @main(%w: tensor<8x4xf32>, %x: tensor<2x8xf32>) -> tensor<2x4xf32> {
//!     %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<2x8xf32>, tensor<8x4xf32>) -> tensor<2x4xf32>
//!     return %0 : tensor<2x4xf32>
//! } }";
//! let imported = import(text, "step.mlir", &ImportOptions::default()).unwrap();
//! assert_eq!(imported.graph.ops[0].op.kind(), "contract");
//! let error = import(&text.replace("2x4xf32>", "2x5xf32>"), "step.mlir", &ImportOptions::default()).unwrap_err();
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

/// Facts that a text does not state.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Roles of arguments by name. `*` matches any text, and later entries take precedence.
    pub roles: Vec<(String, Role)>,
    /// Targets of custom calls that are pure functions and may be planned as opaque ops; `*` for all.
    pub opaque: Vec<String>,
    /// Rules of custom calls by target, `b q h _, b k h _ -> b q h _`: dimensions of one name are shared.
    pub rules: Vec<(String, String)>,
    /// Whether products and softmax that compute attention become one op.
    pub fuse_attention: bool,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self { roles: Vec::new(), opaque: Vec::new(), rules: Vec::new(), fuse_attention: true }
    }
}

/// A program as a graph, with the correspondence between the two.
#[derive(Clone, Debug)]
pub struct ImportedProgram {
    /// The training step.
    pub graph: Graph,
    /// The program's arguments, in order.
    pub arguments: Vec<TensorId>,
    /// The program's results, in order.
    pub results: Vec<TensorId>,
    /// Approximations and replacements: opaque ops, branches of which both sides are computed, fused attention.
    pub notes: Vec<String>,
    /// Per stack that a loop fills and another one reads slice by slice: the tensors of its slices.
    pub stacks: Vec<Vec<TensorId>>,
    /// The program's operations and their ops, in text order. Operations of functions with several call sites are missing,
    /// since each of them corresponds to several ops.
    pub sites: Vec<Site>,
}

/// An operation of the text and its counterpart in the graph.
#[derive(Clone, Debug)]
pub struct Site {
    /// The first byte of the operation in the text.
    pub at: usize,
    /// The name in its location, `jit(f)/block/dot_general`, without the outermost function.
    pub name: Option<String>,
    /// Per operand: the op that reads it, if any.
    pub operands: Vec<Option<OperandUse>>,
    /// Per operand: the ops that show it in another form on its way to that op, in this order.
    pub operand_views: Vec<Vec<OperandUse>>,
    /// Per result: its tensor in the graph, if any.
    pub results: Vec<Option<TensorView>>,
    /// Per result: the transposes after its tensor, in this order, where nothing else reads what they transpose.
    pub result_views: Vec<Vec<OperandUse>>,
    /// For a pure view (reshape, transpose): the ops that read the view, if all are known, with the operand as the tensor.
    pub view_readers: Vec<OperandUse>,
}

/// A value of the program as a view of a graph tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView {
    /// The tensor.
    pub tensor: TensorId,
    /// Per dimension of the value: the dimension of the tensor; `None` if the value repeats the tensor along it.
    pub dims: Vec<Option<usize>>,
}

/// An operand as the input of an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandUse {
    /// The operand.
    pub view: TensorView,
    /// The op that reads it.
    pub op: OpId,
    /// The index of the op's input.
    pub input: usize,
}

/// Imports a program. `file` is its name in errors.
///
/// # Errors
/// If the text cannot be parsed, or the program has operations that cannot be planned.
pub fn import(text: &str, file: &str, options: &ImportOptions) -> Result<ImportedProgram, StablehloError> {
    let imported = parser::parse(text).and_then(|program| import::import(&program, text.len(), options));
    imported.map_err(|fault| fault.locate(file, text))
}

/// Prints a program in MLIR's generic form.
///
/// # Errors
/// If the text cannot be parsed.
pub fn normalise(text: &str, file: &str) -> Result<String, StablehloError> {
    parser::parse(text).map(|program| program.to_string()).map_err(|fault| fault.locate(file, text))
}

/// Writes shardings into a program's text, in Shardy's dialect.
///
/// # Errors
/// If the text cannot be parsed.
pub fn annotate(text: &str, file: &str, known: &Annotations) -> Result<String, StablehloError> {
    annotate::annotate(text, known).map_err(|fault| fault.locate(file, text))
}
