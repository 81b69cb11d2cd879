//! Times the engine's collectives on this machine: all devices at once, with no other work.

use crate::buffer::Pool;
use crate::exchange::{Exchange, ExchangeError, Member, all_reduce};
use crate::fabric::{Edge, Fabric, ProcessMap};
use crate::role::{ExchangeRole, Progress};
use shardwright_cost::{Collective, Reduction};
use shardwright_graph::{Block, DType, block::elements};
use shardwright_runtime::{cores::on_each, measure::median};
use smallvec::smallvec;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Number of timed rounds, after as many warm-up rounds.
const ROUNDS: usize = 5;

/// A barrier that spins. Sleeping threads wake up one after the other, so the timed collective would be over
/// before the last of them has begun.
struct SpinBarrier {
    threads: usize,
    arrived: AtomicUsize,
}

impl SpinBarrier {
    fn new(threads: usize) -> Self {
        Self { threads, arrived: AtomicUsize::new(0) }
    }

    fn wait(&self) {
        let round = self.arrived.fetch_add(1, Ordering::AcqRel) / self.threads;
        let mut spins = 0u32;
        while self.arrived.load(Ordering::Acquire) < (round + 1) * self.threads {
            spins += 1;
            // With fewer cores than threads, another thread needs this core.
            if spins > 10_000 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// The groups of workers that run a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerGroups {
    /// Number of workers.
    pub workers: usize,
    /// Workers per group, a divisor of their number. All groups run at once.
    pub members: usize,
}

/// The exchanges of a collective of `bytes` bytes (the larger side on a device); none for collectives that are not measured.
fn stages(kind: Collective, members: usize, bytes: u64) -> Result<Option<Vec<Exchange>>, ExchangeError> {
    let share = bytes.div_ceil(4).div_ceil(members as u64);
    let (total, parts) = (share * members as u64, members as u64);
    let part = |m: usize| m as u64 * share..(m as u64 + 1) * share;
    let whole = || -> Option<Block> { Some(smallvec![0..total]) };
    let own = |m: usize| -> Option<Block> { Some(smallvec![part(m)]) };
    let between = |combine, member: &dyn Fn(usize) -> Member| {
        Ok(Some(vec![Exchange::between(DType::F32, combine, (0..members).map(member).collect())?]))
    };
    match kind {
        Collective::AllReduce => all_reduce(DType::F32, Reduction::Sum, total, members).map(Some),
        Collective::ReduceScatter => {
            between(Some(Reduction::Sum), &|m| Member { holds: whole(), wants: own(m) })
        }
        Collective::AllGather => between(None, &|m| Member { holds: own(m), wants: whole() }),
        // Rows of a matrix become columns.
        Collective::AllToAll => between(None, &|m| {
            let row = m as u64..m as u64 + 1;
            Member { holds: Some(smallvec![row, 0..total]), wants: Some(smallvec![0..parts, part(m)]) }
        }),
        _ => Ok(None),
    }
}

/// Seconds of one collective of `bytes` bytes (the larger side on a device) in groups of workers; none for collectives that
/// are not measured.
///
/// The median of some rounds, each from the common start to the end of the slowest worker. As in a step, the sent data has just been
/// written, and the received data goes to memory that no cache holds.
pub fn collective_seconds(
    kind: Collective,
    WorkerGroups { workers, members }: WorkerGroups,
    bytes: u64,
) -> Result<Option<f64>, ExchangeError> {
    let Some(stages) = stages(kind, members, bytes)? else { return Ok(None) };
    let mut edges: Vec<Edge> = Vec::new();
    let devices: Vec<u32> = (0..workers as u32).collect();
    let process_map = ProcessMap { devices: workers as u32, processes: 1 };
    // Per stage: the role of every worker.
    let roles: Vec<Vec<ExchangeRole>> = stages
        .iter()
        .map(|stage| {
            let groups = devices.chunks_exact(members);
            groups.flat_map(|group| ExchangeRole::of(stage, group, &process_map, &mut edges)).collect()
        })
        .collect();
    let bytes_of = |block: &Option<Block>| block.as_ref().map_or(0, elements) * DType::F32.bytes();
    let held: Vec<u64> = stages[0].members.iter().map(|member| bytes_of(&member.holds)).collect();
    let (fabric, barrier) = (Fabric::new(workers, edges), SpinBarrier::new(workers));
    let work = |_, device: u32| -> Vec<f64> {
        fabric.notifier(device).claim();
        let (mut pool, mut progress) = (Pool::default(), Progress::default());
        let mut seconds = Vec::new();
        // The first time around, memory is allocated.
        for timed in [false, true] {
            let mut results = Vec::new();
            for _ in 0..ROUNDS {
                let mut own = pool.take(held[device as usize % members] as usize);
                if let Some(own) = std::sync::Arc::get_mut(&mut own) {
                    own.bytes_mut().fill(0);
                }
                barrier.wait();
                let start = Instant::now();
                let mut value = None;
                for stage in &roles {
                    let role = &stage[device as usize];
                    let from = value.as_ref().unwrap_or(&own);
                    let next = progress.complete(role, &fabric, device, Some(from), &mut pool);
                    results.extend(std::mem::replace(&mut value, next));
                }
                if timed {
                    seconds.push(start.elapsed().as_secs_f64());
                }
                results.extend(value);
                barrier.wait();
                pool.give(own);
            }
            results.into_iter().for_each(|result| pool.give(result));
        }
        seconds
    };
    let times = on_each(devices.iter().copied(), work);
    let slowest = |round: usize| times.iter().map(|t| t[round]).fold(0.0, f64::max);
    Ok(Some(median((0..ROUNDS).map(slowest).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_take_some_time_among_any_number_of_workers() {
        let kinds =
            [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::AllToAll];
        for kind in kinds {
            for (workers, members) in [(1, 1), (2, 2), (3, 3), (4, 2)] {
                for bytes in [4, 100_000] {
                    let seconds =
                        collective_seconds(kind, WorkerGroups { workers, members }, bytes).unwrap().unwrap();
                    assert!(seconds > 0.0 && seconds.is_finite(), "{kind:?} {workers} {bytes}: {seconds}");
                }
            }
        }
        let two = WorkerGroups { workers: 2, members: 2 };
        assert_eq!(collective_seconds(Collective::Broadcast, two, 64), Ok(None));
    }
}
