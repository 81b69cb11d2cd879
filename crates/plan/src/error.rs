//! Errors of planning.

use shardwright_cost::{LayoutError, WrongDevice};
use shardwright_machine::show_bytes;
use shardwright_search::{NetworkError, StopReason};
use shardwright_space::AssignmentError;

/// The smallest limit that is known, in words.
fn least_memory(least: Option<u64>, lower_bound: u64) -> String {
    match (least, lower_bound) {
        (None, 0) => "a sufficient limit was not found".into(),
        (None, lower_bound) => {
            format!("no plan needs less than {}; a sufficient limit was not found", show_bytes(lower_bound))
        }
        (Some(bytes), lower_bound)
            if lower_bound >= bytes || show_bytes(lower_bound) == show_bytes(bytes) =>
        {
            format!("the smallest limit of any plan is {}", show_bytes(bytes))
        }
        (Some(bytes), 0) => format!("the smallest limit of any plan is at most {}", show_bytes(bytes)),
        (Some(bytes), lower_bound) => {
            format!(
                "the smallest limit of any plan is at most {} and at least {}",
                show_bytes(bytes),
                show_bytes(lower_bound)
            )
        }
    }
}

/// Why a search ended, in words.
pub fn why_stopped(reason: &StopReason) -> &str {
    match reason {
        StopReason::Deadline => "the time limit was reached",
        StopReason::Cancelled => "the search was stopped",
        StopReason::IterationLimit => "the iteration limit was reached",
        StopReason::Refused(reason) => reason,
        _ => "the search has nothing left to try",
    }
}

/// Errors of planning.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A broken invariant of the planner itself.
    #[error("internal error of the planner: {reason}; please report it")]
    Internal {
        /// The invariant.
        reason: String,
    },
    /// Nothing to plan.
    #[error("model {model} has no ops to plan")]
    Empty {
        /// The model.
        model: String,
    },
    /// A tensor without a valid layout.
    #[error("tensor `{tensor}`: {source}")]
    Tensor {
        /// The tensor's name.
        tensor: String,
        /// The reason.
        source: LayoutError,
    },
    /// An assignment that does not match the graph and the mesh.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// A pipeline that the model cannot have on this machine.
    #[error("--pipeline {groups}: {reason}")]
    Pipeline {
        /// The number of groups of devices.
        groups: u32,
        /// Why, and what to do.
        reason: String,
    },
    /// A plan of another model or machine.
    #[error("the plan does not match: {reason}")]
    Mismatch {
        /// What differs, and what to do.
        reason: String,
    },
    /// An op with too many configs.
    #[error(
        "op `{op}` has more than {most} configs on the {levels} levels of machine {machine}; plan for fewer devices (`{machine}:N`)"
    )]
    TooManyConfigs {
        /// The op.
        op: String,
        /// The limit.
        most: usize,
        /// Levels of the machine.
        levels: usize,
        /// The machine.
        machine: String,
    },
    /// A search problem that needs too much memory.
    #[error(
        "the tables of the search problem need about {needed} MiB, and the limit is {allowed} MiB; allow more (--ram), or plan for fewer devices"
    )]
    TooLarge {
        /// Needed MiB.
        needed: u64,
        /// Allowed MiB.
        allowed: u64,
    },
    /// Costs that were measured on another device.
    #[error(transparent)]
    Costs(#[from] WrongDevice),
    /// The search problem cannot be built.
    #[error("the search problem cannot be built: {0}")]
    Network(#[from] NetworkError),
    /// A stop of the search problem's building, for example by a time limit.
    #[error("building the search problem was stopped: {}; allow more time (--time)", why_stopped(.0))]
    Stopped(StopReason),
    /// It is proved that no plan of the search space keeps the memory limit.
    #[error(
        "no plan of {solver} fits into {} per device (proved for {space}); {}",
        show_bytes(*.limit),
        least_memory(*.least, *.lower_bound)
    )]
    DoesNotFit {
        /// The strategy.
        solver: String,
        /// The search space of the proof.
        space: String,
        /// The limit in bytes.
        limit: u64,
        /// The least peak memory of any plan that was found.
        least: Option<u64>,
        /// No plan needs less.
        lower_bound: u64,
    },
    /// The search ended without a plan that keeps the memory limit, and without a proof that none does.
    #[error(
        "{solver} found no plan that fits into {} per device ({}), and did not prove that none does; {}; allow more time (--time)",
        show_bytes(*.limit),
        why_stopped(.stop),
        least_memory(*.least, *.lower_bound)
    )]
    NotFound {
        /// The strategy.
        solver: String,
        /// The limit in bytes.
        limit: u64,
        /// The least peak memory of any plan that was found.
        least: Option<u64>,
        /// No plan needs less.
        lower_bound: u64,
        /// Why the search ended.
        stop: StopReason,
    },
    /// The plan of a strategy that does not search within a memory limit exceeds it.
    #[error(
        "the plan of {solver} needs {} per device, and the limit is {}; {solver} does not search within a limit: use auto or \
         exact, or give more memory",
        show_bytes(*.needed),
        show_bytes(*.limit)
    )]
    OverLimit {
        /// The strategy.
        solver: String,
        /// The limit in bytes.
        limit: u64,
        /// The peak memory of its plan.
        needed: u64,
    },
    /// A constraint on a config that no plan satisfies.
    #[error("the constraint `{constraint}` cannot be satisfied: {reason}")]
    ConfigConstraint {
        /// The constraint as the user wrote it.
        constraint: String,
        /// The reason.
        reason: String,
    },
    /// The solver stopped without a plan, for example because its time or its tables did not suffice.
    #[error("solver {solver} found no plan: {reason}")]
    NoPlan {
        /// The solver.
        solver: String,
        /// The reason.
        reason: String,
    },
}

impl PlanError {
    /// What the search came to, without the remedy: for a plan that another strategy found.
    pub fn outcome(&self) -> String {
        match self {
            Self::NotFound { solver, limit, stop, .. } => {
                format!("{solver} found no plan within {} ({})", show_bytes(*limit), why_stopped(stop))
            }
            Self::DoesNotFit { solver, limit, space, .. } => {
                format!("{solver} has no plan within {} (proved for {space})", show_bytes(*limit))
            }
            other => other.to_string(),
        }
    }

    /// The same error of a strategy that ran the one that failed.
    #[must_use]
    pub fn of_solver(mut self, name: &str) -> Self {
        if let Self::DoesNotFit { solver, .. } | Self::NotFound { solver, .. } | Self::NoPlan { solver, .. } =
            &mut self
        {
            *solver = name.to_string();
        }
        self
    }

    /// The same error where a plan of so few bytes is known.
    #[must_use]
    pub fn with_known(mut self, bytes: Option<u64>) -> Self {
        if let Self::DoesNotFit { least, .. } | Self::NotFound { least, .. } = &mut self {
            *least = [*least, bytes].into_iter().flatten().min();
        }
        self
    }

    /// Whether the search problem is too large to be built.
    pub fn is_too_large(&self) -> bool {
        matches!(self, Self::TooLarge { .. } | Self::TooManyConfigs { .. })
    }

    /// Whether the input is valid and only the search has no answer: nothing fits, or its time or its tables did not suffice.
    pub fn is_without_answer(&self) -> bool {
        matches!(
            self,
            Self::DoesNotFit { .. }
                | Self::NotFound { .. }
                | Self::OverLimit { .. }
                | Self::NoPlan { .. }
                | Self::Stopped(_)
        ) || self.is_too_large()
    }
}
