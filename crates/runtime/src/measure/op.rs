//! Times of ops: each runs repeatedly on as many cores at once as there will be devices, with its operands in the cache or memory where the
//! step leaves them.

use super::caches::{Caches, Reach};
use super::median;
use crate::cores::on_each;
use crate::init::initial_value;
use crate::kernels::{Context, KernelError, run};
use crate::tensor::{Data, Elements, ElementsMut, HostTensor, View, ViewMut};
use shardwright_graph::{DType, Init, Op, Real, Role, Shape, Tensor, TensorType};
use std::{
    hint::black_box,
    ops::Range,
    sync::Barrier,
    time::{Duration, Instant},
};

/// Target duration of one timing: long enough for the clock, short enough for thousands of timings.
const TIMING: Duration = Duration::from_millis(2);
/// Number of timings of an op, and of an op that takes longer than `LONG`.
const TIMINGS: usize = 5;
const FEW_TIMINGS: usize = 3;
const LONG: Duration = Duration::from_millis(10);

/// A cache surely holds no old data once this multiple of its size has been touched.
const EVICTION_FACTOR: u64 = 2;
/// Most bytes of a core's read memory, and of its write memory.
const MAX_ARENA: u64 = 256 << 20;

/// Several timings of the same work.
#[derive(Clone, Debug, PartialEq)]
pub struct Timings {
    /// Number of calls per timing.
    pub calls: u32,
    /// Seconds per call, one number per timing.
    pub seconds: Vec<f64>,
}

impl Timings {
    /// Warms up, then times enough calls for [`TIMING`] each.
    fn of(mut call: impl FnMut()) -> Self {
        call();
        let begin = Instant::now();
        call();
        let once = begin.elapsed();
        let calls = (TIMING.as_secs_f64() / once.as_secs_f64().max(1e-9)).clamp(1.0, 1e6) as u32;
        let timings = if once > LONG { FEW_TIMINGS } else { TIMINGS };
        let timing = |_| {
            let begin = Instant::now();
            (0..calls).for_each(|_| call());
            begin.elapsed().as_secs_f64() / f64::from(calls)
        };
        Self { calls, seconds: (0..timings).map(timing).collect() }
    }

    /// Mean seconds of a call, interruptions included.
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64
    }

    /// Median seconds of a call.
    pub fn median(&self) -> f64 {
        median(self.seconds.clone())
    }

    /// Seconds of all timed calls together.
    pub fn total(&self) -> f64 {
        self.seconds.iter().sum::<f64>() * f64::from(self.calls)
    }
}

/// An operand of a measured op.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// Its type.
    pub ty: TensorType,
    /// Where the op finds it.
    pub reach: Reach,
}

/// A test bench of several cores. Each has a large arena, so operands can lie where no cache holds them.
pub struct Bench {
    caches: Caches,
    arenas: Vec<Arena>,
}

/// The memory of one core that operands and results move through, larger than its caches.
struct Arena {
    operands: Vec<f32>,
    results: Vec<f32>,
}

impl Bench {
    /// A bench of `workers` cores.
    pub fn new(workers: usize) -> Self {
        let caches = Caches::of_cores(workers);
        let length = ((EVICTION_FACTOR * caches.share).min(MAX_ARENA) / 4) as usize;
        let arena = |_| Arena { operands: vec![0.5; length], results: vec![0.5; length] };
        Self { caches, arenas: (0..workers).map(arena).collect() }
    }

    /// The caches of each core.
    pub fn caches(&self) -> Caches {
        self.caches
    }

    /// Timings of an op on each core while all cores run it, so they compete for shared cache and memory bandwidth. Results
    /// go to the same cache or memory as the first operand: an update's results replace the weights.
    pub fn time(&mut self, op: &Op, operands: &[Operand]) -> Result<Vec<Timings>, KernelError> {
        let (caches, workers) = (self.caches, self.arenas.len());
        let barrier = Barrier::new(workers);
        let times = on_each(self.arenas.iter_mut(), |_, arena| {
            let job = Job::new(op, operands, caches);
            barrier.wait();
            job?.time(arena)
        });
        let times = times.into_iter().collect::<Result<Vec<_>, _>>()?;
        if times.len() < workers { Err(KernelError::BadValue("a thread failed".into())) } else { Ok(times) }
    }
}

/// The memory that a tensor uses over the calls of a timing.
enum Storage<T> {
    /// The same memory in every call.
    Fixed(T),
    /// The next free part of the arena's first `usize` elements in every call.
    Moving(usize),
}

impl<T> Storage<T> {
    /// The storage of tensors of these types. Only single-precision tensors move.
    fn new(types: &[TensorType], reach: Reach, caches: Caches, fixed: impl Fn() -> T) -> Self {
        let range = match reach {
            Reach::Own => 0,
            Reach::Shared => EVICTION_FACTOR * caches.own,
            Reach::Memory => EVICTION_FACTOR * caches.share,
        };
        let range = (range.min(MAX_ARENA) / 4) as usize;
        // A tensor that fills the range evicts itself even in fixed memory.
        let moves = types.iter().all(|ty| ty.dtype == DType::F32) && 2 * elements(types) <= range;
        if moves { Storage::Moving(range) } else { Storage::Fixed(fixed()) }
    }
}

fn elements(types: &[TensorType]) -> usize {
    types.iter().map(|ty| ty.shape.elements() as usize).fold(0, usize::saturating_add)
}

/// The next `length` elements from `at` on within the first `range`; starts again at 0 where too few are left.
fn next_part(range: usize, length: usize, at: &mut usize) -> Range<usize> {
    let start = if *at + length <= range { *at } else { 0 };
    *at = start + length;
    start..*at
}

/// An op with the storage of its operands and results.
struct Job<'a> {
    op: &'a Op,
    operands: &'a [Operand],
    outputs: Vec<TensorType>,
    reads: Vec<Storage<HostTensor>>,
    /// All results are in one storage.
    results: Storage<Vec<HostTensor>>,
}

impl<'a> Job<'a> {
    fn new(op: &'a Op, operands: &'a [Operand], caches: Caches) -> Result<Self, KernelError> {
        let inputs: Vec<TensorType> = operands.iter().map(|operand| operand.ty.clone()).collect();
        let outputs = op.operator().infer(&inputs).map_err(|e| KernelError::BadValue(e.to_string()))?;
        let read = |(ty, o): (&TensorType, &Operand)| {
            Storage::new(std::slice::from_ref(ty), o.reach, caches, || filled(ty))
        };
        let reads = inputs.iter().zip(operands).map(read).collect();
        let reach = operands.first().map_or(Reach::Own, |first| first.reach);
        let zeros = || outputs.iter().map(HostTensor::zeros).collect();
        let results = Storage::new(&outputs, reach, caches, zeros);
        Ok(Self { op, operands, outputs, reads, results })
    }

    fn time(mut self, arena: &mut Arena) -> Result<Timings, KernelError> {
        let mut context = Context::default();
        let (mut failure, mut read, mut written) = (None, 0, 0);
        let timings = Timings::of(|| {
            let reads = self.reads.iter().zip(self.operands);
            let views: Vec<View<'_>> = reads
                .map(|(storage, Operand { ty, .. })| match storage {
                    Storage::Fixed(value) => value.view(),
                    Storage::Moving(range) => {
                        let part = next_part(*range, ty.shape.elements() as usize, &mut read);
                        View { shape: &ty.shape, data: Elements::F32(&arena.operands[part]) }
                    }
                })
                .collect();
            let mut results: Vec<ViewMut<'_>> = match &mut self.results {
                Storage::Fixed(values) => values.iter_mut().map(HostTensor::view_mut).collect(),
                Storage::Moving(range) => {
                    let part = next_part(*range, elements(&self.outputs), &mut written);
                    let mut rest = &mut arena.results[part];
                    let result = |ty: &'_ TensorType| {
                        let (made, after) =
                            std::mem::take(&mut rest).split_at_mut(ty.shape.elements() as usize);
                        rest = after;
                        ElementsMut::F32(made)
                    };
                    let data: Vec<ElementsMut<'_>> = self.outputs.iter().map(result).collect();
                    let shapes = self.outputs.iter().map(|ty| &ty.shape[..]);
                    shapes.zip(data).map(|(shape, data)| ViewMut { shape, data }).collect()
                }
            };
            failure = run(self.op, &views, &mut results, &mut context).err();
            black_box(&mut results);
        });
        failure.map_or(Ok(timings), Err)
    }
}

/// A tensor of plausible numbers. Whole numbers are 0 or 1: labels, ids and window positions that every op accepts. Masks hide
/// one half in one piece, since random masks would cause branch mispredictions that few real masks cause.
fn filled(ty: &TensorType) -> HostTensor {
    if ty.dtype == DType::Bool {
        let count = ty.shape.elements() as usize;
        let mask = (0..count).map(|at| u8::from(2 * at >= count)).collect();
        return HostTensor::new(ty.shape.clone(), Data::Bool(mask));
    }
    let init = if ty.dtype.is_float() { Init::Uniform(Real(1.0)) } else { Init::Below(2) };
    let (name, ty) = ("measured".into(), ty.clone());
    initial_value(0, &Tensor { name, ty, role: Role::Input, producer: None, init: Some(init) })
}

/// The fixed overhead of an op in seconds: the time of adding two numbers.
pub fn op_overhead() -> f64 {
    use shardwright_graph::ops::{Binary, BinaryFn};
    let number = Operand { ty: TensorType::new(DType::F32, Shape::scalar()), reach: Reach::Own };
    let caches = Caches { own: 0, share: 0 };
    let op = Binary { f: BinaryFn::Add }.into();
    let operands = [number.clone(), number];
    let timed = Job::new(&op, &operands, caches)
        .and_then(|job| job.time(&mut Arena { operands: vec![], results: vec![] }));
    debug_assert!(timed.is_ok(), "adding two numbers cannot fail: {timed:?}");
    // A microsecond is what this takes on most processors.
    timed.map_or(1e-6, |timings| timings.median())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::ops::{Binary, BinaryFn};

    #[test]
    fn the_times_of_a_sleep_are_its_length() {
        let timings = Timings::of(|| std::thread::sleep(Duration::from_millis(2)));
        assert!(timings.median() >= 0.002 && timings.mean() >= 0.002, "{timings:?}");
        assert!(timings.total() >= 0.009, "five of them: {timings:?}");
        assert!(op_overhead() > 0.0);
    }

    #[test]
    fn moving_storage_is_elsewhere_in_every_call_and_stays_within_its_range() {
        let mut at = 0;
        let found: Vec<_> = (0..4).map(|_| next_part(10, 4, &mut at)).collect();
        assert_eq!(found, [0..4, 4..8, 0..4, 4..8]);
        let ty = |elements: u64| TensorType::new(DType::F32, [elements].as_slice());
        let caches = Caches { own: 400, share: 4000 };
        let range_of = |elements, reach| match Storage::new(&[ty(elements)], reach, caches, || ()) {
            Storage::Moving(range) => Some(range),
            Storage::Fixed(()) => None,
        };
        assert_eq!(range_of(10, Reach::Own), None);
        assert_eq!(range_of(10, Reach::Shared), Some(200));
        assert_eq!(range_of(10, Reach::Memory), Some(2000));
        assert_eq!(range_of(1001, Reach::Memory), None, "twice of it does not fit");
    }

    #[test]
    fn ops_are_timed_on_all_cores_wherever_their_operands_are() {
        let mut bench = Bench::new(2);
        let op = Binary { f: BinaryFn::Add }.into();
        for reach in [Reach::Own, Reach::Shared, Reach::Memory] {
            let operand = Operand { ty: TensorType::new(DType::F32, [1000].as_slice()), reach };
            let times = bench.time(&op, &[operand.clone(), operand]).unwrap();
            assert!(times.len() == 2 && times.iter().all(|t| t.mean() > 0.0), "{times:?}");
        }
    }
}
