//! Lowering: from a training graph and one config per op to the program that every device runs.
//!
//! [`lower`] makes a [`ParallelGraph`]: one list of instructions for all devices, made of local ops on local blocks,
//! collectives along mesh axes, and fetches for windows. An engine needs to know, per device: the block that it holds of
//! a [`Value`], the op that it runs ([`ParallelGraph::local_op`]), and what its new block is made of
//! ([`ParallelGraph::pieces`]). How it carries a collective out is its own business.
//!
//! The steps are those of the cost model, so the bytes on every axis are the predicted ones to the byte.
//!
//! ```
//! use shardwright_cost::Relayouts;
//! use shardwright_graph::{ops::*, *};
//! use shardwright_lower::{Work, lower};
//! use shardwright_machine::{DeviceId, builtin};
//! use shardwright_space::{AxisUse, Config};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let f32 = |shape: &[u64]| TensorType::new(DType::F32, shape);
//! let mut b = GraphBuilder::new("product");
//! let x = b.source("x", f32(&[8, 6]), Role::Input, Init::Normal(Real(1.0)))?;
//! let w = b.source("w", f32(&[6, 4]), Role::Parameter, Init::Normal(Real(1.0)))?;
//! let y = b.emit("fc", Contract::parse("nc,co->no")?, &[x, w])?;
//! let z = b.emit("relu", Unary { f: UnaryFn::Relu }, &[y])?;
//! b.output(z);
//! let graph = b.finish();
//!
//! // Two devices share the inner sum of the product, then each needs half of the rows.
//! let machine = builtin("flat:2")?;
//! let relayouts = Relayouts::new(&machine, machine.mesh());
//! let split = |op: u32, factor| Config::new([AxisUse::Split(graph.rule(OpId(op)).find(factor).unwrap())]);
//! let program = lower(&graph, &relayouts, &[split(0, "c"), split(1, "d0")])?;
//! assert_eq!(
//!     program.listing(&graph).to_string(),
//!     "%0 x f32[8,6] S1\n\
//!      %1 w f32[6,4] S0\n\
//!      %2 fc f32[8,4] P+ = contract fc (%0, %1)\n\
//!      %3 fc f32[8,4] S0 = reduce-scatter gpu.0 (%2)\n\
//!      %4 relu f32[8,4] S0 = unary relu (%3)\n\
//!      output %4\n"
//! );
//!
//! // What device 1 does.
//! let (mesh, device) = (&program.mesh, DeviceId(1));
//! for instruction in &program.instructions {
//!     match &instruction.work {
//!         // A local op on local blocks.
//!         Work::Compute { .. } => assert!(program.local_op(instruction, device).is_some()),
//!         // Sums both devices' parts of rows 4 to 7.
//!         Work::Relayout(step) => {
//!             let pieces = program.pieces(instruction, 0, device);
//!             assert!(step.reduction.is_some() && pieces.len() == 2);
//!             assert!(pieces.iter().all(|piece| piece.block[..] == [4..8, 0..4]));
//!         }
//!         Work::Window { .. } => unreachable!("a product has no windows"),
//!     }
//! }
//! let z = program.value(program.outputs[0].value);
//! assert_eq!(z.local_type(mesh, device).unwrap().to_string(), "f32[4,4]");
//! # Ok(())
//! # }
//! ```

pub mod blocks;
mod bucket;
mod local;
mod lower;
mod program;
mod text;
mod traffic;
mod verify;

pub use blocks::Piece;
pub use local::SplitOp;
pub use lower::{LowerError, lower, lower_joining, window_fetches};
pub use program::{
    Carry, Instruction, InstructionId, Output, ParallelGraph, Relayout, Source, Value, ValueId, Work,
};
pub use shardwright_cost::Reduction;
pub use text::Listing;
