//! The account of memory: which buffers a device holds at every point of a step. Plans, the simulator and the engine use
//! this one account.
//!
//! **Time** is program order. The tasks of a device run one after the other in the order of the program. Each task
//! allocates its results, runs, and releases all operands without a later reader. Overlap adds nothing: the engine starts
//! a task ahead of that order only if all tasks in between still fit below the peak.
//!
//! **Buffers** that are counted, each rounded up to whole cache lines of [`LINE`] bytes:
//!
//! - weights, optimizer state, constants and data, in every layout in which they are stored or delivered, all step long;
//!   of data that micro-batches slice, all slices;
//! - every result of an op, and every copy that a step of a reshard or a halo exchange makes, from the task that writes
//!   it to its last reader; the step's outputs to the end of the step;
//! - the shares of an all-reduce among more than two devices: each device reduces one share of the tensor, then gathers
//!   the others. The partial result is released in between;
//! - the rows of joined small tensors ([`SMALL_BYTES`]) in a bucket: two rows beside the tensors themselves;
//! - the workspace of a kernel ([`Operator::workspace_bytes`](shardwright_graph::Operator::workspace_bytes)) while it
//!   runs.
//!
//! **Shared memory.** A view, and a reshard that leaves the blocks of all holders as they are, use their operand's buffer. An
//! optimizer's update writes into the old weight's buffer ([`ParallelGraph::updated_in_place`]). Any other op that
//! makes a new weight has its own buffer; the old weight is released after its last reader.
//!
//! Messages need no buffers: receivers read the sender's buffer, which the sender holds until then.

use crate::program::{InstructionId, ParallelGraph, Value, ValueId, Work};
use shardwright_cost::Action;
use shardwright_graph::TensorId;
use shardwright_machine::{AxisSet, DeviceId};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Buffers are whole cache lines of this many bytes.
pub const LINE: u64 = 64;

/// Tensors of at most this size are reduced together as one row: copying them costs less than a message each.
pub const SMALL_BYTES: u64 = 16 << 10;

/// Up to this size every device reduces the whole tensor itself: one exchange instead of two.
pub const DIRECT_BYTES: u64 = 16 << 10;

/// Elements of one device's share in an all-reduce of `elements` elements: whole cache lines, so that no two devices
/// write the same line. None where every device reduces the whole tensor.
pub fn all_reduce_share(elements: u64, element_bytes: u64, devices: u64) -> Option<u64> {
    if elements.saturating_mul(element_bytes) <= DIRECT_BYTES || devices <= 2 {
        return None;
    }
    let line = LINE / element_bytes.max(1);
    Some(elements.div_ceil(line).div_ceil(devices) * line)
}

/// The bytes of a buffer for a tensor of this size.
pub fn buffer_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(LINE).saturating_mul(LINE)
}

/// A value of one device, as the account sees it.
#[derive(Clone, Copy, Debug)]
pub struct AccountValue {
    /// Bytes of its buffer.
    pub bytes: u64,
    /// Whether it exists before the first task.
    pub initial: bool,
    /// Whether it outlives the step.
    pub kept: bool,
}

/// A task of one device, as the account sees it.
#[derive(Clone, Debug, Default)]
pub struct AccountTask {
    /// Its operands.
    pub reads: SmallVec<[u32; 4]>,
    /// Its results, each with the operand whose buffer it uses, if it has no buffer of its own.
    pub writes: SmallVec<[(u32, Option<u32>); 2]>,
    /// Bytes of its workspace.
    pub workspace: u64,
}

/// A buffer and the tasks during which it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferSpan {
    /// The value that it was allocated for.
    pub value: u32,
    /// Its bytes.
    pub bytes: u64,
    /// The tasks, from its producer to the last reader; past the last task if it outlives the step.
    pub tasks: Range<u32>,
}

/// The memory of one device in program order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Bytes held while each task runs.
    pub levels: Vec<u64>,
    /// All buffers, in the order of their allocation.
    pub buffers: Vec<BufferSpan>,
    /// Bytes held before the first task.
    initial: u64,
}

impl Account {
    /// The account of a device's tasks.
    pub fn new(values: &[AccountValue], tasks: &[AccountTask]) -> Self {
        let mut unread = vec![0u32; values.len()];
        for &read in tasks.iter().flat_map(|task| &task.reads) {
            unread[read as usize] += 1;
        }
        let mut account = Self::default();
        // Per value: its buffer. Per buffer: how many live values use it.
        let mut buffer_of: Vec<Option<usize>> = vec![None; values.len()];
        let mut users: Vec<u32> = Vec::new();
        let end = tasks.len() as u32 + 1;
        let mut now = 0u64;
        let allocate = |account: &mut Self, users: &mut Vec<u32>, value: u32, at: u32, now: &mut u64| {
            let bytes = values[value as usize].bytes;
            *now = now.saturating_add(bytes);
            account.buffers.push(BufferSpan { value, bytes, tasks: at..end });
            users.push(1);
            account.buffers.len() - 1
        };
        for (value, _) in values.iter().enumerate().filter(|(_, value)| value.initial) {
            buffer_of[value] = Some(allocate(&mut account, &mut users, value as u32, 0, &mut now));
        }
        account.initial = now;
        for (at, task) in tasks.iter().enumerate() {
            for &(write, shared) in &task.writes {
                let buffer = match shared.and_then(|operand| buffer_of[operand as usize]) {
                    Some(buffer) => {
                        users[buffer] += 1;
                        buffer
                    }
                    None => allocate(&mut account, &mut users, write, at as u32, &mut now),
                };
                buffer_of[write as usize] = Some(buffer);
            }
            account.levels.push(now.saturating_add(task.workspace));
            task.reads.iter().for_each(|&read| unread[read as usize] -= 1);
            for value in task.reads.iter().copied().chain(task.writes.iter().map(|(write, _)| *write)) {
                if unread[value as usize] > 0 || values[value as usize].kept {
                    continue;
                }
                let Some(buffer) = buffer_of[value as usize].take() else { continue };
                users[buffer] -= 1;
                if users[buffer] == 0 {
                    account.buffers[buffer].tasks.end = at as u32 + 1;
                    now = now.saturating_sub(account.buffers[buffer].bytes);
                }
            }
        }
        account
    }

    /// The most bytes held at once.
    pub fn peak(&self) -> u64 {
        self.levels.iter().copied().max().unwrap_or(0).max(self.initial)
    }

    /// The first task at which the most bytes are held; none without tasks.
    pub fn fullest(&self) -> Option<usize> {
        let peak = self.peak();
        self.levels.iter().position(|&level| level == peak)
    }
}

/// The account of one device of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAccount {
    /// The account.
    pub account: Account,
    /// Per task: its instruction.
    pub instructions: Vec<InstructionId>,
}

/// A device's tasks while they are collected.
struct Tasks<'p> {
    program: &'p ParallelGraph,
    device: DeviceId,
    values: Vec<AccountValue>,
    tasks: Vec<AccountTask>,
    instructions: Vec<InstructionId>,
}

impl DeviceAccount {
    /// The account of a device. That of a program whose body is written once is that of the first micro-batches. From the
    /// second on, all sums over micro-batches are held; up to the last but one, all that the next one reads. A pipeline holds
    /// as many micro-batches as its schedule has in flight.
    pub fn of(program: &ParallelGraph, device: DeviceId) -> Self {
        Self::of_stored(program, device, &|_| true)
    }

    /// The same where some tensors never reach memory, because the kernel that makes them also reads them.
    fn of_stored(program: &ParallelGraph, device: DeviceId, stored: &dyn Fn(TensorId) -> bool) -> Self {
        if program.copies == 1 && program.micro_batches.get() > 1 && !program.body.is_empty() {
            return Self::of_stored(&program.unrolled_to(program.memory_copies()), device, stored);
        }
        let in_place = program.updated_in_place();
        let replaced = program.replaced();
        let mut slices = vec![1u64; program.values.len()];
        for source in &program.sources {
            slices[source.value.index()] = source.slices.len() as u64;
        }
        let value = |(at, value): (usize, &Value)| AccountValue {
            bytes: value
                .local_type(&program.mesh, device)
                .filter(|_| stored(value.tensor))
                .map_or(0, |ty| buffer_bytes(ty.bytes()).saturating_mul(slices[at])),
            initial: value.made_by.is_none() && value.is_on(&program.mesh, device),
            kept: value.kept && !replaced[at],
        };
        let values = program.values.iter().enumerate().map(value).collect();
        let mut tasks = Tasks { program, device, values, tasks: Vec::new(), instructions: Vec::new() };
        for (at, instruction) in program.instructions.iter().enumerate() {
            let id = InstructionId(at as u32);
            match &instruction.work {
                Work::Compute { .. } => tasks.compute(id, &in_place),
                Work::Reshard(step) if step.action == Action::AllReduce && step.reduction.is_some() => {
                    tasks.all_reduce(id, step.axes);
                }
                Work::Reshard(step) => tasks.moves(id, step.reduction.is_some()),
                Work::HaloExchange { .. } => tasks.moves(id, false),
            }
        }
        Self { account: Account::new(&tasks.values, &tasks.tasks), instructions: tasks.instructions }
    }
}

impl Tasks<'_> {
    fn holds(&self, value: ValueId) -> bool {
        self.program.value(value).is_on(&self.program.mesh, self.device)
    }

    fn push(&mut self, id: InstructionId, task: AccountTask) {
        self.tasks.push(task);
        self.instructions.push(id);
    }

    fn add(&mut self, bytes: u64) -> u32 {
        self.values.push(AccountValue { bytes: buffer_bytes(bytes), initial: false, kept: false });
        self.values.len() as u32 - 1
    }

    fn compute(&mut self, id: InstructionId, in_place: &BTreeMap<ValueId, ValueId>) {
        let instruction = self.program.instruction(id);
        let Work::Compute { op, .. } = instruction.work else { return };
        if !self.program.computes(instruction, self.device) {
            return;
        }
        let is_view = self.program.ops[op.index()].op.operator().is_view();
        let held = |values: &[ValueId]| -> SmallVec<[u32; 4]> {
            values.iter().filter(|value| self.holds(**value)).map(|value| value.0).collect()
        };
        let reads = held(&instruction.reads);
        let first = reads.first().copied();
        let storage = |write: &u32| {
            let updated = in_place.get(&ValueId(*write)).map(|old| old.0);
            (*write, if is_view { first } else { updated })
        };
        let writes = held(&instruction.writes).iter().map(storage).collect();
        let workspace = buffer_bytes(self.program.workspace_bytes(id, self.device));
        self.push(id, AccountTask { reads, writes, workspace });
    }

    /// An exchange: each value becomes another.
    fn moves(&mut self, id: InstructionId, reduces: bool) {
        let instruction = self.program.instruction(id);
        for (&read, &write) in instruction.reads.iter().zip(&instruction.writes) {
            let (from, to) = (self.holds(read), self.holds(write));
            if !from && !to {
                continue;
            }
            let unchanged = from && to && !reduces && self.program.keeps_blocks(read, write);
            let reads = if from { smallvec![read.0] } else { SmallVec::new() };
            let storage = (write.0, unchanged.then_some(read.0));
            let writes = if to { smallvec![storage] } else { SmallVec::new() };
            self.push(id, AccountTask { reads, writes, workspace: 0 });
        }
    }

    /// All-reduces: each large tensor by itself, all small tensors as one row.
    fn all_reduce(&mut self, id: InstructionId, axes: AxisSet) {
        let program = self.program;
        let instruction = program.instruction(id);
        let devices = u64::from(program.mesh.group_size(axes));
        let mut small: Vec<(u32, u32)> = Vec::new();
        let mut row = 0;
        for (&read, &write) in instruction.reads.iter().zip(&instruction.writes) {
            let Some(ty) = program.value(read).local_type(&program.mesh, self.device) else { continue };
            if ty.bytes() <= SMALL_BYTES {
                small.push((read.0, write.0));
                row += ty.bytes();
            } else {
                self.reduce(id, read.0, write.0, (ty.shape.elements(), ty.dtype.bytes()), devices);
            }
        }
        if let [(read, write)] = small[..] {
            // One tensor of at most [`DIRECT_BYTES`].
            self.reduce(id, read, write, (0, 1), devices);
            return;
        }
        let Some(first) = instruction.reads.first().filter(|_| !small.is_empty()) else { return };
        let size = program.value(*first).ty.dtype.bytes().max(1);
        let (joined, reduced) = (self.add(row), self.add(row));
        let reads = small.iter().map(|pair| pair.0).collect();
        self.push(id, AccountTask { reads, writes: smallvec![(joined, None)], workspace: 0 });
        self.reduce(id, joined, reduced, (row / size, size), devices);
        let writes = small.iter().map(|pair| (pair.1, None)).collect();
        self.push(id, AccountTask { reads: smallvec![reduced], writes, workspace: 0 });
    }

    fn reduce(&mut self, id: InstructionId, from: u32, to: u32, (elements, size): (u64, u64), devices: u64) {
        let exchange = |from: u32, to: u32| AccountTask {
            reads: smallvec![from],
            writes: smallvec![(to, None)],
            workspace: 0,
        };
        match all_reduce_share(elements, size, devices) {
            None => self.push(id, exchange(from, to)),
            Some(share) => {
                // The last devices may have a smaller share; the first has the largest.
                let share = self.add(share.min(elements).saturating_mul(size));
                self.push(id, exchange(from, share));
                self.push(id, exchange(share, to));
            }
        }
    }
}

impl ParallelGraph {
    /// The most bytes that any device holds at once.
    pub fn peak_memory(&self) -> u64 {
        self.peak_memory_of(&|_| true)
    }

    /// The same for an engine whose kernels keep some results to themselves. A tensor that is exchanged is in memory all the same.
    pub fn peak_memory_of(&self, stored: &dyn Fn(TensorId) -> bool) -> u64 {
        let exchanges = self.instructions.iter().filter(|own| !matches!(own.work, Work::Compute { .. }));
        let exchanged: BTreeSet<TensorId> =
            exchanges.flat_map(|own| own.reads.iter().map(|value| self.value(*value).tensor)).collect();
        let stored = |tensor| stored(tensor) || exchanged.contains(&tensor);
        self.peaks(&stored).into_iter().map(|(_, peak)| peak).max().unwrap_or(0)
    }

    /// The most bytes that a device holds at once, for every group of a pipeline.
    pub fn peak_by_group(&self) -> BTreeMap<u32, u64> {
        let mut groups = BTreeMap::new();
        for (device, peak) in self.peaks(&|_| true) {
            let group = self.pipeline.as_ref().map_or(0, |pipeline| pipeline.group_of(&self.mesh, device));
            let most: &mut u64 = groups.entry(group).or_default();
            *most = peak.max(*most);
        }
        groups
    }

    /// The most bytes held at once by each of the devices among which every account occurs.
    fn peaks(&self, stored: &dyn Fn(TensorId) -> bool) -> Vec<(DeviceId, u64)> {
        let program = if self.copies == 1 && !self.body.is_empty() {
            Cow::Owned(self.unrolled_to(self.memory_copies()))
        } else {
            Cow::Borrowed(self)
        };
        let peak = |device| (device, DeviceAccount::of_stored(&program, device, stored).account.peak());
        self.memory_devices().into_iter().map(peak).collect()
    }

    /// Devices among which every account of the program occurs. Devices differ by the digits that values are pinned to,
    /// and by their place in dimensions whose blocks overlap: at an edge or inside.
    pub fn memory_devices(&self) -> Vec<DeviceId> {
        let mut digits: Vec<Vec<u32>> = vec![Vec::new(); self.mesh.len()];
        for value in &self.values {
            let layout = value.at.layout();
            for axis in layout.absent().iter() {
                if let shardwright_cost::Placement::Absent(digit) = layout.get(axis) {
                    digits[axis.index()].push(u32::from(digit));
                }
            }
            for axis in value.cuts.iter().flat_map(|cut| cut.axes.union(layout.shards(cut.dim)).iter()) {
                let size = self.mesh.axis(axis).size;
                digits[axis.index()].extend([0, 1.min(size - 1), size - 1]);
            }
        }
        let mut devices = vec![DeviceId(0)];
        for (axis, mut digits) in self.mesh.all().iter().zip(digits) {
            digits.sort_unstable();
            digits.dedup();
            digits.extend((0..self.mesh.axis(axis).size).find(|digit| !digits.contains(digit)));
            let stride = self.mesh.stride(axis);
            let with = |device: &DeviceId| -> Vec<DeviceId> {
                digits.iter().map(|digit| DeviceId(device.0 + digit * stride)).collect()
            };
            devices = devices.iter().flat_map(with).collect();
        }
        devices.sort_unstable();
        devices
    }

    /// Per updated weight whose op writes into the old weight's buffer: the old weight.
    ///
    /// The op must update in place, read the old weight last, and leave it in the same arrangement. No output may need
    /// the old weight, and no other carry the new one. All results of the op or none are updated in place. A sum over
    /// micro-batches is updated in place too.
    pub fn updated_in_place(&self) -> BTreeMap<ValueId, ValueId> {
        let mut found = BTreeMap::new();
        let needed = self.last_needed();
        let mut carried: BTreeMap<ValueId, u32> = BTreeMap::new();
        for value in self.carries.iter().flat_map(|carry| [carry.old, carry.new]) {
            *carried.entry(value).or_default() += 1;
        }
        for carry in &self.carries {
            let (old, new) = (self.value(carry.old), self.value(carry.new));
            let Some(by) = new.made_by else { continue };
            // Neither the old weight nor a view of it is read later.
            if old.last_read != Some(by) || needed[carry.old.index()] > Some(by) {
                continue;
            }
            let Work::Compute { op, .. } = self.instruction(by).work else { continue };
            let same_place = old.at == new.at && old.cuts.len() == new.cuts.len() && old.ty == new.ty;
            let reads = self.instruction(by).reads.iter().filter(|&&read| read == carry.old).count();
            let output = self.outputs.iter().any(|output| output.value == carry.old);
            if self.ops[op.index()].op.operator().updates_in_place()
                && same_place
                && reads == 1
                && !output
                && carried[&carry.old] == 1
                && carried[&carry.new] == 1
            {
                found.insert(carry.new, carry.old);
            }
        }
        let complete = |new: &ValueId| {
            let by = self.value(*new).made_by;
            by.is_some_and(|by| self.instruction(by).writes.iter().all(|write| found.contains_key(write)))
        };
        let whole: Vec<ValueId> = found.keys().copied().filter(complete).collect();
        found.retain(|new, _| whole.binary_search(new).is_ok());
        for instruction in self.instructions.iter().filter(|instruction| self.accumulates(instruction)) {
            // The sum so far, which no other instruction reads.
            if let ([_, before], [new]) = (&instruction.reads[..], &instruction.writes[..]) {
                found.insert(*new, *before);
            }
        }
        found
    }

    /// Whether every device that holds `from` has the same block of `to`.
    fn keeps_blocks(&self, from: ValueId, to: ValueId) -> bool {
        let (from, to) = (self.value(from), self.value(to));
        let mut held = self.devices().filter(|&device| from.is_on(&self.mesh, device));
        held.all(|device| from.block(&self.mesh, device) == to.block(&self.mesh, device))
    }

    /// Per value: the last instruction that reads its buffer, directly or through values that may share it.
    fn last_needed(&self) -> Vec<Option<InstructionId>> {
        let mut needed: Vec<_> = self.values.iter().map(|value| value.last_read).collect();
        // Last instruction first, so that chains add up.
        for instruction in self.instructions.iter().rev() {
            let shares = match &instruction.work {
                Work::Compute { op, .. } => self.ops[op.index()].op.operator().is_view(),
                Work::Reshard(step) => step.reduction.is_none(),
                Work::HaloExchange { .. } => true,
            };
            for (read, write) in instruction.reads.iter().zip(&instruction.writes).filter(|_| shares) {
                let end = if self.value(*write).kept {
                    Some(InstructionId(self.instructions.len() as u32))
                } else {
                    needed[write.index()]
                };
                needed[read.index()] = needed[read.index()].max(end);
            }
        }
        needed
    }

    /// Per value: whether it is an old weight that the step replaces. Its buffer is released after its last reader.
    pub fn replaced(&self) -> Vec<bool> {
        let mut replaced = vec![false; self.values.len()];
        for carry in &self.carries {
            let made = self.value(carry.new).made_by.is_some();
            let read = self.value(carry.old).last_read.is_some();
            let output = self.outputs.iter().any(|output| output.value == carry.old);
            replaced[carry.old.index()] = made && read && !output;
        }
        replaced
    }

    /// Bytes of the workspace that a device's kernel needs in a compute instruction.
    pub fn workspace_bytes(&self, id: InstructionId, device: DeviceId) -> u64 {
        let instruction = self.instruction(id);
        let Some(op) = self.local_op(instruction, device) else { return 0 };
        let types = |values: &[ValueId]| -> Vec<_> {
            values.iter().filter_map(|&value| self.value(value).local_type(&self.mesh, device)).collect()
        };
        op.operator().workspace_bytes(&types(&instruction.reads), &types(&instruction.writes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(bytes: u64, initial: bool, kept: bool) -> AccountValue {
        AccountValue { bytes, initial, kept }
    }

    fn task(reads: &[u32], writes: &[(u32, Option<u32>)], workspace: u64) -> AccountTask {
        AccountTask { reads: reads.into(), writes: writes.into(), workspace }
    }

    #[test]
    fn buffers_are_held_from_their_producer_to_their_last_reader() {
        // w; a = f(w); b = view(a); c = g(b), kept.
        let values =
            [value(8, true, true), value(4, false, false), value(4, false, false), value(2, false, true)];
        let tasks =
            [task(&[0], &[(1, None)], 3), task(&[1], &[(2, Some(1))], 0), task(&[2], &[(3, None)], 0)];
        let account = Account::new(&values, &tasks);
        assert_eq!(account.levels, [8 + 4 + 3, 8 + 4, 8 + 4 + 2]);
        assert_eq!((account.peak(), account.fullest()), (15, Some(0)));
        let spans: Vec<_> = account.buffers.iter().map(|b| (b.value, b.tasks.clone())).collect();
        assert_eq!(spans, [(0, 0..4), (1, 0..3), (3, 2..4)]);
    }

    #[test]
    fn an_update_in_place_takes_no_memory_and_any_other_update_both_weights() {
        let values = [value(8, true, false), value(8, false, true)];
        let in_place = Account::new(&values, &[task(&[0], &[(1, Some(0))], 0)]);
        assert_eq!(in_place.levels, [8]);
        assert_eq!(in_place.buffers[0].tasks, 0..2, "the new weight outlives the step");
        let apart = Account::new(&values, &[task(&[0], &[(1, None)], 0), task(&[], &[], 0)]);
        assert_eq!(apart.levels, [16, 8]);
    }

    #[test]
    fn unread_results_are_released_at_once() {
        let values = [value(8, false, false)];
        let account = Account::new(&values, &[task(&[], &[(0, None)], 0), task(&[], &[], 0)]);
        assert_eq!(account.levels, [8, 0]);
    }

    #[test]
    fn shares_are_whole_lines_and_small_tensors_have_none() {
        assert_eq!(all_reduce_share(DIRECT_BYTES / 4, 4, 8), None);
        assert_eq!(all_reduce_share(1 << 20, 4, 2), None);
        let share = all_reduce_share(100_001, 4, 3).unwrap();
        assert!(share * 3 >= 100_001 && share.is_multiple_of(16));
    }
}
