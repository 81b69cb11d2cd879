//! Take and put along a dimension: each row of ids picks from, or adds to, the same row of the tensor. NumPy calls it
//! `take_along_axis`, ONNX `GatherElements`. It picks, for example, the log-probability of each sample's label.
//!
//! As with [`crate::ops::Gather`], the dimension may be split: a part holds positions `base..base + rows` of
//! `extent`, gives zeros for ids of other parts, and the parts add up. An id outside `0..extent` is an error
//! in every part.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in, elements, row_scratch_bytes, same_float},
    ops::{
        Op,
        gather::{check_rows, picked_bytes},
    },
    region::Region,
    require,
    rule::{DimMap, Rule, TensorMap, dim_name},
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// `y[.., i, ..] = x[.., ids[.., i, ..], ..]` along `axis`. Inputs: x, ids; all other dimensions agree.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeAlong {
    /// The dimension that ids count along.
    pub axis: usize,
    /// The id of the first position that this tensor holds (not zero in a part of a split).
    pub base: u64,
    /// How many positions the whole tensor has.
    pub extent: u64,
}

/// Adds each element up at the position that its id names, in a tensor of zeros: the gradient of
/// [`TakeAlong`]. Inputs: ids, elements (of the same shape).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PutAlong {
    /// The dimension that ids count along.
    pub axis: usize,
    /// The id of the first position that this tensor holds (not zero in a part of a split).
    pub base: u64,
    /// How many positions the whole tensor has.
    pub extent: u64,
    /// How many positions this tensor holds.
    pub rows: u64,
}

/// Factors, and the maps of the tensor and of the ids.
fn maps(tensor: &[u64], ids: &[u64], axis: usize, whole_rows: bool) -> (Rule, [TensorMap; 2]) {
    let mut rule = Rule::default();
    let (mut of_tensor, mut of_ids) = (TensorMap::default(), TensorMap::default());
    for (d, &size) in tensor.iter().enumerate() {
        if d == axis {
            let rows = if whole_rows { rule.whole_factor("v", size) } else { rule.factor("v", size) };
            of_tensor.dims.push(DimMap::of(rows));
            of_ids.dims.push(DimMap::of(rule.factor("i", ids[d])));
        } else {
            let dim = DimMap::of(rule.factor(dim_name(d), size));
            of_tensor.dims.push(dim.clone());
            of_ids.dims.push(dim);
        }
    }
    (rule, [of_tensor, of_ids])
}

impl Operator for TakeAlong {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let [x, ids] = [&inputs[0], &inputs[1]];
        axis_in(self.axis, x)?;
        check_rows(ids, self.base, x.shape[self.axis], self.extent)?;
        let fits =
            x.rank() == ids.rank() && (0..x.rank()).all(|d| d == self.axis || x.shape[d] == ids.shape[d]);
        require!(fits, "{x} and {ids} differ in a dimension other than {}", self.axis);
        Ok(vec![TensorType::new(x.dtype, ids.shape.clone())])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        // Parts are summed, and truth values have no sum.
        let whole = inputs[0].dtype == DType::Bool;
        let (mut rule, [x, ids]) = maps(&inputs[0].shape, &inputs[1].shape, self.axis, whole);
        rule.inputs.extend([x, ids.clone()]);
        rule.outputs.push(ids);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let rows = cx.input_type(0).shape[self.axis];
        let back = PutAlong { axis: self.axis, base: self.base, extent: self.extent, rows };
        let ids = cx.input(1);
        Ok(vec![Some(cx.emit(back, &[ids, dy])?), None])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        picked_bytes(inputs, outputs)
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        row_scratch_bytes(inputs)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let part = region.part("v", region.inputs[0].shape[self.axis]);
        TakeAlong { base: self.base + part.start, ..self.clone() }.into()
    }
}

impl Operator for PutAlong {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let [ids, from] = [&inputs[0], &inputs[1]];
        axis_in(self.axis, ids)?;
        check_rows(ids, self.base, self.rows, self.extent)?;
        same_float(&inputs[1..])?;
        require!(ids.shape == from.shape, "{ids} and {from} differ in shape");
        let mut shape = ids.shape.clone();
        shape.0[self.axis] = self.rows;
        Ok(vec![TensorType::new(from.dtype, shape)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let (mut rule, [x, ids]) = maps(&outputs[0].shape, &inputs[0].shape, self.axis, false);
        rule.inputs.extend([ids.clone(), ids]);
        rule.outputs.push(x);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let back = TakeAlong { axis: self.axis, base: self.base, extent: self.extent };
        let ids = cx.input(0);
        Ok(vec![None, Some(cx.emit(back, &[dy, ids])?)])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[1])
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        row_scratch_bytes(inputs)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let part = region.part("v", self.rows);
        PutAlong { base: self.base + part.start, rows: part.end - part.start, ..self.clone() }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for PutAlong {
        fn golden() -> Golden {
            Golden::new(
                PutAlong { axis: 1, base: 0, extent: 100, rows: 100 },
                &["i32[8,5]", "f32[8,5]"],
                "([d0, i], [d0, i])->([d0, v]) {d0=8, v=100, i=5} reduction={i}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let taken = TakeAlong::case(rng);
            let Op::TakeAlong(TakeAlong { axis, base, extent }) = taken.op else {
                unreachable!("the generator above takes")
            };
            let rows = taken.inputs[0].0.shape[axis];
            let from = f64s(taken.inputs[1].0.shape.clone());
            Case::new(PutAlong { axis, base, extent, rows }, vec![taken.inputs[1].clone(), from])
        }
    }

    impl Examples for TakeAlong {
        fn golden() -> Golden {
            Golden::new(
                TakeAlong { axis: 1, base: 0, extent: 100 },
                &["f32[8,100]", "i32[8,5]"],
                "([d0, v], [d0, i])->([d0, i]) {d0=8, v=100, i=5} reduction={v}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 3);
            let axis = rng.axis(&shape);
            let base = rng.between(0, 2);
            let extent = base + shape[axis] + rng.between(0, 2);
            let mut width = shape.clone();
            width[axis] = rng.size();
            let ids = rng.ids(&width, extent);
            Case::new(TakeAlong { axis, base, extent }, vec![f64s(&shape[..]), ids])
        }
    }
}
