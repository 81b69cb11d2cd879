//! Why a layer (untied: an op) is split as it is: what it would cost otherwise, everything else staying as it is, and, where
//! that is known ([`crate::reoptimise`]), with everything else chosen anew.
//!
//! A cost has three parts: computing, communication among the layer's own ops (windows' rows, a gradient on its way to
//! the update), and what is fetched from and for its neighbours. They add up as the search's objective does, so that
//! the difference of two options is what the step would gain or lose. Limits of memory are not looked at.

use crate::{
    page::ReportError,
    reoptimise::{Certainty, Reoptimisation},
};
use serde::Serialize;
use shardwright_cost::{Layout, LayoutError, TensorShape};
use shardwright_graph::OpId;
use shardwright_plan::{Context, MOST_CONFIGS, OpTimes, PlanError, Variables, picoseconds};
use shardwright_space::{Assignment, Config, Endpoint, Transfer, configs, count_configs};
use std::collections::HashMap;

/// What ops that choose together could do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The op whose config decides: a layer's forward op.
    pub op: u32,
    /// All ops that follow it, itself among them.
    pub ops: Vec<u32>,
    /// How many configs there are; zero where they are too many to be looked at.
    pub configs: usize,
    /// How [`Choice::reoptimised_ps`] is meant; none where it is not known.
    pub reoptimised: Option<Certainty>,
    /// What the plan does, then the best of what it could do instead, best first: with everything else chosen anew where
    /// that is known, else with everything staying as it is.
    pub options: Vec<Choice>,
}

/// A config and what it costs, in picoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The deciding op's config.
    pub config: String,
    /// Computing, on one device.
    pub compute_ps: i64,
    /// Communication among its own ops.
    pub inside_ps: i64,
    /// Communication with its neighbours as they are.
    pub neighbours_ps: i64,
    /// What the plan's sum would become longer by with this config and everything else chosen anew; none where that is not
    /// known, or nothing goes with it.
    pub reoptimised_ps: Option<i64>,
}

impl Choice {
    /// All together.
    pub fn total_ps(&self) -> i64 {
        self.compute_ps + self.inside_ps + self.neighbours_ps
    }
}

/// A transfer that ops which choose together have a part in.
#[derive(Clone, Copy)]
struct Link<'t> {
    transfer: &'t Transfer,
    /// The other end is another's.
    outside: bool,
}

/// Explains the choices of a plan.
pub struct Explainer<'p> {
    context: &'p Context<'p>,
    groups: &'p Variables,
    chosen: Assignment,
    /// The stage of every op; empty without a pipeline.
    stages: Vec<u32>,
    times: OpTimes<'p>,
    links: Vec<Vec<Link<'p>>>,
    /// Times of reshards that were asked for before.
    known: HashMap<(TensorShape, Layout, Layout), i64>,
}

impl<'p> Explainer<'p> {
    /// For a plan's configs; what chooses together are the context's variables.
    ///
    /// # Errors
    /// Where the context's costs are of another device.
    pub fn new(context: &'p Context<'p>, assignment: &Assignment) -> Result<Self, ReportError> {
        let groups = &context.variables;
        let mut links: Vec<Vec<Link<'p>>> = Vec::new();
        links.resize_with(groups.members.len(), Vec::new);
        for transfer in &context.transfers.pairs {
            let (from, to) = (groups.variable_of(transfer.from.op), groups.variable_of(transfer.to.op));
            links[from].push(Link { transfer, outside: from != to });
            if from != to {
                links[to].push(Link { transfer, outside: true });
            }
        }
        Ok(Self {
            context,
            groups,
            stages: assignment.pipeline.as_ref().map_or_else(Vec::new, |own| own.op_stages(context.graph)),
            chosen: assignment.clone(),
            times: context.times()?,
            links,
            known: HashMap::new(),
        })
    }

    /// How many parts of the graph choose for themselves.
    pub fn parts(&self) -> usize {
        self.groups.members.len()
    }

    /// The part that an op chooses with.
    pub fn part(&self, op: OpId) -> usize {
        self.groups.variable_of(op)
    }

    /// The configs of a part's leading op that are looked at, those first that would cost least with everything else as it
    /// is.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn leads(&mut self, part: usize) -> Result<Vec<Config>, ReportError> {
        let (context, split) = (self.context, &self.groups.members[part]);
        let mut priced = Vec::new();
        for config in self.listed(part) {
            let mut own = split.configs(&context.shapes, context.mesh(), &config);
            if let Some(pipeline) = &self.chosen.pipeline {
                for (op, config) in split.ops.iter().zip(&mut own) {
                    pipeline.pin(context.mesh(), self.stages[op.index()], config);
                }
            }
            if let Some(choice) = self.price(part, &own)? {
                priced.push((choice.total_ps(), config));
            }
        }
        priced.sort();
        Ok(priced.into_iter().map(|(_, config)| config).collect())
    }

    /// All configs of a part's leading op, unless they are too many. In a pipeline, those on the devices of its stage.
    fn listed(&self, part: usize) -> Vec<Config> {
        let lead = self.groups.members[part].forward();
        let rule = &self.context.shapes[lead.index()].rule;
        let mesh = self.context.mesh();
        if count_configs(rule, mesh, MOST_CONFIGS) > MOST_CONFIGS {
            return Vec::new();
        }
        let mut listed = configs(rule, mesh);
        if let Some(pipeline) = &self.chosen.pipeline {
            listed.iter_mut().for_each(|config| pipeline.pin(mesh, self.stages[lead.index()], config));
            listed.sort();
            listed.dedup();
        }
        listed
    }

    /// What a part does, and the best `most` configs that it could have instead.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn explain(
        &mut self,
        part: usize,
        most: usize,
        reoptimised: Option<&Reoptimisation>,
    ) -> Result<Explanation, ReportError> {
        let (context, split) = (self.context, &self.groups.members[part]);
        let (shapes, mesh) = (&context.shapes[..], context.mesh());
        let lead = split.forward();
        let own: Vec<Config> = split.ops.iter().map(|op| self.chosen.config(*op).clone()).collect();
        let mut options: Vec<Choice> = self.price(part, &own)?.into_iter().collect();
        for chosen in &mut options {
            chosen.reoptimised_ps = reoptimised.and_then(|known| known.own_change(part));
        }
        let listed = self.listed(part);
        let mut others: Vec<Choice> = Vec::with_capacity(listed.len());
        for config in &listed {
            let Some(mut other) = self.price(part, &split.configs(shapes, mesh, config))? else { continue };
            other.reoptimised_ps = reoptimised.and_then(|known| known.change(part, config));
            others.push(other);
        }
        let key = |own: &Choice| (own.reoptimised_ps.is_none(), own.reoptimised_ps, own.total_ps());
        others.sort_by(|a, b| (key(a), &a.config).cmp(&(key(b), &b.config)));
        let count = others.len();
        for other in others {
            // Configs that only differ in which axis splits what read the same: the best of them counts.
            if options.len() <= most && options.iter().all(|known| known.config != other.config) {
                options.push(other);
            }
        }
        let ops = split.ops.iter().map(|op| op.0).collect();
        let reoptimised = reoptimised.map(|known| known.certainty);
        Ok(Explanation { op: lead.0, ops, configs: count, reoptimised, options })
    }

    /// What a part costs when its ops have these configs, in their order. None where no reshard leads to a neighbour: a sum
    /// over micro-batches whose partial results another op would have to make.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn price(&mut self, part: usize, configs: &[Config]) -> Result<Option<Choice>, ReportError> {
        let (context, groups) = (self.context, self.groups);
        let (shapes, mesh) = (&context.shapes[..], context.mesh());
        let (mut compute_ps, mut inside_ps, mut neighbours_ps) = (0, 0, 0);
        for (&op, config) in groups.members[part].ops.iter().zip(configs) {
            compute_ps += self.times.compute(op, config);
            inside_ps += self.times.exchange(&context.resharder, op, config);
        }
        for at in 0..self.links[part].len() {
            let Link { transfer, outside } = self.links[part][at];
            let layout = |end: &Endpoint| {
                let (own, member) = groups.index[end.op.index()];
                let config =
                    if own as usize == part { &configs[member as usize] } else { self.chosen.config(end.op) };
                end.layout(shapes, config, mesh)
            };
            let (from, to) = (layout(&transfer.from), layout(&transfer.to));
            let Some(time) = self.time(transfer, from, to)? else { return Ok(None) };
            *(if outside { &mut neighbours_ps } else { &mut inside_ps }) += time;
        }
        let lead = groups.members[part].forward();
        let rule = &shapes[lead.index()].rule;
        let (_, member) = groups.index[lead.index()];
        let config = configs[member as usize].show(rule, mesh);
        Ok(Some(Choice { config, compute_ps, inside_ps, neighbours_ps, reoptimised_ps: None }))
    }

    /// Picoseconds of a reshard; none where a complete tensor would become a partial sum.
    fn time(&mut self, transfer: &Transfer, from: Layout, to: Layout) -> Result<Option<i64>, ReportError> {
        if from == to {
            return Ok(Some(0));
        }
        let tensor = self.context.graph.tensor(transfer.tensor);
        let fail = |source| PlanError::Tensor { tensor: tensor.name.clone(), source };
        let shape = TensorShape::new(&tensor.ty.shape, tensor.ty.dtype.bytes() as u32).map_err(fail)?;
        if let Some(&known) = self.known.get(&(shape, from, to)) {
            return Ok(Some(known));
        }
        let resharder = &self.context.resharder;
        let time = match resharder.seconds(&resharder.tensor(shape), &from, &to) {
            Err(LayoutError::CannotBecomePartial { .. }) => return Ok(None),
            other => other.map(picoseconds).map_err(fail)?,
        };
        self.known.insert((shape, from, to), time);
        Ok(Some(time))
    }
}
