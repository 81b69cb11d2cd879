//! The report: what a plan is, what it costs, when its devices do what, as one HTML page that needs nothing else.
//!
//! [`Page`] gathers what is shown and [`Page::write`] writes it: the data as JSON, with a program that draws them. That
//! program is written in TypeScript (`report/`), bundled by `scripts/build-report` and kept in `page/`.
//!
//! ```
//! use shardwright_frontend::zoo::{BuildOptions, build};
//! use shardwright_machine::builtin;
//! use shardwright_plan::{Demands, Problem, plan, strategy};
//! use shardwright_report::Page;
//! use shardwright_search::Control;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=2", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let problem = Problem::new(&graph, &machine, None)?;
//! let plan = plan(&problem, strategy::find("auto")?, &Demands::default(), &Control::new())?;
//!
//! let mut html = Vec::new();
//! Page::new(&problem, &plan, &[], &Control::new())?.write(&mut html)?;
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
mod reoptimise;
mod step;

pub use comparison::{Comparison, Limited, Row, Scale, mark_front};
pub use difference::{Change, Difference};
pub use explain::{Choice, Explainer, Explanation};
pub use ops::OpFacts;
pub use page::{Improvement, Page, ReportError};
pub use peak::{Held, KINDS, KindOfUse, Peak};
pub use reoptimise::{Alternatives, Certainty, Reoptimised};
pub use step::{Bars, DeviceClass, Move, Step, Track};
