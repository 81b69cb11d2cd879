//! Lowering: from a training graph and an assignment to the program that every device runs.
//!
//! [`lower`] builds a [`ParallelGraph`]: one list of instructions for all devices. Instructions are local ops on local
//! blocks, collectives along mesh axes, and halo exchanges. Per device, an engine needs three facts: its block of a
//! [`Value`], its local op ([`ParallelGraph::local_op`]), and the pieces of its new block ([`ParallelGraph::pieces`]).
//! The engine chooses the algorithm of a collective.
//!
//! The steps are those of the cost model, so the bytes on every axis equal the predicted ones.
//!
//! ```
//! use shardwright_cost::Resharder;
//! use shardwright_graph::{ops::*, *};
//! use shardwright_lower::{Work, lower};
//! use shardwright_machine::{DeviceId, builtin};
//! use shardwright_space::{Assignment, AxisUse, Config};
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
//! let resharder = Resharder::new(&machine, machine.mesh());
//! let split = |op: u32, factor| Config::new([AxisUse::Split(graph.rule(OpId(op)).find(factor).unwrap())]);
//! let assignment = Assignment::new(vec![split(0, "c"), split(1, "d0")]);
//! let program = lower(&graph, &resharder, &assignment)?;
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
//! // The work of device 1.
//! let (mesh, device) = (&program.mesh, DeviceId(1));
//! for instruction in &program.instructions {
//!     match &instruction.work {
//!         // A local op on local blocks.
//!         Work::Compute { .. } => assert!(program.local_op(instruction, device).is_some()),
//!         // Sums both devices' parts of rows 4 to 7.
//!         Work::Reshard(step) => {
//!             let pieces = program.pieces(instruction, 0, device);
//!             assert!(step.reduction.is_some() && pieces.len() == 2);
//!             assert!(pieces.iter().all(|piece| piece.block[..] == [4..8, 0..4]));
//!         }
//!         Work::HaloExchange { .. } => unreachable!("a product has no windows"),
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
pub mod memory;
mod pipeline;
mod program;
mod text;
mod traffic;
mod unroll;
mod verify;

pub use blocks::Piece;
pub use local::SplitOp;
pub use lower::{LowerError, LowerOptions, halo_exchanges, lower, lower_with};
pub use memory::DeviceAccount;
pub use pipeline::{ProgramPipeline, StagePass, weight_gradient_ops};
pub use program::{
    Carry, Instruction, InstructionId, Output, ParallelGraph, Reshard, Source, Value, ValueId, Work,
};
pub use shardwright_cost::Reduction;
pub use shardwright_stages::schedule::Pass;
pub use text::Listing;
