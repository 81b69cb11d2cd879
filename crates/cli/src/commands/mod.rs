//! One module per subcommand.

pub mod convert;
pub mod machine;
pub mod machines;
pub mod models;
pub mod profile;
pub mod solve;
pub mod solvers;
