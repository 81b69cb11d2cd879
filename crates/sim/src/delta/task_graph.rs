//! The task graph of a step under the ops' current configs, updated change by change.
//!
//! Every op has one task per device class that it runs on, at a fixed place in the arrays; in a step of several micro-batches
//! every instance of it ([`Unrolled`]) has. Reshards, halo exchanges and
//! completions take places behind them, which are reused. The reshards of a tensor form a group. A group is rebuilt when an op that
//! produces or reads the tensor changes. A task's rank is its position in the lowered program, so that ties are broken
//! as there.
//!
//! A sum of partial results runs before they are reduced, whatever its config
//! ([`shardwright_space::Sharing::AcrossLayers`]). So a change may propagate along a chain of sums.
//!
//! Every step of a change is logged. Undoing a change reverts the log.

mod build;
mod order;

use crate::delta::{
    NONE,
    configured_ops::{ConfiguredOp, ConfiguredOps},
    device_classes::{CLASS_BITS, DeviceClasses, MOST_CLASSES, device_classes},
    edges::Edges,
    reshard_paths::{ReshardBranch, ReshardPaths},
    structure::Structure,
    unrolled::Unrolled,
};
use crate::schedule::Links;
use shardwright_cost::{LayoutError, TensorShape};
use shardwright_plan::{Context, OpTimes};
use shardwright_space::{Assignment, Config};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A list of tasks whose length a change may alter.
#[derive(Clone, Copy, Debug)]
enum List {
    /// The reshards of a group.
    Reshards(u32),
    /// The halo exchanges of an operand.
    Halos(u32),
    /// The tasks that complete an op.
    Completion(u32),
}

/// An undo log entry: the state before a step of a change.
#[derive(Clone, Copy, Debug)]
enum UndoEntry {
    Config { op: u32, config: u32 },
    ConfiguredOp { instance: u32, configured: ConfiguredOp },
    Task { place: u32, task: Task },
    Source { slot: u32, source: u32 },
    Fetch { slot: u32, task: u32 },
    Allocation { place: u32 },
    Release,
    Push(List),
    Pop(List, u32),
}

/// A task of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Picoseconds.
    pub duration: u64,
    /// Bits of each class: bit 0 the compute stream, bit 1 + l the port to level l.
    pub streams: u64,
    /// Its position in the lowered program; zero: no task.
    pub rank: u64,
}

/// Per class: the task that makes a tensor available; [`NONE`] if it exists from the start or is absent.
type Availability = [u32; MOST_CLASSES];

/// Tasks in flat arrays, by place.
pub struct TaskGraph<'p> {
    configured_ops: ConfiguredOps<'p>,
    reshard_paths: ReshardPaths<'p>,
    structure: Structure,
    /// Per place: its task.
    tasks: Vec<Task>,
    /// Per place: first slot and number of slots of its task.
    slots: Vec<(u32, u32)>,
    /// Predecessors: one slot per class and operand of every instance, then those of every other task: one per class, and in a step
    /// of several micro-batches another one per class, for the order of gathers.
    edges: Edges,
    /// Per slot of an instance: the task that fetches the operand, before halo exchanges, or that the instance follows.
    fetched: Vec<u32>,
    /// Per operand: the tasks of its halo exchanges.
    halos: Vec<Vec<u32>>,
    /// Per instance: the tasks that complete it.
    completions: Vec<Vec<u32>>,
    /// Per group: its tasks.
    reshards: Vec<Vec<u32>>,
    /// Per op: its config.
    chosen: Vec<u32>,
    /// Per instance: its op under that config.
    configured: Vec<ConfiguredOp>,
    /// Per class: picoseconds of computing.
    busy: Vec<u64>,
    /// The groups with which the body fetches tensors from outside of it.
    gathers: Vec<u32>,
    /// Free places.
    free: Vec<u32>,
    /// New or changed tasks, and places of removed tasks, since the last [`TaskGraph::commit`].
    pub touched: Vec<u32>,
    pub removed: Vec<u32>,
    is_touched: Vec<bool>,
    log: Vec<UndoEntry>,
    // Buffers, reused by every change.
    queue: BinaryHeap<Reverse<(u32, bool)>>,
    changed: Vec<u32>,
    wanted: Vec<u32>,
    branches: Vec<ReshardBranch>,
    availabilities: Vec<Option<Availability>>,
    affected: Vec<u32>,
    is_affected: Vec<bool>,
}

impl<'p> TaskGraph<'p> {
    /// The tasks of a step under these configs, one per op, with so many micro-batches.
    pub fn new(
        context: &'p Context<'p>,
        times: OpTimes<'p>,
        assignment: &Assignment,
        device_classes: DeviceClasses,
        copies: u32,
    ) -> Result<Self, LayoutError> {
        let graph = context.graph;
        let count = device_classes.count();
        let mut reshard_paths =
            ReshardPaths::new(&context.resharder, device_classes, Links::of(context.machine));
        let mut tensor_shapes = Vec::with_capacity(graph.tensors.len());
        for tensor in &graph.tensors {
            let shape = TensorShape::new(&tensor.ty.shape, tensor.ty.dtype.bytes() as u32)?;
            tensor_shapes.push(reshard_paths.shape(shape));
        }
        let structure = Structure::new(context, Unrolled::new(graph, copies), &tensor_shapes);
        let instances = structure.unrolled.len();
        let mut edges = Edges::default();
        let mut slots = Vec::with_capacity(instances * count);
        for place in 0..instances * count {
            edges.add_task();
            let operands = structure.operands(place / count);
            let first = operands.start * count + operands.len() * (place % count);
            slots.push((first as u32, operands.len() as u32));
            operands.for_each(|_| {
                edges.add_slot(place as u32);
            });
        }
        let operands = structure.first_operand[instances] as usize;
        let mut task_graph = Self {
            configured_ops: ConfiguredOps::new(context, times),
            reshard_paths,
            tasks: vec![Task::default(); instances * count],
            slots,
            edges,
            fetched: vec![NONE; operands * count],
            halos: vec![Vec::new(); operands],
            completions: vec![Vec::new(); instances],
            reshards: vec![Vec::new(); structure.groups.len()],
            chosen: Vec::with_capacity(graph.ops.len()),
            configured: Vec::with_capacity(instances),
            busy: vec![0; count],
            gathers: Vec::new(),
            free: Vec::new(),
            touched: Vec::new(),
            removed: Vec::new(),
            is_touched: vec![false; instances * count],
            log: Vec::new(),
            queue: BinaryHeap::new(),
            changed: Vec::new(),
            wanted: Vec::new(),
            branches: Vec::new(),
            availabilities: Vec::new(),
            affected: Vec::new(),
            is_affected: vec![false; structure.groups.len()],
            structure,
        };
        for (op, config) in assignment.configs.iter().enumerate() {
            let number = task_graph.configured_ops.number(op, config);
            task_graph.chosen.push(number);
        }
        for instance in 0..instances {
            let configured = task_graph.configure(instance)?;
            task_graph.configured.push(configured);
            task_graph.set_op(instance, configured);
        }
        (0..instances).for_each(|instance| task_graph.order(instance));
        task_graph.gathers = (0..task_graph.structure.groups.len() as u32)
            .filter(|&group| task_graph.structure.groups[group as usize].gathers)
            .collect();
        task_graph.rebuild_all()?;
        task_graph.order_gathers();
        Ok(task_graph)
    }

    /// The number of an op's config, for [`Network::change`].
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        self.configured_ops.number(op, config)
    }

    /// The number of an op's current config.
    pub fn chosen(&self, op: usize) -> u32 {
        self.chosen[op]
    }

    /// An op's current config.
    pub fn config(&self, op: usize) -> &Config {
        self.configured_ops.config(op, self.chosen[op])
    }

    /// The op's config with a number.
    pub fn config_of(&self, op: usize, number: u32) -> &Config {
        self.configured_ops.config(op, number)
    }

    /// The op that a task computes or fetches for.
    pub fn op_of(&self, task: u32) -> usize {
        let unrolled = &self.structure.unrolled;
        unrolled.op(self.instance_of(task).min(unrolled.len() - 1))
    }

    /// The instance that a task belongs to; their number where it returns a carried tensor after all ops.
    fn instance_of(&self, task: u32) -> usize {
        (self.tasks[task as usize].rank >> (32 + CLASS_BITS)) as usize
    }

    /// The device classes.
    pub fn device_classes(&self) -> &DeviceClasses {
        &self.reshard_paths.device_classes
    }

    /// The tasks of an op, of all micro-batches, on the device classes that it runs on.
    pub fn tasks_of(&self, op: usize) -> impl Iterator<Item = u32> + '_ {
        let count = self.device_classes().count();
        self.structure.unrolled.instances(op).flat_map(move |instance| {
            device_classes(self.configured[instance].device_classes)
                .map(move |class| (instance * count + class) as u32)
        })
    }

    /// Picoseconds of computing of the class that computes longest.
    pub fn busy(&self) -> u64 {
        self.busy.iter().copied().max().unwrap_or(0)
    }

    /// Number of ops.
    pub fn ops(&self) -> usize {
        self.chosen.len()
    }

    /// The predecessors of a task; [`NONE`] for tensors that exist from the start.
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

    /// Number of places.
    pub fn places(&self) -> usize {
        self.tasks.len()
    }

    /// The successors of a task, possibly repeated.
    #[inline]
    pub fn readers(&self, task: u32) -> impl Iterator<Item = u32> + '_ {
        self.edges.readers(task)
    }

    /// The first slot of a task.
    #[inline]
    fn slot(&self, task: u32) -> u32 {
        self.slots[task as usize].0
    }

    /// Slots of a task that is in a list.
    fn listed_slots(&self) -> usize {
        let count = self.device_classes().count();
        if self.structure.unrolled.body().is_empty() { count } else { 2 * count }
    }

    /// The slot of an instance's operand on a class.
    fn operand_slot(&self, instance: usize, i: usize, class: usize) -> usize {
        let operands = self.structure.operands(instance);
        operands.start * self.device_classes().count() + operands.len() * class + i
    }

    /// All tasks, by rank.
    pub fn tasks(&self) -> Vec<u32> {
        let mut all: Vec<u32> =
            (0..self.tasks.len() as u32).filter(|&t| self.tasks[t as usize].rank != 0).collect();
        all.sort_unstable_by_key(|&task| self.tasks[task as usize].rank);
        all
    }

    /// An instance under its op's current config, or as a sum of partial results if it is one.
    fn configure(&mut self, instance: usize) -> Result<ConfiguredOp, LayoutError> {
        let op = self.structure.unrolled.op(instance);
        let shapes = self.structure.shapes(instance);
        if let Some(producers) = &self.structure.sums[instance] {
            let layout =
                self.configured_ops.layout(&self.configured[producers[0].op.index()], producers[0].port);
            let equal = producers
                .iter()
                .all(|end| self.configured_ops.layout(&self.configured[end.op.index()], end.port) == layout);
            if equal && self.reshard_paths.is_partial_sum(shapes[0], layout) {
                return Ok(self.configured_ops.sum(op, layout, &self.reshard_paths, shapes));
            }
        }
        self.configured_ops.get(op, self.chosen[op], &mut self.reshard_paths, shapes)
    }

    /// Changes the configs of ops.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out. The change is then incomplete, and can be undone.
    pub fn change(&mut self, changes: &[(u32, u32)]) -> Result<(), LayoutError> {
        let mut queue = std::mem::take(&mut self.queue);
        let mut changed = std::mem::take(&mut self.changed);
        queue.clear();
        changed.clear();
        for &(op, config) in changes {
            let old = std::mem::replace(&mut self.chosen[op as usize], config);
            if old != config {
                self.log.push(UndoEntry::Config { op, config: old });
                let instances = self.structure.unrolled.instances(op as usize);
                queue.extend(instances.map(|instance| Reverse((instance as u32, true))));
            }
        }
        let mut outcome = Ok(());
        // In the graph's order: a sum depends on the producers of its operands.
        while let Some(Reverse((instance, _))) = queue.pop() {
            if changed.last() == Some(&instance) {
                continue;
            }
            let configured = match self.configure(instance as usize) {
                Ok(configured) => configured,
                Err(error) => {
                    outcome = Err(error);
                    continue;
                }
            };
            let old = std::mem::replace(&mut self.configured[instance as usize], configured);
            if old != configured {
                self.log.push(UndoEntry::ConfiguredOp { instance, configured: old });
                changed.push(instance);
                let sums = &self.structure.summed_by[instance as usize];
                queue.extend(sums.iter().map(|&sum| Reverse((sum, false))));
            }
        }
        let mut affected = std::mem::take(&mut self.affected);
        affected.clear();
        for &instance in &changed {
            for &group in self.structure.groups_of(instance as usize) {
                if !std::mem::replace(&mut self.is_affected[group as usize], true) {
                    affected.push(group);
                }
            }
        }
        affected.iter().for_each(|&group| self.is_affected[group as usize] = false);
        for &instance in &changed {
            self.set_op(instance as usize, self.configured[instance as usize]);
        }
        for &instance in &changed {
            self.order(instance as usize);
        }
        for &group in &affected {
            outcome = outcome.and(self.rebuild(group as usize));
        }
        // A group may be rebuilt for a change outside of the body: that of an update to a stored tensor's layout.
        let follows = changed.iter().any(|&instance| self.structure.follows(instance as usize));
        if follows || affected.iter().any(|&group| self.structure.groups[group as usize].gathers) {
            self.order_gathers();
        }
        (self.affected, self.queue, self.changed) = (affected, queue, changed);
        outcome
    }

    /// Reverts all changes since the last [`TaskGraph::commit`].
    pub fn undo(&mut self) {
        while let Some(entry) = self.log.pop() {
            match entry {
                UndoEntry::Config { op, config } => self.chosen[op as usize] = config,
                UndoEntry::ConfiguredOp { instance, configured } => {
                    self.configured[instance as usize] = configured;
                }
                UndoEntry::Task { place, task } => {
                    self.replace_task(place, task);
                }
                UndoEntry::Source { slot, source } => self.edges.set(slot, source),
                UndoEntry::Fetch { slot, task } => self.fetched[slot as usize] = task,
                UndoEntry::Allocation { place } => self.free.push(place),
                UndoEntry::Release => drop(self.free.pop()),
                UndoEntry::Push(list) => drop(self.list(list).pop()),
                UndoEntry::Pop(list, task) => self.list(list).push(task),
            }
        }
        self.commit();
    }

    /// Clears the log: earlier changes become permanent.
    pub fn commit(&mut self) {
        self.touched.iter().for_each(|&task| self.is_touched[task as usize] = false);
        self.touched.clear();
        self.removed.clear();
        self.log.clear();
    }

    fn list(&mut self, list: List) -> &mut Vec<u32> {
        match list {
            List::Reshards(group) => &mut self.reshards[group as usize],
            List::Halos(operand) => &mut self.halos[operand as usize],
            List::Completion(op) => &mut self.completions[op as usize],
        }
    }

    fn touch(&mut self, task: u32) {
        if !std::mem::replace(&mut self.is_touched[task as usize], true) {
            self.touched.push(task);
        }
    }

    /// Sets the predecessor in a slot.
    fn wait(&mut self, slot: u32, source: u32) {
        let old = self.edges.source(slot);
        if old != source {
            self.log.push(UndoEntry::Source { slot, source: old });
            self.edges.set(slot, source);
            self.touch(self.edges.owner(slot));
        }
    }

    /// Replaces a task, and counts its computing. Transfers occupy ports too.
    fn replace_task(&mut self, place: u32, task: Task) -> Task {
        let old = std::mem::replace(&mut self.tasks[place as usize], task);
        let width = self.device_classes().streams;
        let class = |task: &Task| {
            let stream = task.streams.trailing_zeros() as usize;
            (task.streams.is_power_of_two() && stream.is_multiple_of(width)).then(|| stream / width)
        };
        if let Some(class) = class(&old) {
            self.busy[class] -= old.duration;
        }
        if let Some(class) = class(&task) {
            self.busy[class] += task.duration;
        }
        old
    }

    /// Sets a task; rank zero removes it.
    fn set_task(&mut self, place: u32, duration: u64, streams: u64, rank: u64) {
        let task = Task { duration, streams, rank };
        let old = self.replace_task(place, task);
        if old != task {
            self.log.push(UndoEntry::Task { place, task: old });
            self.touch(place);
            if rank == 0 && old.rank != 0 {
                self.removed.push(place);
            }
        }
    }
}
