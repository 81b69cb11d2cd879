//! SoyBean (Wang, Huang, Li, arXiv 1805.04170): tilings of all tensors of a training step that move the fewest elements.
//!
//! The devices are cut in two, and every tensor gets a tiling: one dimension is cut, or both sides hold it whole. Every
//! op runs in one of its aligned forms, with one loop split. The cost is the number of elements that move between the
//! tensors' tilings and that form. One cut is solved exactly, by a dynamic program over breadth-first levels or, for
//! wide graphs, by the exact solver of the search crate. Then both halves are cut again.
//!
//! No times are measured or predicted: every op is always halved, so all tilings do the same work.
//!
//! ```
//! use shardwright_cost::Comm;
//! use shardwright_zoo::{BuildOptions, build};
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
//! let result = solve(&graph, &shapes, &comm, Objective::Elements, &Control::new())?;
//! assert_eq!((&result.cuts[..], result.total_elements()), (&[780_000, 480_000][..], 1_740_000));
//! # Ok(())
//! # }
//! ```

mod cut_layout;
mod cuts;
mod eliminate;
mod levels;
mod one_cut;
mod tiling_graph;

#[cfg(test)]
mod tests;

pub use cut_layout::Tiling;
pub use cuts::{Cuts, Objective, SoyBeanError, count, solve};
