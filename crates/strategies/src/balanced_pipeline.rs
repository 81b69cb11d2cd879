//! A pipeline of balanced stages around any strategy: the strategy plans the whole step on the devices of one group, and the
//! layers are then divided among the groups.
//!
//! Groups are the units of the machine's outermost axes. The stages are consecutive layers, in the order of their forward ops.
//! They are cut so that the longest stage, or the longest time of sends between two stages if that is longer, is as short as possible
//! by the price of the strategy's answer. Among all cuts that are at most [`TOLERANCE`] longer, those with the fewest sends are
//! taken.

use crate::{Planner, Solution, Strategy, error::StrategyError};
use shardwright_cost::{Collective, Placement};
use shardwright_graph::{Graph, LayerId, OpId, Phase, TensorId};
use shardwright_machine::{AxisId, AxisSet, Bytes, Machine, Mesh};
use shardwright_plan::{Constraints, LayerCost, Optimised, PlanError, picoseconds};
use shardwright_search::Control;
use shardwright_space::{Assignment, AxisUse, Config, Pipeline, output_layout, reads_data};
use shardwright_stages::schedule::Schedule;

/// How much longer the longest stage may be than the shortest possible, for less time of sends: parts of a thousand.
const TOLERANCE: i64 = 20;

/// A pipeline around a strategy.
#[derive(Clone, Copy)]
pub struct BalancedPipeline<'s> {
    /// Plans the step on the devices of one group.
    pub inside: &'s dyn Strategy,
    /// The number of groups.
    pub groups: u32,
    /// The schedule.
    pub schedule: Schedule,
}

impl Strategy for BalancedPipeline<'_> {
    fn name(&self) -> &'static str {
        self.inside.name()
    }

    fn about(&self) -> &'static str {
        self.inside.about()
    }

    fn optimises(&self) -> Optimised {
        self.inside.optimises()
    }

    fn searches_within_memory(&self) -> bool {
        false
    }

    fn takes_proposals(&self) -> bool {
        self.inside.takes_proposals()
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let (graph, machine) = (planner.graph(), planner.machine());
        let refuse = |reason: String| PlanError::Pipeline { groups: self.groups, reason };
        if constraints.spmd {
            let reason = "engines that run one program on all devices have no stages; plan without --spmd";
            return Err(refuse(reason.into()).into());
        }
        self.schedule
            .check(self.groups, graph.micro_batches.get())
            .map_err(|error| refuse(format!("{error}; set --micro-batches")))?;
        let outermost = outermost_axes(machine, self.groups).map_err(refuse)?;
        let unit = machine
            .restrict(u64::from(machine.devices() / self.groups))
            .map_err(|e| refuse(e.to_string()))?;
        let inner = Planner::new(graph, &unit, planner.costs(), planner.is_untied());
        let inner = self.inner(&inner, constraints, control)?;
        let (mesh, axes) = joint_mesh(machine, &outermost, inner.context.mesh()).map_err(refuse)?;
        let count = self.groups.saturating_mul(self.schedule.chunks());
        let context = planner.context(mesh.clone(), inner.context.untied)?;
        // Forwards and backwards, in all micro-batches.
        let send = |t: TensorId, producer: OpId, o: usize| {
            let (own, shapes) = (&inner.context, &inner.context.shapes[producer.index()]);
            let layout = output_layout(shapes, o, inner.assignment.config(producer), own.mesh());
            let parts =
                own.mesh().group_size(layout.axes_where(|place| matches!(place, Placement::Shard(_))));
            let bytes = Bytes(graph.tensor(t).ty.bytes() / u64::from(parts.max(1)));
            let seconds = context.resharder.comm().seconds(Collective::Send, axes, bytes);
            picoseconds(seconds).saturating_mul(2 * i64::from(graph.runs(producer)))
        };
        let chain = Chain::of(graph, &inner.costs.layers, send);
        let stages = chain.cut(count).map_err(refuse)?;
        let stage_of = |layer: LayerId| stages.get(chain.places[layer.index()]).copied().unwrap_or(0);
        let pipeline = Pipeline::new(graph, axes, self.schedule, stage_of);
        let op_stages = pipeline.op_stages(graph);
        let config = |op: OpId| {
            let replicated = axes.iter().map(|_| AxisUse::Replicate);
            let uses = inner.assignment.config(op).uses().iter().copied();
            let mut config = Config::new(replicated.chain(uses));
            pipeline.pin(&mesh, op_stages[op.index()], &mut config);
            config
        };
        let configs = graph.op_ids().map(config).collect();
        let assignment = Assignment { pipeline: Some(pipeline), ..Assignment::of(graph, configs) };
        let mut solution = Solution::new(context, assignment, inner.optimised)?;
        solution.choices = inner.choices;
        solution.stages = inner.stages;
        solution.notes.push(format!(
            "configs inside stages are those of {} on {} devices of a stage; the search proves nothing about the pipeline",
            self.inside.name(),
            unit.devices()
        ));
        let limit = Constraints { configs: Vec::new(), ..constraints.clone() };
        solution.checked(&limit, self.inside.name())
    }
}

impl BalancedPipeline<'_> {
    /// The strategy's answer on the devices of one group. Of the whole step, a group holds about its share; where no answer keeps
    /// the limit by that measure, the limit is left to the pipeline.
    fn inner<'u>(
        &self,
        planner: &Planner<'u>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'u>, StrategyError> {
        let share = |limit: Bytes| Bytes(limit.0.saturating_mul(u64::from(self.groups)));
        let limited = Constraints { memory: constraints.memory.map(share), ..constraints.clone() };
        match self.inside.solve(planner, &limited, control) {
            Err(StrategyError::Plan(error)) if limited.memory.is_some() && error.is_without_answer() => {
                self.inside.solve(planner, &Constraints { memory: None, ..limited }, control)
            }
            answer => answer,
        }
    }
}

/// The machine's outermost prime axes, level by level, whose product is the number of groups.
fn outermost_axes(machine: &Machine, groups: u32) -> Result<Vec<AxisSet>, String> {
    let mesh = machine.mesh();
    let mut size = 1u32;
    let mut levels: Vec<AxisSet> = Vec::new();
    let mut possible = Vec::new();
    for (at, axis) in mesh.axes().iter().enumerate() {
        if size == groups && groups > 1 {
            return Ok(levels);
        }
        size = size.saturating_mul(axis.size);
        possible.push(size.to_string());
        let id = AxisId(at as u32);
        match levels.last_mut() {
            Some(own) if mesh.axes()[at - 1].level == axis.level && mesh.axes()[at - 1].dim == axis.dim => {
                *own = own.with(id);
            }
            _ => levels.push(AxisSet::of(id)),
        }
    }
    if size == groups && groups > 1 {
        return Ok(levels);
    }
    match possible.is_empty() {
        true => Err(format!("{} has one device", machine.name())),
        false => Err(format!(
            "{} has outermost groups of devices only for {}",
            machine.name(),
            possible.join(", ")
        )),
    }
}

/// The mesh of the outermost axes and of the mesh of one unit, and its pipeline axes.
fn joint_mesh(machine: &Machine, outermost: &[AxisSet], unit: &Mesh) -> Result<(Mesh, AxisSet), String> {
    let taken: usize = outermost.iter().map(|axes| axes.len()).sum();
    let inner = unit
        .axes()
        .iter()
        .map(|axis| -> AxisSet { axis.primes.iter().map(|prime| AxisId(prime.0 + taken as u32)).collect() });
    let groups: Vec<AxisSet> = outermost.iter().copied().chain(inner).collect();
    let mesh = machine.mesh().merge_axes(&groups).map_err(|error| error.to_string())?;
    let same = mesh.axes()[outermost.len()..]
        .iter()
        .map(|axis| axis.size)
        .eq(unit.axes().iter().map(|axis| axis.size));
    if !same {
        return Err(format!(
            "the devices of a group of {} have other axes than a smaller machine",
            machine.name()
        ));
    }
    Ok((mesh, AxisSet::first(outermost.len())))
}

/// The layers that read data in the order of their forward ops, with their price and the places where stages may be cut.
struct Chain {
    /// Per layer: its place in the chain; none for layers that read no data.
    places: Vec<usize>,
    /// Per place: picoseconds.
    costs: Vec<i64>,
    /// Per place: whether a stage may end after it.
    ends: Vec<bool>,
    /// Per place: picoseconds of sending what the places after it read from it and those before it.
    sends: Vec<i64>,
}

impl Chain {
    fn of(graph: &Graph, costs: &[LayerCost], send: impl Fn(TensorId, OpId, usize) -> i64) -> Self {
        let of_data = reads_data(graph);
        let mut layers: Vec<usize> = (0..graph.layers.len()).filter(|&layer| of_data[layer]).collect();
        layers.sort_by_key(|&layer| graph.layers[layer].forward);
        let mut places = vec![usize::MAX; graph.layers.len()];
        layers.iter().enumerate().for_each(|(place, &layer)| places[layer] = place);
        let count = layers.len();
        let mut chain = Self {
            costs: layers.iter().map(|&layer| costs[layer].compute + costs[layer].comm).collect(),
            ends: vec![true; count],
            sends: vec![0; count],
            places,
        };
        let consumers = graph.consumers();
        for t in graph.tensor_ids() {
            let Some(producer) = graph.tensor(t).producer else { continue };
            let from = graph.node(producer);
            let start = chain.places[from.layer.index()];
            let mut last = start;
            for &reader in consumers.of(t) {
                let node = graph.node(reader);
                let end = chain.places[node.layer.index()];
                if start == usize::MAX
                    || end == usize::MAX
                    || from.phase == Phase::Update
                    || node.phase == Phase::Update
                {
                    continue;
                }
                // Forward tensors flow down the chain, gradients up: any other pair stays together.
                let against = match (from.phase, node.phase) {
                    (Phase::Forward, Phase::Forward) => end < start,
                    (Phase::Backward, Phase::Backward) => end > start,
                    _ => false,
                };
                if against {
                    chain.ends[start.min(end)..start.max(end)].fill(false);
                }
                if from.phase == Phase::Forward {
                    last = last.max(end);
                }
            }
            let result = from.outputs.iter().position(|&made| made == t);
            if let Some(result) = result.filter(|_| start < last && last < count) {
                let time = send(t, producer, result);
                chain.sends[start..last].iter_mut().for_each(|sum| *sum = sum.saturating_add(time));
            }
        }
        chain
    }

    /// The stage of every place.
    fn cut(&self, stages: u32) -> Result<Vec<u32>, String> {
        let places = self.costs.len();
        let possible = self.ends.iter().take(places.saturating_sub(1)).filter(|end| **end).count() + 1;
        if possible < stages as usize {
            return Err(format!("the model can be cut into {possible} stages at most, not {stages}"));
        }
        let longest = self.shortest_longest(stages as usize);
        let limit = longest.saturating_add(longest.saturating_mul(TOLERANCE) / 1000);
        Ok(self.fewest_sends(stages as usize, limit))
    }

    /// Sums of costs before every place.
    fn sums(&self) -> Vec<i64> {
        let mut sums = vec![0i64];
        for &cost in &self.costs {
            sums.push(sums[sums.len() - 1].saturating_add(cost));
        }
        sums
    }

    /// Picoseconds of sends after some places.
    fn sent(&self, end: usize) -> i64 {
        if end < self.costs.len() { self.sends[end - 1] } else { 0 }
    }

    /// The least possible cost of the most expensive of some stages and of the sends between them.
    fn shortest_longest(&self, stages: usize) -> i64 {
        let (sums, places) = (self.sums(), self.costs.len());
        // Per number of places: the least cost of the most expensive of the stages so far.
        let mut best: Vec<Option<i64>> = vec![None; places + 1];
        best[0] = Some(0);
        for _ in 0..stages {
            let mut next = vec![None; places + 1];
            for (end, own) in next.iter_mut().enumerate().skip(1) {
                if end < places && !self.ends[end - 1] {
                    continue;
                }
                let longest = (0..end).filter_map(|start| Some(best[start]?.max(sums[end] - sums[start])));
                *own = longest.min().map(|longest| longest.max(self.sent(end)));
            }
            best = next;
        }
        best[places].unwrap_or(i64::MAX)
    }

    /// The stages of at most a cost each, and with sends of at most that cost, that send least.
    fn fewest_sends(&self, stages: usize, limit: i64) -> Vec<u32> {
        let (sums, places) = (self.sums(), self.costs.len());
        let mut best: Vec<Option<i64>> = vec![None; places + 1];
        best[0] = Some(0);
        // Per stage and number of places: where the stage starts.
        let mut starts: Vec<Vec<usize>> = Vec::with_capacity(stages);
        for _ in 0..stages {
            let (mut next, mut from) = (vec![None; places + 1], vec![0; places + 1]);
            for end in 1..=places {
                if end < places && !self.ends[end - 1] {
                    continue;
                }
                let sent = self.sent(end);
                let fits = |start: &usize| (sums[end] - sums[*start]).max(sent) <= limit;
                let costs = (0..end)
                    .filter(fits)
                    .filter_map(|start| Some((best[start]?.saturating_add(sent), start)));
                if let Some((sends, start)) = costs.min() {
                    (next[end], from[end]) = (Some(sends), start);
                }
            }
            best = next;
            starts.push(from);
        }
        let mut stage_of = vec![0; places];
        let mut end = places;
        for (stage, from) in starts.iter().enumerate().rev() {
            let start = from[end].min(end);
            stage_of[start..end].fill(stage as u32);
            end = start;
        }
        stage_of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(costs: &[i64], sends: &[i64]) -> Chain {
        let ends = vec![true; costs.len()];
        Chain { places: (0..costs.len()).collect(), costs: costs.to_vec(), ends, sends: sends.to_vec() }
    }

    #[test]
    fn the_longest_stage_is_as_short_as_possible() {
        let own = chain(&[5, 1, 1, 1, 4, 4], &[1; 6]);
        assert_eq!(own.cut(3), Ok(vec![0, 0, 1, 1, 1, 2]));
        assert_eq!(own.shortest_longest(3), 6);
        assert_eq!(own.shortest_longest(6), 5);
        assert!(own.cut(7).unwrap_err().contains("6 stages at most"));
    }

    #[test]
    fn equal_stages_send_least_and_keep_pairs_together() {
        let mut own = chain(&[1000, 10, 1000], &[900, 5, 0]);
        assert_eq!(own.cut(2), Ok(vec![0, 0, 1]));
        own.sends = vec![5, 900, 0];
        assert_eq!(own.cut(2), Ok(vec![0, 1, 1]));
        // Sends that take longer than a stage decide.
        own.sends = vec![5000, 900, 0];
        assert_eq!((own.cut(2), own.shortest_longest(2)), (Ok(vec![0, 0, 1]), 1010));
        own.sends = vec![5, 900, 0];
        own.ends[0] = false;
        assert_eq!(own.cut(2), Ok(vec![0, 0, 1]));
    }
}
