//! What two plans of one model do differently, layer by layer (untied: op by op), and what each difference is worth.
//!
//! A change is priced twice: alone, as the only change to the first plan, and undone, as the only thing taken back from the
//! second. One by one and together the changes are not worth the same, since neighbours that change along save each
//! other re-layouts; a change that is dear alone and dear to undo is one that only goes with others.

use crate::{explain::Explainer, page::ReportError};
use serde::Serialize;
use shardwright_plan::{Plan, PlanError, Problem};
use shardwright_space::Config;

/// Two plans, the first one's figures first.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// The simulated step.
    pub step_seconds: [f64; 2],
    /// Picoseconds if nothing overlapped.
    pub objective: [i64; 2],
    /// The most that a device holds.
    pub peak_memory_bytes: [u64; 2],
    /// Bytes sent, all devices together.
    pub traffic_bytes: [u64; 2],
    /// Who made them.
    pub solvers: [String; 2],
    /// Layers (untied: ops) that are split otherwise, those that are worth most first.
    pub changes: Vec<Change>,
}

/// A layer (untied: an op) that is split otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// The deciding op's name.
    pub op: String,
    /// Its place in the plan.
    pub index: u32,
    /// Its config in the first plan.
    pub before: String,
    /// In the second.
    pub after: String,
    /// Ops whose configs differ.
    pub ops: usize,
    /// What the first plan's sum would become longer by, were this the only change.
    pub alone_seconds: f64,
    /// What the second plan's sum would become longer by, were this alone taken back.
    pub undone_seconds: f64,
}

impl Difference {
    /// The difference of two plans on the same axes; the problem is any on these, untied if one of the plans is.
    ///
    /// # Errors
    /// Where a plan is of another model, or they have other axes.
    pub fn of(problem: &Problem<'_>, before: &Plan, after: &Plan) -> Result<Self, ReportError> {
        if before.axes != after.axes {
            let reason = "the plans have other axes".to_string();
            return Err(PlanError::Mismatch { reason }.into());
        }
        let old = before.configs(problem.graph, problem.mesh())?;
        let new = after.configs(problem.graph, problem.mesh())?;
        let (mut from_old, mut from_new) = (Explainer::new(problem, &old)?, Explainer::new(problem, &new)?);
        let mut changes = Vec::new();
        for (part, split) in problem.variables.splits.iter().enumerate() {
            let differ = split.ops.iter().filter(|op| old[op.index()] != new[op.index()]).count();
            if differ == 0 {
                continue;
            }
            let lead = split.forward();
            let own =
                |all: &[Config]| split.ops.iter().map(|op| all[op.index()].clone()).collect::<Vec<Config>>();
            let longer = |explainer: &mut Explainer<'_>, from: &[Config], to: &[Config]| {
                let price = |explainer: &mut Explainer<'_>, all: &[Config]| {
                    explainer.price(part, &own(all)).map(|choice| choice.total_ps())
                };
                let change = price(explainer, to)? - price(explainer, from)?;
                Ok::<f64, ReportError>(change as f64 / 1e12)
            };
            let shown =
                |all: &[Config]| all[lead.index()].show(&problem.shapes[lead.index()].rule, problem.mesh());
            changes.push(Change {
                op: problem.graph.node(lead).name.clone(),
                index: lead.0,
                before: shown(&old),
                after: shown(&new),
                ops: differ,
                alone_seconds: longer(&mut from_old, &old, &new)?,
                undone_seconds: longer(&mut from_new, &new, &old)?,
            });
        }
        changes.sort_by(|a, b| b.alone_seconds.abs().total_cmp(&a.alone_seconds.abs()));
        Ok(Self {
            step_seconds: [before, after].map(|plan| plan.simulated.step_seconds),
            objective: [before, after].map(|plan| plan.objective),
            peak_memory_bytes: [before, after].map(|plan| plan.peak_memory_bytes),
            traffic_bytes: [before, after].map(|plan| plan.traffic_bytes),
            solvers: [before, after].map(|plan| plan.solver.clone()),
            changes,
        })
    }
}
