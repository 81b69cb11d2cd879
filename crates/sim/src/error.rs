//! Why something cannot be simulated, or searched by simulating.

use crate::{delta::DeltaError, schedule::TooManyTasks};
use shardwright_lower::LowerError;
use shardwright_plan::PlanError;

/// Why there is no simulation.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// There is no plan to begin with.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The configs cannot be lowered.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The program is too large.
    #[error(transparent)]
    Size(#[from] TooManyTasks),
    /// The step cannot be simulated change by change.
    #[error(transparent)]
    Delta(#[from] DeltaError),
}
