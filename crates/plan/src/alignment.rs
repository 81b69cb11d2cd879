//! Sizes that matrix units cannot load in whole vectors, and what padding them would gain.

use crate::{context::Context, error::PlanError};
use shardwright_cost::OperatorTimes;
use shardwright_graph::{Init, Role, Workload};
use std::collections::BTreeSet;

/// Sizes are padded to a multiple of this.
const PADDING: u64 = 64;
/// The least gain of the step that is worth a note.
const LEAST_GAIN: f64 = 1.01;

/// What padding the worst size of a weight would gain: `pad vocab 50257 to 50304: 1.08x`. None where nothing is gained.
///
/// The gain is that of one device that computes the whole step. A plan divides all products alike.
pub fn padding_hint(context: &Context<'_>) -> Result<Option<String>, PlanError> {
    let graph = context.graph;
    let device = context.machine.slowest();
    let times = OperatorTimes::new(&device, context.costs())?;
    let works: Vec<Workload> = graph
        .op_ids()
        .map(|op| graph.node(op).op.workload(&graph.input_types(op), &graph.output_types(op)))
        .collect();
    let slow = |work: &&Workload| {
        work.roofline.product().is_some_and(|product| product.align < 8) && work.dtype.bytes() == 2
    };
    if !works.iter().any(|work| slow(&work)) {
        return Ok(None);
    }
    let total: f64 = works.iter().map(|work| times.estimate(work).seconds.0).sum();
    let weights = graph.parameters().flat_map(|t| graph.tensor(t).ty.shape.iter().copied());
    let sizes: BTreeSet<u64> = weights.filter(|size| !size.is_multiple_of(8) && *size > PADDING).collect();
    let gain = |size: u64| {
        let padded = size.next_multiple_of(PADDING);
        let saved: f64 = works
            .iter()
            .filter(slow)
            .filter(|work| work.sizes.contains(&size))
            .map(|work| {
                let sizes: Vec<u64> =
                    work.sizes.iter().map(|&s| if s == size { padded } else { s }).collect();
                times.estimate(work).seconds.0 - times.estimate(&work.resized(&sizes)).seconds.0
            })
            .sum();
        (total / (total - saved).max(f64::MIN_POSITIVE), size, padded)
    };
    let best = sizes.into_iter().map(gain).max_by(|a, b| a.0.total_cmp(&b.0));
    Ok(best.filter(|best| best.0 >= LEAST_GAIN).map(|(gain, size, padded)| {
        // Ids below a size are tokens of a vocabulary.
        let ids = |t| graph.tensor(t).init == Some(Init::Below(size));
        let name = if graph.sources(Role::Input).any(ids) { "vocab" } else { "size" };
        format!(
            "pad {name} {size} to {padded}: {gain:.2}x (16-bit products need sizes that are multiples of 8)"
        )
    }))
}
