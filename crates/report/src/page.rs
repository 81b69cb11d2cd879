//! Everything that the page shows, gathered.

use crate::{
    difference::Difference,
    explain::{Explainer, Explanation},
    ops::OpFacts,
    rates::DeviceRates,
    reoptimise::Reoptimisation,
    step::StepView,
};
use serde::Serialize;
use shardwright_lower::LowerError;
use shardwright_plan::{Context, Plan, PlanError};
use shardwright_search::{Control, LogEntry};
use shardwright_sim::{SimError, TooManyTasks};
use shardwright_space::Assignment;
use shardwright_strategies::recipes::DATA;

/// How many other configs of a layer are shown.
const OPTIONS: usize = 6;

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The plan is not one of this model and machine.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// It cannot be run.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// It cannot be simulated.
    #[error(transparent)]
    Sim(#[from] TooManyTasks),
}

impl From<SimError> for ReportError {
    fn from(error: SimError) -> Self {
        match error {
            SimError::Plan(error) => Self::Plan(error),
            SimError::Lower(error) => Self::Lower(error),
            SimError::Size(error) => Self::Sim(error),
        }
    }
}

/// What the page shows.
#[derive(Clone, Debug, Serialize)]
pub struct Page<'p> {
    /// The plan, as `plan --json` prints it.
    pub plan: &'p Plan,
    /// What a device's memory holds.
    pub device_memory_bytes: u64,
    /// What a plan may fill of it; none where the machine states no memory.
    pub usable_memory_bytes: Option<u64>,
    /// The rates of a device's data sheet.
    pub device: DeviceRates,
    /// Names of the machine's levels, outermost first.
    pub levels: Vec<String>,
    /// Per op of the plan: what the plan does not say.
    pub ops: Vec<OpFacts>,
    /// The simulated steps: the plan's, then data parallelism's, or the other plan's.
    pub steps: Vec<StepView>,
    /// Why the layers (untied: the ops) are split as they are.
    pub explanations: Vec<Explanation>,
    /// Why nothing is said of what everything else chosen anew would change, where nothing is.
    pub not_reoptimised: Option<String>,
    /// How the search went; empty where nobody watched.
    pub search: Vec<Improvement>,
    /// What another plan does differently, where the page is about two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<Difference>,
}

/// The search had something better.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Improvement {
    /// Since the start.
    pub seconds: f64,
    /// The best plan's cost in picoseconds, if there is one.
    pub best: Option<i64>,
    /// No plan costs less.
    pub bound: i64,
}

impl<'p> Page<'p> {
    /// The page of a plan; the context is any of its model, machine and costs that has the plan's axes and is untied if
    /// the plan is. What alternatives cost with everything else chosen anew is left out where `control` stops it.
    ///
    /// # Errors
    /// Where the plan is of another model or machine, or cannot be simulated.
    pub fn new(
        context: &Context<'_>,
        plan: &'p Plan,
        assignment: &Assignment,
        log: &[LogEntry],
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let data = DATA.assignment(context);
        let mut page = Self::beside(context, (plan, assignment), ("data", &data), control)?;
        let improvement = |entry: &LogEntry| Improvement {
            seconds: entry.elapsed.as_secs_f64(),
            best: entry.best,
            bound: entry.bound,
        };
        page.search = log.iter().map(improvement).collect();
        Ok(page)
    }

    /// The page of two plans on the same axes: the second in full, beside the first.
    ///
    /// # Errors
    /// As [`Page::new`]; and where the plans have other axes.
    pub fn of_two(
        context: &Context<'_>,
        before: (&Plan, &Assignment),
        after: (&'p Plan, &Assignment),
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let difference = Difference::of(context, before, after)?;
        let page = Self::beside(context, after, ("before", before.1), control)?;
        Ok(Self { difference: Some(difference), ..page })
    }

    /// The page of a plan, its step beside another.
    fn beside(
        context: &Context<'_>,
        (plan, assignment): (&'p Plan, &Assignment),
        other: (&'static str, &Assignment),
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let steps = vec![
            StepView::simulate("plan", context, assignment)?,
            StepView::simulate(other.0, context, other.1)?,
        ];
        let mut explainer = Explainer::new(context, assignment)?;
        let (reoptimised, not_reoptimised) = match Reoptimisation::of(context, plan, assignment, control) {
            Ok(reoptimised) => (Some(reoptimised), None),
            Err(reason) => (None, Some(reason)),
        };
        let explain = |part| explainer.explain(part, OPTIONS, reoptimised.as_ref());
        let explanations = (0..context.variables.members.len()).map(explain).collect::<Result<_, _>>()?;
        Ok(Self {
            plan,
            device_memory_bytes: context.machine.slowest().memory.0,
            usable_memory_bytes: context.machine.memory_limit().map(|usable| usable.0),
            device: DeviceRates::of(context),
            levels: context.machine.levels().iter().map(|level| level.name.clone()).collect(),
            ops: OpFacts::all(context, assignment)?,
            steps,
            explanations,
            not_reoptimised,
            search: Vec::new(),
            difference: None,
        })
    }
}
