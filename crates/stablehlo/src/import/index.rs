//! Gather and scatter: rows of a table by ids, elements along a dimension by ids (`take_along_axis`), and their
//! derivatives. Several indices at once (`x[i, j]`) become one index into the merged dimensions. Other forms, such as
//! windows at computed positions, are opaque.

use super::{
    super::error::Result, Importer, ResolvedOperation, draft::Slot, reduce::body_function,
    value::SymbolicValue,
};
use shardwright_graph::{
    Shape,
    ops::{BinaryFn, Gather, PutAlong, ScatterAdd, Slice, TakeAlong},
};
use smallvec::SmallVec;

type List = SmallVec<[usize; 4]>;

/// The dimension numbers of a gather or scatter, in the terms of the gather.
struct DimensionNumbers {
    /// Dimensions of the gathered rows that come from the table.
    offsets: List,
    /// Dimensions of the table of which one element is taken.
    collapsed: List,
    table_batch: List,
    ids_batch: List,
    /// The table's dimension that each component of an index refers to.
    indexed: List,
    /// The dimension of the ids that holds an index's components; the rank of the ids if there is none.
    components: usize,
}

impl DimensionNumbers {
    /// `keys` are the names of the first four lists and of `indexed`; `rows` is the rank of the gathered rows.
    fn read(op: &ResolvedOperation<'_, '_>, name: &str, keys: [&str; 5], rows: usize) -> Result<Self> {
        let [table, ids] = [op.types[0].ty.rank(), op.types[1].ty.rank()];
        let list = |key: &str, rank: usize| op.dims(&op.field(name, key)?, rank);
        let components = op.field_int(name, "index_vector_dim")?;
        let components = usize::try_from(components).ok().filter(|&d| d <= ids);
        Ok(Self {
            offsets: list(keys[0], rows)?,
            collapsed: list(keys[1], table)?,
            table_batch: list(keys[2], table)?,
            ids_batch: list(keys[3], ids)?,
            indexed: list(keys[4], table)?,
            components: components
                .ok_or_else(|| op.error("`index_vector_dim` is not a dimension of the ids"))?,
        })
    }

    /// Whether single elements are taken along exactly the indexed dimensions, and the others are whole.
    fn takes_rows(&self) -> bool {
        let same = |a: &List, b: &List| a.len() == b.len() && a.iter().all(|d| b.contains(d));
        same(&self.collapsed, &self.indexed) && !self.indexed.is_empty()
    }
}

/// The correspondence between the program's rows and the op's.
enum GatherForm {
    /// Rows of a table along `axis`, for ids of any shape. `perm` permutes the op's rows to the program's.
    Rows { table: Shape, axis: usize, perm: List },
    /// Elements along `axis`. Ids are transposed by `order`, then reshaped to `merged`.
    Along { axis: usize, order: List, merged: Shape },
}

impl<'a> Importer<'a> {
    pub fn gather(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(2)?;
        const NAME: &str = "dimension_numbers";
        let keys = [
            "offset_dims",
            "collapsed_slice_dims",
            "operand_batching_dims",
            "start_indices_batching_dims",
            "start_index_map",
        ];
        let rows = op.result()?.ty.clone();
        let numbers = DimensionNumbers::read(op, NAME, keys, rows.rank())?;
        let table = op.types[0].ty.shape.clone();
        let sizes = op.ints("slice_sizes")?;
        let whole = |d: usize| sizes.get(d) == Some(&(table[d] as i64));
        let single = |d: usize| sizes.get(d) == Some(&1);
        let taken = |d: &usize| numbers.indexed.contains(d) || numbers.table_batch.contains(d);
        let fits = sizes.len() == table.rank()
            && (0..table.rank()).all(|d| if taken(&d) { single(d) } else { whole(d) });
        let form =
            if fits { form(&numbers, &table, &self.ids_shape(op, &numbers)?, rows.rank()) } else { None };
        let Some(form) = form else {
            return self.opaque(op, "gather", "this form of indexing is not supported");
        };
        let x = op.slot(0, &mut self.draft)?;
        let ids = self.ids(op, &numbers, &table)?;
        let made = match form {
            GatherForm::Rows { table, axis, perm } => {
                let x = self.draft.reshape(x, &table)?;
                let made = self.draft.one(Gather { axis, base: 0, extent: table[axis] }, &[x, ids])?;
                self.draft.transpose(made, &perm)?
            }
            GatherForm::Along { axis, order, merged } => {
                let ordered = self.draft.transpose(ids, &order)?;
                let ids = self.draft.reshape(ordered, &merged)?;
                let made = self.draft.one(TakeAlong { axis, base: 0, extent: table[axis] }, &[x, ids])?;
                let shape = self.draft.ty(ordered).shape.clone();
                let made = self.draft.reshape(made, &shape)?;
                self.draft.transpose(made, &inverse(&order))?
            }
        };
        Ok(vec![SymbolicValue::Tensor(made)])
    }

    pub fn scatter(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        if op.operands.len() != 3 {
            return self.opaque(op, "scatter", "it scatters several tensors at once");
        }
        const NAME: &str = "scatter_dimension_numbers";
        let keys = [
            "update_window_dims",
            "inserted_window_dims",
            "input_batching_dims",
            "scatter_indices_batching_dims",
            "scatter_dims_to_operand_dims",
        ];
        let rows = op.types[2].ty.clone();
        let numbers = DimensionNumbers::read(op, NAME, keys, rows.rank())?;
        let table = op.types[0].ty.shape.clone();
        // The windows of the rows must be whole, in the order of the table's other dimensions.
        let others: List = (0..table.rank())
            .filter(|d| !numbers.collapsed.contains(d) && !numbers.table_batch.contains(d))
            .collect();
        let fits = others.len() == numbers.offsets.len()
            && others.iter().zip(&numbers.offsets).all(|(&d, &o)| table[d] == rows.shape[o]);
        let adds = op.operation.regions.first().and_then(body_function) == Some(BinaryFn::Add);
        let form = if fits && adds && rows.dtype.is_float() {
            form(&numbers, &table, &self.ids_shape(op, &numbers)?, rows.rank())
        } else {
            None
        };
        let Some(form) = form else { return self.opaque(op, "scatter", "only sums into rows are supported") };
        let ids = self.ids(op, &numbers, &table)?;
        let from = op.slot(2, &mut self.draft)?;
        let added = match form {
            GatherForm::Rows { table: merged, axis, perm } => {
                let from = self.draft.transpose(from, &inverse(&perm))?;
                let extent = merged[axis];
                let added =
                    self.draft.one(ScatterAdd { axis, base: 0, extent, rows: extent }, &[ids, from])?;
                self.draft.reshape(added, &table)?
            }
            GatherForm::Along { axis, order, merged } => {
                let [ids, from] = [self.draft.transpose(ids, &order)?, self.draft.transpose(from, &order)?];
                let [ids, from] = [self.draft.reshape(ids, &merged)?, self.draft.reshape(from, &merged)?];
                self.draft
                    .one(PutAlong { axis, base: 0, extent: table[axis], rows: table[axis] }, &[ids, from])?
            }
        };
        if op.operands[0].splat() == Some(0.0) {
            return Ok(vec![SymbolicValue::Tensor(added)]);
        }
        Ok(vec![self.binary(BinaryFn::Add, &op.operands[0], &SymbolicValue::Tensor(added))?])
    }

    /// The shape of the ids without their components.
    fn ids_shape(&self, op: &ResolvedOperation<'_, 'a>, numbers: &DimensionNumbers) -> Result<Shape> {
        let shape = &op.types[1].ty.shape;
        // Without a dimension for components, each index has one.
        let count = shape.get(numbers.components).copied().unwrap_or(1);
        if count != numbers.indexed.len() as u64 {
            return Err(op.error(format!(
                "indices of {count} components do not fit {} dimensions",
                numbers.indexed.len()
            )));
        }
        Ok(shape.without(&[numbers.components]))
    }

    /// One id per index: several components index the merged dimensions.
    fn ids(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        numbers: &DimensionNumbers,
        table: &Shape,
    ) -> Result<Slot> {
        let shape = self.ids_shape(op, numbers)?;
        let ids = op.slot(1, &mut self.draft)?;
        if numbers.indexed.len() == 1 {
            return self.draft.reshape(ids, &shape);
        }
        let all = self.draft.ty(ids).shape.clone();
        let mut order: List = (0..numbers.indexed.len()).collect();
        order.sort_by_key(|&i| numbers.indexed[i]);
        let mut flat: Option<SymbolicValue> = None;
        for &component in &order {
            let one = Slice::along(numbers.components, component as u64, component as u64 + 1, &all);
            let part = self.draft.one(one, &[ids])?;
            let part = SymbolicValue::Tensor(self.draft.reshape(part, &shape)?);
            let size = table[numbers.indexed[component]] as f64;
            flat = Some(match flat {
                None => part,
                Some(before) => {
                    let size = SymbolicValue::constant(op.types[1].ty.dtype, shape.clone(), size);
                    let scaled = self.binary(BinaryFn::Mul, &before, &size)?;
                    self.binary(BinaryFn::Add, &scaled, &part)?
                }
            });
        }
        let flat = flat.ok_or_else(|| op.error("the indices have no components"))?;
        flat.slot(&mut self.draft)
    }
}

fn inverse(perm: &[usize]) -> List {
    let mut inverse: List = SmallVec::from_elem(0, perm.len());
    for (i, &p) in perm.iter().enumerate() {
        inverse[p] = i;
    }
    inverse
}

/// The form of an indexing whose slices are single elements along indexed dimensions and whole along others.
fn form(numbers: &DimensionNumbers, table: &Shape, ids: &Shape, rows: usize) -> Option<GatherForm> {
    if !numbers.takes_rows() {
        return None;
    }
    if numbers.table_batch.is_empty() {
        let mut indexed = numbers.indexed.clone();
        indexed.sort_unstable();
        let axis = indexed[0];
        // The other dimensions are the rows' offsets.
        if indexed.len() + numbers.offsets.len() != table.rank() {
            return None;
        }
        // Several indexed dimensions are merged, so they must be adjacent.
        if indexed.iter().enumerate().any(|(i, &d)| d != axis + i)
            || rows != ids.rank() + numbers.offsets.len()
        {
            return None;
        }
        let size = indexed.iter().map(|&d| table[d]).product();
        let after = axis + indexed.len();
        let merged: Shape = table[..axis].iter().chain(&[size]).chain(&table[after..]).copied().collect();
        // The op's rows: the table's dimensions before the axis, the ids', the table's after it.
        let (mut offsets, mut places) = (0, 0);
        let perm = (0..rows)
            .map(|p| {
                if numbers.offsets.contains(&p) {
                    offsets += 1;
                    if offsets <= axis { offsets - 1 } else { offsets - 1 + ids.rank() }
                } else {
                    places += 1;
                    axis + places - 1
                }
            })
            .collect();
        // Offsets in the rows follow the table's order only if they are listed in ascending order.
        return numbers.offsets.is_sorted().then_some(GatherForm::Rows { table: merged, axis, perm });
    }
    // Along a dimension: every other dimension is a batch dimension.
    let [axis] = numbers.indexed[..] else { return None };
    let batched =
        numbers.table_batch.len() + 1 == table.rank() && numbers.table_batch.len() == numbers.ids_batch.len();
    if !batched || !numbers.offsets.is_empty() || rows != ids.rank() {
        return None;
    }
    // The component dimension is included in the numbering of the ids' dimensions.
    let ids_dim = |d: usize| if d > numbers.components { d - 1 } else { d };
    let of_batch: List = numbers.ids_batch.iter().map(|&d| ids_dim(d)).collect();
    let free: List = (0..ids.rank()).filter(|d| !of_batch.contains(d)).collect();
    let mut order = List::new();
    let mut merged = Shape::default();
    for d in 0..table.rank() {
        if d == axis {
            order.extend(free.iter().copied());
            merged.0.push(free.iter().map(|&f| ids[f]).product());
        } else {
            let at = numbers.table_batch.iter().position(|&b| b == d)?;
            let from = *of_batch.get(at)?;
            if ids.get(from) != Some(&table[d]) {
                return None;
            }
            order.push(from);
            merged.0.push(ids[from]);
        }
    }
    (order.len() == ids.rank()).then_some(GatherForm::Along { axis, order, merged })
}
