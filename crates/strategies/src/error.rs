//! Why a strategy has no answer.

use shardwright_lower::LowerError;
use shardwright_plan::PlanError;
use shardwright_sim::{DeltaError, SimError, TooManyTasks};
use shardwright_soybean::SoyBeanError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum StrategyError {
    /// No strategy has this name.
    #[error("there is no strategy `{name}`; there are {known}{nearest}")]
    Unknown {
        /// The name that was given.
        name: String,
        /// The nearest known name, as the message's text; empty where none is near.
        nearest: String,
        /// Those that exist.
        known: String,
    },
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The assignment cannot be lowered.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The program is too large to be simulated.
    #[error(transparent)]
    Size(#[from] TooManyTasks),
    /// The step cannot be simulated change by change.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// Degrees of a uniform plan do not suit the model or the machine.
    #[error(transparent)]
    Degrees(#[from] crate::pipeline::DegreeError),
    /// SoyBean has no tilings.
    #[error(transparent)]
    SoyBean(#[from] SoyBeanError),
}

impl From<SimError> for StrategyError {
    fn from(error: SimError) -> Self {
        match error {
            SimError::Plan(error) => Self::Plan(error),
            SimError::Lower(error) => Self::Lower(error),
            SimError::Size(error) => Self::Size(error),
        }
    }
}
