//! The ops of the program as they are found, before roles are known: typed, each once, with where it came from.

use super::super::error::{Fault, Result};
use shardwright_graph::{
    DType, Op, Real, Shape, TensorType,
    ops::{Fill, Reshape, Transpose},
};
use smallvec::SmallVec;
use std::collections::HashMap;

/// The most ops that a program may become once loops are unrolled and calls inlined.
const MOST_STEPS: usize = 1 << 20;

/// A tensor: an argument, a number, or what an op makes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Slot(pub u32);

/// Where a slot's value comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// This argument of the program.
    Argument(usize),
    /// The same number everywhere.
    Number(f64),
    /// This step.
    Step(u32),
}

/// Where an op came from: the calls and loops around it, its place in the text, and which of the ops that were
/// made from that place it is. Iterations of a loop have the same origins.
pub(super) type Origin = (u32, usize, u32);

pub(super) struct Step {
    pub name: String,
    pub op: Op,
    pub inputs: Inputs,
    pub outputs: Outputs,
    pub origin: Origin,
}

type Inputs = SmallVec<[Slot; 4]>;
type Outputs = SmallVec<[Slot; 2]>;

#[derive(Default)]
pub(super) struct Steps {
    pub steps: Vec<Step>,
    types: Vec<TensorType>,
    sources: Vec<Source>,
    known: HashMap<(Option<usize>, Op, Inputs), Outputs>,
    numbers: HashMap<(DType, u64), Slot>,
    /// How ops are named and placed now.
    pub name: String,
    pub path: u32,
    pub at: usize,
    pub ordinal: u32,
    /// The innermost loop around them, by where it begins.
    pub in_loop: Option<usize>,
}

impl Steps {
    pub fn ty(&self, slot: Slot) -> &TensorType {
        &self.types[slot.0 as usize]
    }

    pub fn source(&self, slot: Slot) -> Source {
        self.sources[slot.0 as usize]
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.types.len()
    }

    /// The step that makes a slot.
    pub fn maker(&self, slot: Slot) -> Option<&Step> {
        match self.source(slot) {
            Source::Step(step) => Some(&self.steps[step as usize]),
            _ => None,
        }
    }

    fn push(&mut self, ty: TensorType, source: Source) -> Slot {
        self.types.push(ty);
        self.sources.push(source);
        Slot(self.types.len() as u32 - 1)
    }

    pub fn fault(&self, reason: impl Into<String>) -> Fault {
        Fault::new(self.at, reason)
    }

    /// An argument of the program.
    pub fn argument(&mut self, ty: TensorType, index: usize) -> Slot {
        self.push(ty, Source::Argument(index))
    }

    /// A number as a scalar.
    pub fn number(&mut self, dtype: DType, value: f64) -> Result<Slot> {
        if let Some(&slot) = self.numbers.get(&(dtype, value.to_bits())) {
            return Ok(slot);
        }
        let ty = TensorType::new(dtype, Shape::scalar());
        let holds =
            shardwright_graph::verify::check_init(&ty, shardwright_graph::Init::Constant(Real(value)));
        let slot = match holds {
            Ok(()) => self.push(ty, Source::Number(value)),
            // What is not a number, and the least whole numbers, cannot be a first value.
            Err(_) => self.one(Fill { value: Real(value), ty }, &[])?,
        };
        self.numbers.insert((dtype, value.to_bits()), slot);
        Ok(slot)
    }

    /// Adds an op, unless the same op of the same inputs is there already. What a loop computes is not there for
    /// others: a backward pass takes its slices of stacked weights again, and repeats what it was told to.
    pub fn add(&mut self, op: impl Into<Op>, inputs: &[Slot]) -> Result<SmallVec<[Slot; 2]>> {
        let key = (self.in_loop, op.into(), SmallVec::from_slice(inputs));
        if let Some(outputs) = self.known.get(&key) {
            return Ok(outputs.clone());
        }
        let types: SmallVec<[TensorType; 4]> = inputs.iter().map(|&slot| self.ty(slot).clone()).collect();
        let (_, op, inputs) = key.clone();
        let refuse = |reason: String| Fault::new(self.at, format!("{} ({}): {reason}", self.name, op.kind()));
        let made = op.operator().infer(&types).map_err(|reason| refuse(reason.to_string()))?;
        for ty in &made {
            ty.shape.check().map_err(refuse)?;
        }
        if self.steps.len() >= MOST_STEPS {
            return Err(self.fault(format!(
                "more than {MOST_STEPS} ops once loops are unrolled and calls inlined; plan a step with fewer iterations"
            )));
        }
        let index = self.steps.len() as u32;
        let outputs: SmallVec<[Slot; 2]> =
            made.into_iter().map(|ty| self.push(ty, Source::Step(index))).collect();
        let origin = (self.path, self.at, self.ordinal);
        self.ordinal += 1;
        self.steps.push(Step { name: self.name.clone(), op, inputs, outputs: outputs.clone(), origin });
        self.known.insert(key, outputs.clone());
        Ok(outputs)
    }

    /// Adds an op with one result.
    pub fn one(&mut self, op: impl Into<Op>, inputs: &[Slot]) -> Result<Slot> {
        Ok(self.add(op, inputs)?[0])
    }

    /// The same elements in another shape; what was reshaped before is taken from its origin.
    pub fn reshape(&mut self, slot: Slot, shape: &Shape) -> Result<Slot> {
        let mut from = slot;
        while let Some(step) = self.maker(from)
            && let Op::Reshape(_) = step.op
        {
            from = step.inputs[0];
        }
        for candidate in [slot, from] {
            if self.ty(candidate).shape == *shape {
                return Ok(candidate);
            }
        }
        self.one(Reshape { shape: shape.clone() }, &[from])
    }

    /// The dimensions in another order; transpositions of transpositions become one.
    pub fn transpose(&mut self, slot: Slot, perm: &[usize]) -> Result<Slot> {
        let (mut from, mut perm) = (slot, SmallVec::<[usize; 4]>::from_slice(perm));
        if let Some(step) = self.maker(slot)
            && let Op::Transpose(first) = &step.op
            && first.perm.len() == perm.len()
            && perm.iter().all(|&p| p < first.perm.len())
        {
            perm = perm.iter().map(|&p| first.perm[p]).collect();
            from = step.inputs[0];
        }
        if perm.iter().enumerate().all(|(i, &p)| i == p) && perm.len() == self.ty(from).rank() {
            return Ok(from);
        }
        // Moving dimensions of size one only is a change of shape.
        let shape = &self.ty(from).shape;
        let mut moved = perm.iter().filter(|&&p| shape.get(p) != Some(&1));
        if perm.len() == shape.rank() && moved.clone().zip(moved.by_ref().skip(1)).all(|(a, b)| a < b) {
            let shape = perm.iter().map(|&p| shape.get(p).copied().unwrap_or(0)).collect();
            return self.reshape(from, &shape);
        }
        self.one(Transpose { perm }, &[from])
    }
}

impl Steps {
    /// Says that another step makes a slot now.
    pub fn move_output(&mut self, slot: Slot, step: u32) {
        self.sources[slot.0 as usize] = Source::Step(step);
    }
}
