//! One module per subcommand.

pub mod convert;
pub mod solve;
pub mod solvers;
