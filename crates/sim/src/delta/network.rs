//! The tasks of a step under the ops' current configs, kept up to date change by change.
//!
//! Every op has one task, in the place of its number; re-layouts and windows' fetches take places behind them, given
//! back when they are gone. The re-layouts of a tensor (of a weight: of one pass) form a group, which is made anew when an
//! op that makes or reads the tensor changes. A task's rank says where it comes in the lowered program, so that ties
//! are decided as there.
//!
//! A sum of partial results is run before they are reduced, whatever its config says ([`shardwright_space::place`]), so a
//! change may go on along a chain of sums.
//!
//! Undoing a change is making the opposite one in the opposite order, which gives every task its old place back.

use crate::delta::{
    NONE,
    parts::{Part, Parts},
    ways::{Branch, Hop, Ways},
};
use shardwright_cost::{Layout, LayoutError, Placement, TensorShape};
use shardwright_graph::{OpId, Phase, Role, TensorId};
use shardwright_plan::{OpTimes, Problem};
use shardwright_space::Config;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Ranks within an op: fetches of operands, then the op, then what its results set off.
const COMPUTE: u64 = 0xf000_0000;
/// Ranks within an operand: re-layouts, then windows.
const WINDOWS: u64 = 0x8000;

/// A place where a tensor has a layout: an operand of an op, or, counted on, a result.
#[derive(Clone, Copy, Debug)]
struct End {
    op: u32,
    slot: u32,
}

/// A layout that a group has to offer.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// The rank of the first task that is made for it, if it is the first to ask.
    rank: u64,
    /// Whose layout; none: partial sums of the home added up.
    end: Option<End>,
    /// The operand that gets it, counted over all ops; [`NONE`] where somebody only wants it made early.
    operand: u32,
}

/// The re-layouts of a tensor.
struct Group {
    shape: u32,
    home: End,
    /// The op's task that makes the tensor; [`NONE`] for what is there from the start.
    maker: u32,
    needs: std::ops::Range<u32>,
    tasks: Vec<u32>,
}

/// Tasks in flat arrays, by place.
pub struct Network<'p> {
    parts: Parts<'p>,
    ways: Ways<'p>,
    /// Picoseconds.
    pub durations: Vec<u64>,
    /// Bit 0 the compute stream, bit 1 + l the port to level l.
    pub streams: Vec<u8>,
    pub ranks: Vec<u64>,
    /// For tasks that are not ops': what they wait for.
    waits_for: Vec<u32>,
    /// Per op: where its operands start in `operands`; one more at the end.
    first_operand: Vec<u32>,
    /// Per operand: the task that the op waits for.
    operands: Vec<u32>,
    /// Per operand: the same before windows.
    fetched: Vec<u32>,
    /// Per operand: tasks of its windows.
    windows: Vec<Vec<u32>>,
    /// Per op: where the shapes of its operands and results start; one more at the end.
    first_shape: Vec<u32>,
    shapes: Vec<u32>,
    /// Per op: its config.
    chosen: Vec<u32>,
    chosen_parts: Vec<Part>,
    /// Per op: whether it is a sum that nobody but it reads the operands of, and what makes those.
    sums: Vec<Option<Box<[End]>>>,
    /// Per op: the sums that read its results and that nothing else reads.
    summed_by: Vec<SmallVec<[u32; 1]>>,
    groups: Vec<Group>,
    needs: Vec<Need>,
    /// Per op: the groups that depend on its config.
    first_group: Vec<u32>,
    groups_of: Vec<u32>,
    /// Places that are free.
    free: Vec<u32>,
    /// Tasks that are new or changed, and places whose tasks went, since the last [`Network::settle`].
    pub touched: Vec<u32>,
    pub gone: Vec<u32>,
    is_touched: Vec<bool>,
    // Reused by every change.
    open: BinaryHeap<Reverse<(u32, bool)>>,
    changed: Vec<u32>,
    wanted: Vec<u32>,
    branches: Vec<Branch>,
    values: Vec<u32>,
    affected: Vec<u32>,
    is_affected: Vec<bool>,
}

impl<'p> Network<'p> {
    /// The tasks of a step under these configs, one per op.
    pub fn new(
        problem: &'p Problem<'p>,
        times: OpTimes<'p>,
        configs: &[Config],
    ) -> Result<Self, LayoutError> {
        let graph = problem.graph;
        let mut ways = Ways::new(&problem.relayouts);
        let mut tensor_shapes = Vec::with_capacity(graph.tensors.len());
        for tensor in &graph.tensors {
            let shape = TensorShape::new(&tensor.ty.shape, tensor.ty.dtype.bytes() as u32)?;
            tensor_shapes.push(ways.shape(shape));
        }
        let (mut first_operand, mut first_shape, mut shapes) = (vec![0], vec![0], Vec::new());
        for node in &graph.ops {
            first_operand.push(first_operand[first_operand.len() - 1] + node.inputs.len() as u32);
            shapes.extend(node.inputs.iter().chain(&node.outputs).map(|t| tensor_shapes[t.index()]));
            first_shape.push(shapes.len() as u32);
        }
        let operands = first_operand[graph.ops.len()] as usize;
        let ops = graph.ops.len();
        let mut network = Self {
            parts: Parts::new(problem, times),
            ways,
            durations: vec![0; ops],
            streams: vec![0; ops],
            ranks: (0..ops as u64).map(|op| (op << 32) | COMPUTE).collect(),
            waits_for: vec![NONE; ops],
            operands: vec![NONE; operands],
            fetched: vec![NONE; operands],
            windows: vec![Vec::new(); operands],
            first_operand,
            first_shape,
            shapes,
            chosen: vec![NONE; ops],
            chosen_parts: Vec::with_capacity(ops),
            sums: vec![None; ops],
            summed_by: vec![SmallVec::new(); ops],
            groups: Vec::new(),
            needs: Vec::new(),
            first_group: Vec::new(),
            groups_of: Vec::new(),
            free: Vec::new(),
            touched: Vec::new(),
            gone: Vec::new(),
            is_touched: vec![false; ops],
            open: BinaryHeap::new(),
            changed: Vec::new(),
            wanted: Vec::new(),
            branches: Vec::new(),
            values: Vec::new(),
            affected: Vec::new(),
            is_affected: Vec::new(),
        };
        network.make_groups(problem, &tensor_shapes);
        network.find_sums(problem);
        for (op, config) in configs.iter().enumerate() {
            network.chosen[op] = network.parts.number(op, config);
            let part = network.part(op)?;
            network.chosen_parts.push(part);
            network.set_op(op, part);
            network.set_windows(op, part, false);
        }
        for group in 0..network.groups.len() {
            network.rebuild(group)?;
        }
        Ok(network)
    }

    /// Who needs which tensor, in the order in which lowering comes to it.
    fn make_groups(&mut self, problem: &Problem<'_>, tensor_shapes: &[u32]) {
        let graph = problem.graph;
        let consumers = graph.consumers();
        let result = |op: OpId, t: TensorId| {
            let node = graph.node(op);
            let o = node.outputs.iter().position(|&out| out == t).unwrap_or(0);
            (o, End { op: op.0, slot: (node.inputs.len() + o) as u32 })
        };
        let mut back: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
        for carry in &graph.carries {
            back[carry.new.index()] = Some(carry.old);
        }
        let homes: Vec<Option<End>> = graph
            .tensor_ids()
            .map(|t| {
                let home = problem.transfers.homes[t.index()]?;
                Some(match graph.tensor(t).producer {
                    Some(op) => result(op, t).1,
                    None => End { op: home.op.0, slot: home.slot },
                })
            })
            .collect();
        let mut by_op: Vec<Vec<u32>> = vec![Vec::new(); graph.ops.len()];
        for t in graph.tensor_ids() {
            let tensor = graph.tensor(t);
            let Some(home) = homes[t.index()] else { continue };
            let delivered = tensor.producer.is_none() && matches!(tensor.role, Role::Input | Role::Constant);
            if delivered {
                continue;
            }
            let mut ops = consumers.of(t).to_vec();
            ops.dedup();
            let slots = |op: OpId| {
                let inputs = graph.node(op).inputs.iter().enumerate();
                inputs.filter(|(_, input)| **input == t).map(move |(i, _)| (op, i)).collect::<Vec<_>>()
            };
            let readers: Vec<(OpId, usize)> = ops.iter().flat_map(|&op| slots(op)).collect();
            let passes: &[Option<Phase>] = match tensor.producer {
                Some(_) => &[None],
                None => &[Some(Phase::Forward), Some(Phase::Backward), Some(Phase::Update)],
            };
            for pass in passes {
                let first = self.needs.len() as u32;
                let mut ends: Vec<u32> = vec![home.op];
                if let Some(op) = tensor.producer {
                    let (o, _) = result(op, t);
                    let rank = (u64::from(op.0) << 32) | (COMPUTE + ((o as u64 + 1) << 16));
                    let update = readers.iter().filter(|(op, _)| graph.node(*op).phase == Phase::Update);
                    for &(op, i) in update {
                        let end = End { op: op.0, slot: i as u32 };
                        self.needs.push(Need { rank, end: Some(end), operand: NONE });
                    }
                    if let Some(old) = back[t.index()] {
                        let end = homes[old.index()];
                        ends.extend(end.map(|end| end.op));
                        self.needs.push(Need { rank, end, operand: NONE });
                    }
                }
                for &(op, i) in
                    readers.iter().filter(|(op, _)| pass.is_none_or(|p| graph.node(*op).phase == p))
                {
                    let rank = (u64::from(op.0) << 32) | ((i as u64 + 1) << 16);
                    let operand = self.first_operand[op.index()] + i as u32;
                    let end = End { op: op.0, slot: i as u32 };
                    self.needs.push(Need { rank, end: Some(end), operand });
                    ends.push(op.0);
                }
                let needs = first..self.needs.len() as u32;
                if needs.is_empty() {
                    continue;
                }
                ends.sort_unstable();
                ends.dedup();
                let group = self.groups.len() as u32;
                ends.iter().for_each(|&op| by_op[op as usize].push(group));
                let maker = tensor.producer.map_or(NONE, |op| op.0);
                let shape = tensor_shapes[t.index()];
                self.groups.push(Group { shape, home, maker, needs, tasks: Vec::new() });
            }
        }
        self.is_affected = vec![false; self.groups.len()];
        self.first_group.push(0);
        for groups in by_op {
            self.groups_of.extend(groups);
            self.first_group.push(self.groups_of.len() as u32);
        }
    }

    /// The number of an op's config, for [`Network::change`].
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        self.parts.number(op, config)
    }

    /// The number of the config that an op has.
    pub fn chosen(&self, op: usize) -> u32 {
        self.chosen[op]
    }

    /// The config that an op has.
    pub fn config(&self, op: usize) -> &Config {
        self.parts.config(op, self.chosen[op])
    }

    /// The config of an op that a number stands for.
    pub fn config_of(&self, op: usize, number: u32) -> &Config {
        self.parts.config(op, number)
    }

    /// The op that a task belongs to: that computes, or that something is fetched for.
    pub fn op_of(&self, task: u32) -> usize {
        (self.ranks[task as usize] >> 32) as usize
    }

    /// Finds the ops that may be sums of partial results, for all that does not depend on configs.
    fn find_sums(&mut self, problem: &Problem<'_>) {
        let graph = problem.graph;
        let consumers = graph.consumers();
        for op in graph.op_ids() {
            let node = graph.node(op);
            let Some(&result) = node.outputs.first() else { continue };
            let maker = |&t: &TensorId| {
                let tensor = graph.tensor(t);
                let alone = consumers.of(t).iter().all(|&reader| reader == op);
                let fits = alone && tensor.ty == graph.tensor(result).ty;
                let by = graph.node(tensor.producer.filter(|_| fits)?);
                let o = by.outputs.iter().position(|&out| out == t)?;
                Some(End { op: tensor.producer?.0, slot: (by.inputs.len() + o) as u32 })
            };
            let makers: Option<Box<[End]>> = node.inputs.iter().map(maker).collect();
            if let Some(makers) = makers.filter(|makers| node.op.operator().is_sum() && !makers.is_empty()) {
                makers.iter().for_each(|end| self.summed_by[end.op as usize].push(op.0));
                self.sums[op.index()] = Some(makers);
            }
        }
    }

    /// An op under its config, or as the sum of partial results that it is.
    fn part(&mut self, op: usize) -> Result<Part, LayoutError> {
        let shapes = &self.shapes[self.first_shape[op] as usize..self.first_shape[op + 1] as usize];
        if let Some(makers) = &self.sums[op] {
            let layout = self.parts.layout(&self.chosen_parts[makers[0].op as usize], makers[0].slot);
            let alike = makers
                .iter()
                .all(|end| self.parts.layout(&self.chosen_parts[end.op as usize], end.slot) == layout);
            if alike && self.ways.is_partial_sum(shapes[0], layout) {
                return Ok(self.parts.sum(op, layout, &self.ways, shapes));
            }
        }
        self.parts.part(op, self.chosen[op], &mut self.ways, shapes)
    }

    /// Gives ops other configs. `undo`: the opposite of the change before, and in the opposite order.
    pub fn change(&mut self, changes: &[(u32, u32)], undo: bool) -> Result<(), LayoutError> {
        let mut open = std::mem::take(&mut self.open);
        let mut changed = std::mem::take(&mut self.changed);
        open.clear();
        changed.clear();
        for &(op, config) in changes {
            self.chosen[op as usize] = config;
            open.push(Reverse((op, true)));
        }
        let mut outcome = Ok(());
        // In the graph's order: what an operand's maker becomes decides what a sum becomes.
        while let Some(Reverse((op, asked))) = open.pop() {
            if changed.last() == Some(&op) {
                continue;
            }
            let part = match self.part(op as usize) {
                Ok(part) => part,
                Err(error) => {
                    outcome = Err(error);
                    continue;
                }
            };
            let differs = std::mem::replace(&mut self.chosen_parts[op as usize], part) != part;
            if differs || asked {
                changed.push(op);
            }
            if differs {
                open.extend(self.summed_by[op as usize].iter().map(|&sum| Reverse((sum, false))));
            }
        }
        let mut affected = std::mem::take(&mut self.affected);
        affected.clear();
        for &op in &changed {
            for at in self.first_group[op as usize]..self.first_group[op as usize + 1] {
                let group = self.groups_of[at as usize];
                if !std::mem::replace(&mut self.is_affected[group as usize], true) {
                    affected.push(group);
                }
            }
        }
        affected.iter().for_each(|&group| self.is_affected[group as usize] = false);
        let windows = |network: &mut Self, op: u32| {
            let part = network.chosen_parts[op as usize];
            network.set_op(op as usize, part);
            network.set_windows(op as usize, part, undo);
        };
        if undo {
            for &group in affected.iter().rev() {
                outcome = outcome.and(self.rebuild(group as usize));
            }
            changed.iter().rev().for_each(|&op| windows(self, op));
        } else {
            changed.iter().for_each(|&op| windows(self, op));
            for &group in &affected {
                outcome = outcome.and(self.rebuild(group as usize));
            }
        }
        (self.affected, self.open, self.changed) = (affected, open, changed);
        outcome
    }

    /// Forgets what was touched.
    pub fn settle(&mut self) {
        self.touched.iter().for_each(|&task| self.is_touched[task as usize] = false);
        self.touched.clear();
        self.gone.clear();
    }

    fn touch(&mut self, task: u32) {
        if !std::mem::replace(&mut self.is_touched[task as usize], true) {
            self.touched.push(task);
        }
    }

    fn set_op(&mut self, op: usize, part: Part) {
        if self.durations[op] != part.duration {
            self.durations[op] = part.duration;
            self.streams[op] = u8::from(part.duration > 0);
            self.touch(op as u32);
        }
    }

    fn take(&mut self) -> u32 {
        let place = self.free.pop().unwrap_or_else(|| {
            self.durations.push(0);
            self.streams.push(0);
            self.ranks.push(0);
            self.waits_for.push(NONE);
            self.is_touched.push(false);
            self.durations.len() as u32 - 1
        });
        // Nothing has rank 0 but a task that is not there: a new one differs in any case.
        self.ranks[place as usize] = 0;
        place
    }

    fn give_back(&mut self, place: u32) {
        self.ranks[place as usize] = 0;
        self.gone.push(place);
        self.free.push(place);
    }

    fn set(&mut self, task: u32, hop: Hop, rank: u64, waits_for: u32) {
        let at = task as usize;
        let is = (self.durations[at], self.streams[at], self.ranks[at], self.waits_for[at]);
        if is != (hop.duration, hop.streams, rank, waits_for) {
            (self.durations[at], self.streams[at]) = (hop.duration, hop.streams);
            (self.ranks[at], self.waits_for[at]) = (rank, waits_for);
            self.touch(task);
        }
    }

    fn set_windows(&mut self, op: usize, part: Part, undo: bool) {
        let (first, last) = (self.first_operand[op], self.first_operand[op + 1]);
        let count = last - first;
        for i in (0..count).map(|i| if undo { count - 1 - i } else { i }) {
            let operand = (first + i) as usize;
            let wanted = self.parts.windows(&part).iter().filter(|(of, _)| *of == i).count();
            if wanted == 0 && self.windows[operand].is_empty() {
                continue;
            }
            while self.windows[operand].len() > wanted {
                let place = self.windows[operand].pop().unwrap_or(NONE);
                self.give_back(place);
            }
            let mut before = self.fetched[operand];
            let mut nth = 0;
            for at in 0..self.parts.windows(&part).len() {
                let (of, hop) = self.parts.windows(&part)[at];
                if of != i {
                    continue;
                }
                if nth == self.windows[operand].len() {
                    let place = self.take();
                    self.windows[operand].push(place);
                }
                let task = self.windows[operand][nth];
                let operand_rank = ((op as u64) << 32) | ((u64::from(i) + 1) << 16);
                let rank = operand_rank + WINDOWS + nth as u64;
                self.set(task, hop, rank, before);
                before = task;
                nth += 1;
            }
            self.wait(op as u32, operand, before);
        }
    }

    /// Makes an op wait for a task because of an operand.
    fn wait(&mut self, op: u32, operand: usize, task: u32) {
        if self.operands[operand] != task {
            self.operands[operand] = task;
            self.touch(op);
        }
    }

    fn layout(&self, end: End) -> u32 {
        self.parts.layout(&self.chosen_parts[end.op as usize], end.slot)
    }

    /// The layout with partial sums added up: how a weight that nobody reads is stored.
    fn reduced(&mut self, shape: u32, layout: u32) -> u32 {
        let layout: Layout = *self.ways.layout_of(shape, layout);
        let partial = layout.axes_where(|p| matches!(p, Placement::Partial(_)));
        let whole = partial.iter().fold(layout, |layout, axis| layout.with(axis, Placement::Replicated));
        self.ways.layout(shape, whole)
    }

    /// Makes the re-layouts of a group anew.
    fn rebuild(&mut self, at: usize) -> Result<(), LayoutError> {
        let group = &mut self.groups[at];
        let (shape, maker, needs) = (group.shape, group.maker, group.needs.clone());
        let mut tasks = std::mem::take(&mut group.tasks);
        let home = self.layout(self.groups[at].home);
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.clear();
        for need in needs.clone() {
            let layout = match self.needs[need as usize].end {
                Some(end) => self.layout(end),
                None => self.reduced(shape, home),
            };
            if layout != home && !wanted.contains(&layout) {
                wanted.push(layout);
            }
        }
        let mut branches = std::mem::take(&mut self.branches);
        let outcome = self.ways.spread(shape, home, &wanted, &mut branches);
        let mut values = std::mem::take(&mut self.values);
        values.clear();
        values.resize(branches.len(), NONE);
        let (mut used, mut last_rank, mut nth) = (0, 0, 0);
        for need in needs {
            let need = self.needs[need as usize];
            let layout = match need.end {
                Some(end) => self.layout(end),
                None => self.reduced(shape, home),
            };
            if need.rank != last_rank {
                (last_rank, nth) = (need.rank, 0);
            }
            let value = match branches.iter().position(|branch| branch.to == layout) {
                None => maker,
                Some(branch) => {
                    let mut chain =
                        Chain { tasks: &mut tasks, used: &mut used, nth: &mut nth, rank: need.rank, maker };
                    self.grow(&mut chain, &branches, &mut values, branch)
                }
            };
            if need.operand != NONE {
                self.deliver(need, value);
            }
        }
        while tasks.len() > used {
            let place = tasks.pop().unwrap_or(NONE);
            self.give_back(place);
        }
        self.groups[at].tasks = tasks;
        (self.wanted, self.branches, self.values) = (wanted, branches, values);
        outcome
    }

    /// The task after which a branch is there, made if nobody has asked for it before.
    fn grow(&mut self, chain: &mut Chain<'_>, branches: &[Branch], values: &mut [u32], at: usize) -> u32 {
        // A value of its own marks branches that cost nothing: they are there when their maker is.
        if values[at] != NONE {
            return if values[at] == NONE - 1 { NONE } else { values[at] };
        }
        let branch = &branches[at];
        let mut value = match branch.from {
            NONE => chain.maker,
            from => self.grow(chain, branches, values, from as usize),
        };
        for hop in self.ways.hops(branch) {
            if *chain.used == chain.tasks.len() {
                chain.tasks.push(self.take());
            }
            let task = chain.tasks[*chain.used];
            self.set(task, self.ways.hop(hop), chain.rank + *chain.nth, value);
            value = task;
            *chain.used += 1;
            *chain.nth += 1;
        }
        values[at] = if value == NONE { NONE - 1 } else { value };
        value
    }

    /// An operand's tensor is there after a task.
    fn deliver(&mut self, need: Need, task: u32) {
        let Some(End { op, .. }) = need.end else { return };
        let operand = need.operand as usize;
        if self.fetched[operand] == task {
            return;
        }
        self.fetched[operand] = task;
        match self.windows[operand].first() {
            None => self.wait(op, operand, task),
            Some(&window) => {
                if self.waits_for[window as usize] != task {
                    self.waits_for[window as usize] = task;
                    self.touch(window);
                }
            }
        }
    }

    /// What a task waits for; [`NONE`]s are there from the start.
    #[inline]
    pub fn before(&self, task: u32) -> &[u32] {
        let at = task as usize;
        if at < self.chosen.len() {
            &self.operands[self.first_operand[at] as usize..self.first_operand[at + 1] as usize]
        } else {
            std::slice::from_ref(&self.waits_for[at])
        }
    }

    /// How many ops there are.
    pub fn ops(&self) -> usize {
        self.chosen.len()
    }

    /// Makes all re-layouts anew; nothing changes.
    pub fn rebuild_all(&mut self) {
        for group in 0..self.groups.len() {
            // What could be made once can be made again.
            let _ = self.rebuild(group);
        }
    }

    /// All tasks that there are, by rank.
    pub fn tasks(&self) -> Vec<u32> {
        let mut all: Vec<u32> =
            (0..self.ranks.len() as u32).filter(|&t| self.ranks[t as usize] != 0).collect();
        all.sort_unstable_by_key(|&task| self.ranks[task as usize]);
        all
    }
}

/// Where new tasks of a group go.
struct Chain<'t> {
    tasks: &'t mut Vec<u32>,
    used: &'t mut usize,
    nth: &'t mut u64,
    rank: u64,
    maker: u32,
}
