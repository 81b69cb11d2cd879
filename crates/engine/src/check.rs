//! Compares a parallel run with the serial program, and bounds the difference that rounding explains.
//!
//! A parallel program adds in another order, so it rounds differently, and training amplifies that. With few layers the
//! amplification is small. Consecutive norms over few samples amplify a million times and more, since they divide by nearly
//! zero; so does Adam, which divides gradients that cancel out by their own size. Where a tensor differs too much, the
//! amplification in that tensor is measured: the serial program runs again with the last bits of weights, data and all sums
//! changed ([`Serial::nudge`]). A tensor may differ by some times the change that this causes in it.
//!
//! Two differences are compared, the largest of all elements and the root mean square. Under Adam, rounding moves an element
//! whose gradient is nearly zero as far as a mistake would; but only a mistake moves most elements.
//!
//! NaN and infinity are no rounding: they have to be where the serial program has them.

use crate::outcome::{Outcome, relative_errors};
use crate::run::Options;
use shardwright_graph::{DType, Graph};
use shardwright_runtime::{RunError, Serial};
use std::cell::RefCell;
use std::time::Instant;

/// Most difference by rounding in all ops and steps, relative to the change caused by changed last bits: of the largest
/// difference, and of the root mean square, which varies less.
const ROUNDING_FACTORS: [f64; 2] = [10.0, 4.0];
/// Most serial runs with changed last bits. One run suffices for most programs; where gradients cancel out, a run may
/// happen to change little.
const MOST_NUDGED_RUNS: u64 = 4;
/// A tolerance above this hides real mistakes.
const WEAK_TOLERANCE: f64 = 0.05;

/// The serial run that parallel runs are compared with.
pub struct Check<'g> {
    graph: &'g Graph,
    options: Options<'g>,
    serial: SerialRun,
    /// Relative changes caused by changed last bits, per nudged run; computed when first needed.
    changes: RefCell<Vec<Vec<[f64; 2]>>>,
}

/// The results of a serial run.
struct SerialRun {
    losses: Vec<f64>,
    /// Final values of the carried tensors, in the order of the graph's carries.
    finals: Vec<Vec<f64>>,
    step_seconds: Vec<f64>,
}

/// The difference between a run and the serial one.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The tensor with the largest error relative to its tolerance: `loss` or a tensor's name.
    pub worst: String,
    /// Its relative error ([`crate::relative_error`]), or the root mean square if that exceeds its tolerance by more.
    pub error: f64,
    /// The relative error of it that rounding explains.
    pub tolerance: f64,
    /// Number of steps from the first whose losses equal the serial ones bit by bit.
    pub bitwise_steps: usize,
    /// A tensor with NaN or infinity where the serial program has another number, or the other way round.
    pub misplaced: Option<String>,
    /// How little the comparison means, where it means little: one sentence each.
    pub weaknesses: Vec<String>,
}

impl Difference {
    /// Whether rounding explains the difference.
    pub fn is_rounding(&self) -> bool {
        self.misplaced.is_none() && self.error <= self.tolerance
    }
}

/// One compared tensor.
struct Compared<'n> {
    name: &'n str,
    /// The largest relative error, and the root mean square.
    errors: [f64; 2],
    /// Whether NaN and infinity are at other places.
    misplaced: bool,
    /// Whether both have NaN or infinity, at the same places.
    infinite: bool,
}

impl<'n> Compared<'n> {
    fn new(name: &'n str, actual: &[f64], expected: &[f64]) -> Self {
        let differs =
            |(a, e): (&f64, &f64)| !(a.is_finite() && e.is_finite() || a.is_nan() && e.is_nan() || a == e);
        let misplaced = actual.len() != expected.len() || actual.iter().zip(expected).any(differs);
        let infinite = expected.iter().any(|e| !e.is_finite());
        Self { name, errors: relative_errors(actual, expected), misplaced, infinite }
    }
}

impl<'g> Check<'g> {
    /// Runs the serial program.
    pub fn new(graph: &'g Graph, options: Options<'g>) -> Result<Self, RunError> {
        let serial = SerialRun::of(graph, options, None)?;
        Ok(Self { graph, options, serial, changes: RefCell::new(Vec::new()) })
    }

    /// Seconds of each step of the serial run.
    pub fn step_seconds(&self) -> &[f64] {
        &self.serial.step_seconds
    }

    /// Compares losses and all carried tensors.
    pub fn compare(&self, outcome: &Outcome) -> Result<Difference, RunError> {
        let plain = plain_tolerance(self.graph);
        let expected = &self.serial;
        let mut all = vec![Compared::new("loss", &outcome.losses, &expected.losses)];
        for (at, carry) in self.graph.carries.iter().enumerate() {
            let value = outcome.finals.iter().find(|(tensor, _)| *tensor == carry.old);
            let value = value.map_or_else(Vec::new, |(_, value)| value.to_f64_vec());
            all.push(Compared::new(&self.graph.tensor(carry.old).name, &value, &expected.finals[at]));
        }
        let same = |(a, b): &(&f64, &f64)| a.to_bits() == b.to_bits();
        let mut answer = Difference {
            worst: "loss".into(),
            error: 0.0,
            tolerance: plain,
            bitwise_steps: outcome.losses.iter().zip(&expected.losses).take_while(same).count(),
            misplaced: all.iter().find(|tensor| tensor.misplaced).map(|tensor| tensor.name.to_string()),
            weaknesses: Vec::new(),
        };
        let mut weak = Vec::new();
        for (at, tensor) in all.iter().enumerate() {
            let tolerances = self.tolerances(at, tensor.errors, plain)?;
            if tolerances[1] > WEAK_TOLERANCE {
                weak.push(tensor.name);
            }
            for (error, tolerance) in tensor.errors.into_iter().zip(tolerances) {
                // Multiplied out, since the answer's error may be zero.
                if error * answer.tolerance > answer.error * tolerance {
                    answer = Difference { worst: tensor.name.into(), error, tolerance, ..answer };
                }
            }
        }
        answer.weaknesses = self.weaknesses(&all, &weak);
        Ok(answer)
    }

    /// Why a comparison means little.
    fn weaknesses(&self, all: &[Compared<'_>], weak: &[&str]) -> Vec<String> {
        let mut weaknesses = Vec::new();
        let losses = &self.serial.losses;
        if losses.len() > 1 && losses.windows(2).all(|pair| pair[0].to_bits() == pair[1].to_bits()) {
            weaknesses.push(
                "the loss never changes, so the run checks little: are there weights, and gradients?".into(),
            );
        }
        if let Some(infinite) = all.iter().find(|tensor| tensor.infinite && !tensor.misplaced) {
            let count = all.iter().filter(|tensor| tensor.infinite).count();
            weaknesses.push(format!(
                "NaN or infinity in {count} of {} tensors ({} is the first), as in the serial program: these numbers are not \
                 compared",
                all.len(),
                infinite.name
            ));
        }
        if let [first, ..] = weak {
            weaknesses.push(format!(
                "rounding alone changes {} of {} tensors by over {:.0}% ({first} is the first), so mistakes in them would \
                 pass: run in f64, or with more samples",
                weak.len(),
                all.len(),
                WEAK_TOLERANCE * 100.0
            ));
        }
        weaknesses
    }

    /// The relative errors that rounding explains, of the losses at 0 and of the carried tensors after it. Runs the serial
    /// program with changed last bits until the errors are explained or the runs are used up.
    fn tolerances(&self, at: usize, errors: [f64; 2], plain: f64) -> Result<[f64; 2], RunError> {
        let mut tolerances = [plain; 2];
        let explained =
            |tolerances: &[f64; 2]| errors.iter().zip(tolerances).all(|(error, most)| error <= most);
        for run in 0..MOST_NUDGED_RUNS {
            if explained(&tolerances) || errors[0].is_infinite() {
                break;
            }
            let changes = self.changes(run, at)?;
            for i in 0..2 {
                // A change to NaN says nothing about the size of a difference.
                if changes[i].is_finite() {
                    tolerances[i] = tolerances[i].max(ROUNDING_FACTORS[i] * changes[i]);
                }
            }
        }
        Ok(tolerances)
    }

    /// The relative changes of the losses (at 0) or of a carried tensor in one run of the serial program with changed last
    /// bits: the largest, and the root mean square.
    pub fn changes(&self, run: u64, at: usize) -> Result<[f64; 2], RunError> {
        let mut known = self.changes.borrow_mut();
        while known.len() as u64 <= run {
            let seed = self.options.seed.wrapping_add(known.len() as u64);
            let (nudged, expected) = (SerialRun::of(self.graph, self.options, Some(seed))?, &self.serial);
            let finals = nudged.finals.iter().zip(&expected.finals).map(|(a, b)| relative_errors(a, b));
            let losses = relative_errors(&nudged.losses, &expected.losses);
            known.push([losses].into_iter().chain(finals).collect());
        }
        Ok(known[run as usize][at])
    }
}

/// The relative error that rounding explains in a few steps where nothing amplifies it.
fn plain_tolerance(graph: &Graph) -> f64 {
    let floats = graph.tensors.iter().map(|t| t.ty.dtype).filter(|dtype| dtype.is_float());
    let of = |dtype| match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 1e-4,
        _ => 2e-2,
    };
    floats.map(of).fold(1e-10, f64::max)
}

impl SerialRun {
    fn of(graph: &Graph, options: Options<'_>, nudges: Option<u64>) -> Result<Self, RunError> {
        let mut serial = Serial::new(graph, options.seed, &[]);
        for (tensor, value) in options.given {
            serial.set(*tensor, value.clone())?;
        }
        if let Some(seed) = nudges {
            serial.nudge(seed);
        }
        let (mut losses, mut step_seconds) = (Vec::new(), Vec::new());
        for _ in 0..options.steps {
            let start = Instant::now();
            serial.step()?;
            step_seconds.push(start.elapsed().as_secs_f64());
            losses.extend(serial.loss());
        }
        let carried = graph.carries.iter().map(|carry| serial.value(carry.old));
        let finals = carried.map(|value| value.map_or_else(Vec::new, |v| v.to_f64_vec())).collect();
        Ok(Self { losses, finals, step_seconds })
    }
}
