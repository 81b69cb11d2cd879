//! Workloads worth measuring: those of the ops of given graphs, whole and split.

use shardwright_graph::{DType, FactorIndex, Graph, Op, OpId, Region, TensorType, Workload};
use std::collections::BTreeMap;

/// A workload with an op that has it, so that a kernel can be run to measure it.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The workload to measure.
    pub workload: Workload,
    /// An op of this workload.
    pub op: Op,
    /// Types of the op's inputs.
    pub inputs: Vec<TensorType>,
}

/// The most measurements of a class with a single size: they lie on a curve.
const CURVE_POINTS: usize = 64;

/// The key that measurements are stored by.
type Key = (&'static str, DType, Vec<u64>);

/// Collects distinct workloads.
#[derive(Default)]
pub struct WorkloadSet {
    samples: BTreeMap<Key, Sample>,
}

impl WorkloadSet {
    /// Adds the workloads of every op of a graph: whole, and with one or two factors split over up to `max_devices`
    /// devices, each by a power of two that divides it.
    pub fn add_graph(&mut self, graph: &Graph, max_devices: u64) {
        let mut seen = std::collections::BTreeSet::new();
        for id in graph.op_ids() {
            // Identical ops (deep models repeat themselves) have identical workloads.
            let node = graph.node(id);
            let text = format!("{:?} {:?}", node.op, graph.input_types(id));
            if seen.insert(text) {
                self.add_op(graph, id, max_devices);
            }
        }
    }

    fn add_op(&mut self, graph: &Graph, id: OpId, max_devices: u64) {
        let rule = graph.rule(id);
        let (inputs, outputs) = (graph.input_types(id), graph.output_types(id));
        let splits: Vec<(FactorIndex, u64)> = (0..rule.factors.len())
            .flat_map(|f| powers_of_two(max_devices).skip(1).map(move |parts| (f as FactorIndex, parts)))
            .filter(|&(f, parts)| rule.factors[f as usize].divides_into(parts))
            .collect();
        let mut add = |chosen: &[(FactorIndex, u64)]| {
            let mut region = Region::whole(&rule, &inputs, &outputs);
            for &(factor, parts) in chosen {
                region = region.split(factor, 0, parts);
            }
            let op = graph.node(id).op.operator().localize(&region);
            let types: Vec<TensorType> = inputs
                .iter()
                .enumerate()
                .map(|(i, t)| TensorType { dtype: t.dtype, shape: region.input_shape(i) })
                .collect();
            if let Ok(results) = op.operator().infer(&types) {
                let workload = op.workload(&types, &results);
                let key = (workload.class.name, workload.dtype, workload.sizes.to_vec());
                self.samples.entry(key).or_insert(Sample { workload, op, inputs: types });
            }
        };
        add(&[]);
        for (i, &first) in splits.iter().enumerate() {
            add(&[first]);
            for &second in splits[i + 1..].iter().filter(|s| s.0 != first.0 && s.1 * first.1 <= max_devices) {
                add(&[first, second]);
            }
        }
    }

    /// At most `per_table` workloads of each class and element type, evenly spaced. Classes with a single size need
    /// fewer: they lie on a curve.
    pub fn thinned(&self, per_table: usize) -> Vec<&Sample> {
        let mut tables: BTreeMap<(&str, DType), Vec<&Sample>> = BTreeMap::new();
        for ((class, dtype, _), sample) in &self.samples {
            tables.entry((class, *dtype)).or_default().push(sample);
        }
        let mut kept = Vec::new();
        for samples in tables.into_values() {
            let count = samples.len();
            let curve = samples[0].workload.sizes.len() == 1;
            let wanted = per_table.min(count).min(if curve { CURVE_POINTS } else { usize::MAX });
            // Ends included: the smallest and the largest bound the interpolation.
            kept.extend(
                (0..wanted).map(|i| samples[if wanted < 2 { 0 } else { i * (count - 1) / (wanted - 1) }]),
            );
        }
        kept
    }

    /// The number of distinct workloads.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }
}

fn powers_of_two(limit: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(1u64), move |n| n.checked_mul(2).filter(|&n| n <= limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{GraphBuilder, Init, Real, Role, ops::Contract};

    #[test]
    fn splits_by_powers_of_two_within_the_devices() {
        let mut b = GraphBuilder::new("m");
        let mut source = |name, shape: [u64; 2]| {
            b.source(name, TensorType::new(DType::F32, shape), Role::Input, Init::Normal(Real(1.0))).unwrap()
        };
        let (x, w) = (source("x", [4, 6]), source("w", [6, 3]));
        b.emit("y", Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
        let mut set = WorkloadSet::default();
        set.add_graph(&b.finish(), 4);
        let sizes: Vec<Vec<u64>> = set.thinned(100).iter().map(|s| s.workload.sizes.to_vec()).collect();
        // m = 4 by 1, 2, 4 and k = 6 by 1, 2, at most 4 parts in all; n = 3 cannot be halved.
        assert_eq!(sizes, [[1, 1, 3, 6], [1, 2, 3, 3], [1, 2, 3, 6], [1, 4, 3, 3], [1, 4, 3, 6]]);
        assert_eq!(set.thinned(2).len(), 2);
    }
}
