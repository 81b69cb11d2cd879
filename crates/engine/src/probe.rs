//! How long this machine's threads take for collectives: the engine's own, all devices at once, nothing else going on.

use crate::buffer::Pool;
use crate::exchange::{Exchange, ExchangeError, Member, all_reduce};
use crate::fabric::{Edge, Fabric, Placement};
use crate::role::{Progress, Role};
use crate::walk::Combine;
use shardwright_cost::Collective;
use shardwright_graph::{Block, DType};
use shardwright_runtime::cores::pin;
use smallvec::smallvec;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Rounds that are timed; one more before them warms up.
const ROUNDS: usize = 7;

/// Where threads meet and go on at once. Waiting is looking again and again: threads that sleep wake up one after the other, and
/// what is to be timed would be over before the last has begun.
struct Gate {
    threads: usize,
    arrived: AtomicUsize,
}

impl Gate {
    fn new(threads: usize) -> Self {
        Self { threads, arrived: AtomicUsize::new(0) }
    }

    fn wait(&self) {
        let round = self.arrived.fetch_add(1, Ordering::AcqRel) / self.threads;
        let mut looks = 0u32;
        while self.arrived.load(Ordering::Acquire) < (round + 1) * self.threads {
            looks += 1;
            // With fewer cores than threads, somebody else needs this one.
            if looks > 10_000 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// Seconds of one collective of so many bytes (the larger side on a device) among so many workers: the median of some
/// rounds, each from when all are ready to when the last is done. None for collectives that are not measured.
pub fn collective_seconds(
    kind: Collective,
    workers: usize,
    bytes: u64,
) -> Result<Option<f64>, ExchangeError> {
    let elements = bytes.div_ceil(4).div_ceil(workers as u64) * workers as u64;
    let share = elements / workers as u64;
    let block = |range: Range<u64>| -> Option<Block> { Some(smallvec![range]) };
    let whole = || block(0..elements);
    let part = |m: usize| block(m as u64 * share..(m as u64 + 1) * share);
    let between = |combine, member: &dyn Fn(usize) -> Member| {
        Ok(vec![Exchange::between(DType::F32, combine, (0..workers).map(member).collect())?])
    };
    let stages = match kind {
        Collective::AllReduce => all_reduce(DType::F32, Combine::Sum, elements, workers)?,
        Collective::ReduceScatter => {
            between(Some(Combine::Sum), &|m| Member { holds: whole(), wants: part(m) })?
        }
        Collective::AllGather => between(None, &|m| Member { holds: part(m), wants: whole() })?,
        _ => return Ok(None),
    };
    let mut edges: Vec<Edge> = Vec::new();
    let devices: Vec<u32> = (0..workers as u32).collect();
    let placement = Placement { devices: workers as u32, processes: 1 };
    let roles: Vec<Vec<Role>> =
        stages.iter().map(|stage| Role::of(stage, &devices, &placement, &mut edges)).collect();
    let held = stages[0].members.iter().map(|m| m.holds.as_ref().map_or(0, |b| (b[0].end - b[0].start) * 4));
    let held: Vec<u64> = held.collect();
    let (fabric, barrier) = (Fabric::new(workers, edges), Gate::new(workers));
    let work = |device: u32| -> Vec<f64> {
        pin(device as usize, workers);
        fabric.bell(device).claim();
        let (mut pool, mut progress) = (Pool::default(), Progress::default());
        let round = |_| {
            // What is sent was just written, as a gradient is.
            let mut own = pool.take(held[device as usize] as usize);
            if let Some(own) = std::sync::Arc::get_mut(&mut own) {
                own.bytes_mut().fill(0);
            }
            barrier.wait();
            let start = Instant::now();
            let mut value = Some(own);
            for stage in &roles {
                let role = &stage[device as usize];
                let next = progress.complete(role, &fabric, device, value.as_ref(), &mut pool);
                value.into_iter().for_each(|old| pool.give(old));
                value = next;
            }
            let seconds = start.elapsed().as_secs_f64();
            value.into_iter().for_each(|last| pool.give(last));
            barrier.wait();
            seconds
        };
        (0..=ROUNDS).map(round).collect()
    };
    let work = &work;
    let times: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = devices.iter().map(|&d| scope.spawn(move || work(d))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let slowest = |round: usize| times.iter().map(|t| t[round]).fold(0.0, f64::max);
    let mut rounds: Vec<f64> = (1..=ROUNDS).map(slowest).collect();
    rounds.sort_by(f64::total_cmp);
    Ok(Some(rounds[ROUNDS / 2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_take_some_time_among_any_number_of_workers() {
        for kind in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
            for workers in [1, 2, 3] {
                for bytes in [4, 100_000] {
                    let seconds = collective_seconds(kind, workers, bytes).unwrap().unwrap();
                    assert!(seconds > 0.0 && seconds.is_finite(), "{kind:?} {workers} {bytes}: {seconds}");
                }
            }
        }
        assert_eq!(collective_seconds(Collective::Broadcast, 2, 64), Ok(None));
    }
}
