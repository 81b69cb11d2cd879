//! Stages of unequal numbers of blocks: embedding and head make the end stages longer, so they may take fewer blocks.
//!
//! The stage solver ([`shardwright_stages`]) divides the segments among the groups for the least 1F1B step, exactly. The
//! schedule's simulation then decides whether the step is shorter than with equal stages.

use super::{
    degrees::UniformPlan,
    pricer::{PricedUniform, UniformPricer},
    segment_costs::SegmentCost,
};
use crate::error::StrategyError;
use shardwright_machine::Bytes;
use shardwright_stages::schedule::Schedule;
use shardwright_stages::{
    ChainOracle, Control as StageControl, Limits, Objective, RangeCosts, RangeOption, Shape, solve,
};
use std::ops::Range;

/// One group of a uniform plan's devices.
const GROUP: Shape = Shape { tensor: 1, replicas: 1 };

/// The costs of ranges of segments.
struct SegmentRanges {
    segments: Vec<SegmentCost>,
    kinds: Vec<u32>,
}

impl RangeCosts for SegmentRanges {
    fn layers(&self) -> usize {
        self.segments.len()
    }

    fn kind(&self, layer: usize) -> u32 {
        self.kinds[layer]
    }

    fn families(&self) -> Vec<Vec<Shape>> {
        vec![vec![GROUP]]
    }

    fn options(&mut self, range: Range<usize>, _: Shape) -> Vec<RangeOption> {
        let own = &self.segments[range];
        let seconds = own.iter().map(|cost| cost.forward + cost.backward).sum();
        let transient = own.iter().map(|cost| cost.memory.transient).max().unwrap_or(0);
        let fixed: u64 = own.iter().map(|cost| cost.memory.fixed).sum();
        vec![RangeOption {
            seconds,
            lower_bound_seconds: seconds,
            bytes_per_micro_batch: own.iter().map(|cost| cost.memory.kept as f64).sum(),
            fixed_bytes: fixed.saturating_add(transient) as f64,
        }]
    }
}

/// The plan with the best division of its blocks among 1F1B stages; none where equal stages are as good.
///
/// # Errors
/// Where a stage cannot be simulated.
pub fn balanced(
    pricer: &UniformPricer<'_>,
    even: &PricedUniform,
    limit: Option<Bytes>,
) -> Result<Option<PricedUniform>, StrategyError> {
    let plan = UniformPlan { ..even.plan };
    if !matches!(plan.schedule, Schedule::OneForwardOneBackward | Schedule::ZbH1) || plan.pipeline < 2 {
        return Ok(None);
    }
    let segments = pricer.segments(&plan)?;
    let kinds = pricer.chain.segments.iter().map(|segment| segment.like).collect();
    let memory = limit.map_or(f64::MAX, |limit| limit.0 as f64);
    let mut oracle = ChainOracle::new(SegmentRanges { segments, kinds }, memory);
    let order = oracle.order();
    let limits = Limits { devices: plan.pipeline, replicas: plan.pipeline };
    let objective = Objective::Step { micro_batches: u64::from(plan.micro_batches) };
    let outcome = solve(&mut oracle, &order, limits, objective, &StageControl::default());
    let Some(stages) = outcome.stages.filter(|stages| stages.len() == plan.pipeline as usize) else {
        return Ok(None);
    };
    let mut ranges = Vec::with_capacity(stages.len());
    for stage in &stages {
        let (first, last) = (stage.option.layers.iter().min(), stage.option.layers.iter().max());
        let (Some(&first), Some(&last)) = (first, last) else { return Ok(None) };
        ranges.push(first as usize..last as usize + 1);
    }
    let priced = pricer.price_stages(&plan, &ranges, even.price.step_seconds)?;
    let fits = |own: &PricedUniform| limit.is_none_or(|limit| own.price.peak_memory <= limit.0);
    Ok(priced.filter(|own| own.price.step_seconds < even.price.step_seconds && fits(own)))
}
