//! Pipelined programs: which pass of which stage every instruction of the body belongs to, and the order in which all groups of
//! devices run their passes.
//!
//! The list of instructions stays one list for all devices. Every group finds its passes there in the order of its schedule, and
//! every pass comes after the passes that it reads from. So a device that runs its instructions in the list's order never waits
//! for an instruction that waits for it: the program cannot deadlock.
//!
//! A backward op belongs to the gradients of weights if only ops of its own layer depend on it within the micro-batch. All other
//! backward ops lead to gradients of inputs.

use crate::program::{Instruction, ParallelGraph, Work};
use rustc_hash::FxHashMap;
use shardwright_graph::{Graph, OpId, Phase};
use shardwright_machine::{DeviceId, Mesh};
use shardwright_space::Pipeline;
use shardwright_stages::schedule::{Action, Pass, Schedule, Slot};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The pipeline of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramPipeline {
    /// Stages, axes and schedule.
    pub pipeline: Pipeline,
    /// Per instruction of the body: its pass.
    pub passes: Vec<StagePass>,
}

/// A pass of a stage for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StagePass {
    /// The stage.
    pub stage: u32,
    /// Forward pass, gradients of inputs, or gradients of weights.
    pub pass: Pass,
    /// The micro-batch.
    pub micro_batch: u32,
}

impl StagePass {
    /// The order in which a micro-batch goes through the passes.
    fn key(self) -> (bool, u32, Reverse<u32>) {
        let forward = self.pass == Pass::Forward;
        (!forward, if forward { self.stage } else { 0 }, Reverse(if forward { 0 } else { self.stage }))
    }

    /// The pass before both passes, as far as one of them reads from there. Gradients of weights may run at any time after
    /// those of the inputs.
    fn first(self, other: Self) -> Self {
        if self == other {
            return self;
        }
        let input = |own: Self| match own.pass {
            Pass::BackwardWeight => Self { pass: Pass::BackwardInput, ..own },
            _ => own,
        };
        let (own, other) = (input(self), input(other));
        if own.key() <= other.key() { own } else { other }
    }
}

/// Per op: whether it computes gradients of weights and nothing that another layer's gradients depend on.
pub fn weight_gradient_ops(graph: &Graph) -> Vec<bool> {
    let consumers = graph.consumers();
    let in_pass = |op: OpId| graph.node(op).repeated || graph.micro_batches.get() == 1;
    let mut own = vec![false; graph.ops.len()];
    for op in graph.op_ids().rev() {
        let node = graph.node(op);
        let readers = node.outputs.iter().flat_map(|&t| consumers.of(t)).copied();
        let mut readers =
            readers.filter(|&reader| in_pass(reader) && graph.node(reader).phase == Phase::Backward);
        own[op.index()] = node.phase == Phase::Backward
            && node.recomputes.is_none()
            && readers.all(|reader| graph.node(reader).layer == node.layer && own[reader.index()]);
    }
    own
}

impl ProgramPipeline {
    /// The pipeline of a lowered program whose body is written once.
    pub(crate) fn new(graph: &Graph, pipeline: &Pipeline, program: &ParallelGraph) -> Self {
        let (weights, stages) = (weight_gradient_ops(graph), pipeline.op_stages(graph));
        let body = &program.instructions[program.body.clone()];
        // Per value: the pass before all its readers in the body.
        let mut read_by: FxHashMap<u32, StagePass> = FxHashMap::default();
        let mut passes: Vec<Option<StagePass>> = vec![None; body.len()];
        for (at, instruction) in body.iter().enumerate().rev() {
            let pass = match instruction.work {
                Work::Compute { op, .. } => {
                    // A sum that another stage's gradients of weights wait for is sent with the gradients of inputs.
                    let sent = stages[op.index()] != pipeline.stages[graph.node(op).layer.index()];
                    let pass = match graph.node(op).phase {
                        Phase::Forward => Pass::Forward,
                        _ if weights[op.index()] && !sent => Pass::BackwardWeight,
                        _ => Pass::BackwardInput,
                    };
                    Some(StagePass { stage: stages[op.index()], pass, micro_batch: 0 })
                }
                _ => {
                    let readers =
                        instruction.writes.iter().filter_map(|write| read_by.get(&write.0).copied());
                    readers.reduce(StagePass::first)
                }
            };
            passes[at] = pass;
            for read in instruction.reads.iter().filter(|_| pass.is_some()) {
                if let Some(pass) = pass {
                    read_by.entry(read.0).and_modify(|own| *own = own.first(pass)).or_insert(pass);
                }
            }
        }
        // What nothing in the body reads stays with its operands.
        let mut made_by: FxHashMap<u32, StagePass> = FxHashMap::default();
        let mut settled = Vec::with_capacity(body.len());
        for (instruction, pass) in body.iter().zip(passes) {
            let operand = instruction.reads.iter().find_map(|read| made_by.get(&read.0).copied());
            let first = StagePass { stage: 0, pass: Pass::Forward, micro_batch: 0 };
            let pass = pass.or(operand).unwrap_or(first);
            made_by.extend(instruction.writes.iter().map(|write| (write.0, pass)));
            settled.push(pass);
        }
        Self { pipeline: pipeline.clone(), passes: settled }
    }

    /// The group of a device.
    pub fn group_of(&self, mesh: &Mesh, device: DeviceId) -> u32 {
        self.pipeline.group_of(mesh, device)
    }

    /// The turn of every pass in the order of its group, for so many micro-batches. A whole backward pass is one turn.
    pub(crate) fn turns(
        &self,
        mesh: &Mesh,
        micro_batches: u32,
    ) -> Result<BTreeMap<StagePass, usize>, String> {
        let (schedule, groups) = (self.pipeline.schedule, self.pipeline.groups(mesh));
        let mut turns = BTreeMap::new();
        if micro_batches < 2 {
            return Ok(turns);
        }
        let orders = schedule.orders(groups, micro_batches).map_err(|error| error.to_string())?;
        for (group, order) in orders.into_iter().enumerate() {
            for (turn, slot) in order.into_iter().enumerate() {
                for Action { pass, chunk, micro_batch } in slot.actions() {
                    let stage = schedule.stage(groups, group as u32, chunk);
                    let parts: &[Pass] = match pass {
                        Pass::Backward => &[Pass::BackwardInput, Pass::BackwardWeight],
                        Pass::Forward => &[Pass::Forward],
                        Pass::BackwardInput => &[Pass::BackwardInput],
                        Pass::BackwardWeight => &[Pass::BackwardWeight],
                    };
                    let own = |&pass: &Pass| (StagePass { stage, pass, micro_batch }, turn);
                    turns.extend(parts.iter().map(own));
                }
            }
        }
        Ok(turns)
    }

    /// Micro-batches after which memory no longer grows. All schedules but GPipe hold the activations of at most `2p + 1` chunks
    /// on each of `p` groups.
    pub(crate) fn memory_copies(&self, mesh: &Mesh, micro_batches: u32) -> u32 {
        match self.pipeline.schedule {
            Schedule::GPipe => micro_batches,
            _ => self.steady_copies(mesh).min(micro_batches),
        }
    }

    /// Micro-batches after which the next ones take as long as those before.
    pub fn steady_copies(&self, mesh: &Mesh) -> u32 {
        self.pipeline.stage_count(mesh).saturating_mul(4)
    }

    /// The bodies of all micro-batches in the order of the schedule.
    pub(crate) fn order(&self, mesh: &Mesh, bodies: Vec<Vec<Instruction>>) -> (Vec<Instruction>, Self) {
        let (schedule, groups) = (self.pipeline.schedule, self.pipeline.groups(mesh));
        let mut positions: BTreeMap<(u32, Pass), Vec<usize>> = BTreeMap::new();
        for (at, own) in self.passes.iter().enumerate() {
            positions.entry((own.stage, own.pass)).or_default().push(at);
            if own.pass != Pass::Forward {
                positions.entry((own.stage, Pass::Backward)).or_default().push(at);
            }
        }
        let mut order: Vec<(u32, usize)> = Vec::new();
        for (group, slot) in linear_order(schedule, groups, bodies.len() as u32) {
            let instructions = |action: Action| {
                let stage = schedule.stage(groups, group, action.chunk);
                let own = positions.get(&(stage, action.pass)).map_or(&[][..], Vec::as_slice);
                own.iter().map(move |&at| (action.micro_batch, at))
            };
            match slot {
                Slot::Single(action) => order.extend(instructions(action)),
                Slot::Overlapped(one, other) => alternate(instructions(one), instructions(other), &mut order),
            }
        }
        debug_assert_eq!(order.len(), bodies.len() * self.passes.len(), "every pass runs once");
        let passes = order.iter().map(|&(micro_batch, at)| StagePass { micro_batch, ..self.passes[at] });
        let passes = passes.collect();
        let instructions = order.into_iter().map(|(body, at)| bodies[body as usize][at].clone()).collect();
        (instructions, Self { pipeline: self.pipeline.clone(), passes })
    }
}

/// Merges two lists evenly, so that the communication of one pass hides behind the computing of the other.
fn alternate<T>(
    one: impl ExactSizeIterator<Item = T>,
    other: impl ExactSizeIterator<Item = T>,
    out: &mut Vec<T>,
) {
    let (first, second) = (one.len(), other.len());
    let (mut one, mut other) = (one.enumerate().peekable(), other.enumerate().peekable());
    while one.peek().is_some() || other.peek().is_some() {
        let share = |next: Option<&(usize, T)>, of: usize| next.map_or(2.0, |(at, _)| *at as f64 / of as f64);
        let one_is_next = share(one.peek(), first) <= share(other.peek(), second);
        out.extend(if one_is_next { one.next() } else { other.next() }.map(|(_, item)| item));
    }
}

/// The slots of all groups in one order: each group's in its own order, and each after the passes that it reads from.
fn linear_order(schedule: Schedule, groups: u32, micro_batches: u32) -> Vec<(u32, Slot)> {
    let orders = schedule.orders(groups, micro_batches);
    debug_assert!(orders.is_ok(), "assignments are checked before they are lowered");
    let orders = orders.unwrap_or_default();
    let stages = groups * schedule.chunks();
    let at = |stage: u32, micro_batch: u32| (stage * micro_batches + micro_batch) as usize;
    let mut forward = vec![false; (stages * micro_batches) as usize];
    let mut backward = forward.clone();
    let mut next = vec![0; orders.len()];
    let mut line = Vec::new();
    loop {
        let before = line.len();
        // What is ready in this round does not depend on what this round adds: rounds are like moments.
        let mut ready: Vec<(u32, Slot)> = Vec::new();
        for (group, order) in orders.iter().enumerate() {
            let Some(&slot) = order.get(next[group]) else { continue };
            let is_ready = |action: Action| {
                let stage = schedule.stage(groups, group as u32, action.chunk);
                match action.pass {
                    Pass::Forward => stage == 0 || forward[at(stage - 1, action.micro_batch)],
                    // The group's own order puts it behind the gradients of inputs.
                    Pass::BackwardWeight => true,
                    Pass::Backward | Pass::BackwardInput if stage + 1 == stages => {
                        forward[at(stage, action.micro_batch)]
                    }
                    Pass::Backward | Pass::BackwardInput => backward[at(stage + 1, action.micro_batch)],
                }
            };
            if slot.actions().all(is_ready) {
                ready.push((group as u32, slot));
            }
        }
        for &(group, slot) in &ready {
            next[group as usize] += 1;
            for action in slot.actions() {
                let done = at(schedule.stage(groups, group, action.chunk), action.micro_batch);
                match action.pass {
                    Pass::Forward => forward[done] = true,
                    Pass::Backward | Pass::BackwardInput => backward[done] = true,
                    Pass::BackwardWeight => {}
                }
            }
        }
        line.extend(ready);
        if line.len() == before {
            return line;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_stages::schedule::SCHEDULES;

    #[test]
    fn every_slot_of_every_schedule_has_a_place_in_one_order() {
        for (name, schedule) in SCHEDULES.into_iter().skip(1) {
            for groups in [2, 3, 4, 8] {
                for micro_batches in [2 * groups, 3 * groups, 4 * groups * schedule.chunks()] {
                    let orders = schedule.orders(groups, micro_batches).unwrap();
                    let line = linear_order(schedule, groups, micro_batches);
                    for (group, order) in orders.into_iter().enumerate() {
                        let own = line.iter().filter(|(own, _)| *own == group as u32).map(|(_, slot)| *slot);
                        assert_eq!(own.collect::<Vec<_>>(), order, "{name}, {groups} groups");
                    }
                }
            }
        }
    }

    #[test]
    fn lists_alternate_evenly() {
        let mut out = Vec::new();
        alternate([0, 1, 2, 3].into_iter(), [10, 11].into_iter(), &mut out);
        assert_eq!(out, [0, 10, 1, 2, 11, 3]);
    }
}
