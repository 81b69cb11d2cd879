//! One module per subcommand.

pub mod compare;
pub mod convert;
pub mod diff;
pub mod explain;
pub mod export;
pub mod machine;
pub mod machines;
pub mod models;
pub mod network;
pub mod plan;
pub mod profile;
pub mod report;
pub mod run;
pub mod simulate;
pub mod solve;
pub mod solvers;
