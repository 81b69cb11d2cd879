//! Measuring: how long a call takes, and what this machine's cores and memory give when several work at once.

use crate::cores::pin;
use crate::kernels::{Context, KernelError, run};
use crate::tensor::Value;
use shardwright_graph::{Init, Op, Real, Role, Tensor, TensorType};
use std::{
    hint::black_box,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How long one timing should last: long enough for the clock, short enough for thousands of them.
const TIMING: Duration = Duration::from_millis(2);
/// Timings of which the median is taken, and of calls that take longer than `LONG`.
const TIMINGS: usize = 5;
const FEW_TIMINGS: usize = 3;
const LONG: Duration = Duration::from_millis(10);

/// The median time of a call, in seconds: warm-up, then several timings of enough calls each.
pub fn median_seconds(mut call: impl FnMut()) -> f64 {
    call();
    let begin = Instant::now();
    call();
    let once = begin.elapsed();
    let calls = (TIMING.as_secs_f64() / once.as_secs_f64().max(1e-9)).clamp(1.0, 1e6) as u32;
    let timings = if once > LONG { FEW_TIMINGS } else { TIMINGS };
    let mut times: Vec<f64> = (0..timings)
        .map(|_| {
            let begin = Instant::now();
            (0..calls).for_each(|_| call());
            begin.elapsed().as_secs_f64() / f64::from(calls)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[timings / 2]
}

/// The median time of an op on inputs of these types, in seconds.
pub fn op_seconds(op: &Op, inputs: &[TensorType]) -> Result<f64, KernelError> {
    let outputs = op.operator().infer(inputs).map_err(|e| KernelError::BadValue(e.to_string()))?;
    let values: Vec<Value> = inputs
        .iter()
        .map(|ty| {
            // Small whole numbers are labels, ids and window positions inside any op's range.
            let init = if ty.dtype.is_float() { Init::Uniform(Real(1.0)) } else { Init::Below(2) };
            let (name, ty) = ("measured".into(), ty.clone());
            crate::init::initial_value(
                0,
                &Tensor { name, ty, role: Role::Input, producer: None, init: Some(init) },
            )
        })
        .collect();
    let mut results: Vec<Value> = outputs.iter().map(Value::zeros).collect();
    let mut context = Context::default();
    let views: Vec<_> = values.iter().map(Value::view).collect();
    let mut failure = None;
    let seconds = median_seconds(|| {
        let mut views_mut: Vec<_> = results.iter_mut().map(Value::view_mut).collect();
        failure = run(op, &views, &mut views_mut, &mut context).err();
        black_box(&mut views_mut);
    });
    failure.map_or(Ok(seconds), Err)
}

/// The median time of an op on inputs of these types on each of so many cores while all of them do the same, in seconds: what
/// it takes where all want their share of caches and memory.
pub fn op_seconds_among(op: &Op, inputs: &[TensorType], workers: usize) -> Result<Vec<f64>, KernelError> {
    let barrier = Barrier::new(workers);
    let times: Vec<Result<f64, KernelError>> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                scope.spawn(move || {
                    pin(worker, workers);
                    barrier.wait();
                    op_seconds(op, inputs)
                })
            })
            .collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    let times = times.into_iter().collect::<Result<Vec<f64>, _>>()?;
    if times.len() < workers { Err(KernelError::BadValue("a thread failed".into())) } else { Ok(times) }
}

/// How much longer than the average the slowest of several workers takes that do the same work: all of them wait for it.
///
/// Which core is slow was seen to change from run to run, so measurements are taken in rounds about as long as a run; in each of
/// them the slowest is the one whose times are the longest on the whole, not here or there.
#[derive(Clone, Debug, Default)]
pub struct Slowest {
    /// Per worker: its times in this round, each relative to the average of all workers.
    round: Vec<f64>,
    measurements: u32,
    /// Over the rounds before: how much longer the slowest took, added up.
    sum: f64,
    rounds: u32,
    begun: Option<Instant>,
}

/// About how long a round of [`Slowest`] lasts.
const ROUND: Duration = Duration::from_secs(1);

impl Slowest {
    /// Takes the workers' times for the same work into account.
    pub fn add(&mut self, times: &[f64]) {
        let average = times.iter().sum::<f64>() / times.len().max(1) as f64;
        self.round.resize(times.len(), 0.0);
        self.round
            .iter_mut()
            .zip(times)
            .for_each(|(sum, time)| *sum += time / average.max(f64::MIN_POSITIVE));
        self.measurements += 1;
        if self.begun.get_or_insert_with(Instant::now).elapsed() > ROUND {
            self.close();
        }
    }

    fn close(&mut self) {
        if self.measurements > 0 {
            self.sum += self.round.iter().copied().fold(0.0, f64::max) / f64::from(self.measurements);
            self.rounds += 1;
        }
        (self.measurements, self.begun) = (0, None);
        self.round.fill(0.0);
    }

    /// How much longer the slowest takes, on average over the rounds; one where nothing was measured.
    pub fn factor(mut self) -> f64 {
        // A last round that has only begun would be about noise.
        if self.rounds == 0 {
            self.close();
        }
        if self.rounds == 0 { 1.0 } else { self.sum / f64::from(self.rounds) }
    }
}

/// What each of several workers gets while all of them work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerRates {
    /// How many workers there were.
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

/// Runs `job` on so many threads at once, for about `TIMING` each after a common start; returns the slowest
/// worker's calls per second.
fn together(workers: usize, make: impl Fn(usize) -> Box<dyn FnMut() + Send> + Sync) -> f64 {
    let barrier = Barrier::new(workers);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|i| {
                let (barrier, make) = (&barrier, &make);
                scope.spawn(move || {
                    pin(i, workers);
                    let mut job = make(i);
                    job();
                    barrier.wait();
                    let (begin, mut calls) = (Instant::now(), 0u32);
                    while begin.elapsed() < TIMING * 25 {
                        job();
                        calls += 1;
                    }
                    f64::from(calls) / begin.elapsed().as_secs_f64()
                })
            })
            .collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    rates.into_iter().fold(f64::INFINITY, f64::min)
}

/// Side of the matrices that rates are measured with: large enough for the full rate of one core.
const SIDE: usize = 512;
/// Bytes of the buffers that are copied: well past the caches.
const COPY: usize = 64 << 20;

fn product<T: crate::tensor::Float>() -> Box<dyn FnMut() + Send> {
    use crate::kernels::gemm::{Matrix, gemm};
    let (a, b) = (vec![T::ONE; SIDE * SIDE], vec![T::ONE; SIDE * SIDE]);
    let mut c = vec![T::ZERO; SIDE * SIDE];
    Box::new(move || {
        let square = Matrix::rows(0, SIDE);
        gemm([SIDE; 3], (&a, square), (&b, square), (&mut c, square), false);
        black_box(&mut c);
    })
}

/// Measures what `workers` threads get when all of them work.
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
        f32_flops: flops * together(workers, |_| product::<f32>()),
        f64_flops: flops * together(workers, |_| product::<f64>()),
        memory: 2.0 * COPY as f64 * together(workers, |_| copy(COPY)),
        neighbour: neighbour_rate(workers),
    }
}

/// Bytes of a message between neighbours.
const MESSAGE: usize = 4 << 20;

/// All workers in a ring: each writes its buffer, then all copy their neighbour's, as collectives through
/// shared memory do. A lone worker copies from itself.
fn neighbour_rate(workers: usize) -> f64 {
    const ROUNDS: u32 = 20;
    let words = MESSAGE / 8;
    let buffers: Vec<Vec<AtomicU64>> =
        (0..workers).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect();
    let barrier = Barrier::new(workers);
    let times: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|i| {
                let (buffers, barrier) = (&buffers, &barrier);
                scope.spawn(move || {
                    pin(i, workers);
                    let mut mine = vec![0u64; words];
                    let mut spent = Duration::ZERO;
                    for round in 0..ROUNDS + 2 {
                        // Relaxed atomics compile to plain moves; the barriers order them.
                        for word in &buffers[i] {
                            word.store(u64::from(round), Ordering::Relaxed);
                        }
                        barrier.wait();
                        let begin = Instant::now();
                        for (to, from) in mine.iter_mut().zip(&buffers[(i + 1) % workers]) {
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
                })
            })
            .collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    MESSAGE as f64 / times.into_iter().fold(0.0, f64::max)
}

/// One-way time of a signal between two threads through shared memory, in seconds. Where there is one core
/// only, this is the time of a switch between threads.
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

/// The time that an op takes for itself, whatever it computes: that of adding two numbers.
pub fn op_overhead() -> f64 {
    use shardwright_graph::{
        DType, Shape,
        ops::{Binary, BinaryFn},
    };
    let number = TensorType::new(DType::F32, Shape::scalar());
    op_seconds(&Binary { f: BinaryFn::Add }.into(), &[number.clone(), number]).unwrap_or(1e-6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_time_of_a_sleep_is_its_length() {
        let seconds = median_seconds(|| std::thread::sleep(Duration::from_millis(2)));
        assert!(seconds >= 0.002, "{seconds}");
    }

    #[test]
    fn the_slowest_is_slow_on_the_whole() {
        let mut slowest = Slowest::default();
        // Each is late once, the second always.
        slowest.add(&[3.0, 2.0, 1.0]);
        slowest.add(&[1.0, 2.0, 3.0]);
        assert!((slowest.clone().factor() - 1.0).abs() < 1e-9, "nobody is slow on the whole");
        slowest.add(&[1.0, 4.0, 1.0]);
        assert!((slowest.factor() - (1.0 + 1.0 + 2.0) / 3.0).abs() < 1e-9);
        assert!((Slowest::default().factor() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn every_rate_is_positive_and_finite() {
        let rates = worker_rates(2);
        for rate in [rates.f32_flops, rates.f64_flops, rates.memory, rates.neighbour] {
            assert!(rate > 0.0 && rate.is_finite(), "{rates:?}");
        }
        assert!(signal_latency(2) > 0.0);
        assert!(op_overhead() > 0.0);
    }
}
