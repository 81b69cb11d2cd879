//! How long ops take: each again and again on as many cores at once as devices will have, what they read where they will find it.

use super::caches::{Caches, Reach};
use super::median;
use crate::cores::on_each;
use crate::init::initial_value;
use crate::kernels::{Context, KernelError, run};
use crate::tensor::{Data, Elements, ElementsMut, Value, View, ViewMut};
use shardwright_graph::{DType, Init, Op, Real, Role, Shape, Tensor, TensorType};
use std::{
    hint::black_box,
    ops::Range,
    sync::Barrier,
    time::{Duration, Instant},
};

/// How long one timing should last: long enough for the clock, short enough for thousands of them.
const TIMING: Duration = Duration::from_millis(2);
/// Timings of an op, and of one that takes longer than `LONG`.
const TIMINGS: usize = 5;
const FEW_TIMINGS: usize = 3;
const LONG: Duration = Duration::from_millis(10);

/// How many times as much as a cache holds has been touched until it has surely forgotten all.
const TO_FORGET: u64 = 2;
/// The most memory that a core walks through, in bytes, for what it reads and for what it writes.
const MOST_WALKED: u64 = 256 << 20;

/// Several timings of the same work.
#[derive(Clone, Debug, PartialEq)]
pub struct Timings {
    /// How many calls each is of.
    pub calls: u32,
    /// Seconds of a call, one number per timing.
    pub seconds: Vec<f64>,
}

impl Timings {
    /// Warm-up, then enough calls for each timing.
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

    /// Seconds of a call on average: what it loses to others now and then is part of it.
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64
    }

    /// Seconds of a call, as it mostly is.
    pub fn median(&self) -> f64 {
        median(self.seconds.clone())
    }

    /// Seconds that all calls took.
    pub fn spent(&self) -> f64 {
        self.seconds.iter().sum::<f64>() * f64::from(self.calls)
    }
}

/// An operand of an op that is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// Its type.
    pub ty: TensorType,
    /// Where the op finds it.
    pub reach: Reach,
}

/// So many cores, and memory for each to walk through, so that an op's operands can be where no cache has them.
pub struct Bench {
    caches: Caches,
    floors: Vec<Floor>,
}

/// The memory that one core walks through: what it reads, and what it writes.
struct Floor {
    read: Vec<f32>,
    written: Vec<f32>,
}

impl Bench {
    /// For so many cores at once.
    pub fn new(workers: usize) -> Self {
        let caches = Caches::of_cores(workers);
        let length = ((TO_FORGET * caches.share).min(MOST_WALKED) / 4) as usize;
        let floor = |_| Floor { read: vec![0.5; length], written: vec![0.5; length] };
        Self { caches, floors: (0..workers).map(floor).collect() }
    }

    /// The caches of each core.
    pub fn caches(&self) -> Caches {
        self.caches
    }

    /// Timings of an op on each core while all of them do the same: what it takes where all want their share of caches and
    /// memory. Results are written where the first operand is: an update's take the place of the weights.
    pub fn time(&mut self, op: &Op, operands: &[Operand]) -> Result<Vec<Timings>, KernelError> {
        let (caches, workers) = (self.caches, self.floors.len());
        let barrier = Barrier::new(workers);
        let times = on_each(self.floors.iter_mut(), |_, floor| {
            let job = Job::new(op, operands, caches);
            barrier.wait();
            job?.time(floor)
        });
        let times = times.into_iter().collect::<Result<Vec<_>, _>>()?;
        if times.len() < workers { Err(KernelError::BadValue("a thread failed".into())) } else { Ok(times) }
    }
}

/// Where something is in every call.
enum Place<T> {
    /// Always there.
    Fixed(T),
    /// After the one before, within so many elements.
    Walking(usize),
}

impl<T> Place<T> {
    /// Of single-precision numbers, so many of them.
    fn new(types: &[TensorType], reach: Reach, caches: Caches, fixed: impl Fn() -> T) -> Self {
        let range = match reach {
            Reach::Own => 0,
            Reach::Shared => TO_FORGET * caches.own,
            Reach::Memory => TO_FORGET * caches.share,
        };
        let range = (range.min(MOST_WALKED) / 4) as usize;
        // What fills where it would walk is forgotten wherever it is.
        let walks = types.iter().all(|ty| ty.dtype == DType::F32) && 2 * elements(types) <= range;
        if walks { Place::Walking(range) } else { Place::Fixed(fixed()) }
    }
}

fn elements(types: &[TensorType]) -> usize {
    types.iter().map(|ty| ty.shape.elements() as usize).fold(0, usize::saturating_add)
}

/// So many elements within a range, where `at` is the first that has not been walked over; the start again where the end is too near.
fn step(range: usize, length: usize, at: &mut usize) -> Range<usize> {
    let start = if *at + length <= range { *at } else { 0 };
    *at = start + length;
    start..*at
}

/// An op that is about to be measured.
struct Job<'a> {
    op: &'a Op,
    operands: &'a [Operand],
    outputs: Vec<TensorType>,
    reads: Vec<Place<Value>>,
    /// All results are in one place.
    results: Place<Vec<Value>>,
}

impl<'a> Job<'a> {
    fn new(op: &'a Op, operands: &'a [Operand], caches: Caches) -> Result<Self, KernelError> {
        let inputs: Vec<TensorType> = operands.iter().map(|operand| operand.ty.clone()).collect();
        let outputs = op.operator().infer(&inputs).map_err(|e| KernelError::BadValue(e.to_string()))?;
        let read = |(ty, o): (&TensorType, &Operand)| {
            Place::new(std::slice::from_ref(ty), o.reach, caches, || filled(ty))
        };
        let reads = inputs.iter().zip(operands).map(read).collect();
        let reach = operands.first().map_or(Reach::Own, |first| first.reach);
        let zeros = || outputs.iter().map(Value::zeros).collect();
        let results = Place::new(&outputs, reach, caches, zeros);
        Ok(Self { op, operands, outputs, reads, results })
    }

    fn time(mut self, floor: &mut Floor) -> Result<Timings, KernelError> {
        let mut context = Context::default();
        let (mut failure, mut read, mut written) = (None, 0, 0);
        let timings = Timings::of(|| {
            let reads = self.reads.iter().zip(self.operands);
            let views: Vec<View<'_>> = reads
                .map(|(place, Operand { ty, .. })| match place {
                    Place::Fixed(value) => value.view(),
                    Place::Walking(range) => {
                        let taken = step(*range, ty.shape.elements() as usize, &mut read);
                        View { shape: &ty.shape, data: Elements::F32(&floor.read[taken]) }
                    }
                })
                .collect();
            let mut results: Vec<ViewMut<'_>> = match &mut self.results {
                Place::Fixed(values) => values.iter_mut().map(Value::view_mut).collect(),
                Place::Walking(range) => {
                    let taken = step(*range, elements(&self.outputs), &mut written);
                    let mut rest = &mut floor.written[taken];
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

/// Small whole numbers are labels, ids and window positions inside any op's range. Masks hide one half: one that hides this and shows that
/// would take processors that guess by surprise, as few masks do.
fn filled(ty: &TensorType) -> Value {
    if ty.dtype == DType::Bool {
        let count = ty.shape.elements() as usize;
        let mask = (0..count).map(|at| u8::from(2 * at >= count)).collect();
        return Value::new(ty.shape.clone(), Data::Bool(mask));
    }
    let init = if ty.dtype.is_float() { Init::Uniform(Real(1.0)) } else { Init::Below(2) };
    let (name, ty) = ("measured".into(), ty.clone());
    initial_value(0, &Tensor { name, ty, role: Role::Input, producer: None, init: Some(init) })
}

/// The time that an op takes for itself, whatever it computes, in seconds: that of adding two numbers.
pub fn op_overhead() -> f64 {
    use shardwright_graph::ops::{Binary, BinaryFn};
    let number = Operand { ty: TensorType::new(DType::F32, Shape::scalar()), reach: Reach::Own };
    let caches = Caches { own: 0, share: 0 };
    let op = Binary { f: BinaryFn::Add }.into();
    let operands = [number.clone(), number];
    let timed = Job::new(&op, &operands, caches)
        .and_then(|job| job.time(&mut Floor { read: vec![], written: vec![] }));
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
        assert!(timings.spent() >= 0.009, "five of them: {timings:?}");
        assert!(op_overhead() > 0.0);
    }

    #[test]
    fn what_walks_is_elsewhere_every_time_and_stays_within_its_range() {
        let mut at = 0;
        let found: Vec<_> = (0..4).map(|_| step(10, 4, &mut at)).collect();
        assert_eq!(found, [0..4, 4..8, 0..4, 4..8]);
        let ty = |elements: u64| TensorType::new(DType::F32, [elements].as_slice());
        let caches = Caches { own: 400, share: 4000 };
        let walks = |elements, reach| match Place::new(&[ty(elements)], reach, caches, || ()) {
            Place::Walking(range) => Some(range),
            Place::Fixed(()) => None,
        };
        assert_eq!(walks(10, Reach::Own), None);
        assert_eq!(walks(10, Reach::Shared), Some(200));
        assert_eq!(walks(10, Reach::Memory), Some(2000));
        assert_eq!(walks(1001, Reach::Memory), None, "twice of it does not fit");
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
