//! Parallel against serial: how far a run is from the serial program, and how far rounding alone may take it.
//!
//! A parallel program adds in another order, so it rounds otherwise, and training amplifies that: hardly where layers are
//! few, a million times and more where norms over few samples follow each other, since they divide by what is nearly
//! nothing, and by what is left of gradients that cancel out where Adam divides them by their own size. How much a program
//! amplifies is measured where it matters: the serial program is run once more, from weights and data whose last bits were
//! changed, and a tensor may differ by so many times what that changes in it.

use crate::outcome::{Outcome, relative_error};
use crate::run::Options;
use shardwright_graph::{DType, Graph};
use shardwright_runtime::{RunError, Serial};
use std::cell::OnceCell;
use std::time::Instant;

/// How many times as far as one change of last bits at the start the rounding of all ops in all steps may lead.
const MORE_ROUNDING: f64 = 10.0;

/// The serial program's run that parallel ones are held against.
pub struct Check<'g> {
    graph: &'g Graph,
    options: Options<'g>,
    expected: Expected,
    /// What changes with the last bits; found out when it is needed.
    changes: OnceCell<Vec<f64>>,
}

/// What a serial run gave.
struct Expected {
    losses: Vec<f64>,
    /// In the order of the graph's carries.
    finals: Vec<Vec<f64>>,
    step_seconds: Vec<f64>,
}

/// How far a run is from the serial one.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The largest of all, relative as [`relative_error`] says.
    pub max_relative_error: f64,
    /// What is farthest beyond, or closest to, what rounding explains: `loss` or a tensor's name.
    pub worst: String,
    /// Its difference.
    pub error: f64,
    /// What rounding explains of it.
    pub tolerance: f64,
    /// How many steps' losses are the serial ones bit by bit, from the first.
    pub bitwise_steps: usize,
}

impl Difference {
    /// Whether rounding explains all of it.
    pub fn is_rounding(&self) -> bool {
        self.error.is_finite() && self.error <= self.tolerance
    }
}

impl<'g> Check<'g> {
    /// Runs the serial program.
    pub fn new(graph: &'g Graph, options: Options<'g>) -> Result<Self, RunError> {
        let expected = Expected::of(graph, options, false)?;
        Ok(Self { graph, options, expected, changes: OnceCell::new() })
    }

    /// How long each of its steps took.
    pub fn step_seconds(&self) -> &[f64] {
        &self.expected.step_seconds
    }

    /// Compares losses and everything that is carried over.
    pub fn compare(&self, outcome: &Outcome) -> Result<Difference, RunError> {
        let plain = plain_tolerance(self.graph);
        let expected = &self.expected;
        let mut found: Vec<(&str, f64)> = vec![("loss", relative_error(&outcome.losses, &expected.losses))];
        for (at, carry) in self.graph.carries.iter().enumerate() {
            let value = outcome.finals.iter().find(|(tensor, _)| *tensor == carry.old);
            let error = value.map_or(f64::INFINITY, |(_, value)| {
                relative_error(&value.to_f64_vec(), &expected.finals[at])
            });
            found.push((&self.graph.tensor(carry.old).name, error));
        }
        let same = |(a, b): &(&f64, &f64)| a.to_bits() == b.to_bits();
        let mut answer = Difference {
            max_relative_error: found.iter().map(|(_, error)| *error).fold(0.0, f64::max),
            worst: "loss".into(),
            error: 0.0,
            tolerance: plain,
            bitwise_steps: outcome.losses.iter().zip(&expected.losses).take_while(same).count(),
        };
        for (at, (name, error)) in found.into_iter().enumerate() {
            let tolerance = if error > plain { self.amplified(at)?.max(plain) } else { plain };
            // Multiplied, since the answer's error may be zero.
            if error * answer.tolerance > answer.error * tolerance {
                answer = Difference { worst: name.into(), error, tolerance, ..answer };
            }
        }
        Ok(answer)
    }

    /// What rounding explains of a difference: the losses' (0), or of what is carried over.
    fn amplified(&self, at: usize) -> Result<f64, RunError> {
        Ok(MORE_ROUNDING * self.changes()?[at])
    }

    /// By how much the losses and each of what is carried over change in the serial program itself, when the last bits of
    /// all that it starts from change.
    pub fn changes(&self) -> Result<&[f64], RunError> {
        if let Some(known) = self.changes.get() {
            return Ok(known);
        }
        let (nudged, expected) = (Expected::of(self.graph, self.options, true)?, &self.expected);
        let finals = nudged.finals.iter().zip(&expected.finals).map(|(a, b)| relative_error(a, b));
        let changes = [relative_error(&nudged.losses, &expected.losses)].into_iter().chain(finals).collect();
        Ok(self.changes.get_or_init(|| changes))
    }
}

/// What the rounding of a few steps comes to where nothing amplifies it.
fn plain_tolerance(graph: &Graph) -> f64 {
    let floats = graph.tensors.iter().map(|t| t.ty.dtype).filter(|dtype| dtype.is_float());
    let of = |dtype| match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 1e-4,
        _ => 2e-2,
    };
    floats.map(of).fold(1e-10, f64::max)
}

impl Expected {
    fn of(graph: &Graph, options: Options<'_>, nudged: bool) -> Result<Self, RunError> {
        let mut serial = Serial::new(graph, options.seed, &[]);
        for (tensor, value) in options.given {
            serial.set(*tensor, value.clone())?;
        }
        if nudged {
            serial.nudge(options.seed);
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
