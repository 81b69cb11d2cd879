//! Simulates one training step of a lowered program: when every device computes, communicates and waits, what it holds,
//! and what makes the step as long as it is.
//!
//! [`Schedule`] turns a program into tasks on streams, [`Timeline`] says when they run, [`usages`] and [`Memory`] what
//! that means for the devices, [`Trace`] writes it down for Perfetto. Times are those of the cost model; what
//! the simulator adds is order: communication hides behind computation where nothing waits for it.
//!
//! [`Delta`] simulates a step again and again as configs change, [`mcmc`] searches with it, and [`plan`] makes plans that
//! have seen the simulator.
//!
//! ```
//! use shardwright_frontend::zoo::{BuildOptions, build};
//! use shardwright_lower::lower;
//! use shardwright_machine::builtin;
//! use shardwright_plan::{Demands, Problem, search, strategy};
//! use shardwright_search::Control;
//! use shardwright_sim::{Classes, Links, Schedule, usages};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=3", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let problem = Problem::new(&graph, &machine, None)?;
//! let data = search(&problem, strategy::find("data")?, &Demands::default(), &Control::new())?;
//! let program = lower(&graph, &problem.relayouts, &data.configs)?;
//!
//! let times = problem.times()?;
//! let compute = |op: shardwright_graph::OpId| times.compute(op, &data.configs[op.index()]);
//! let schedule = Schedule::new(&program, Classes::of(&program), Links::of(&machine), compute)?;
//! let timeline = schedule.simulate();
//! // All four devices do the same, so one stands for all.
//! assert_eq!(schedule.classes.len(), 1);
//! // Gradients travel while the layers before them compute.
//! assert!(timeline.makespan() < data.objective as u64);
//! assert!(usages(&schedule, &timeline)[0].exposed < usages(&schedule, &timeline)[0].communicating);
//! # Ok(())
//! # }
//! ```

mod assist;
mod classes;
pub mod delta;
mod error;
mod mcmc;
mod memory;
mod moves;
mod placing;
mod planning;
mod schedule;
mod sharing;
mod step;
mod tasks;
mod timeline;
mod trace;
mod usage;

pub use assist::{Assisted, Homes, Reality, Rule, assist, homes, paces};
pub use classes::Classes;
pub use delta::{Delta, DeltaError};
pub use error::SimError;
pub use mcmc::{Best, Limits, mcmc};
pub use memory::{Memory, Stay};
pub use moves::Moves;
pub use placing::PLACE;
pub use planning::{MCMC, find, plan, search, strategies};
pub use schedule::{Links, MOST_TASKS, Schedule, Stream, TooManyTasks};
pub use step::{Step, apart, simulate_step};
pub use tasks::{Lists, Tasks};
pub use timeline::{NOBODY, Timeline};
pub use trace::Trace;
pub use usage::{Usage, usages};
