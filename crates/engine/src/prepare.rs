//! From the program of all devices to each device's tasks. This happens once, before the first step.
//!
//! An instruction becomes at most one task on a device; an all-reduce of several tensors becomes a few, since its small tensors
//! are reduced as one row. Tasks name values by the device's local numbers. Values know their readers, so a step only
//! counts missing operands.

use crate::exchange::{BlockSource, Exchange, ExchangeError, Member, all_reduce};
use crate::fabric::{Edge, ProcessMap};
use crate::role::ExchangeRole;
use shardwright_cost::{Action, Reduction};
use shardwright_graph::{Block, Op, TensorId, TensorType, block::extents};
use shardwright_lower::memory::{Account, AccountTask, AccountValue, SMALL_BYTES, buffer_bytes};
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, DeviceId};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// What a task does.
pub enum Job {
    /// Runs a kernel.
    Compute(Op),
    /// Reads the same memory with another shape.
    View,
    /// Concatenates the bytes of its operands and splits them among its results.
    Regroup,
    /// Takes part in an exchange.
    Exchange(ExchangeRole),
}

/// A unit of work that a device does once in every step.
pub struct Task {
    /// The instruction that it comes from.
    pub instruction: InstructionId,
    /// The work.
    pub job: Job,
    /// Its operands, as local numbers.
    pub reads: SmallVec<[u32; 4]>,
    /// Its results, as local numbers.
    pub writes: SmallVec<[u32; 2]>,
    /// Per result: the operand that it replaces in place. Empty if there is none.
    pub replaces: SmallVec<[Option<u32>; 2]>,
    /// Most bytes of the kernel's scratch memory.
    pub workspace: u64,
    /// The micro-batch that it belongs to.
    pub micro_batch: u32,
}

impl Task {
    fn new(
        instruction: InstructionId,
        job: Job,
        reads: SmallVec<[u32; 4]>,
        writes: SmallVec<[u32; 2]>,
    ) -> Self {
        Self { instruction, job, reads, writes, replaces: SmallVec::new(), workspace: 0, micro_batch: 0 }
    }

    /// The operand whose buffer a result uses; none where it has its own.
    pub fn shared(&self, result: usize) -> Option<u32> {
        match &self.job {
            Job::View => self.reads.first().copied(),
            Job::Exchange(role) if role.is_unchanged() => self.reads.first().copied(),
            Job::Compute(_) => self.replaces.get(result).copied().flatten(),
            Job::Exchange(_) | Job::Regroup => None,
        }
    }
}

/// A value of the program on one device.
pub struct LocalValue {
    /// The type of the device's block.
    pub ty: TensorType,
    /// The tasks that read it, in order.
    pub readers: SmallVec<[u32; 2]>,
    /// Whether it outlives the step.
    pub kept: bool,
}

/// A block that exists before the first step.
pub struct InitialBlock {
    /// The local number of its value.
    pub value: u32,
    /// The tensor of the graph.
    pub tensor: TensorId,
    /// The device's block of that tensor, as it is with the samples of all micro-batches.
    pub block: Block,
}

/// The tasks and values of one device.
#[derive(Default)]
pub struct DeviceProgram {
    /// The tasks, each after those whose results it reads.
    pub tasks: Vec<Task>,
    /// The values.
    pub values: Vec<LocalValue>,
    /// The blocks that exist before the first step.
    pub sources: Vec<InitialBlock>,
    /// Per task: the task that must not run before it, although it may read nothing of it. In a pipeline, kernels run in the order of
    /// the schedule.
    pub followers: Vec<Option<u32>>,
    /// The last task whose follower is not known yet.
    last_ordered: Option<u32>,
    /// Pairs of values: at the end of a step the second replaces the first.
    pub carries: Vec<(u32, u32)>,
    /// Per value of the program: its local number.
    numbers: Vec<Option<u32>>,
}

impl DeviceProgram {
    /// The local number of a value; none where the device holds no block of it.
    pub fn number(&self, value: ValueId) -> Option<u32> {
        self.numbers[value.index()]
    }

    /// The device's memory in the order of its tasks.
    pub fn account(&self) -> Account {
        let value = |value: &LocalValue| AccountValue {
            bytes: buffer_bytes(value.ty.bytes()),
            initial: false,
            kept: value.kept,
        };
        let task = |task: &Task| AccountTask {
            reads: task.reads.clone(),
            writes: task.writes.iter().enumerate().map(|(at, &write)| (write, task.shared(at))).collect(),
            workspace: buffer_bytes(task.workspace),
        };
        let mut values: Vec<AccountValue> = self.values.iter().map(value).collect();
        self.sources.iter().for_each(|source| values[source.value as usize].initial = true);
        Account::new(&values, &self.tasks.iter().map(task).collect::<Vec<_>>())
    }

    fn add(&mut self, ty: TensorType, kept: bool) -> u32 {
        self.values.push(LocalValue { ty, readers: SmallVec::new(), kept });
        self.values.len() as u32 - 1
    }

    fn push(&mut self, task: Task) {
        let at = self.tasks.len() as u32;
        for &read in &task.reads {
            self.values[read as usize].readers.push(at);
        }
        self.tasks.push(task);
        self.followers.push(None);
    }

    /// Lets the last task follow the ordered task before it.
    fn keep_order(&mut self) {
        let Some(at) = (self.tasks.len() as u32).checked_sub(1) else { return };
        if let Some(before) = self.last_ordered.replace(at) {
            self.followers[before as usize] = Some(at);
        }
    }
}

/// The tasks of all devices, and the messages between them.
pub struct TaskGraph {
    /// One program per device.
    pub devices: Vec<DeviceProgram>,
    /// The messages of a step.
    pub edges: Vec<Edge>,
    /// Which devices share a process.
    pub process_map: ProcessMap,
}

/// Why a program cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("instruction {instruction} of the lowered program: {reason}")]
pub struct PrepareError {
    /// The instruction's position.
    pub instruction: usize,
    /// The exchange that is impossible.
    pub reason: ExchangeError,
}

impl TaskGraph {
    /// The tasks of a program whose devices run in `processes` processes.
    pub fn new(program: &ParallelGraph, processes: u32) -> Result<Self, PrepareError> {
        let replaced = program.replaced();
        let devices: Vec<DeviceProgram> = program.devices().map(|d| declare(program, d, &replaced)).collect();
        let in_place = program.updated_in_place();
        let process_map = ProcessMap { devices: devices.len() as u32, processes };
        let mut task_graph = Self { devices, edges: Vec::new(), process_map };
        for (at, instruction) in program.instructions.iter().enumerate() {
            let id = InstructionId(at as u32);
            match &instruction.work {
                Work::Compute { .. } => task_graph.compute(program, id, &in_place),
                Work::Reshard(step) => {
                    task_graph.moves(program, id, step.axes, step.reduction, step.action == Action::AllReduce)
                }
                Work::HaloExchange { axes, .. } => task_graph.moves(program, id, *axes, None, false),
            }
            .map_err(|reason| PrepareError { instruction: at, reason })?;
        }
        Ok(task_graph)
    }

    fn compute(
        &mut self,
        program: &ParallelGraph,
        id: InstructionId,
        in_place: &BTreeMap<ValueId, ValueId>,
    ) -> Result<(), ExchangeError> {
        let instruction = program.instruction(id);
        for (device, local) in self.devices.iter_mut().enumerate() {
            let Some(op) = program.local_op(instruction, DeviceId(device as u32)) else { continue };
            let reads = instruction.reads.iter().filter_map(|&v| local.number(v)).collect();
            let writes = instruction.writes.iter().filter_map(|&v| local.number(v)).collect();
            let job = if op.operator().is_view() { Job::View } else { Job::Compute(op) };
            let held = instruction.writes.iter().filter(|&&v| local.number(v).is_some());
            let replaces: SmallVec<[Option<u32>; 2]> =
                held.map(|write| in_place.get(write).and_then(|&old| local.number(old))).collect();
            let replaces = if replaces.contains(&None) { SmallVec::new() } else { replaces };
            let workspace = program.workspace_bytes(id, DeviceId(device as u32));
            let micro_batch = program.micro_batch_of(id);
            local.push(Task { replaces, workspace, micro_batch, ..Task::new(id, job, reads, writes) });
            if program.stage_pass(id).is_some() {
                local.keep_order();
            }
        }
        Ok(())
    }

    /// Adds an instruction that moves data: `reads[i]` becomes `writes[i]` within every group along the axes.
    fn moves(
        &mut self,
        program: &ParallelGraph,
        id: InstructionId,
        axes: AxisSet,
        combine: Option<Reduction>,
        everywhere: bool,
    ) -> Result<(), ExchangeError> {
        let instruction = program.instruction(id);
        for group in program.mesh.groups(axes) {
            let devices: Vec<u32> = group.iter().map(|d| d.0).collect();
            if let (Some(how), true) = (combine, everywhere) {
                self.all_reduces(program, id, how, &devices)?;
                continue;
            }
            for (which, (&read, &write)) in instruction.reads.iter().zip(&instruction.writes).enumerate() {
                let exchange = exchange(program, instruction, which, combine, &group)?;
                let (from, to) = (self.numbers(&devices, read), self.numbers(&devices, write));
                self.add_exchange(id, &exchange, &devices, &from, &to);
            }
        }
        Ok(())
    }

    /// Adds the all-reduces of one group: each large tensor by itself without a copy, all small tensors as one row.
    fn all_reduces(
        &mut self,
        program: &ParallelGraph,
        id: InstructionId,
        how: Reduction,
        devices: &[u32],
    ) -> Result<(), ExchangeError> {
        let instruction = program.instruction(id);
        let first = DeviceId(devices[0]);
        let mut small: Vec<(ValueId, ValueId, TensorType)> = Vec::new();
        for (&read, &write) in instruction.reads.iter().zip(&instruction.writes) {
            // A value that is absent from one member is absent from all: the group lies on another side of a pin.
            let Some(ty) = program.value(read).local_type(&program.mesh, first) else { continue };
            if ty.bytes() <= SMALL_BYTES {
                small.push((read, write, ty));
                continue;
            }
            let (from, to) = (self.numbers(devices, read), self.numbers(devices, write));
            self.all_reduce(id, how, &ty, devices, &from, &to)?;
        }
        let [(.., first), _, ..] = &small[..] else {
            for (read, write, ty) in small {
                let (from, to) = (self.numbers(devices, read), self.numbers(devices, write));
                self.all_reduce(id, how, &ty, devices, &from, &to)?;
            }
            return Ok(());
        };
        let elements: u64 = small.iter().map(|(.., ty)| ty.shape.elements()).sum();
        let row = TensorType::new(first.dtype, [elements]);
        let mut rows = || -> Vec<Option<u32>> {
            devices.iter().map(|&d| Some(self.devices[d as usize].add(row.clone(), false))).collect()
        };
        let (from, to) = (rows(), rows());
        for (&device, &row) in devices.iter().zip(&from) {
            let local = &mut self.devices[device as usize];
            let reads = small.iter().filter_map(|(read, ..)| local.number(*read)).collect();
            let writes = row.into_iter().collect();
            local.push(Task::new(id, Job::Regroup, reads, writes));
        }
        self.all_reduce(id, how, &row, devices, &from, &to)?;
        for (&device, &row) in devices.iter().zip(&to) {
            let local = &mut self.devices[device as usize];
            let writes = small.iter().filter_map(|(_, write, _)| local.number(*write)).collect();
            let reads = row.into_iter().collect();
            local.push(Task::new(id, Job::Regroup, reads, writes));
        }
        Ok(())
    }

    fn numbers(&self, devices: &[u32], value: ValueId) -> Vec<Option<u32>> {
        devices.iter().map(|&d| self.devices[d as usize].number(value)).collect()
    }

    fn all_reduce(
        &mut self,
        id: InstructionId,
        how: Reduction,
        ty: &TensorType,
        devices: &[u32],
        from: &[Option<u32>],
        to: &[Option<u32>],
    ) -> Result<(), ExchangeError> {
        let stages = all_reduce(ty.dtype, how, ty.shape.elements(), devices.len())?;
        match &stages[..] {
            [scatter, gather] => {
                let shares = devices.iter().zip(&scatter.members).map(|(&device, member)| {
                    let share = member.wants.as_ref()?;
                    let ty = TensorType::new(ty.dtype, extents(share));
                    Some(self.devices[device as usize].add(ty, false))
                });
                let shares: Vec<Option<u32>> = shares.collect();
                self.add_exchange(id, scatter, devices, from, &shares);
                self.add_exchange(id, gather, devices, &shares, to);
            }
            stages => stages.iter().for_each(|stage| self.add_exchange(id, stage, devices, from, to)),
        }
        Ok(())
    }

    fn add_exchange(
        &mut self,
        id: InstructionId,
        exchange: &Exchange,
        devices: &[u32],
        from: &[Option<u32>],
        to: &[Option<u32>],
    ) {
        let roles = ExchangeRole::of(exchange, devices, &self.process_map, &mut self.edges);
        for (member, role) in roles.into_iter().enumerate() {
            if from[member].is_none() && to[member].is_none() {
                continue;
            }
            let (reads, writes) = (from[member].into_iter().collect(), to[member].into_iter().collect());
            self.devices[devices[member] as usize].push(Task::new(id, Job::Exchange(role), reads, writes));
        }
    }
}

/// A device's program with its values, initial blocks and carries, and no tasks yet.
fn declare(program: &ParallelGraph, device: DeviceId, replaced: &[bool]) -> DeviceProgram {
    let mut local = DeviceProgram::default();
    for (value, replaced) in program.values.iter().zip(replaced) {
        let number = value.local_type(&program.mesh, device).map(|ty| local.add(ty, value.kept && !replaced));
        local.numbers.push(number);
    }
    for source in &program.sources {
        let block = source.block(program, device);
        if let (Some(value), Some(block)) = (local.number(source.value), block) {
            local.sources.push(InitialBlock { value, tensor: source.tensor, block });
        }
    }
    let carried =
        |carry: &shardwright_lower::Carry| Some((local.number(carry.old)?, local.number(carry.new)?));
    local.carries = program.carries.iter().filter_map(carried).collect();
    local
}

/// The exchange of one group, as the pieces of the lowered program define it.
fn exchange(
    program: &ParallelGraph,
    instruction: &Instruction,
    which: usize,
    combine: Option<Reduction>,
    group: &[DeviceId],
) -> Result<Exchange, ExchangeError> {
    let (before, after) = (program.value(instruction.reads[which]), program.value(instruction.writes[which]));
    let mesh = &program.mesh;
    let members: Vec<Member> =
        group.iter().map(|&d| Member { holds: before.block(mesh, d), wants: after.block(mesh, d) }).collect();
    let rank = |device: DeviceId| {
        group.iter().position(|&d| d == device).ok_or(ExchangeError::NotInGroup { device: device.0 })
    };
    let sources = |&device: &DeviceId| {
        let pieces = program.pieces(instruction, which, device);
        match (combine, pieces.first()) {
            (Some(_), Some(first)) => {
                let from = pieces.iter().map(|piece| rank(piece.from)).collect::<Result<_, _>>()?;
                Ok(vec![BlockSource { block: first.block.clone(), from }])
            }
            _ => pieces
                .into_iter()
                .map(|piece| Ok(BlockSource { from: smallvec![rank(piece.from)?], block: piece.block }))
                .collect(),
        }
    };
    let sources = group.iter().map(sources).collect::<Result<_, _>>()?;
    Exchange::new(before.ty.dtype, combine, members, sources)
}
