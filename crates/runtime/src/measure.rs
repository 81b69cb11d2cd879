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

/// Bytes after which a core's caches have forgotten what it worked on; and the most copies of small operands.
pub const FORGOTTEN: u64 = 16 << 20;
const MOST_COPIES: u64 = 256;

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

/// The median time of an op on inputs of these types, in seconds; those that are `forgotten` are in no cache, and where the first is,
/// nor is the memory of the results: an update's take the place of the weights.
pub fn op_seconds(op: &Op, inputs: &[TensorType], forgotten: &[bool]) -> Result<f64, KernelError> {
    let outputs = op.operator().infer(inputs).map_err(|e| KernelError::BadValue(e.to_string()))?;
    let value = |ty: &TensorType| {
        // Small whole numbers are labels, ids and window positions inside any op's range.
        let init = if ty.dtype.is_float() { Init::Uniform(Real(1.0)) } else { Init::Below(2) };
        let (name, ty) = ("measured".into(), ty.clone());
        crate::init::initial_value(
            0,
            &Tensor { name, ty, role: Role::Input, producer: None, init: Some(init) },
        )
    };
    // What caches have forgotten since the last time: as many copies take turns.
    let old = |at: usize| forgotten.get(at).copied().unwrap_or(false);
    let results = if old(0) { &outputs[..] } else { &[] };
    let old_inputs = inputs.iter().enumerate().filter(|(at, _)| old(*at)).map(|(_, ty)| ty);
    let bytes: u64 = old_inputs.chain(results).map(TensorType::bytes).sum();
    let copies = FORGOTTEN.checked_div(bytes).map_or(1, |copies| copies.clamp(1, MOST_COPIES) as usize);
    let turns = |own: bool| if own { copies } else { 1 };
    let values: Vec<Vec<Value>> =
        inputs.iter().enumerate().map(|(at, ty)| vec![value(ty); turns(old(at))]).collect();
    let mut results: Vec<Vec<Value>> =
        (0..turns(old(0))).map(|_| outputs.iter().map(Value::zeros).collect()).collect();
    let mut context = Context::default();
    let (mut failure, mut next) = (None, 0);
    let seconds = median_seconds(|| {
        next = (next + 1) % copies;
        let views: Vec<_> = values.iter().map(|turns| turns[next % turns.len()].view()).collect();
        let turn = next % results.len();
        let results = &mut results[turn];
        let mut views_mut: Vec<_> = results.iter_mut().map(Value::view_mut).collect();
        failure = run(op, &views, &mut views_mut, &mut context).err();
        black_box(&mut views_mut);
    });
    failure.map_or(Ok(seconds), Err)
}

/// The median time of an op on inputs of these types on each of so many cores while all of them do the same, in seconds: what
/// it takes where all want their share of caches and memory.
pub fn op_seconds_among(
    op: &Op,
    inputs: &[TensorType],
    forgotten: &[bool],
    workers: usize,
) -> Result<Vec<f64>, KernelError> {
    let barrier = Barrier::new(workers);
    let times: Vec<Result<f64, KernelError>> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                scope.spawn(move || {
                    pin(worker, workers);
                    barrier.wait();
                    op_seconds(op, inputs, forgotten)
                })
            })
            .collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    let times = times.into_iter().collect::<Result<Vec<f64>, _>>()?;
    if times.len() < workers { Err(KernelError::BadValue("a thread failed".into())) } else { Ok(times) }
}

/// How often a core that computes is kept from it by others: the system, or other users of the same processor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interruptions {
    /// Per second of work.
    pub per_second: f64,
    /// How long one lasts on average, in seconds.
    pub seconds: f64,
}

/// How long cores are watched for interruptions.
const WATCHED: Duration = Duration::from_millis(700);
/// Less than this is no interruption.
const NOTICED: f64 = 1e-4;

/// Watches so many cores while all of them work: the same small piece of work again and again, which now and then takes longer.
pub fn interruptions(workers: usize) -> Interruptions {
    let barrier = Barrier::new(workers);
    let found: Vec<(f64, f64, f64)> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                scope.spawn(move || {
                    pin(worker, workers);
                    let mut work = product::<f32>(SMALL_SIDE);
                    let mut times = Vec::new();
                    work();
                    barrier.wait();
                    let begin = Instant::now();
                    let mut last = begin;
                    while last.duration_since(begin) < WATCHED {
                        work();
                        let now = Instant::now();
                        times.push(now.duration_since(last).as_secs_f64());
                        last = now;
                    }
                    interrupted(&mut times)
                })
            })
            .collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    let sum = |of: fn(&(f64, f64, f64)) -> f64| found.iter().map(of).sum::<f64>();
    let (count, lost, worked) = (sum(|f| f.0), sum(|f| f.1), sum(|f| f.2));
    Interruptions { per_second: count / worked.max(1e-9), seconds: lost / count.max(1.0) }
}

/// Of times of the same work: how many were interrupted, how long in all, and how long the work took without that.
fn interrupted(times: &mut [f64]) -> (f64, f64, f64) {
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied().unwrap_or(0.0);
    let late = times.iter().map(|time| time - median).filter(|&late| late > NOTICED);
    let (count, lost) = late.fold((0.0, 0.0), |(count, lost), late| (count + 1.0, lost + late));
    (count, lost, times.iter().sum::<f64>() - lost)
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
/// Side of matrices whose product is over in tens of microseconds.
const SMALL_SIDE: usize = 128;
/// Bytes of the buffers that are copied: well past the caches.
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
        f32_flops: flops * together(workers, |_| product::<f32>(SIDE)),
        f64_flops: flops * together(workers, |_| product::<f64>(SIDE)),
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
    op_seconds(&Binary { f: BinaryFn::Add }.into(), &[number.clone(), number], &[]).unwrap_or(1e-6)
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
    fn an_interruption_is_what_takes_longer_than_usual() {
        let mut times = [0.001, 0.001, 0.0012, 0.001, 0.004, 0.00105, 0.001];
        let (count, lost, worked) = interrupted(&mut times);
        assert!((count - 2.0).abs() < 1e-9 && (lost - 0.0032).abs() < 1e-9, "{count} {lost}");
        assert!((worked - 0.00705).abs() < 1e-9, "{worked}");
        assert_eq!(interrupted(&mut []), (0.0, 0.0, 0.0));
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
