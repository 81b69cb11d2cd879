//! What fills a device's memory at its peak: weights, gradients, state and activations, and the ops whose results are largest.
//!
//! The bytes are those of the one account of memory ([`shardwright_lower::DeviceAccount`]), so the shares add up to the peak.

use crate::context::Context;
use shardwright_graph::{Role, TensorId};
use shardwright_lower::{DeviceAccount, lower};
use shardwright_machine::Bytes;
use shardwright_space::Assignment;
use std::collections::BTreeMap;

/// The memory of the device that holds most, at its peak, by purpose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryShares {
    /// Weights, with copies in other layouts.
    pub weights: Bytes,
    /// Gradients of weights.
    pub gradients: Bytes,
    /// Optimizer state.
    pub optimizer_state: Bytes,
    /// Activations and their gradients.
    pub activations: Bytes,
    /// Data, constants, workspaces and shares of all-reduces.
    pub other: Bytes,
    /// Activations by the op that makes them, largest first. Equal ops of different blocks are one entry (`blocks.*.mlp.up`).
    pub largest: Vec<(String, u64)>,
}

/// The memory at its peak under an assignment; none if the assignment cannot be lowered, or has no ops.
pub fn memory_shares(context: &Context<'_>, assignment: &Assignment) -> Option<MemoryShares> {
    let graph = context.graph;
    // Micro-batches hold the same from the third one on.
    let program = lower(graph, &context.resharder, assignment).ok()?.unrolled_to(3);
    let accounts =
        program.memory_devices().into_iter().map(|device| DeviceAccount::of(&program, device).account);
    let account = accounts.reduce(|a, b| if b.peak() > a.peak() { b } else { a })?;
    let at = account.fullest()?;
    let mut shares = MemoryShares::default();
    let mut by_op: BTreeMap<String, u64> = BTreeMap::new();
    let mut held = 0;
    for buffer in account.buffers.iter().filter(|buffer| buffer.tasks.contains(&(at as u32))) {
        held += buffer.bytes;
        let tensor = program.values.get(buffer.value as usize).map(|value| value.tensor);
        let share = match tensor.map(|tensor| graph.tensor(tensor).role) {
            Some(Role::Parameter) => &mut shares.weights,
            Some(Role::Gradient) => &mut shares.gradients,
            Some(Role::OptimizerState) => &mut shares.optimizer_state,
            Some(Role::Activation) => &mut shares.activations,
            Some(Role::Input | Role::Constant) | None => &mut shares.other,
        };
        share.0 += buffer.bytes;
        if let Some(tensor) = tensor.filter(|&tensor| graph.tensor(tensor).role == Role::Activation) {
            *by_op.entry(stem(context, tensor)).or_default() += buffer.bytes;
        }
    }
    // The workspace of the running kernel.
    shares.other.0 += account.peak().saturating_sub(held);
    shares.largest = by_op.into_iter().collect();
    shares.largest.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    Some(shares)
}

/// The name of a tensor's producer, or its own, with `*` for numbers of blocks.
fn stem(context: &Context<'_>, tensor: TensorId) -> String {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let tensor = context.graph.tensor(tensor);
    let name = tensor.producer.map_or(&tensor.name, |op| &context.graph.node(op).name);
    name.split('.').map(|part| if number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}
