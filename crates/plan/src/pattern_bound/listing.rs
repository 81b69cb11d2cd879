//! Lists the configs of a class of variables one by one, with what the bound needs of each.

use super::{
    features::{Features, features, group_by, main_use},
    held_memory::WantedSize,
    relaxation::{ClassConfigs, Group},
};
use crate::{compute_lower_bound::least_time, context::Context, op_times::OpTimes};
use shardwright_cost::{Comm, PatternTensor};
use shardwright_graph::OpId;
use shardwright_search::Control;
use shardwright_space::{Config, Endpoint, LayerSplit, configs};

/// An endpoint that stands for those of all variables of its class.
pub(super) struct EndExample {
    pub end: Endpoint,
    pub class: u32,
    pub member: u32,
    pub tensor: u32,
}

/// What the configs of all classes are listed with.
pub(super) struct Listing<'c, 'a> {
    pub context: &'c Context<'a>,
    pub times: &'c OpTimes<'c>,
    pub comm: Comm,
    /// Whether halo exchanges do not depend on the order of interchangeable axes.
    pub symmetric: bool,
    pub control: &'c Control<'c>,
}

/// The configs of a class.
pub(super) struct Listed {
    pub class: ClassConfigs,
    /// Per endpoint of the class: the pattern under each config.
    pub patterns: Vec<Vec<u32>>,
    /// Per size of the class: the bytes under each config.
    pub sizes: Vec<Vec<i64>>,
}

impl Listing<'_, '_> {
    /// All configs of a class, in large groups; none where the control stops, or a tensor has a layout without a pattern.
    pub fn listed(
        &self,
        split: &LayerSplit,
        ends: &[(&EndExample, Option<&PatternTensor>)],
        sizes: &[&WantedSize],
    ) -> Option<Listed> {
        let (shapes, mesh) = (&self.context.shapes, self.context.machine.mesh());
        if self.control.stop_by_time().is_some() {
            return None;
        }
        let leads = configs(&shapes[split.forward().index()].rule, mesh);
        let mut patterns: Vec<Vec<u32>> = vec![Vec::with_capacity(leads.len()); ends.len()];
        let mut bytes: Vec<Vec<i64>> = vec![Vec::with_capacity(leads.len()); sizes.len()];
        let mut costs = Vec::with_capacity(leads.len());
        for lead in &leads {
            let own = split.configs(shapes, mesh, lead);
            costs.push(split.ops.iter().zip(&own).map(|(&op, config)| self.cost(op, config)).sum());
            for ((end, tensor), patterns) in ends.iter().zip(&mut patterns) {
                let pattern = match tensor {
                    Some(tensor) => {
                        tensor.pattern(&end.end.layout(shapes, &own[end.member as usize], mesh))?
                    }
                    None => 0,
                };
                patterns.push(pattern);
            }
            for (size, bytes) in sizes.iter().zip(&mut bytes) {
                bytes.push(size.of(self.context, &own[size.member as usize]));
            }
        }
        let features: Vec<Features> = leads.iter().map(|lead| features(lead, mesh)).collect();
        let all: Vec<u32> = (0..leads.len() as u32).collect();
        let groups = group_by(&all, |config| {
            features[config as usize].iter().map(|own| main_use(*own)).collect::<Vec<_>>()
        });
        let class = ClassConfigs::new(features, costs, groups.into_iter().map(Group::of).collect());
        Some(Listed { class, patterns, sizes: bytes })
    }

    /// A class whose configs are not listed: one stands for all, which computes as little as any.
    pub fn free(
        &self,
        split: &LayerSplit,
        ends: &[(&EndExample, Option<&PatternTensor>)],
        sizes: &[&WantedSize],
    ) -> Listed {
        let runs = |op: OpId| i64::from(self.context.graph.runs(op));
        let least = |&op: &OpId| runs(op).saturating_mul(least_time(self.context, self.times, op));
        let devices = self.context.machine.mesh().devices();
        Listed {
            class: ClassConfigs::free(split.ops.iter().map(least).sum()),
            patterns: vec![vec![0]; ends.len()],
            sizes: sizes.iter().map(|size| vec![size.in_parts(devices)]).collect(),
        }
    }

    /// Picoseconds of computing and halo exchanges. Reductions of results that ops complete count as free.
    fn cost(&self, op: OpId, config: &Config) -> i64 {
        let halo = if self.symmetric { self.times.halo(&self.comm, op, config) } else { 0 };
        let runs = i64::from(self.context.graph.runs(op));
        runs.saturating_mul(self.times.compute(op, config) + halo)
    }
}
