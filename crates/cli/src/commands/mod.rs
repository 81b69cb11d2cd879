//! One module per subcommand.

pub mod compare;
pub mod completions;
pub mod convert;
pub mod diff;
pub mod explain;
pub mod export;
pub mod licences;
pub mod machine;
pub mod machines;
pub mod man;
pub mod models;
pub mod network;
pub mod ops;
pub mod plan;
pub mod profile;
pub mod report;
pub mod run;
pub mod simulate;
pub mod solve;
pub mod solvers;
pub mod stages;
