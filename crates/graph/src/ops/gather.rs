//! Gather and scatter-add: rows of a table by their ids. Embeddings and their gradients.
//!
//! The table's rows may be split: a part holds rows `base..base + rows` of `extent`, gives zeros for ids of
//! other parts, and the parts add up. An id outside `0..extent` is an error in every part.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in, elements, row_scratch_bytes, same_float},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, Rule, TensorMap, dim_name},
    types::{DType, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// Takes the rows (positions along `axis`) of a table that ids name: `table[.., ids[..], ..]`.
///
/// Inputs: table, ids. The ids' dimensions take the place of the table's `axis`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gather {
    /// The table's dimension that ids count along.
    pub axis: usize,
    /// The id of the first row that this table holds (not zero in a part of a split).
    pub base: u64,
    /// How many rows the whole table has.
    pub extent: u64,
}

/// Adds rows up into a table of zeros, each at the row that its id names: the gradient of [`Gather`].
///
/// Inputs: ids, rows (shaped as the result of the gather).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScatterAdd {
    /// The table's dimension that ids count along.
    pub axis: usize,
    /// The id of the first row that this table holds (not zero in a part of a split).
    pub base: u64,
    /// How many rows the whole table has.
    pub extent: u64,
    /// How many rows this table holds.
    pub rows: u64,
}

/// Names of the factors of the ids' dimensions.
const ID_NAMES: [&str; 16] =
    ["i0", "i1", "i2", "i3", "i4", "i5", "i6", "i7", "i8", "i9", "i10", "i11", "i12", "i13", "i14", "i15"];

/// Refuses ids that are no whole numbers, and rows that the whole table does not have.
pub(super) fn check_rows(ids: &TensorType, base: u64, rows: u64, extent: u64) -> Result<(), OpError> {
    require!(ids.dtype.is_int(), "ids must be i32 or i64, not {}", ids.dtype);
    require!(
        rows > 0 && base.checked_add(rows).is_some_and(|end| end <= extent),
        "rows {base} to {base}+{rows} of a table of {extent}"
    );
    Ok(())
}

/// Bytes moved if ids (the second input) pick rows of a table (the first): only picked rows are read.
pub(super) fn picked_bytes(inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
    let written = outputs[0].bytes();
    let read = written.min(inputs[0].bytes());
    read.saturating_add(written).saturating_add(inputs[1].bytes())
}

/// The rule's factors, and the maps of table, ids and gathered rows. The table's dimensions are `d0`, `d1`,
/// ... except `axis`, which is `v`.
fn maps(table: &[u64], axis: usize, ids: &[u64], whole_rows: bool) -> (Rule, [TensorMap; 3]) {
    let mut rule = Rule::default();
    let rows = if whole_rows { rule.whole_factor("v", table[axis]) } else { rule.factor("v", table[axis]) };
    let ids =
        TensorMap::new(ids.iter().enumerate().map(|(i, &size)| DimMap::of(rule.factor(ID_NAMES[i], size))));
    let (mut of_table, mut gathered) = (TensorMap::default(), TensorMap::default());
    for (d, &size) in table.iter().enumerate() {
        if d == axis {
            of_table.dims.push(DimMap::of(rows));
            gathered.dims.extend(ids.dims.iter().cloned());
        } else {
            let dim = DimMap::of(rule.factor(dim_name(d), size));
            of_table.dims.push(dim.clone());
            gathered.dims.push(dim);
        }
    }
    (rule, [of_table, ids, gathered])
}

impl Operator for Gather {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let [table, ids] = [&inputs[0], &inputs[1]];
        axis_in(self.axis, table)?;
        check_rows(ids, self.base, table.shape[self.axis], self.extent)?;
        let (before, after) = (&table.shape[..self.axis], &table.shape[self.axis + 1..]);
        let shape: Shape = before.iter().chain(ids.shape.iter()).chain(after).copied().collect();
        Ok(vec![TensorType::new(table.dtype, shape)])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let [table, ids] = [&inputs[0], &inputs[1]];
        // Parts are summed, and truth values have no sum.
        let (mut rule, [table, ids, gathered]) =
            maps(&table.shape, self.axis, &ids.shape, table.dtype == DType::Bool);
        rule.inputs.extend([table, ids]);
        rule.outputs.push(gathered);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let rows = cx.input_type(0).shape[self.axis];
        let back = ScatterAdd { axis: self.axis, base: self.base, extent: self.extent, rows };
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
        Gather { base: self.base + part.start, ..self.clone() }.into()
    }
}

impl Operator for ScatterAdd {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let [ids, rows] = [&inputs[0], &inputs[1]];
        check_rows(ids, self.base, self.rows, self.extent)?;
        same_float(&inputs[1..])?;
        let end = self.axis.saturating_add(ids.rank());
        require!(
            end <= rows.rank() && rows.shape[self.axis..end] == *ids.shape,
            "{rows} does not have the dimensions of {ids} from dimension {} on",
            self.axis
        );
        let (before, after) = (&rows.shape[..self.axis], &rows.shape[end..]);
        let shape: Shape = before.iter().chain(&[self.rows]).chain(after).copied().collect();
        Ok(vec![TensorType::new(rows.dtype, shape)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let (mut rule, [table, ids, gathered]) = maps(&outputs[0].shape, self.axis, &inputs[0].shape, false);
        rule.inputs.extend([ids, gathered]);
        rule.outputs.push(table);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let back = Gather { axis: self.axis, base: self.base, extent: self.extent };
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
        let rows = part.end - part.start;
        ScatterAdd { base: self.base + part.start, rows, ..self.clone() }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Gather {
        fn golden() -> Golden {
            Golden::new(
                Gather { axis: 0, base: 0, extent: 100 },
                &["f32[100,6]", "i32[8,5]"],
                "([v, d1], [i0, i1])->([i0, i1, d1]) {v=100, i0=8, i1=5, d1=6} reduction={v}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let table = rng.shape(1, 3);
            let axis = rng.axis(&table);
            let ids_shape = rng.shape(0, 2);
            // Parts of a larger table too: some ids belong to others.
            let base = rng.between(0, 2);
            let extent = base + table[axis] + rng.between(0, 2);
            let ids = rng.ids(&ids_shape, extent);
            Case::new(Gather { axis, base, extent }, vec![f64s(&table[..]), ids])
        }
    }

    impl Examples for ScatterAdd {
        fn golden() -> Golden {
            Golden::new(
                ScatterAdd { axis: 0, base: 0, extent: 100, rows: 100 },
                &["i32[8,5]", "f32[8,5,6]"],
                "([i0, i1], [i0, i1, d1])->([v, d1]) {v=100, i0=8, i1=5, d1=6} reduction={i0, i1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let case_of_gather = Gather::case(rng);
            let types = case_of_gather.input_types();
            let gathered = case_of_gather.output_types().remove(0);
            let Op::Gather(Gather { axis, base, extent }) = case_of_gather.op else {
                unreachable!("the generator above makes gathers")
            };
            let op = ScatterAdd { axis, base, extent, rows: types[0].shape[axis] };
            Case::new(op, vec![case_of_gather.inputs[1].clone(), f64s(gathered.shape)])
        }
    }
}
