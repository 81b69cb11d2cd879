//! What two plans of one model do differently, layer by layer (untied: op by op), and what each difference is worth.
//!
//! A change is priced twice: alone, as the only change to the first plan, and undone, as the only thing taken back from the
//! second. One by one and together the changes are not worth the same, since neighbours that change along save each
//! other reshards; a change that is dear alone and dear to undo is one that only goes with others.

use crate::{explain::Explainer, page::ReportError};
use serde::Serialize;
use shardwright_plan::{Context, Plan};
use shardwright_space::{Assignment, Config};

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
    /// Their pipelines in words: stages and schedule; none without stages.
    pub pipelines: [Option<String>; 2],
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
    /// What the first plan's sum would become longer by, were this the only change; none where it goes with others only.
    pub alone_seconds: Option<f64>,
    /// What the second plan's sum would become longer by, were this alone taken back; none where that is impossible.
    pub undone_seconds: Option<f64>,
}

impl Difference {
    /// The difference of two plans, their assignments on the axes of the context; it is untied if one of the plans is.
    ///
    /// # Errors
    /// Where a plan is of another model, or an assignment on other axes.
    pub fn of(
        context: &Context<'_>,
        (before, old): (&Plan, &Assignment),
        (after, new): (&Plan, &Assignment),
    ) -> Result<Self, ReportError> {
        let (mut from_old, mut from_new) = (Explainer::new(context, old)?, Explainer::new(context, new)?);
        let mut changes = Vec::new();
        for (part, split) in context.variables.members.iter().enumerate() {
            let differ = split.ops.iter().filter(|op| old.config(**op) != new.config(**op)).count();
            if differ == 0 {
                continue;
            }
            let lead = split.forward();
            let own = |all: &Assignment| {
                split.ops.iter().map(|op| all.config(*op).clone()).collect::<Vec<Config>>()
            };
            let longer = |explainer: &mut Explainer<'_>, from: &Assignment, to: &Assignment| {
                let price = |explainer: &mut Explainer<'_>, all: &Assignment| {
                    explainer.price(part, &own(all)).map(|choice| choice.map(|choice| choice.total_ps()))
                };
                let (new, old) = (price(explainer, to)?, price(explainer, from)?);
                let change = new.zip(old).map(|(new, old)| (new - old) as f64 / 1e12);
                Ok::<Option<f64>, ReportError>(change)
            };
            let shown =
                |all: &Assignment| all.config(lead).show(&context.shapes[lead.index()].rule, context.mesh());
            changes.push(Change {
                op: context.graph.node(lead).name.clone(),
                index: lead.0,
                before: shown(old),
                after: shown(new),
                ops: differ,
                alone_seconds: longer(&mut from_old, old, new)?,
                undone_seconds: longer(&mut from_new, new, old)?,
            });
        }
        let worth = |change: &Change| change.alone_seconds.map_or(f64::INFINITY, f64::abs);
        changes.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        Ok(Self {
            step_seconds: [before, after].map(|plan| plan.simulated.step_seconds),
            objective: [before, after].map(|plan| plan.objective),
            peak_memory_bytes: [before, after].map(|plan| plan.peak_memory_bytes),
            traffic_bytes: [before, after].map(|plan| plan.traffic_bytes),
            solvers: [before, after].map(|plan| plan.solver.clone()),
            pipelines: [before, after].map(|plan| {
                let pipeline = plan.pipeline.as_ref()?;
                Some(format!("{} stages, {}", pipeline.stages.len(), pipeline.schedule))
            }),
            changes,
        })
    }
}
