//! The draft graph: the program's ops before the roles of arguments are known. Ops are typed and deduplicated, and have
//! their origin in the text.

use super::{
    super::error::{Result, TextError},
    value::Stack,
};
use shardwright_graph::{
    DType, Op, Real, Shape, TensorType,
    ops::{Fill, Reshape, Transpose},
};
use smallvec::SmallVec;
use std::{collections::HashMap, rc::Rc};

/// The most ops of a program after unrolling and inlining.
const MOST_STEPS: usize = 1 << 20;

/// A tensor of the draft: an argument, a number, or an op's result.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Slot(pub u32);

/// The producer of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// An argument of the program, by index.
    Argument(usize),
    /// A scalar constant.
    Number(f64),
    /// An op of the draft, by index.
    Op(u32),
}

/// The origin of an op: the path of calls and loops around it, its position in the text, and its number among the ops of
/// that position. All iterations of a loop have the same origins.
pub(super) type Origin = (u32, usize, u32);

pub(super) struct DraftOp {
    pub name: String,
    pub op: Op,
    pub inputs: Inputs,
    pub outputs: Outputs,
    pub origin: Origin,
}

type Inputs = SmallVec<[Slot; 4]>;
type Outputs = SmallVec<[Slot; 2]>;

#[derive(Default)]
pub(super) struct DraftGraph {
    pub ops: Vec<DraftOp>,
    types: Vec<TensorType>,
    sources: Vec<Source>,
    known: HashMap<(Option<usize>, Op, Inputs), Outputs>,
    numbers: HashMap<(DType, u64), Slot>,
    /// The name of the ops that are added next.
    pub name: String,
    pub path: u32,
    pub at: usize,
    pub ordinal: u32,
    /// The innermost loop around the next ops, by its position.
    pub in_loop: Option<usize>,
    /// Stacks that loops filled, of which slices are read again.
    pub stacks: Vec<Rc<Stack>>,
}

impl DraftGraph {
    pub fn ty(&self, slot: Slot) -> &TensorType {
        &self.types[slot.0 as usize]
    }

    pub fn source(&self, slot: Slot) -> Source {
        self.sources[slot.0 as usize]
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.types.len()
    }

    /// The op that produces a slot.
    pub fn producer(&self, slot: Slot) -> Option<&DraftOp> {
        match self.source(slot) {
            Source::Op(op) => Some(&self.ops[op as usize]),
            _ => None,
        }
    }

    fn push(&mut self, ty: TensorType, source: Source) -> Slot {
        self.types.push(ty);
        self.sources.push(source);
        Slot(self.types.len() as u32 - 1)
    }

    pub fn error(&self, reason: impl Into<String>) -> TextError {
        TextError::new(self.at, reason)
    }

    /// An argument of the program.
    pub fn argument(&mut self, ty: TensorType, index: usize) -> Slot {
        self.push(ty, Source::Argument(index))
    }

    /// A scalar constant.
    pub fn number(&mut self, dtype: DType, value: f64) -> Result<Slot> {
        if let Some(&slot) = self.numbers.get(&(dtype, value.to_bits())) {
            return Ok(slot);
        }
        let ty = TensorType::new(dtype, Shape::scalar());
        let holds =
            shardwright_graph::verify::check_init(&ty, shardwright_graph::Init::Constant(Real(value)));
        let slot = match holds {
            Ok(()) => self.push(ty, Source::Number(value)),
            // NaN and the smallest whole numbers cannot be initial values.
            Err(_) => self.one(Fill { value: Real(value), ty }, &[])?,
        };
        self.numbers.insert((dtype, value.to_bits()), slot);
        Ok(slot)
    }

    /// Adds an op, unless the same op with the same inputs exists. Ops of a loop are not reused outside it: a backward pass
    /// slices stacked weights again, and recomputes where the program says so.
    pub fn add(&mut self, op: impl Into<Op>, inputs: &[Slot]) -> Result<SmallVec<[Slot; 2]>> {
        let key = (self.in_loop, op.into(), SmallVec::from_slice(inputs));
        if let Some(outputs) = self.known.get(&key) {
            return Ok(outputs.clone());
        }
        let types: SmallVec<[TensorType; 4]> = inputs.iter().map(|&slot| self.ty(slot).clone()).collect();
        let (_, op, inputs) = key.clone();
        let refuse =
            |reason: String| TextError::new(self.at, format!("{} ({}): {reason}", self.name, op.kind()));
        let made = op.operator().infer(&types).map_err(|reason| refuse(reason.to_string()))?;
        for ty in &made {
            ty.shape.check().map_err(refuse)?;
        }
        if self.ops.len() >= MOST_STEPS {
            return Err(self.error(format!(
                "more than {MOST_STEPS} ops once loops are unrolled and calls inlined; plan a step with fewer iterations"
            )));
        }
        let index = self.ops.len() as u32;
        let outputs: SmallVec<[Slot; 2]> =
            made.into_iter().map(|ty| self.push(ty, Source::Op(index))).collect();
        let origin = (self.path, self.at, self.ordinal);
        self.ordinal += 1;
        self.ops.push(DraftOp { name: self.name.clone(), op, inputs, outputs: outputs.clone(), origin });
        self.known.insert(key, outputs.clone());
        Ok(outputs)
    }

    /// Adds an op with one result.
    pub fn one(&mut self, op: impl Into<Op>, inputs: &[Slot]) -> Result<Slot> {
        Ok(self.add(op, inputs)?[0])
    }

    /// Notes that slices of a stack are read.
    pub fn read_stack(&mut self, stack: &Rc<Stack>) {
        if !self.stacks.iter().rev().any(|known| Rc::ptr_eq(known, stack)) {
            self.stacks.push(stack.clone());
        }
    }

    /// A view of equal shape, whose config constrains the layout of an argument.
    pub fn constrained(&mut self, slot: Slot) -> Result<Slot> {
        self.one(Reshape { shape: self.ty(slot).shape.clone() }, &[slot])
    }

    /// The same elements in another shape. A reshape of a reshape reads the original.
    pub fn reshape(&mut self, slot: Slot, shape: &Shape) -> Result<Slot> {
        let mut from = slot;
        while let Some(op) = self.producer(from)
            && let Op::Reshape(_) = op.op
            && self.ty(op.inputs[0]).shape != self.ty(from).shape
        {
            from = op.inputs[0];
        }
        for candidate in [slot, from] {
            if self.ty(candidate).shape == *shape {
                return Ok(candidate);
            }
        }
        self.one(Reshape { shape: shape.clone() }, &[from])
    }

    /// The dimensions in another order. A transpose of a transpose becomes one.
    pub fn transpose(&mut self, slot: Slot, perm: &[usize]) -> Result<Slot> {
        let (mut from, mut perm) = (slot, SmallVec::<[usize; 4]>::from_slice(perm));
        if let Some(op) = self.producer(slot)
            && let Op::Transpose(first) = &op.op
            && first.perm.len() == perm.len()
            && perm.iter().all(|&p| p < first.perm.len())
        {
            perm = perm.iter().map(|&p| first.perm[p]).collect();
            from = op.inputs[0];
        }
        if perm.iter().enumerate().all(|(i, &p)| i == p) && perm.len() == self.ty(from).rank() {
            return Ok(from);
        }
        // A transpose that only moves dimensions of size one is a reshape.
        let shape = &self.ty(from).shape;
        let mut moved = perm.iter().filter(|&&p| shape.get(p) != Some(&1));
        let sizes: Option<Shape> = perm.iter().map(|&p| shape.get(p).copied()).collect();
        if let Some(sizes) = sizes.filter(|sizes| sizes.rank() == shape.rank())
            && moved.clone().zip(moved.by_ref().skip(1)).all(|(a, b)| a < b)
        {
            return self.reshape(from, &sizes);
        }
        self.one(Transpose { perm }, &[from])
    }
}

impl DraftGraph {
    /// Sets another op as the producer of a slot.
    pub fn move_output(&mut self, slot: Slot, op: u32) {
        self.sources[slot.0 as usize] = Source::Op(op);
    }
}
