//! The tasks of a step under the ops' current configs, kept up to date change by change.
//!
//! Every op has one task on every lane that it runs on, in places of their own; re-layouts and windows' fetches take places
//! behind them, given back when they are gone. The re-layouts of a tensor form a group, which is made anew when an op that makes or reads the
//! tensor changes. A task's rank says where it comes in the lowered program, so that ties are decided as there.
//!
//! A sum of partial results is run before they are reduced, whatever its config says ([`shardwright_space::place`]), so a
//! change may go on along a chain of sums.
//!
//! Every step of a change is written down, so that undoing it is taking the steps back.

mod making;

use crate::delta::{
    NONE,
    edges::Edges,
    lanes::{LANE_BITS, Lanes, MOST_LANES, lanes},
    parts::{Part, Parts},
    structure::Structure,
    ways::{Branch, Ways},
};
use crate::schedule::Links;
use shardwright_cost::{LayoutError, TensorShape};
use shardwright_plan::{OpTimes, Problem};
use shardwright_space::Config;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A list of tasks that a change makes longer or shorter.
#[derive(Clone, Copy, Debug)]
enum List {
    /// The re-layouts of a group.
    Group(u32),
    /// The windows' fetches of an operand.
    Windows(u32),
}

/// What was before a step of a change.
#[derive(Clone, Copy, Debug)]
enum Before {
    Chosen { op: u32, config: u32 },
    Part { op: u32, part: Part },
    Task { place: u32, task: Task },
    Source { slot: u32, source: u32 },
    Fetched { slot: u32, task: u32 },
    Taken { place: u32 },
    GivenBack,
    Longer(List),
    Shorter(List, u32),
}

/// What takes time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Picoseconds.
    pub duration: u64,
    /// Of each lane: bit 0 the compute stream, bit 1 + l the port to level l.
    pub streams: u64,
    /// Where it comes in the lowered program; zero: there is no task here.
    pub rank: u64,
}

/// Per lane: the task after which a tensor is there; [`NONE`] where it is from the start, or not at all.
type Value = [u32; MOST_LANES];

/// Tasks in flat arrays, by place.
pub struct Network<'p> {
    parts: Parts<'p>,
    ways: Ways<'p>,
    structure: Structure,
    /// Per place: the task that is there.
    tasks: Vec<Task>,
    /// Per place: where the slots of its task start, and how many they are.
    slots: Vec<(u32, u32)>,
    /// Who waits for whom: one slot per lane and operand of every op, then one per lane of every other task.
    edges: Edges,
    /// Per slot of an op: the task that brings the operand, before windows.
    fetched: Vec<u32>,
    /// Per operand: tasks of its windows.
    windows: Vec<Vec<u32>>,
    /// Per group: its tasks.
    relayouts: Vec<Vec<u32>>,
    /// Per op: its config.
    chosen: Vec<u32>,
    chosen_parts: Vec<Part>,
    /// Places that are free.
    free: Vec<u32>,
    /// Tasks that are new or changed, and places whose tasks went, since the last [`Network::settle`].
    pub touched: Vec<u32>,
    pub gone: Vec<u32>,
    is_touched: Vec<bool>,
    log: Vec<Before>,
    // Reused by every change.
    open: BinaryHeap<Reverse<(u32, bool)>>,
    changed: Vec<u32>,
    wanted: Vec<u32>,
    branches: Vec<Branch>,
    values: Vec<Option<Value>>,
    affected: Vec<u32>,
    is_affected: Vec<bool>,
}

impl<'p> Network<'p> {
    /// The tasks of a step under these configs, one per op.
    pub fn new(
        problem: &'p Problem<'p>,
        times: OpTimes<'p>,
        configs: &[Config],
        lanes: Lanes,
    ) -> Result<Self, LayoutError> {
        let graph = problem.graph;
        let count = lanes.count();
        let mut ways = Ways::new(&problem.relayouts, lanes, Links::of(problem.machine));
        let mut tensor_shapes = Vec::with_capacity(graph.tensors.len());
        for tensor in &graph.tensors {
            let shape = TensorShape::new(&tensor.ty.shape, tensor.ty.dtype.bytes() as u32)?;
            tensor_shapes.push(ways.shape(shape));
        }
        let structure = Structure::new(problem, &tensor_shapes);
        let ops = graph.ops.len();
        let mut edges = Edges::default();
        let mut slots = Vec::with_capacity(ops * count);
        for place in 0..ops * count {
            edges.add_task();
            let operands = structure.operands(place / count);
            let first = operands.start * count + operands.len() * (place % count);
            slots.push((first as u32, operands.len() as u32));
            operands.for_each(|_| {
                edges.add_slot(place as u32);
            });
        }
        let operands = structure.first_operand[ops] as usize;
        let mut network = Self {
            parts: Parts::new(problem, times),
            ways,
            tasks: vec![Task::default(); ops * count],
            slots,
            edges,
            fetched: vec![NONE; operands * count],
            windows: vec![Vec::new(); operands],
            relayouts: vec![Vec::new(); structure.groups.len()],
            chosen: vec![NONE; ops],
            chosen_parts: Vec::with_capacity(ops),
            free: Vec::new(),
            touched: Vec::new(),
            gone: Vec::new(),
            is_touched: vec![false; ops * count],
            log: Vec::new(),
            open: BinaryHeap::new(),
            changed: Vec::new(),
            wanted: Vec::new(),
            branches: Vec::new(),
            values: Vec::new(),
            affected: Vec::new(),
            is_affected: vec![false; structure.groups.len()],
            structure,
        };
        for (op, config) in configs.iter().enumerate() {
            network.chosen[op] = network.parts.number(op, config);
            let part = network.part(op)?;
            network.chosen_parts.push(part);
            network.set_op(op, part);
        }
        network.rebuild_all()?;
        Ok(network)
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
        (self.tasks[task as usize].rank >> (32 + LANE_BITS)) as usize
    }

    /// The devices that are told apart.
    pub fn lanes(&self) -> &Lanes {
        &self.ways.lanes
    }

    /// The tasks of an op, on the lanes that it runs on.
    pub fn tasks_of(&self, op: usize) -> impl Iterator<Item = u32> + '_ {
        lanes(self.chosen_parts[op].lanes).map(move |lane| (op * self.lanes().count() + lane) as u32)
    }

    /// How many ops there are.
    pub fn ops(&self) -> usize {
        self.chosen.len()
    }

    /// What a task waits for; [`NONE`]s are there from the start.
    #[inline]
    pub fn before(&self, task: u32) -> &[u32] {
        let (first, count) = self.slots[task as usize];
        self.edges.sources(first as usize..(first + count) as usize)
    }

    /// The task at a place.
    #[inline]
    pub fn task(&self, place: u32) -> &Task {
        &self.tasks[place as usize]
    }

    /// How many places there are.
    pub fn places(&self) -> usize {
        self.tasks.len()
    }

    /// The tasks that wait for a task; some more than once.
    #[inline]
    pub fn readers(&self, task: u32) -> impl Iterator<Item = u32> + '_ {
        self.edges.readers(task)
    }

    /// The first slot of a task.
    #[inline]
    fn slot(&self, task: u32) -> u32 {
        self.slots[task as usize].0
    }

    /// The slot of an op's operand on a lane.
    fn operand_slot(&self, op: usize, i: usize, lane: usize) -> usize {
        let operands = self.structure.operands(op);
        operands.start * self.lanes().count() + operands.len() * lane + i
    }

    /// All tasks that there are, by rank.
    pub fn tasks(&self) -> Vec<u32> {
        let mut all: Vec<u32> =
            (0..self.tasks.len() as u32).filter(|&t| self.tasks[t as usize].rank != 0).collect();
        all.sort_unstable_by_key(|&task| self.tasks[task as usize].rank);
        all
    }

    /// An op under its config, or as the sum of partial results that it is.
    fn part(&mut self, op: usize) -> Result<Part, LayoutError> {
        let shapes = self.structure.shapes(op);
        if let Some(makers) = &self.structure.sums[op] {
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

    /// Gives ops other configs.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out so; the change is half made then, and can be undone.
    pub fn change(&mut self, changes: &[(u32, u32)]) -> Result<(), LayoutError> {
        let mut open = std::mem::take(&mut self.open);
        let mut changed = std::mem::take(&mut self.changed);
        open.clear();
        changed.clear();
        for &(op, config) in changes {
            let old = std::mem::replace(&mut self.chosen[op as usize], config);
            if old != config {
                self.log.push(Before::Chosen { op, config: old });
                open.push(Reverse((op, true)));
            }
        }
        let mut outcome = Ok(());
        // In the graph's order: what an operand's maker becomes decides what a sum becomes.
        while let Some(Reverse((op, _))) = open.pop() {
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
            let old = std::mem::replace(&mut self.chosen_parts[op as usize], part);
            if old != part {
                self.log.push(Before::Part { op, part: old });
                changed.push(op);
                open.extend(self.structure.summed_by[op as usize].iter().map(|&sum| Reverse((sum, false))));
            }
        }
        let mut affected = std::mem::take(&mut self.affected);
        affected.clear();
        for &op in &changed {
            for &group in self.structure.groups_of(op as usize) {
                if !std::mem::replace(&mut self.is_affected[group as usize], true) {
                    affected.push(group);
                }
            }
        }
        affected.iter().for_each(|&group| self.is_affected[group as usize] = false);
        for &op in &changed {
            self.set_op(op as usize, self.chosen_parts[op as usize]);
        }
        for &group in &affected {
            outcome = outcome.and(self.rebuild(group as usize));
        }
        (self.affected, self.open, self.changed) = (affected, open, changed);
        outcome
    }

    /// Takes back what was done since the last [`Network::settle`].
    pub fn undo(&mut self) {
        while let Some(before) = self.log.pop() {
            match before {
                Before::Chosen { op, config } => self.chosen[op as usize] = config,
                Before::Part { op, part } => self.chosen_parts[op as usize] = part,
                Before::Task { place, task } => self.tasks[place as usize] = task,
                Before::Source { slot, source } => self.edges.set(slot, source),
                Before::Fetched { slot, task } => self.fetched[slot as usize] = task,
                Before::Taken { place } => self.free.push(place),
                Before::GivenBack => drop(self.free.pop()),
                Before::Longer(list) => drop(self.list(list).pop()),
                Before::Shorter(list, task) => self.list(list).push(task),
            }
        }
        self.settle();
    }

    /// Forgets what was touched; it cannot be undone any more.
    pub fn settle(&mut self) {
        self.touched.iter().for_each(|&task| self.is_touched[task as usize] = false);
        self.touched.clear();
        self.gone.clear();
        self.log.clear();
    }

    fn list(&mut self, list: List) -> &mut Vec<u32> {
        match list {
            List::Group(group) => &mut self.relayouts[group as usize],
            List::Windows(operand) => &mut self.windows[operand as usize],
        }
    }

    fn touch(&mut self, task: u32) {
        if !std::mem::replace(&mut self.is_touched[task as usize], true) {
            self.touched.push(task);
        }
    }

    /// Makes a slot wait for a task.
    fn wait(&mut self, slot: u32, source: u32) {
        let old = self.edges.source(slot);
        if old != source {
            self.log.push(Before::Source { slot, source: old });
            self.edges.set(slot, source);
            self.touch(self.edges.owner(slot));
        }
    }

    /// Changes what a task is; with rank zero it is gone.
    fn set_task(&mut self, place: u32, duration: u64, streams: u64, rank: u64) {
        let task = Task { duration, streams, rank };
        let old = std::mem::replace(&mut self.tasks[place as usize], task);
        if old != task {
            self.log.push(Before::Task { place, task: old });
            self.touch(place);
            if rank == 0 && old.rank != 0 {
                self.gone.push(place);
            }
        }
    }
}
