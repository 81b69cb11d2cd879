//! Data parallelism without the recipes, which are in a crate that depends on this one.

use shardwright_plan::Context;
use shardwright_space::{Assignment, AxisUse, Config};

/// The first factor of every layer's forward op on as many axes as divide it, outermost first. The other ops follow it.
pub fn data_parallel(context: &Context<'_>) -> Assignment {
    let (mesh, shapes) = (context.mesh(), &context.shapes);
    let mut assignment = Assignment::replicated(context.graph, mesh);
    for layer in &context.layers.members {
        let split_axes = |count: usize| {
            let used = |axis| if axis < count { AxisUse::Split(0) } else { AxisUse::Replicate };
            Config::new((0..mesh.len()).map(used))
        };
        let rule = &shapes[layer.forward().index()].rule;
        let mut splits = (1..=mesh.len()).rev().map(split_axes);
        let Some(lead) = splits.find(|config| config.check(rule, mesh).is_ok()) else { continue };
        for (op, config) in layer.ops.iter().zip(layer.configs(shapes, mesh, &lead)) {
            assignment.configs[op.index()] = config;
        }
    }
    assignment
}
