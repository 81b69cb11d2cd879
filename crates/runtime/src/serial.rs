//! The serial interpreter: runs a training graph on one thread, op by op. Every parallel run is compared
//! with it.

use crate::{
    init::{initial_value, mix, nudged},
    kernels::{Context, KernelError, run},
    tensor::HostTensor,
};
use shardwright_graph::{FactorIndex, Graph, OpId, Reduction, Role, TensorId, TensorMap, block};
use std::ops::Range;

/// Why a run stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// A kernel failed.
    #[error("op `{op}`: {reason}")]
    Kernel {
        /// The op.
        op: String,
        /// What is wrong.
        reason: KernelError,
    },
    /// A tensor was given a value of the wrong type.
    #[error("tensor `{tensor}`: {reason}")]
    Value {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
}

/// A serial run of a graph, step after step. Weights and optimizer state persist between steps; any other
/// tensor is dropped after its last use.
pub struct Serial<'g> {
    graph: &'g Graph,
    values: Vec<Option<HostTensor>>,
    /// Per op: the tensors that no later op reads.
    last_reads: Vec<Vec<TensorId>>,
    /// Per tensor that is sliced: the current micro-batch's slice.
    slices: Vec<Option<HostTensor>>,
    context: Context,
    nudges: Option<Nudges>,
}

/// Changes of last bits during a run.
struct Nudges {
    seed: u64,
    /// Per op: whether it adds up in an order that a split changes.
    sums: Vec<bool>,
}

impl<'g> Serial<'g> {
    /// Prepares a run with weights and data from `seed`. The tensors `keep` stay readable after a step,
    /// besides the graph's outputs and the carried tensors.
    pub fn new(graph: &'g Graph, seed: u64, keep: &[TensorId]) -> Self {
        let values = graph
            .tensor_ids()
            .map(|t| graph.tensor(t).producer.is_none().then(|| initial_value(seed, &graph.whole_tensor(t))))
            .collect();
        let mut kept = vec![false; graph.tensors.len()];
        let carried = graph.carries.iter().map(|c| &c.new);
        for t in keep.iter().chain(&graph.outputs).chain(carried) {
            kept[t.index()] = true;
        }
        let mut last_reads = vec![Vec::new(); graph.ops.len()];
        let mut last_use: Vec<Option<OpId>> = graph.tensors.iter().map(|t| t.producer).collect();
        for id in graph.op_ids() {
            for t in &graph.node(id).inputs {
                last_use[t.index()] = Some(id);
            }
        }
        for (i, op) in last_use.iter().enumerate() {
            if let Some(op) = op.filter(|_| graph.tensors[i].producer.is_some() && !kept[i]) {
                last_reads[op.index()].push(TensorId::new(i));
            }
        }
        let slices = vec![None; graph.tensors.len()];
        Self { graph, values, last_reads, slices, context: Context::default(), nudges: None }
    }

    /// Replaces the value of a tensor that no op produces. Data have the samples of all micro-batches.
    pub fn set(&mut self, tensor: TensorId, value: HostTensor) -> Result<(), RunError> {
        let t = self.graph.whole_tensor(tensor);
        let reason = match &t.producer {
            Some(_) => "is computed by an op; it cannot be set".into(),
            None if value.ty() != t.ty => format!("has type {}, not {}", t.ty, value.ty()),
            None => {
                self.values[tensor.index()] = Some(value);
                return Ok(());
            }
        };
        Err(RunError::Value { tensor: t.name, reason })
    }

    /// Moves floats to a neighbouring float, up or down: all weights and data now, and the results of all sums in every
    /// step from now on. The changed results show how much the program amplifies rounding.
    ///
    /// Constants stay, as do results of ops that do not add up: a split changes no bit of them, and a program may compare
    /// them with exact numbers.
    pub fn nudge(&mut self, seed: u64) {
        for (i, value) in self.values.iter_mut().enumerate() {
            if let Some(value) = value
                && self.graph.tensors[i].role != Role::Constant
            {
                *value = nudged(value, mix(seed.wrapping_add(i as u64)));
            }
        }
        let adds_up = |id: OpId| {
            let rule = self.graph.rule(id);
            let summed = |map: &TensorMap| {
                let factors = rule.factors.iter().enumerate();
                map.reduction == Reduction::Sum
                    && factors.into_iter().any(|(f, factor)| factor.size > 1 && !map.has(f as FactorIndex))
            };
            rule.outputs.iter().any(summed)
        };
        self.nudges = Some(Nudges { seed, sums: self.graph.op_ids().map(adds_up).collect() });
    }

    /// The value of a tensor: of sources always, of outputs and kept tensors after a step, otherwise none.
    pub fn value(&self, tensor: TensorId) -> Option<&HostTensor> {
        self.values[tensor.index()].as_ref()
    }

    /// Runs one step without the carries: a second call repeats it.
    pub fn evaluate(&mut self) -> Result<(), RunError> {
        let body = self.graph.body();
        self.section(0..body.start, true)?;
        let count = u64::from(self.graph.micro_batches.get());
        for at in (0..count).filter(|_| !body.is_empty()) {
            self.slice(at);
            self.context.micro_batch = at;
            self.section(body.clone(), at + 1 == count)?;
        }
        self.context.micro_batch = 0;
        self.section(body.end..self.graph.ops.len(), true)
    }

    /// Cuts the slices of a micro-batch.
    fn slice(&mut self, at: u64) {
        for slice in &self.graph.sliced {
            let shape = &self.graph.tensor(slice.tensor).ty.shape;
            let mut block = block::whole(shape);
            let range = &mut block[usize::from(slice.dim)];
            *range = at * range.end..(at + 1) * range.end;
            self.slices[slice.tensor.index()] =
                self.values[slice.tensor.index()].as_ref().map(|whole| whole.block(&block));
        }
    }

    /// Runs some ops. Unless this is the `last` time, they find their operands from other ops again.
    fn section(&mut self, ops: Range<usize>, last: bool) -> Result<(), RunError> {
        for id in ops.map(OpId::new) {
            let last_reads = &self.last_reads[id.index()];
            let node = self.graph.node(id);
            let fail = |reason| RunError::Kernel { op: node.name.clone(), reason };
            let types = node.outputs.iter().map(|&t| &self.graph.tensor(t).ty);
            let mut outputs: Vec<HostTensor> = types.map(HostTensor::zeros).collect();
            let missing = || fail(KernelError::BadValue("an input has no value".into()));
            let before = node.outputs.iter().filter(|_| {
                // The sum so far is the second operand.
                node.op.operator().accumulates() && self.context.micro_batch > 0
            });
            let value = |t: &TensorId| self.slices[t.index()].as_ref().or(self.values[t.index()].as_ref());
            let inputs = node
                .inputs
                .iter()
                .chain(before)
                .map(|t| value(t).map(HostTensor::view).ok_or_else(missing))
                .collect::<Result<Vec<_>, _>>()?;
            let mut views: Vec<_> = outputs.iter_mut().map(HostTensor::view_mut).collect();
            run(&node.op, &inputs, &mut views, &mut self.context).map_err(fail)?;
            drop(views);
            if let Some(nudges) = self.nudges.as_ref().filter(|nudges| nudges.sums[id.index()]) {
                let step = mix(nudges.seed ^ self.context.step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                for (value, t) in outputs.iter_mut().zip(&node.outputs) {
                    *value = nudged(value, mix(step.wrapping_add(t.index() as u64)));
                }
            }
            for (t, value) in node.outputs.iter().zip(outputs) {
                self.values[t.index()] = Some(value);
            }
            for t in last_reads {
                let again = self.graph.tensor(*t).producer.is_some_and(|op| !self.graph.node(op).repeated);
                if last || !again {
                    self.values[t.index()] = None;
                }
            }
        }
        Ok(())
    }

    /// Runs one training step: evaluates, then new weights and optimizer state replace the old.
    pub fn step(&mut self) -> Result<(), RunError> {
        self.evaluate()?;
        for carry in &self.graph.carries {
            let new = self.values[carry.new.index()].take();
            self.values[carry.old.index()] = new;
        }
        self.context.step += 1;
        Ok(())
    }

    /// The loss of the last step, if the graph computes one.
    pub fn loss(&self) -> Option<f64> {
        let loss = self.value(self.graph.loss()?)?;
        loss.to_f64_vec().first().copied()
    }
}
