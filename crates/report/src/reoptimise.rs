//! What a choice would cost with everything else chosen anew: min-marginals.
//!
//! Every variable's configs are priced on the plan's own axes, which makes a cost network; elimination gives the
//! min-marginals of all choices at once where its tables are small enough ([`Alternatives::all`]). Where they are not, or a
//! limit of memory has to be kept, single choices are fixed and the rest is searched ([`Alternatives::one`]): what is not
//! proved then is a bound. Changes are told against the plan's sum.

use crate::page::ReportError;
use serde::Serialize;
use shardwright_machine::Bytes;
use shardwright_plan::{Candidates, Context, MOST_CONFIGS, Plan, PlanError, SearchProblem, limited};
use shardwright_search::{Control, Solver, StopReason, VarId, exact::Exact, min_marginals};
use shardwright_space::{Assignment, Config, configs, count_configs};
use std::collections::BTreeMap;

/// Additions that min-marginals are worth: a few seconds.
const MOST_ADDITIONS: f64 = 4e9;

/// How a figure is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Certainty {
    /// It is the least there is.
    Exact,
    /// It may be more: a limit of memory was not looked at, or nothing was proved in time.
    AtLeast,
    /// It may be less: some ops have too many configs and stay as they are.
    AtMost,
}

/// What choices change, everything else chosen anew.
#[derive(Clone, Debug)]
pub struct Reoptimisation {
    /// How the changes are meant.
    pub certainty: Certainty,
    /// By part and its leading op's config: picoseconds that the plan's sum becomes longer by.
    changes: BTreeMap<(usize, Config), i64>,
    /// What the plan does itself, by part; none where the space does not have it.
    own: BTreeMap<usize, i64>,
}

impl Reoptimisation {
    /// What all choices of a plan would change; `problem` is any on the plan's axes.
    ///
    /// # Errors
    /// Why that is not known, in words.
    pub fn of(
        context: &Context<'_>,
        plan: &Plan,
        assignment: &Assignment,
        control: &Control<'_>,
    ) -> Result<Self, String> {
        if assignment.pipeline.is_some() {
            return Err("the search of all other configs has no stages".into());
        }
        let alternatives =
            Alternatives::new(context, plan, assignment, control).map_err(|error| error.to_string())?;
        alternatives.all(control).map_err(|reason| match reason {
            StopReason::Refused(reason) => reason,
            StopReason::Deadline => "it takes too long".into(),
            other => format!("{other:?}"),
        })
    }

    /// What a part's config would change.
    pub fn change(&self, part: usize, lead: &Config) -> Option<i64> {
        self.changes.get(&(part, lead.clone())).copied()
    }

    /// The greater of two lower bounds of every change.
    #[must_use]
    pub fn tightened(mut self, other: Self) -> Self {
        for (key, bound) in other.changes {
            self.changes.entry(key).and_modify(|own| *own = bound.max(*own)).or_insert(bound);
        }
        for (part, bound) in other.own {
            self.own.entry(part).and_modify(|own| *own = bound.max(*own)).or_insert(bound);
        }
        self
    }

    /// What would change if the part stayed as it is, and everything else were chosen anew: zero for a plan that is
    /// optimal.
    pub fn own_change(&self, part: usize) -> Option<i64> {
        self.own.get(&part).copied()
    }
}

/// The choices that a plan had, priced on its own axes.
pub struct Alternatives<'p> {
    problem: SearchProblem<'p>,
    /// By part: the choice that the plan made, where it is one of them.
    chosen: Vec<Option<u32>>,
    objective: i64,
    memory: Option<Bytes>,
    /// Whether every part has all its configs.
    whole: bool,
}

impl<'p> Alternatives<'p> {
    /// Prices all choices, unless `control` stops it; `problem` is any on the plan's axes.
    ///
    /// # Errors
    /// Where that was stopped, or a tensor cannot be laid out.
    pub fn new(
        context: &Context<'p>,
        plan: &Plan,
        assignment: &Assignment,
        control: &Control<'_>,
    ) -> Result<Self, ReportError> {
        let mesh = context.mesh();
        let mut whole = true;
        let listed = |lead: shardwright_graph::OpId| {
            let (rule, own) = (&context.shapes[lead.index()].rule, assignment.config(lead));
            if count_configs(rule, mesh, MOST_CONFIGS) > MOST_CONFIGS {
                whole = false;
                return vec![own.clone()];
            }
            let mut all = configs(rule, mesh);
            if !all.contains(own) {
                all.push(own.clone());
            }
            all
        };
        let configs = context.variables.members.iter().map(|split| split.forward()).map(listed).collect();
        let candidates = Candidates { mesh: mesh.clone(), configs };
        let near = SearchProblem::among(context, candidates, control)?;
        let made = |part: usize| {
            let ops = &context.variables.members[part].ops;
            let own =
                |configs: &[Config]| ops.iter().zip(configs).all(|(op, own)| assignment.config(*op) == own);
            near.choices[part].iter().position(|choice| own(&choice.configs)).map(|at| at as u32)
        };
        let chosen = (0..near.choices.len()).map(made).collect();
        let memory = plan.memory_limit_bytes.map(Bytes);
        Ok(Self { problem: near, chosen, objective: plan.objective, memory, whole })
    }

    /// The changes of all choices, by elimination.
    ///
    /// # Errors
    /// Why there are none.
    pub fn all(&self, control: &Control<'_>) -> Result<Reoptimisation, StopReason> {
        let certainty = match (self.memory, self.whole) {
            (None, true) => Certainty::Exact,
            (Some(_), true) => Certainty::AtLeast,
            (None, false) => Certainty::AtMost,
            (Some(_), false) => {
                let reason = "memory is limited, and some ops have too many configs to look at";
                return Err(StopReason::Refused(reason.into()));
            }
        };
        let marginals = min_marginals(&self.problem.network, MOST_ADDITIONS, control)?;
        let mut found = Reoptimisation { certainty, changes: BTreeMap::new(), own: BTreeMap::new() };
        for part in 0..self.problem.choices.len() {
            for choice in 0..self.problem.choices[part].len() as u32 {
                if let Some(least) = marginals.least(VarId(part as u32), choice) {
                    self.note(&mut found, part, choice, least);
                }
            }
        }
        Ok(found)
    }

    /// The changes of some of a part's configs, one after the other: each is fixed and the rest searched, for half of the
    /// time that is left. What is proved counts; bounds only where nothing is.
    ///
    /// # Errors
    /// Where the network with the limit of memory cannot be made.
    pub fn one(
        &self,
        part: usize,
        leads: &[Config],
        control: &Control<'_>,
    ) -> Result<Option<Reoptimisation>, PlanError> {
        if !self.whole {
            return Ok(None);
        }
        let limited = self.memory.map(|limit| limited(&self.problem, limit, control)).transpose()?;
        let network = limited.as_ref().unwrap_or(&self.problem.network);
        let (mut proved, mut bounds) = (Vec::new(), Vec::new());
        let choice_of = |lead: &Config| {
            let is = |choice: &u32| self.problem.forward_config(part, *choice) == lead;
            (0..self.problem.choices[part].len() as u32).find(is)
        };
        let mut choices: Vec<u32> = leads.iter().filter_map(choice_of).collect();
        // Alternatives first: of what the plan does itself most is known already.
        choices.sort_by_key(|&choice| self.chosen[part] == Some(choice));
        for choice in choices {
            if control.stop(0).is_some() {
                break;
            }
            let outcome = Exact.solve(&network.with_choice(VarId(part as u32), choice), &control.share(2));
            match outcome.cost {
                Some(cost) if outcome.proved_optimal() => proved.push((choice, cost)),
                // Nothing that keeps the limit goes with this choice.
                None if outcome.stop_reason == StopReason::Infeasible => {}
                _ => bounds.push((choice, outcome.bound)),
            }
        }
        let (certainty, known) =
            if proved.is_empty() { (Certainty::AtLeast, bounds) } else { (Certainty::Exact, proved) };
        // The network counts less memory than plans need: under a limit its optimum is a lower bound.
        let certainty = if self.memory.is_some() { Certainty::AtLeast } else { certainty };
        let mut found = Reoptimisation { certainty, changes: BTreeMap::new(), own: BTreeMap::new() };
        for (choice, least) in known {
            self.note(&mut found, part, choice, least);
        }
        Ok(Some(found))
    }

    fn note(&self, found: &mut Reoptimisation, part: usize, choice: u32, least: i64) {
        let change = least - self.objective;
        found.changes.insert((part, self.problem.forward_config(part, choice).clone()), change);
        if self.chosen[part] == Some(choice) {
            found.own.insert(part, change);
        }
    }
}
