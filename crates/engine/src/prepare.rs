//! From the program of all devices to each device's tasks: what is decided once, before the first step.
//!
//! An instruction becomes at most one task on a device, an all-reduce of several tensors a few: those that are small travel
//! as one row. Tasks name their values by the device's own numbers, and know who waits for them, so that a step only counts.

use crate::exchange::{Exchange, ExchangeError, Member, Take, all_reduce, extents};
use crate::fabric::{Edge, Placement};
use crate::role::Role;
use crate::walk::{Combine, combine_of};
use shardwright_cost::Action;
use shardwright_graph::{Block, Op, TensorId, TensorType};
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, DeviceId};
use smallvec::{SmallVec, smallvec};

/// Tensors of at most so many bytes are reduced as one row with others: copying them costs less than a message each.
const SMALL_BYTES: u64 = 16 << 10;

/// What a task does.
pub enum Job {
    /// Runs a kernel.
    Compute(Op),
    /// Sees the same memory with another shape.
    View,
    /// Lays the bytes of what it reads, one after the other, into what it writes.
    Regroup,
    /// Takes part in an exchange.
    Exchange(Role),
}

/// Something that a device does once in every step.
pub struct Task {
    /// The instruction that it comes from.
    pub instruction: InstructionId,
    /// What to do.
    pub job: Job,
    /// Values that must be there first.
    pub reads: SmallVec<[u32; 4]>,
    /// Values that are there afterwards.
    pub writes: SmallVec<[u32; 2]>,
}

/// A value on one device.
pub struct Local {
    /// Its type there.
    pub ty: TensorType,
    /// The tasks that read it, in order.
    pub readers: SmallVec<[u32; 2]>,
    /// Whether it outlives the step.
    pub kept: bool,
}

/// A value that is there before the first step.
pub struct SourceBlock {
    /// The device's number of the value.
    pub value: u32,
    /// The tensor of the graph.
    pub tensor: TensorId,
    /// The block of it.
    pub block: Block,
}

/// All that one device does.
#[derive(Default)]
pub struct DeviceProgram {
    /// The tasks: each after those whose values it reads.
    pub tasks: Vec<Task>,
    /// The values.
    pub values: Vec<Local>,
    /// What is there before the first step.
    pub sources: Vec<SourceBlock>,
    /// At the end of a step the second takes the place of the first.
    pub carries: Vec<(u32, u32)>,
    /// The device's number of a value of the program.
    numbers: Vec<Option<u32>>,
}

impl DeviceProgram {
    /// The device's number of a value; none where it has no block of it.
    pub fn number(&self, value: ValueId) -> Option<u32> {
        self.numbers[value.index()]
    }

    fn add(&mut self, ty: TensorType, kept: bool) -> u32 {
        self.values.push(Local { ty, readers: SmallVec::new(), kept });
        self.values.len() as u32 - 1
    }

    fn push(&mut self, task: Task) {
        let at = self.tasks.len() as u32;
        for &read in &task.reads {
            self.values[read as usize].readers.push(at);
        }
        self.tasks.push(task);
    }
}

/// The tasks of all devices, and the messages between them.
pub struct Prepared {
    /// One program per device.
    pub devices: Vec<DeviceProgram>,
    /// The messages of a step.
    pub edges: Vec<Edge>,
    /// Which devices share a process.
    pub placement: Placement,
}

/// Why a program cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("instruction {instruction} of the lowered program: {reason}")]
pub struct PrepareError {
    /// Its position.
    pub instruction: usize,
    /// What is wrong with it.
    pub reason: ExchangeError,
}

impl Prepared {
    /// Prepares a program whose devices share so many processes.
    pub fn new(program: &ParallelGraph, processes: u32) -> Result<Self, PrepareError> {
        let devices: Vec<DeviceProgram> = program.devices().map(|d| declare(program, d)).collect();
        let placement = Placement { devices: devices.len() as u32, processes };
        let mut prepared = Self { devices, edges: Vec::new(), placement };
        for (at, instruction) in program.instructions.iter().enumerate() {
            let id = InstructionId(at as u32);
            match &instruction.work {
                Work::Compute { .. } => prepared.compute(program, id),
                Work::Relayout(step) => {
                    let combine = step.reduction.map(combine_of);
                    prepared.moves(program, id, step.axes, combine, step.action == Action::AllReduce)
                }
                Work::Window { axes, .. } => prepared.moves(program, id, *axes, None, false),
            }
            .map_err(|reason| PrepareError { instruction: at, reason })?;
        }
        Ok(prepared)
    }

    fn compute(&mut self, program: &ParallelGraph, id: InstructionId) -> Result<(), ExchangeError> {
        let instruction = program.instruction(id);
        for (device, local) in self.devices.iter_mut().enumerate() {
            let Some(op) = program.local_op(instruction, DeviceId(device as u32)) else { continue };
            let reads = instruction.reads.iter().filter_map(|&v| local.number(v)).collect();
            let writes = instruction.writes.iter().filter_map(|&v| local.number(v)).collect();
            let job = if op.operator().is_view() { Job::View } else { Job::Compute(op) };
            local.push(Task { instruction: id, job, reads, writes });
        }
        Ok(())
    }

    /// An instruction that moves data: `reads[i]` becomes `writes[i]` within every group along the axes.
    fn moves(
        &mut self,
        program: &ParallelGraph,
        id: InstructionId,
        axes: AxisSet,
        combine: Option<Combine>,
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

    /// All-reduces within one group: large tensors each on its own, straight from where they lie; small ones as one row.
    fn all_reduces(
        &mut self,
        program: &ParallelGraph,
        id: InstructionId,
        how: Combine,
        devices: &[u32],
    ) -> Result<(), ExchangeError> {
        let instruction = program.instruction(id);
        let first = DeviceId(devices[0]);
        let mut small: Vec<(ValueId, ValueId, TensorType)> = Vec::new();
        for (&read, &write) in instruction.reads.iter().zip(&instruction.writes) {
            // Absent from one member, it is absent from all: the group lies on another side of a pin.
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
            local.push(Task { instruction: id, job: Job::Regroup, reads, writes });
        }
        self.all_reduce(id, how, &row, devices, &from, &to)?;
        for (&device, &row) in devices.iter().zip(&to) {
            let local = &mut self.devices[device as usize];
            let writes = small.iter().filter_map(|(_, write, _)| local.number(*write)).collect();
            let reads = row.into_iter().collect();
            local.push(Task { instruction: id, job: Job::Regroup, reads, writes });
        }
        Ok(())
    }

    fn numbers(&self, devices: &[u32], value: ValueId) -> Vec<Option<u32>> {
        devices.iter().map(|&d| self.devices[d as usize].number(value)).collect()
    }

    fn all_reduce(
        &mut self,
        id: InstructionId,
        how: Combine,
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
        let roles = Role::of(exchange, devices, &self.placement, &mut self.edges);
        for (member, role) in roles.into_iter().enumerate() {
            if from[member].is_none() && to[member].is_none() {
                continue;
            }
            self.devices[devices[member] as usize].push(Task {
                instruction: id,
                job: Job::Exchange(role),
                reads: from[member].into_iter().collect(),
                writes: to[member].into_iter().collect(),
            });
        }
    }
}

/// A device's values, sources and carries.
fn declare(program: &ParallelGraph, device: DeviceId) -> DeviceProgram {
    let mut local = DeviceProgram::default();
    for value in &program.values {
        let number = value.local_type(&program.mesh, device).map(|ty| local.add(ty, value.kept));
        local.numbers.push(number);
    }
    for source in &program.sources {
        let block = program.value(source.value).block(&program.mesh, device);
        if let (Some(value), Some(block)) = (local.number(source.value), block) {
            local.sources.push(SourceBlock { value, tensor: source.tensor, block });
        }
    }
    let carried =
        |carry: &shardwright_lower::Carry| Some((local.number(carry.old)?, local.number(carry.new)?));
    local.carries = program.carries.iter().filter_map(carried).collect();
    local
}

/// The exchange of one group, as the lowered program's pieces say.
fn exchange(
    program: &ParallelGraph,
    instruction: &Instruction,
    which: usize,
    combine: Option<Combine>,
    group: &[DeviceId],
) -> Result<Exchange, ExchangeError> {
    let (before, after) = (program.value(instruction.reads[which]), program.value(instruction.writes[which]));
    let mesh = &program.mesh;
    let members: Vec<Member> =
        group.iter().map(|&d| Member { holds: before.block(mesh, d), wants: after.block(mesh, d) }).collect();
    let rank = |device: DeviceId| group.iter().position(|&d| d == device).unwrap_or(0);
    let takes = group.iter().map(|&device| {
        let pieces = program.pieces(instruction, which, device);
        match (combine, pieces.first()) {
            (Some(_), Some(first)) => {
                let block = first.block.clone();
                vec![Take { block, from: pieces.iter().map(|piece| rank(piece.from)).collect() }]
            }
            _ => pieces
                .into_iter()
                .map(|piece| Take { block: piece.block, from: smallvec![rank(piece.from)] })
                .collect(),
        }
    });
    Exchange::new(before.ty.dtype, combine, members.clone(), takes.collect())
}
