//! The serial interpreter: runs a training graph on one thread, op by op. What every parallel run is
//! compared with.

use crate::{
    init::{initial_value, mix, nudged},
    kernels::{Context, KernelError, run},
    tensor::Value,
};
use shardwright_graph::{Graph, OpId, TensorId};

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

/// A serial run of a graph, step after step. Weights and optimizer state live on between steps; everything
/// else is dropped after its last use.
pub struct Serial<'g> {
    graph: &'g Graph,
    values: Vec<Option<Value>>,
    /// The tensors that each op is the last to read.
    dying: Vec<Vec<TensorId>>,
    context: Context,
}

impl<'g> Serial<'g> {
    /// Prepares a run; `seed` decides weights and data. `keep` are tensors to be left readable after a step
    /// besides the graph's outputs and what is carried over.
    pub fn new(graph: &'g Graph, seed: u64, keep: &[TensorId]) -> Self {
        let values = graph
            .tensors
            .iter()
            .map(|t| if t.producer.is_none() { Some(initial_value(seed, t)) } else { None })
            .collect();
        let mut kept = vec![false; graph.tensors.len()];
        let carried = graph.carries.iter().map(|c| &c.new);
        for t in keep.iter().chain(&graph.outputs).chain(carried) {
            kept[t.index()] = true;
        }
        let mut dying = vec![Vec::new(); graph.ops.len()];
        let mut last_use: Vec<Option<OpId>> = graph.tensors.iter().map(|t| t.producer).collect();
        for id in graph.op_ids() {
            for t in &graph.node(id).inputs {
                last_use[t.index()] = Some(id);
            }
        }
        for (i, op) in last_use.iter().enumerate() {
            if let Some(op) = op.filter(|_| graph.tensors[i].producer.is_some() && !kept[i]) {
                dying[op.index()].push(TensorId::new(i));
            }
        }
        Self { graph, values, dying, context: Context::default() }
    }

    /// Replaces the value of a tensor that no op makes.
    pub fn set(&mut self, tensor: TensorId, value: Value) -> Result<(), RunError> {
        let t = self.graph.tensor(tensor);
        let reason = match &t.producer {
            Some(_) => "is computed by an op; it cannot be set".into(),
            None if value.ty() != t.ty => format!("has type {}, not {}", t.ty, value.ty()),
            None => {
                self.values[tensor.index()] = Some(value);
                return Ok(());
            }
        };
        Err(RunError::Value { tensor: t.name.clone(), reason })
    }

    /// Moves every float that the run starts from to its neighbour, up or down: what then comes out differently tells
    /// how much the program amplifies rounding.
    pub fn nudge(&mut self, seed: u64) {
        for (i, value) in self.values.iter_mut().enumerate() {
            if let Some(value) = value {
                *value = nudged(value, mix(seed.wrapping_add(i as u64)));
            }
        }
    }

    /// The value of a tensor, if it is there: sources always, outputs and kept tensors after a step.
    pub fn value(&self, tensor: TensorId) -> Option<&Value> {
        self.values[tensor.index()].as_ref()
    }

    /// Runs one step without carrying anything over: a second call repeats it.
    pub fn evaluate(&mut self) -> Result<(), RunError> {
        for (id, dying) in self.graph.op_ids().zip(&self.dying) {
            let node = self.graph.node(id);
            let fail = |reason| RunError::Kernel { op: node.name.clone(), reason };
            let types = node.outputs.iter().map(|&t| &self.graph.tensor(t).ty);
            let mut outputs: Vec<Value> = types.map(Value::zeros).collect();
            let missing = || fail(KernelError::BadValue("an input has no value".into()));
            let inputs = node
                .inputs
                .iter()
                .map(|t| self.values[t.index()].as_ref().map(Value::view).ok_or_else(missing))
                .collect::<Result<Vec<_>, _>>()?;
            let mut views: Vec<_> = outputs.iter_mut().map(Value::view_mut).collect();
            run(&node.op, &inputs, &mut views, &mut self.context).map_err(fail)?;
            drop(views);
            for (t, value) in node.outputs.iter().zip(outputs) {
                self.values[t.index()] = Some(value);
            }
            for t in dying {
                self.values[t.index()] = None;
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
