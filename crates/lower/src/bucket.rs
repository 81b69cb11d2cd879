//! Buckets: small all-reduces joined into larger ones, as DDP does with gradients (Li et al., VLDB 2020, section
//! 3.2.3).
//!
//! An all-reduce waits for others along the same axes, until the bucket is large enough or an op reads one of the
//! results. Updates wait with it: no op of the step reads their results. Latency is paid once per bucket. The bytes on
//! every axis stay the same. An all-reduce for which the cost model would switch to an algorithm with other traffic
//! starts a new bucket.
//!
//! In a pipeline, groups of devices do not wait for each other's buckets, and nothing is joined in the body: its passes move apart.

use crate::program::{Instruction, ParallelGraph, Reshard, ValueId, Work};
use rustc_hash::FxHashMap;
use shardwright_cost::{Action, Collective, Comm, Placement, Reduction, Traffic};
use shardwright_graph::{DType, OpId};
use shardwright_machine::{AxisId, AxisSet, Bytes};
use shardwright_space::Pipeline;

/// All-reduces of at least this size are not joined: DDP's default.
pub const BUCKET: Bytes = Bytes(25 << 20);

/// The key of a bucket: axes, absent axes, reduction, element type, and the group of a pipeline that reduces.
type Key = (AxisSet, AxisSet, Reduction, DType, u32);

/// All-reduces that wait to be joined.
struct Bucket {
    key: Key,
    members: Vec<Instruction>,
    /// Instructions that wait for them: updates, and reshards of their results.
    waiting: Vec<Instruction>,
    bytes: u64,
    traffic: Traffic,
}

struct BucketPass<'a> {
    program: &'a ParallelGraph,
    comm: &'a Comm,
    limit: Bytes,
    pipeline: Option<&'a Pipeline>,
    /// Whether an op is an update, which can wait. Other ops need their operands at once.
    is_update: &'a dyn Fn(OpId) -> bool,
    open: Vec<Bucket>,
    /// Per value: the open bucket that delays it.
    pending: FxHashMap<ValueId, Key>,
    out: Vec<Instruction>,
}

/// Joins all-reduces of less than `limit` bytes.
pub(crate) fn bucket(
    mut program: ParallelGraph,
    comm: &Comm,
    limit: Bytes,
    pipeline: Option<&Pipeline>,
    is_update: &dyn Fn(OpId) -> bool,
) -> ParallelGraph {
    let instructions = std::mem::take(&mut program.instructions);
    let (open, pending) = (Vec::new(), FxHashMap::default());
    let out = Vec::with_capacity(instructions.len());
    let mut pass = BucketPass { program: &program, comm, limit, pipeline, is_update, open, pending, out };
    let (body, count) = (program.body.clone(), instructions.len());
    let mut bounds = [0; 2];
    for (at, instruction) in instructions.into_iter().enumerate() {
        // No bucket reaches over an end of the body.
        for (bound, end) in bounds.iter_mut().zip([body.start, body.end]) {
            if at == end {
                pass.close_all();
                *bound = pass.out.len();
            }
        }
        match pipeline {
            Some(_) if body.contains(&at) => pass.out.push(instruction),
            _ => pass.add(instruction),
        }
    }
    pass.close_all();
    if body.end == count {
        bounds[1] = pass.out.len();
    }
    program.instructions = pass.out;
    program.body = bounds[0]..bounds[1];
    program
}

impl BucketPass<'_> {
    fn add(&mut self, instruction: Instruction) {
        let can_wait = match instruction.work {
            Work::Compute { op, .. } => (self.is_update)(op),
            Work::Reshard(_) => true,
            Work::HaloExchange { .. } => false,
        };
        // Closing a bucket may move its waiting instructions into another one.
        loop {
            let mut held = instruction.reads.iter().filter_map(|read| self.pending.get(read)).copied();
            let Some(key) = held.next() else { break };
            if can_wait && held.all(|other| other == key) {
                self.pending.extend(instruction.writes.iter().map(|&value| (value, key)));
                let bucket = self.open.iter_mut().find(|bucket| bucket.key == key);
                debug_assert!(bucket.is_some(), "pending values belong to an open bucket");
                bucket.into_iter().for_each(|bucket| bucket.waiting.push(instruction.clone()));
                return;
            }
            self.close(key);
        }
        match self.small(&instruction) {
            Some((key, bytes)) => self.join(instruction, key, bytes),
            None => self.out.push(instruction),
        }
    }

    /// The key and bytes of an all-reduce that is small enough to wait.
    fn small(&self, instruction: &Instruction) -> Option<(Key, u64)> {
        let Work::Reshard(step) = &instruction.work else { return None };
        if step.action != Action::AllReduce || step.message >= self.limit {
            return None;
        }
        let before = self.program.value(instruction.reads[0]);
        let layout = before.at.layout();
        let digit = |group: u32, axis: AxisId| match layout.get(axis) {
            Placement::Absent(digit) => group * self.program.mesh.axis(axis).size + u32::from(digit),
            _ => group,
        };
        let group = self.pipeline.map_or(0, |pipeline| pipeline.axes.iter().fold(0, digit));
        Some(((step.axes, layout.absent(), step.reduction?, before.ty.dtype, group), step.message.0))
    }

    fn traffic(&self, key: Key, bytes: u64) -> Traffic {
        self.comm.traffic(Collective::AllReduce, key.0, key.1, Bytes(bytes))
    }

    fn join(&mut self, instruction: Instruction, key: Key, bytes: u64) {
        let sent = self.traffic(key, bytes);
        if let Some(bucket) = self.open.iter().find(|bucket| bucket.key == key) {
            let all = bucket.bytes.saturating_add(bytes);
            let mut separate = bucket.traffic;
            separate.merge(&sent);
            if all > self.limit.0 || separate != self.traffic(key, all) {
                self.close(key);
            }
        }
        let at = self.open.iter().position(|bucket| bucket.key == key).unwrap_or_else(|| {
            let (members, waiting) = (Vec::new(), Vec::new());
            self.open.push(Bucket { key, members, waiting, bytes: 0, traffic: Traffic::default() });
            self.open.len() - 1
        });
        self.pending.extend(instruction.writes.iter().map(|&value| (value, key)));
        let bucket = &mut self.open[at];
        bucket.bytes += bytes;
        bucket.traffic.merge(&sent);
        bucket.members.push(instruction);
    }

    fn close_all(&mut self) {
        while let Some(bucket) = self.open.first() {
            self.close(bucket.key);
        }
    }

    /// Emits a bucket as one instruction, then the instructions that waited for it.
    fn close(&mut self, key: Key) {
        let Some(at) = self.open.iter().position(|bucket| bucket.key == key) else { return };
        let bucket = self.open.remove(at);
        for value in bucket.members.iter().chain(&bucket.waiting).flat_map(|member| &member.writes) {
            self.pending.remove(value);
        }
        let (axes, absent, reduction, ..) = key;
        let message = Bytes(bucket.bytes);
        let seconds = self.comm.choose(Collective::AllReduce, axes, absent, message).1;
        let action = Action::AllReduce;
        let work = Work::Reshard(Reshard { action, axes, message, seconds, reduction: Some(reduction) });
        let reads = bucket.members.iter().flat_map(|member| member.reads.iter().copied()).collect();
        let writes = bucket.members.iter().flat_map(|member| member.writes.iter().copied()).collect();
        self.out.push(Instruction { work, reads, writes });
        for instruction in bucket.waiting {
            self.add(instruction);
        }
    }
}
