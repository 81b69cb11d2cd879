//! The report: what a plan is, what it costs, when its devices do what, as one HTML page that needs nothing else.
//!
//! [`Page`] gathers what is shown and [`Page::write`] writes it: the data as JSON, with a program that draws them. That
//! program is written in TypeScript (`report/`), bundled by `scripts/build-report` and kept in `page/`.
//!
//! ```
//! use shardwright_machine::builtin;
//! use shardwright_plan::Constraints;
//! use shardwright_report::Page;
//! use shardwright_search::Control;
//! use shardwright_strategies::{PlanAnswer, Planner, find, plan};
//! use shardwright_zoo::{BuildOptions, build};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=2", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let planner = Planner::new(&graph, &machine, None, false);
//! let PlanAnswer { plan, assignment, mesh } =
//!     plan(&planner, find("auto")?, &Constraints::default(), &Control::new())?;
//!
//! let mut html = Vec::new();
//! let context = planner.context(mesh, false)?;
//! Page::new(&context, &plan, &assignment, &[], &Control::new())?.write(&mut html)?;
//! assert!(html.starts_with(b"<!doctype html>"));
//! # Ok(())
//! # }
//! ```

mod comparison;
mod difference;
mod explain;
mod html;
mod ops;
mod page;
mod peak;
mod rates;
mod reoptimise;
mod step;

pub use comparison::{Comparison, MemoryLimitRow, Row, Scale, mark_front};
pub use difference::{Change, Difference};
pub use explain::{Choice, Explainer, Explanation};
pub use ops::OpFacts;
pub use page::{Improvement, Page, ReportError};
pub use peak::{HeldTensor, KINDS, KindOfUse, LayerUse, Peak};
pub use rates::{DeviceRates, PeakRate};
pub use reoptimise::{Alternatives, Certainty, Reoptimisation};
pub use step::{BandView, Bars, DeviceClass, Move, Passes, StepView, Track};
