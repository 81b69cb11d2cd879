//! Everything that the page shows, gathered.

use crate::{
    difference::Difference,
    explain::{Explainer, Explanation},
    ops::OpFacts,
    reoptimise::Reoptimised,
    step::Step,
};
use serde::Serialize;
use shardwright_lower::LowerError;
use shardwright_plan::{Demands, Plan, PlanError, Problem, search, strategy};
use shardwright_search::{Control, LogEntry};
use shardwright_sim::TooManyTasks;
use shardwright_space::Config;

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

/// What the page shows.
#[derive(Clone, Debug, Serialize)]
pub struct Page<'p> {
    /// The plan, as `plan --json` prints it.
    pub plan: &'p Plan,
    /// What a device's memory holds.
    pub device_memory_bytes: u64,
    /// Names of the machine's levels, outermost first.
    pub levels: Vec<String>,
    /// Per op of the plan: what the plan does not say.
    pub ops: Vec<OpFacts>,
    /// The simulated steps: the plan's, then data parallelism's, or the other plan's.
    pub steps: Vec<Step>,
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
    /// The page of a plan; the problem is any of its model, machine and costs that has the plan's axes and is untied if
    /// the plan is. What alternatives cost with everything else chosen anew is left out where `control` stops it.
    ///
    /// # Errors
    /// Where the plan is of another model or machine, or cannot be simulated.
    pub fn new(
        problem: &Problem<'_>,
        plan: &'p Plan,
        log: &[LogEntry],
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let data = search(problem, strategy::find("data")?, &Demands::default(), &Control::new())?;
        let mut page = Self::beside(problem, plan, ("data", &data.configs), control)?;
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
        problem: &Problem<'_>,
        before: &Plan,
        after: &'p Plan,
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let difference = Difference::of(problem, before, after)?;
        let old = before.configs(problem.graph, problem.mesh())?;
        let page = Self::beside(problem, after, ("before", &old), control)?;
        Ok(Self { difference: Some(difference), ..page })
    }

    /// The page of a plan, its step beside another.
    fn beside(
        problem: &Problem<'_>,
        plan: &'p Plan,
        other: (&'static str, &[Config]),
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let configs = plan.configs(problem.graph, problem.mesh())?;
        let steps =
            vec![Step::simulate("plan", problem, &configs)?, Step::simulate(other.0, problem, other.1)?];
        let mut explainer = Explainer::new(problem, &configs)?;
        let (reoptimised, not_reoptimised) = match Reoptimised::of(problem, plan, &configs, control) {
            Ok(reoptimised) => (Some(reoptimised), None),
            Err(reason) => (None, Some(reason)),
        };
        let explain = |part| explainer.explain(part, OPTIONS, reoptimised.as_ref());
        let explanations = (0..problem.variables.splits.len()).map(explain).collect::<Result<_, _>>()?;
        Ok(Self {
            plan,
            device_memory_bytes: problem.machine.slowest().memory.0,
            levels: problem.machine.levels().iter().map(|level| level.name.clone()).collect(),
            ops: OpFacts::all(problem, &configs),
            steps,
            explanations,
            not_reoptimised,
            search: Vec::new(),
            difference: None,
        })
    }
}
