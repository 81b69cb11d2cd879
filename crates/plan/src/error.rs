//! Why there is no plan.

use shardwright_cost::{LayoutError, WrongDevice};
use shardwright_search::{NetworkError, StopReason};
use shardwright_soybean::SoyBeanError;

fn smallest(least: Option<u64>, floor: u64) -> String {
    match (least, floor) {
        (None, 0) => "how much would do was not found".into(),
        (None, floor) => format!("no plan keeps a limit below {floor}, and how much would do was not found"),
        (Some(bytes), floor) if floor >= bytes => format!("the smallest limit that one keeps is {bytes}"),
        (Some(bytes), 0) => format!("the smallest limit that one keeps is at most {bytes}"),
        (Some(bytes), floor) => {
            format!("the smallest limit that one keeps is at most {bytes}, and at least {floor}")
        }
    }
}

/// Why a plan could not be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Nothing to plan.
    #[error("model {model} has no ops: there is nothing to plan")]
    Empty {
        /// The model.
        model: String,
    },
    /// A tensor that the layouts cannot describe.
    #[error("tensor `{tensor}`: {source}")]
    Tensor {
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        source: LayoutError,
    },
    /// A config that an op cannot have.
    #[error("op `{op}`: {reason}")]
    Config {
        /// The op, or the model.
        op: String,
        /// Why not.
        reason: String,
    },
    /// A plan of something else.
    #[error("the plan does not fit: {reason}")]
    Mismatch {
        /// What differs, and what to do.
        reason: String,
    },
    /// More ways to split an op than can be searched.
    #[error(
        "op `{op}` has more than {most} ways to be split over the {levels} levels of machine {machine}; plan for fewer devices (`{machine}:N`)"
    )]
    TooManyConfigs {
        /// The op.
        op: String,
        /// How many are allowed.
        most: usize,
        /// Levels of the machine.
        levels: usize,
        /// The machine.
        machine: String,
    },
    /// The search problem would take too much memory.
    #[error(
        "the tables of the search problem take about {needed} MiB and {allowed} MiB of memory are allowed; allow more (--ram), or plan for fewer devices"
    )]
    TooLarge {
        /// MiB that they take.
        needed: u64,
        /// MiB that they may take.
        allowed: u64,
    },
    /// Measured costs of another device.
    #[error(transparent)]
    Costs(#[from] WrongDevice),
    /// The search problem cannot be built.
    #[error("the search problem cannot be built: {0}")]
    Network(#[from] NetworkError),
    /// Building the search problem took too long.
    #[error("building the search problem was stopped: {0:?}")]
    Stopped(StopReason),
    /// No strategy or solver has this name.
    #[error("there is no strategy `{name}`; there are {known}")]
    UnknownStrategy {
        /// What was asked for.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// No plan keeps the memory limit.
    #[error(
        "no plan of {solver} fits into {limit} bytes per device; {}; give more memory, more devices, or a smaller batch",
        smallest(*.least, *.floor)
    )]
    DoesNotFit {
        /// The strategy.
        solver: String,
        /// The limit in bytes.
        limit: u64,
        /// The least that a plan was found to need.
        least: Option<u64>,
        /// No plan needs less than this.
        floor: u64,
        /// Whether it is proved that none fits.
        proved: bool,
    },
    /// A wish that cannot be granted.
    #[error("the wish `{wish}` cannot be granted: {reason}")]
    Wish {
        /// As it was given.
        wish: String,
        /// Why not.
        reason: String,
    },
    /// SoyBean has no tilings.
    #[error(transparent)]
    SoyBean(#[from] SoyBeanError),
    /// The solver gave up.
    #[error("solver {solver} found no plan: {reason}")]
    NoPlan {
        /// The solver.
        solver: String,
        /// Why.
        reason: String,
    },
}
