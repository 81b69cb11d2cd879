//! Small all-reduces joined into larger ones, as DDP does with gradients (Li et al., VLDB 2020, section 3.2.3).
//!
//! An all-reduce waits for others along the same axes until together they are large enough, or until somebody reads
//! one of the results. Latency is paid once per bucket; the bytes on every axis stay the same: an all-reduce that
//! would make the cost model switch to an algorithm that sends differently starts a bucket of its own.

use crate::program::{Instruction, ParallelGraph, Relayout, ValueId, Work};
use rustc_hash::FxHashMap;
use shardwright_cost::{Action, Collective, Comm, Reduction, Traffic};
use shardwright_graph::DType;
use shardwright_machine::{AxisSet, Bytes};

/// All-reduces of so many bytes or more are not worth joining: DDP's default.
pub const BUCKET: Bytes = Bytes(25 << 20);

/// What the members of a bucket have in common: axes, absent axes, reduction, element type.
type Key = (AxisSet, AxisSet, Reduction, DType);

/// All-reduces waiting for more.
struct Bucket {
    key: Key,
    members: Vec<Instruction>,
    bytes: u64,
    traffic: Traffic,
}

/// Joins all-reduces of less than `limit` bytes.
pub(crate) fn bucket(mut program: ParallelGraph, comm: &Comm, limit: Bytes) -> ParallelGraph {
    let mut out: Vec<Instruction> = Vec::with_capacity(program.instructions.len());
    let mut open: Vec<Bucket> = Vec::new();
    // Which open bucket will write a value.
    let mut pending: FxHashMap<ValueId, Key> = FxHashMap::default();
    for instruction in std::mem::take(&mut program.instructions) {
        for read in &instruction.reads {
            if let Some(key) = pending.get(read) {
                let at = open.iter().position(|bucket| bucket.key == *key);
                at.into_iter().for_each(|at| close(open.remove(at), comm, &mut out, &mut pending));
            }
        }
        let Some((key, bytes)) = small(&program, &instruction, limit) else {
            out.push(instruction);
            continue;
        };
        let traffic = |bytes| comm.traffic(Collective::AllReduce, key.0, key.1, Bytes(bytes));
        let at = open.iter().position(|bucket| bucket.key == key);
        let mut bucket = match at.map(|at| open.remove(at)) {
            Some(bucket) => {
                let mut together = bucket.traffic;
                together.merge(&traffic(bytes));
                let all = bucket.bytes.saturating_add(bytes);
                if all <= limit.0 && together == traffic(all) {
                    bucket
                } else {
                    close(bucket, comm, &mut out, &mut pending);
                    Bucket { key, members: Vec::new(), bytes: 0, traffic: Traffic::default() }
                }
            }
            None => Bucket { key, members: Vec::new(), bytes: 0, traffic: Traffic::default() },
        };
        bucket.bytes += bytes;
        bucket.traffic.merge(&traffic(bytes));
        pending.extend(instruction.writes.iter().map(|&value| (value, key)));
        bucket.members.push(instruction);
        open.push(bucket);
    }
    for bucket in open {
        close(bucket, comm, &mut out, &mut pending);
    }
    program.instructions = out;
    program
}

/// The key and bytes of an all-reduce that is small enough to wait.
fn small(program: &ParallelGraph, instruction: &Instruction, limit: Bytes) -> Option<(Key, u64)> {
    let Work::Relayout(step) = &instruction.work else { return None };
    if step.action != Action::AllReduce || step.message >= limit {
        return None;
    }
    let before = program.value(instruction.reads[0]);
    Some(((step.axes, before.at.layout().absent(), step.reduction?, before.ty.dtype), step.message.0))
}

/// Emits a bucket as one instruction.
fn close(bucket: Bucket, comm: &Comm, out: &mut Vec<Instruction>, pending: &mut FxHashMap<ValueId, Key>) {
    let reads = bucket.members.iter().flat_map(|member| member.reads.iter().copied()).collect();
    let writes: smallvec::SmallVec<_> =
        bucket.members.iter().flat_map(|member| member.writes.iter().copied()).collect();
    writes.iter().for_each(|value| {
        pending.remove(value);
    });
    let (axes, absent, reduction, _) = bucket.key;
    let message = Bytes(bucket.bytes);
    let seconds = comm.choose(Collective::AllReduce, axes, absent, message).1;
    let action = Action::AllReduce;
    let work = Work::Relayout(Relayout { action, axes, message, seconds, reduction: Some(reduction) });
    out.push(Instruction { work, reads, writes });
}
