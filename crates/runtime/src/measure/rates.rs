//! Rates of this machine's cores and memory while several cores work at once.

use crate::cores::on_each;
use std::{
    hint::black_box,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Duration of one measurement.
const DURATION: Duration = Duration::from_millis(50);

/// The rates of each worker while all workers are busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerRates {
    /// Number of workers.
    pub workers: usize,
    /// Single-precision matrix product, flops per second of each worker.
    pub f32_flops: f64,
    /// Double-precision matrix product, flops per second of each worker.
    pub f64_flops: f64,
    /// Bytes per second that each worker reads plus writes when it copies memory.
    pub memory: f64,
    /// Bytes per second that each worker receives when it copies its neighbour's freshly written data.
    pub neighbour: f64,
}

/// Runs a job on `workers` threads at once, for [`DURATION`] after a common start; returns the slowest
/// worker's calls per second.
fn together(workers: usize, make: impl Fn(usize) -> Box<dyn FnMut() + Send> + Sync) -> f64 {
    let barrier = Barrier::new(workers);
    let rates = on_each(0..workers, |worker, _| {
        let mut job = make(worker);
        job();
        barrier.wait();
        let (begin, mut calls) = (Instant::now(), 0u32);
        while begin.elapsed() < DURATION {
            job();
            calls += 1;
        }
        f64::from(calls) / begin.elapsed().as_secs_f64()
    });
    rates.into_iter().fold(f64::INFINITY, f64::min)
}

/// Side of the matrices: large enough for the full rate of one core.
const SIDE: usize = 512;
/// Bytes of the copied buffers: well past the caches.
const COPY: usize = 64 << 20;

fn product<T: crate::tensor::Float>(side: usize) -> Box<dyn FnMut() + Send> {
    use crate::kernels::gemm::{Matrix, gemm};
    let (a, b) = (vec![T::ONE; side * side], vec![T::ONE; side * side]);
    let mut c = vec![T::ZERO; side * side];
    Box::new(move || {
        let square = Matrix::rows(0, side);
        gemm([side; 3], (&a, square), (&b, square), (&mut c, square), false);
        black_box(&mut c);
    })
}

/// Measures the rates of `workers` threads while all of them are busy.
pub fn worker_rates(workers: usize) -> WorkerRates {
    let flops = 2.0 * (SIDE as f64).powi(3);
    let copy = |bytes: usize| -> Box<dyn FnMut() + Send> {
        let from = vec![1u8; bytes];
        let mut to = vec![0u8; bytes];
        Box::new(move || {
            to.copy_from_slice(&from);
            black_box(&mut to);
        })
    };
    WorkerRates {
        workers,
        f32_flops: flops * together(workers, |_| product::<f32>(SIDE)),
        f64_flops: flops * together(workers, |_| product::<f64>(SIDE)),
        memory: 2.0 * COPY as f64 * together(workers, |_| copy(COPY)),
        neighbour: neighbour_rate(workers),
    }
}

/// Bytes of a message between neighbours.
const MESSAGE: usize = 4 << 20;

/// Bytes per second of workers in a ring. Each writes its buffer, then all copy their neighbour's, as collectives through
/// shared memory do. A lone worker copies from itself.
fn neighbour_rate(workers: usize) -> f64 {
    const ROUNDS: u32 = 20;
    let words = MESSAGE / 8;
    let buffers: Vec<Vec<AtomicU64>> =
        (0..workers).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect();
    let barrier = Barrier::new(workers);
    let times = on_each(0..workers, |worker, _| {
        let mut mine = vec![0u64; words];
        let mut spent = Duration::ZERO;
        for round in 0..ROUNDS + 2 {
            // Relaxed atomics compile to plain moves; the barriers order them.
            for word in &buffers[worker] {
                word.store(u64::from(round), Ordering::Relaxed);
            }
            barrier.wait();
            let begin = Instant::now();
            for (to, from) in mine.iter_mut().zip(&buffers[(worker + 1) % workers]) {
                *to = from.load(Ordering::Relaxed);
            }
            black_box(&mut mine);
            // The first rounds warm up.
            if round >= 2 {
                spent += begin.elapsed();
            }
            barrier.wait();
        }
        spent.as_secs_f64() / f64::from(ROUNDS)
    });
    MESSAGE as f64 / times.into_iter().fold(0.0, f64::max)
}

/// One-way time of a signal between two threads through shared memory, in seconds. On a single core
/// this is the time of a thread switch.
pub fn signal_latency(cores: usize) -> f64 {
    const ROUNDS: u64 = 10_000;
    let ball = AtomicU64::new(0);
    let wait_for = |value: u64| {
        let mut spins = 0u32;
        while ball.load(Ordering::Acquire) != value {
            spins += 1;
            // Without a second core, or with a busy one, the other thread needs this core.
            if cores < 2 || spins > 1000 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                wait_for(2 * round + 1);
                ball.store(2 * round + 2, Ordering::Release);
            }
        });
        let begin = Instant::now();
        for round in 0..ROUNDS {
            ball.store(2 * round + 1, Ordering::Release);
            wait_for(2 * round + 2);
        }
        begin.elapsed().as_secs_f64() / (2 * ROUNDS) as f64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rate_is_positive_and_finite() {
        let rates = worker_rates(2);
        for rate in [rates.f32_flops, rates.f64_flops, rates.memory, rates.neighbour] {
            assert!(rate > 0.0 && rate.is_finite(), "{rates:?}");
        }
        assert!(signal_latency(2) > 0.0);
    }
}
