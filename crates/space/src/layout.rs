//! Layouts of an op's operands and results under its config.
//!
//! An axis that splits a factor shards the dimension that the factor leads. An output without the factor is a partial
//! result; an input without it is needed whole, unless its rule takes partial sums along the factor. An axis that pins the op leaves its tensors on one digit only. An input
//! read through a window is stored in equal blocks like any other. Rows that windows read beyond their block are
//! fetched from the devices that store them ([`crate::halos`]). If such an input does not divide into equal blocks, it
//! is needed whole.

use crate::config::{AxisUse, Config};
use shardwright_cost::{Layout, Placement, Reduction};
use shardwright_graph::{Graph, OpId, Rule, TensorMap, TensorType};
use shardwright_machine::{AxisId, Mesh};
use smallvec::SmallVec;

/// An op's sharding rule and tensor types, inferred once.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct OpShapes {
    /// The sharding rule.
    pub rule: Rule,
    /// Types of the inputs.
    pub inputs: SmallVec<[TensorType; 4]>,
    /// Types of the outputs.
    pub outputs: SmallVec<[TensorType; 4]>,
}

impl OpShapes {
    /// The rule and types of an op in a graph.
    pub fn of(graph: &Graph, op: OpId) -> Self {
        Self { rule: graph.rule(op), inputs: graph.input_types(op), outputs: graph.output_types(op) }
    }
}

/// The layout in which an op needs its `i`-th input.
pub fn input_layout(shapes: &OpShapes, i: usize, config: &Config, mesh: &Mesh) -> Layout {
    let (map, ty) = (&shapes.rule.inputs[i], &shapes.inputs[i]);
    layout(&shapes.rule, map, ty, config, mesh, Placement::Replicated)
}

/// The layout in which an op leaves its `o`-th output. Results that the op reduces itself ([`crate::completion`]) are complete.
pub fn output_layout(shapes: &OpShapes, o: usize, config: &Config, mesh: &Mesh) -> Layout {
    let (map, ty) = (&shapes.rule.outputs[o], &shapes.outputs[o]);
    let without = match map.reduction {
        Reduction::LogSumExp => Placement::Replicated,
        kind => Placement::Partial(kind),
    };
    layout(&shapes.rule, map, ty, config, mesh, without)
}

/// The layout of an op's `o`-th output before the op reduces any result itself.
pub(crate) fn part_layout(shapes: &OpShapes, o: usize, config: &Config, mesh: &Mesh) -> Layout {
    let (map, ty) = (&shapes.rule.outputs[o], &shapes.outputs[o]);
    layout(&shapes.rule, map, ty, config, mesh, Placement::Partial(map.reduction))
}

fn layout(
    rule: &Rule,
    map: &TensorMap,
    ty: &TensorType,
    config: &Config,
    mesh: &Mesh,
    without: Placement,
) -> Layout {
    let mut layout = Layout::replicated(mesh.len());
    let mut blocks: SmallVec<[u64; 8]> = SmallVec::from_elem(1, ty.rank());
    for (at, (used, axis)) in config.uses().iter().zip(mesh.axes()).enumerate() {
        let placement = match *used {
            AxisUse::Replicate => Placement::Replicated,
            AxisUse::Pin(digit) => Placement::Absent(digit),
            AxisUse::Split(factor) if map.partial == Some(factor) => Placement::Partial(Reduction::Sum),
            AxisUse::Split(factor) => match map.dim_led_by(factor, rule) {
                None => without,
                Some(dim) => {
                    let finer = blocks[dim] * u64::from(axis.size);
                    // Only a windowed dimension may fail to divide: other dimensions are multiples of their leading
                    // factor.
                    if ty.shape[dim].is_multiple_of(finer) {
                        blocks[dim] = finer;
                        Placement::Shard(dim as u8)
                    } else {
                        Placement::Replicated
                    }
                }
            },
        };
        layout = layout.with(AxisId(at as u32), placement);
    }
    layout
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::configs;
    use proptest::prelude::*;
    use shardwright_cost::TensorShape;
    use shardwright_graph::{DType, Op, ops::Contract};
    use shardwright_machine::builtin;

    fn shapes(op: Op, inputs: &[&[u64]]) -> OpShapes {
        let inputs: SmallVec<[TensorType; 4]> =
            inputs.iter().map(|s| TensorType::new(DType::F32, *s)).collect();
        let outputs: SmallVec<[TensorType; 4]> = op.operator().infer(&inputs).unwrap().into();
        OpShapes { rule: op.rule(&inputs, &outputs), inputs, outputs }
    }

    pub(crate) fn conv(size: u64, kernel: u64, stride: u64, pad: u64) -> OpShapes {
        let op = shardwright_graph::ops::Conv {
            geometry: shardwright_graph::ops::ConvGeometry {
                stride: [stride; 2].into_iter().collect(),
                pad: [(pad as i64, pad as i64); 2].into_iter().collect(),
                dilation: [1; 2].into_iter().collect(),
                groups: 1,
            },
        };
        shapes(op.into(), &[&[4, 2, size, size], &[8, 2, kernel, kernel]])
    }

    #[test]
    fn a_product_shards_replicates_and_sums() {
        let mesh = builtin("flat:2").unwrap().mesh().clone();
        let s = shapes(Contract::parse("mk,kn->mn").unwrap().into(), &[&[4, 6], &[6, 8]]);
        let check = |factor: &str, expected: [&str; 3]| {
            let config = Config::new([AxisUse::Split(s.rule.find(factor).unwrap())]);
            let found = [
                input_layout(&s, 0, &config, &mesh),
                input_layout(&s, 1, &config, &mesh),
                output_layout(&s, 0, &config, &mesh),
            ];
            assert_eq!(found.map(|l| format!("{l:?}")), expected.map(String::from), "{factor}");
        };
        check("m", ["S0", "R", "S0"]);
        check("n", ["R", "S1", "S1"]);
        check("k", ["S1", "S0", "P+"]);
    }

    #[test]
    fn a_pinned_op_leaves_its_tensors_on_one_side() {
        let mesh = builtin("flat:4").unwrap().mesh().clone();
        let s = shapes(Contract::parse("mk,kn->mn").unwrap().into(), &[&[4, 6], &[6, 8]]);
        let config = Config::new([AxisUse::Pin(1), AxisUse::Split(s.rule.find("k").unwrap())]);
        assert_eq!(format!("{:?}", input_layout(&s, 0, &config, &mesh)), "@1 S1");
        assert_eq!(format!("{:?}", output_layout(&s, 0, &config, &mesh)), "@1 P+");
    }

    proptest! {
        /// Every layout is valid for its tensor, whatever the config.
        #[test]
        fn every_layout_fits_its_tensor(sizes in prop::array::uniform3(1u64..13), image in 3u64..20, stride in 1u64..4) {
            let machine = builtin("flat:12").unwrap();
            let mesh = machine.mesh();
            let [m, k, n] = sizes;
            let product = shapes(Contract::parse("mk,kn->mn").unwrap().into(), &[&[m, k], &[k, n]]);
            for s in [product, conv(image, 3, stride, 1)] {
                for config in configs(&s.rule, mesh) {
                    let check = |ty: &TensorType, layout: &Layout| {
                        TensorShape::new(&ty.shape, 4).unwrap().check(mesh, layout)
                    };
                    for (i, ty) in s.inputs.iter().enumerate() {
                        prop_assert_eq!(check(ty, &input_layout(&s, i, &config, mesh)), Ok(()));
                    }
                    for (o, ty) in s.outputs.iter().enumerate() {
                        prop_assert_eq!(check(ty, &output_layout(&s, o, &config, mesh)), Ok(()));
                    }
                }
            }
        }
    }
}
