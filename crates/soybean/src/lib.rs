//! SoyBean (Wang, Huang, Li, arXiv 1805.04170): tilings of all tensors of a training step that move the least.
//!
//! The devices are cut in two, and every tensor gets a tiling: one of its dimensions is cut, or both sides hold it
//! whole. Every op runs in one of its aligned forms, one loop split; whatever its tensors must travel between their
//! tilings and that form is counted in elements. The best tilings of one cut are found exactly, by a
//! dynamic program over breadth-first levels or, for wide graphs, by the search crate; then both halves
//! are cut again.
//!
//! Nothing is measured and no time is predicted here: every op is always halved, so all tilings do the same work.
//!
//! ```
//! use shardwright_cost::Comm;
//! use shardwright_frontend::zoo::{BuildOptions, build};
//! use shardwright_machine::builtin;
//! use shardwright_search::Control;
//! use shardwright_soybean::{Objective, solve};
//! use shardwright_space::OpShapes;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=400,hidden=300,layers=5,loss=elementwise", &BuildOptions::default())?;
//! let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
//! let machine = builtin("flat:4")?;
//! let comm = Comm::new(&machine, machine.mesh());
//! let found = solve(&graph, &shapes, &comm, Objective::Elements, &Control::new())?;
//! assert_eq!((&found.cuts[..], found.total_elements()), (&[780_000, 480_000][..], 1_740_000));
//! # Ok(())
//! # }
//! ```

mod cuts;
mod eliminate;
mod levels;
mod one_cut;
mod share;
mod step;

#[cfg(test)]
mod tests;

pub use cuts::{Cuts, Objective, SoyBeanError, count, solve};
pub use share::Tiling;
