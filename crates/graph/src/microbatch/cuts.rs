//! The cuts of a batch: which dimension of each tensor, and which factor of each op, runs over the samples.
//!
//! Cuts start at the first dimension of the data and follow the sharding rules in both directions, from operands to results
//! and back. A broadcast of the loss's gradient reads no sample, but those who read its result do.

use super::MicroBatchError;
use crate::{
    graph::{Graph, Role},
    ids::{OpId, TensorId},
    region::Region,
    rule::{FactorIndex, Rule, TensorMap},
    types::TensorType,
};

/// The cuts of a graph.
pub(super) struct Cuts {
    /// Per tensor: the dimension that the samples lead.
    pub dims: Vec<Option<u8>>,
    /// Per op: the factor that runs over the samples.
    pub factors: Vec<Option<FactorIndex>>,
    /// Per op: its rule.
    pub rules: Vec<Rule>,
}

impl Cuts {
    /// The cuts of a graph whose data have the batch as their first dimension, into `count` parts.
    pub fn of(graph: &Graph, count: u64) -> Result<Self, MicroBatchError> {
        let mut cuts = Self {
            dims: vec![None; graph.tensors.len()],
            factors: vec![None; graph.ops.len()],
            rules: graph.op_ids().map(|op| graph.rule(op)).collect(),
        };
        for t in graph.sources(Role::Input).filter(|&t| graph.tensor(t).ty.rank() > 0) {
            cuts.dims[t.index()] = Some(0);
        }
        // Forwards and backwards in turn: a chain of ops takes one sweep in either direction.
        while cuts.sweep(graph, graph.op_ids(), count)? && cuts.sweep(graph, graph.op_ids().rev(), count)? {}
        Ok(cuts)
    }

    /// Visits ops in an order; returns whether a cut was found.
    fn sweep(
        &mut self,
        graph: &Graph,
        order: impl Iterator<Item = OpId>,
        count: u64,
    ) -> Result<bool, MicroBatchError> {
        let mut found = false;
        for op in order {
            found |= self.visit(graph, op, count).map_err(|reason| MicroBatchError::op(graph, op, reason))?;
        }
        Ok(found)
    }

    fn visit(&mut self, graph: &Graph, op: OpId, count: u64) -> Result<bool, String> {
        let node = graph.node(op);
        let rule = &self.rules[op.index()];
        let tensors = || {
            let inputs = rule.inputs.iter().zip(node.inputs.iter().copied());
            inputs.chain(rule.outputs.iter().zip(node.outputs.iter().copied()))
        };
        let mut factor = self.factors[op.index()];
        for (map, t) in tensors() {
            let Some(dim) = self.dims[t.index()] else { continue };
            let led = led_factor(rule, map, usize::from(dim), count)
                .map_err(|reason| format!("`{}`: {reason}", graph.tensor(t).name.escape_debug()))?;
            if factor.is_some_and(|known| known != led) {
                return Err("it relates samples to each other".into());
            }
            factor = Some(led);
        }
        let Some(factor) = factor else { return Ok(false) };
        let mut found = self.factors[op.index()].replace(factor).is_none();
        let cuts: Vec<(TensorId, Option<usize>)> = tensors()
            .filter(|(map, _)| map.has(factor))
            .map(|(m, t)| (t, m.dim_led_by(factor, rule)))
            .collect();
        for (t, dim) in cuts {
            let tensor = graph.tensor(t);
            let name = tensor.name.escape_debug();
            let Some(dim) = dim else {
                return Err(format!("the samples do not lead a dimension of `{name}`"));
            };
            match self.dims[t.index()] {
                Some(known) if usize::from(known) != dim => {
                    return Err(format!("two dimensions of `{name}` run over the samples"));
                }
                Some(_) => {}
                None if tensor.producer.is_none() && !matches!(tensor.role, Role::Input | Role::Constant) => {
                    return Err(format!("the weight `{name}` has a dimension that runs over the samples"));
                }
                None => {
                    self.dims[t.index()] = Some(dim as u8);
                    found = true;
                }
            }
        }
        Ok(found)
    }

    /// The region of an op that a micro-batch computes; none if the op does not run over the samples.
    pub fn region<'a>(
        &'a self,
        op: OpId,
        inputs: &'a [TensorType],
        outputs: &'a [TensorType],
        (index, count): (u64, u64),
    ) -> Option<Region<'a>> {
        let factor = self.factors[op.index()]?;
        Some(Region::whole(&self.rules[op.index()], inputs, outputs).split(factor, index, count))
    }
}

/// The factor that leads a dimension, if it can be cut into `count` parts.
fn led_factor(rule: &Rule, map: &TensorMap, dim: usize, count: u64) -> Result<FactorIndex, String> {
    let dim = &map.dims[dim];
    let Some(led) = rule.leading(dim) else { return Err("it needs all samples at once".into()) };
    let factor = &rule.factors[usize::from(led)];
    if factor.whole || dim.window.is_some() {
        return Err("it needs all samples at once".into());
    }
    if !factor.divides_into(count) {
        return Err(format!("its {} samples do not divide into {count} parts", factor.size));
    }
    Ok(led)
}
