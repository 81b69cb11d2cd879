//! Gather and scatter: rows of a table by ids, and elements along a dimension by ids (`take_along_axis`), with
//! their derivatives. Several indices at once (`x[i, j]`) become one into the merged dimensions. Other forms, such
//! as windows at computed places, are opaque.

use super::{super::error::Result, Importer, Reading, reduce::body_function, steps::Slot, value::Value};
use shardwright_graph::{
    Shape,
    ops::{BinaryFn, Gather, PutAlong, ScatterAdd, Slice, TakeAlong},
};
use smallvec::SmallVec;

type List = SmallVec<[usize; 4]>;

/// What a gather or scatter says about dimensions, in the words of the gather.
struct Numbers {
    /// Dimensions of the gathered rows that come from the table.
    offsets: List,
    /// Dimensions of the table of which one element is taken.
    collapsed: List,
    table_batch: List,
    ids_batch: List,
    /// The table's dimension that each component of an index counts along.
    indexed: List,
    /// The dimension of the ids that holds an index's components; their rank: there is none.
    components: usize,
}

impl Numbers {
    /// `keys` are the names of the first four lists and of `indexed`, `rows` the rank of the gathered rows.
    fn read(op: &Reading<'_, '_>, name: &str, keys: [&str; 5], rows: usize) -> Result<Self> {
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
                .ok_or_else(|| op.fault("`index_vector_dim` is not a dimension of the ids"))?,
        })
    }

    /// Whether exactly the indexed dimensions are taken by single elements, all others whole.
    fn takes_rows(&self) -> bool {
        let same = |a: &List, b: &List| a.len() == b.len() && a.iter().all(|d| b.contains(d));
        same(&self.collapsed, &self.indexed) && !self.indexed.is_empty()
    }
}

/// How the program's rows and ours lie.
enum Form {
    /// Rows of a table along `axis`, ids of any shape; `perm` takes our rows to the program's.
    Rows { table: Shape, axis: usize, perm: List },
    /// Elements along `axis`; ids ordered by `order` and then of shape `merged`.
    Along { axis: usize, order: List, merged: Shape },
}

impl<'a> Importer<'a> {
    pub fn gather(&mut self, op: &Reading<'_, 'a>) -> Result<Vec<Value>> {
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
        let numbers = Numbers::read(op, NAME, keys, rows.rank())?;
        let table = op.types[0].ty.shape.clone();
        let sizes = op.ints("slice_sizes")?;
        let whole = |d: usize| sizes.get(d) == Some(&(table[d] as i64));
        let single = |d: usize| sizes.get(d) == Some(&1);
        let taken = |d: &usize| numbers.indexed.contains(d) || numbers.table_batch.contains(d);
        let fits = sizes.len() == table.rank()
            && (0..table.rank()).all(|d| if taken(&d) { single(d) } else { whole(d) });
        let form =
            if fits { form(&numbers, &table, &self.ids_shape(op, &numbers)?, rows.rank()) } else { None };
        let Some(form) = form else { return self.opaque(op, "gather", "this form of indexing is not known") };
        let x = op.slot(0, &mut self.steps)?;
        let ids = self.ids(op, &numbers, &table)?;
        let made = match form {
            Form::Rows { table, axis, perm } => {
                let x = self.steps.reshape(x, &table)?;
                let made = self.steps.one(Gather { axis, base: 0, extent: table[axis] }, &[x, ids])?;
                self.steps.transpose(made, &perm)?
            }
            Form::Along { axis, order, merged } => {
                let ordered = self.steps.transpose(ids, &order)?;
                let ids = self.steps.reshape(ordered, &merged)?;
                let made = self.steps.one(TakeAlong { axis, base: 0, extent: table[axis] }, &[x, ids])?;
                let shape = self.steps.ty(ordered).shape.clone();
                let made = self.steps.reshape(made, &shape)?;
                self.steps.transpose(made, &inverse(&order))?
            }
        };
        Ok(vec![Value::Tensor(made)])
    }

    pub fn scatter(&mut self, op: &Reading<'_, 'a>) -> Result<Vec<Value>> {
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
        let numbers = Numbers::read(op, NAME, keys, rows.rank())?;
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
        let Some(form) = form else { return self.opaque(op, "scatter", "only sums into rows are known") };
        let ids = self.ids(op, &numbers, &table)?;
        let from = op.slot(2, &mut self.steps)?;
        let added = match form {
            Form::Rows { table: merged, axis, perm } => {
                let from = self.steps.transpose(from, &inverse(&perm))?;
                let extent = merged[axis];
                let added =
                    self.steps.one(ScatterAdd { axis, base: 0, extent, rows: extent }, &[ids, from])?;
                self.steps.reshape(added, &table)?
            }
            Form::Along { axis, order, merged } => {
                let [ids, from] = [self.steps.transpose(ids, &order)?, self.steps.transpose(from, &order)?];
                let [ids, from] = [self.steps.reshape(ids, &merged)?, self.steps.reshape(from, &merged)?];
                self.steps
                    .one(PutAlong { axis, base: 0, extent: table[axis], rows: table[axis] }, &[ids, from])?
            }
        };
        if op.operands[0].splat() == Some(0.0) {
            return Ok(vec![Value::Tensor(added)]);
        }
        Ok(vec![self.binary(BinaryFn::Add, &op.operands[0], &Value::Tensor(added))?])
    }

    /// The shape of the ids without their components.
    fn ids_shape(&self, op: &Reading<'_, 'a>, numbers: &Numbers) -> Result<Shape> {
        let shape = &op.types[1].ty.shape;
        let count = shape.get(numbers.components).copied().unwrap_or(1);
        if count != numbers.indexed.len() as u64 {
            return Err(
                op.fault(format!("indices of {count} components for {} dimensions", numbers.indexed.len()))
            );
        }
        Ok(shape.without(&[numbers.components]))
    }

    /// One id per index: several components count through the merged dimensions.
    fn ids(&mut self, op: &Reading<'_, 'a>, numbers: &Numbers, table: &Shape) -> Result<Slot> {
        let shape = self.ids_shape(op, numbers)?;
        let ids = op.slot(1, &mut self.steps)?;
        if numbers.indexed.len() == 1 {
            return self.steps.reshape(ids, &shape);
        }
        let all = self.steps.ty(ids).shape.clone();
        let mut order: List = (0..numbers.indexed.len()).collect();
        order.sort_by_key(|&i| numbers.indexed[i]);
        let mut flat: Option<Value> = None;
        for &component in &order {
            let one = Slice::along(numbers.components, component as u64, component as u64 + 1, &all);
            let part = self.steps.one(one, &[ids])?;
            let part = Value::Tensor(self.steps.reshape(part, &shape)?);
            let size = table[numbers.indexed[component]] as f64;
            flat = Some(match flat {
                None => part,
                Some(before) => {
                    let size = Value::constant(op.types[1].ty.dtype, shape.clone(), size);
                    let scaled = self.binary(BinaryFn::Mul, &before, &size)?;
                    self.binary(BinaryFn::Add, &scaled, &part)?
                }
            });
        }
        let flat = flat.ok_or_else(|| op.fault("indices without components"))?;
        flat.slot(&mut self.steps)
    }
}

fn inverse(perm: &[usize]) -> List {
    let mut inverse: List = SmallVec::from_elem(0, perm.len());
    for (i, &p) in perm.iter().enumerate() {
        inverse[p] = i;
    }
    inverse
}

/// The form of an indexing whose slices are single elements along the taken dimensions and whole along others.
fn form(numbers: &Numbers, table: &Shape, ids: &Shape, rows: usize) -> Option<Form> {
    if !numbers.takes_rows() {
        return None;
    }
    if numbers.table_batch.is_empty() {
        let mut indexed = numbers.indexed.clone();
        indexed.sort_unstable();
        let axis = indexed[0];
        // The others are the rows' offsets.
        if indexed.len() + numbers.offsets.len() != table.rank() {
            return None;
        }
        // Several indexed dimensions are merged, which needs them side by side.
        if indexed.iter().enumerate().any(|(i, &d)| d != axis + i)
            || rows != ids.rank() + numbers.offsets.len()
        {
            return None;
        }
        let size = indexed.iter().map(|&d| table[d]).product();
        let after = axis + indexed.len();
        let merged: Shape = table[..axis].iter().chain(&[size]).chain(&table[after..]).copied().collect();
        // Ours: the table's dimensions before the axis, the ids', the table's behind it.
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
        // Offsets in the rows follow the table's order only if they are listed rising.
        return numbers.offsets.is_sorted().then_some(Form::Rows { table: merged, axis, perm });
    }
    // Along a dimension: every other dimension is batched.
    let [axis] = numbers.indexed[..] else { return None };
    let batched =
        numbers.table_batch.len() + 1 == table.rank() && numbers.table_batch.len() == numbers.ids_batch.len();
    if !batched || !numbers.offsets.is_empty() || rows != ids.rank() {
        return None;
    }
    // The ids' dimensions are counted with their components among them.
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
    (order.len() == ids.rank()).then_some(Form::Along { axis, order, merged })
}
