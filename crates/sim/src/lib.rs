//! Simulates one training step of a lowered program: when every device computes, communicates and waits, its memory
//! over time, and the step's critical path.
//!
//! - [`Schedule`] turns a program into tasks on streams.
//! - [`Timeline`] gives the start and end of every task.
//! - [`usages`] and [`Memory`] sum up each device's time and memory.
//! - [`Trace`] writes a timeline for Perfetto.
//! - [`Delta`] simulates a step again and again as configs change.
//!
//! Durations are those of the cost model. The simulator adds order: communication overlaps with computation where no
//! task waits for it.
//!
//! ```
//! use shardwright_machine::builtin;
//! use shardwright_plan::Context;
//! use shardwright_sim::{simulate_objective, simulate_step};
//! use shardwright_space::{Assignment, AxisUse, Config};
//! use shardwright_zoo::{BuildOptions, build};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=3", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false)?;
//! // Data parallelism: every layer's forward op is split along the batch, and the other ops follow.
//! let batch = Config::new([AxisUse::Split(0); 2]);
//! let mut assignment = Assignment::replicated(&graph, machine.mesh());
//! for layer in &context.layers.members {
//!     if batch.check(&context.shapes[layer.forward().index()].rule, machine.mesh()).is_ok() {
//!         for (op, config) in layer.ops.iter().zip(layer.configs(&context.shapes, machine.mesh(), &batch)) {
//!             assignment.configs[op.index()] = config;
//!         }
//!     }
//! }
//! let objective = context.price(&assignment)?.objective() as u64;
//! assert_eq!(simulate_objective(&context, &assignment)?, objective, "without overlap");
//! // Gradients travel while earlier layers compute.
//! assert!(simulate_step(&context, &assignment)?.makespan < objective);
//! # Ok(())
//! # }
//! ```

mod assist;
mod bands;
mod classes;
mod contention;
pub mod delta;
mod error;
mod memory;
mod passes;
mod pipelined_products;
mod schedule;
mod sharing;
mod step;
mod tasks;
mod timeline;
mod trace;
mod usage;

pub use assist::{AssistOutcome, Reality, StealRule, assist};
pub use bands::{Band, Pass, bands};
pub use classes::Classes;
pub use delta::{Delta, DeltaError};
pub use error::SimError;
pub use memory::{Memory, Stay};
pub use passes::{PassSpan, bubble, pass_name, pass_spans};
pub use schedule::{Links, MOST_TASKS, Schedule, Stream, TooManyTasks};
pub use step::{
    SimulatedStep, device_schedule, schedule, schedule_per_device, simulate_bubble, simulate_objective,
    simulate_priced, simulate_program, simulate_step,
};
pub use tasks::{Lists, Tasks};
pub use timeline::{NO_TASK, Timeline};
pub use trace::Trace;
pub use usage::{Usage, usages};
