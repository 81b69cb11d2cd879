//! Slices at a computed position: a box of a tensor, or a tensor with a box replaced, from given starts.
//!
//! Starts are integers, one scalar per dimension. A start that would put the box past an end is moved to the nearest
//! position where the box fits, as in StableHLO. Dimensions that the box covers fully may be split.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator},
    ops::Op,
    region::Region,
    require,
    rule::{Rule, TensorMap},
    types::{Dims, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// The box of `sizes` at the given position. Inputs: tensor, one start per dimension.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicSlice {
    /// The box's sizes.
    pub sizes: Dims,
}

/// The tensor with the box at the given position replaced. Inputs: tensor, box, one start per dimension.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicUpdate {}

/// Checks that the starts fit the tensor, and the box too.
fn check(x: &TensorType, sizes: &[u64], starts: &[TensorType]) -> Result<(), OpError> {
    require!(sizes.len() == x.rank(), "a box of rank {} in {x}", sizes.len());
    for (d, (&size, &whole)) in sizes.iter().zip(x.shape.iter()).enumerate() {
        require!((1..=whole).contains(&size), "a box of {size} does not fit dimension {d} of {x}");
    }
    require!(starts.len() == x.rank(), "{} starts for {x}", starts.len());
    for start in starts {
        require!(start.dtype.is_int() && start.rank() == 0, "a start must be one whole number, not {start}");
    }
    Ok(())
}

/// The rule's factors, and the map of both tensor and box.
fn maps(x: &Shape, sizes: &[u64]) -> (Rule, TensorMap) {
    Rule::over_dims_where(x, |d| sizes.get(d) == Some(&x[d]))
}

impl Operator for DynamicSlice {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(!inputs.is_empty(), "takes a tensor and its starts");
        check(&inputs[0], &self.sizes, &inputs[1..])?;
        Ok(vec![TensorType::new(inputs[0].dtype, self.sizes.iter().copied().collect::<Shape>())])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let (mut rule, map) = maps(&inputs[0].shape, &self.sizes);
        rule.inputs.push(map.clone());
        rule.inputs.extend(inputs[1..].iter().map(|_| TensorMap::default()));
        rule.outputs.push(map);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let count = cx.inputs().len();
        let mut grads = vec![None; count];
        let Some(dy) = cx.grad(0) else { return Ok(grads) };
        let ty = cx.input_type(0).clone();
        let zeros = cx.zeros(ty)?;
        let operands: Vec<TensorId> =
            [zeros, dy].into_iter().chain((1..count).map(|i| cx.input(i))).collect();
        grads[0] = Some(cx.emit(DynamicUpdate {}, &operands)?);
        Ok(grads)
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    /// Reads only the box.
    fn bytes(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        outputs[0].bytes().saturating_mul(2)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        DynamicSlice { sizes: region.output_shape(0).0 }.into()
    }
}

impl Operator for DynamicUpdate {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(inputs.len() >= 2, "takes a tensor, a box and its starts");
        let (x, part) = (&inputs[0], &inputs[1]);
        require!(x.dtype == part.dtype, "element types differ: {} and {}", x.dtype, part.dtype);
        check(x, &part.shape, &inputs[2..])?;
        Ok(vec![x.clone()])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let (mut rule, map) = maps(&inputs[0].shape, &inputs[1].shape);
        rule.inputs.extend([map.clone(), map.clone()]);
        rule.inputs.extend(inputs[2..].iter().map(|_| TensorMap::default()));
        rule.outputs.push(map);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let count = cx.inputs().len();
        let mut grads = vec![None; count];
        let Some(dy) = cx.grad(0) else { return Ok(grads) };
        let part = cx.input_type(1).clone();
        let starts: Vec<TensorId> = (2..count).map(|i| cx.input(i)).collect();
        let with_starts = |first: &[TensorId]| first.iter().chain(&starts).copied().collect::<Vec<_>>();
        if cx.wants(0) {
            let zeros = cx.zeros(part.clone())?;
            grads[0] = Some(cx.emit(DynamicUpdate {}, &with_starts(&[dy, zeros]))?);
        }
        if cx.wants(1) {
            grads[1] = Some(cx.emit(DynamicSlice { sizes: part.shape.0 }, &with_starts(&[dy]))?);
        }
        Ok(grads)
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    /// Writes only the box: engines update in place if no other op reads the tensor.
    fn bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        inputs[1].bytes().saturating_mul(2)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        graph::Init,
    };
    use smallvec::smallvec;

    /// A tensor, the sizes of a box in it, and starts, some of which put the box past the end.
    fn boxed(rng: &mut Rng) -> (Vec<u64>, Vec<u64>, Vec<(TensorType, Init)>) {
        let shape = rng.shape(1, 4);
        let sizes = shape.iter().map(|&n| if rng.flip() { n } else { rng.between(1, n) }).collect();
        let starts = shape.iter().map(|&n| rng.ids(&[], n)).collect();
        (shape, sizes, starts)
    }

    impl Examples for DynamicSlice {
        fn golden() -> Golden {
            Golden::new(
                DynamicSlice { sizes: smallvec![8, 2] },
                &["f32[8,6]", "i32[]", "i32[]"],
                "([d0, _], [], [])->([d0, _]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, sizes, starts) = boxed(rng);
            let inputs = std::iter::once(f64s(&shape[..])).chain(starts).collect();
            Case::new(DynamicSlice { sizes: sizes.into() }, inputs)
        }
    }

    impl Examples for DynamicUpdate {
        fn golden() -> Golden {
            Golden::new(
                DynamicUpdate {},
                &["f32[8,6]", "f32[8,2]", "i32[]", "i32[]"],
                "([d0, _], [d0, _], [], [])->([d0, _]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (shape, sizes, starts) = boxed(rng);
            Case::new(
                DynamicUpdate {},
                [f64s(&shape[..]), f64s(&sizes[..])].into_iter().chain(starts).collect(),
            )
        }
    }
}
