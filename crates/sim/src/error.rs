//! Errors of the simulation.

use crate::schedule::TooManyTasks;
use shardwright_lower::LowerError;
use shardwright_plan::PlanError;

/// Why a step cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// Operator times are not available.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The assignment cannot be lowered.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The program is too large.
    #[error(transparent)]
    Size(#[from] TooManyTasks),
}
