//! Plans in the words of other engines.
//!
//! [`Shardings`] says how every value of a StableHLO program lies under a plan, as XLA's partitioners say it: for each
//! dimension the mesh axes that split it; [`to_sdy`] writes that into the program. [`Layouts`] says the same of any graph,
//! op by op, in the words of engines that move tensors between ops themselves; [`TensorPlacements`] adds the placement of every
//! tensor in DTensor's words, and [`TensorSpecs`] in the words of JAX's `PartitionSpec`. [`collectives`] lists what has to be
//! exchanged for that, to be held against what an engine makes of it. [`to_trainer`] writes uniform plans as options of trainers.
//!
//! ```
//! use shardwright_cost::Resharder;
//! use shardwright_export::Shardings;
//! use shardwright_stablehlo::{ImportOptions, import};
//! use shardwright_machine::builtin;
//! use shardwright_space::{Assignment, AxisUse, Config};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = "module @f { func.func public @main(%w: tensor<8x4xf32>, %x: tensor<2x8xf32>) -> tensor<2x4xf32> {
//!     %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<2x8xf32>, tensor<8x4xf32>) -> tensor<2x4xf32>
//!     return %0 : tensor<2x4xf32>
//! } }";
//! let program = import(text, "f.mlir", &ImportOptions::default())?;
//! let machine = builtin("flat:2")?;
//! // The rows of x are split: w is needed whole.
//! let rows = program.graph.rule(program.graph.op_ids().next().unwrap()).find("b").unwrap();
//! let resharder = Resharder::new(&machine, machine.mesh());
//! let shardings = Shardings::of(&program, &program.graph, &resharder, &Assignment::new(vec![Config::new([AxisUse::Split(rows)])]))?;
//! let shown: Vec<String> = shardings.arguments.iter().map(|spec| spec.to_string()).collect();
//! assert_eq!(shown, ["[{}, {}]", "[{gpu.0}, {}]"]);
//! # Ok(())
//! # }
//! ```

mod collectives;
mod dtensor;
mod layouts;
mod sdy;
mod shardings;
mod tensor_paths;
mod tensor_specs;
mod trainers;
mod xla_heap;
mod xla_memory;

pub use collectives::{Collective, collectives};
pub use dtensor::{MeshAxes, PlacedTensor, TensorPlacements};
pub use layouts::{Layouts, OpLayouts, Placements};
pub use sdy::to_sdy;
pub use shardings::{ExportError, Shardings, SiteSpecs, Spec};
pub use tensor_specs::{TensorSpec, TensorSpecs};
pub use trainers::{Trainer, to_trainer};
pub use xla_memory::xla_memory;
