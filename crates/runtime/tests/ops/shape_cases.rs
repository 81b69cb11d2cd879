//! Generators of the op kinds that move elements, look up ids or run along a dimension.

use crate::{
    case::{Case, Rng},
    cases::{case, f64s},
};
use shardwright_graph::{
    DType, Dims, Init, Real, Shape, TensorType,
    ops::{
        Concat, Cumsum, DynamicSlice, DynamicUpdate, Gather, Lstm, LstmGrad, OneHot, Pad, PutAlong, Reverse,
        ScatterAdd, Slice, Sort, TakeAlong, TopK, TopKMask, Transpose, TransposeGrad,
    },
};
use smallvec::SmallVec;

fn axis(rng: &mut Rng, shape: &[u64]) -> usize {
    rng.between(0, shape.len() as u64 - 1) as usize
}

pub fn concat(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 4);
    let axis = axis(rng, &shape);
    let inputs = (0..rng.between(1, 4)).map(|_| {
        let mut shape = shape.clone();
        shape[axis] = rng.size();
        f64s(&shape[..])
    });
    case(Concat { axis }, inputs.collect())
}

pub fn cumsum(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 4);
    let op = Cumsum { axis: axis(rng, &shape), exclusive: rng.flip(), reverse: rng.flip() };
    case(op, vec![f64s(&shape[..])])
}

fn ids(rng: &mut Rng, shape: &[u64], below: u64) -> (TensorType, Init) {
    (TensorType::new(rng.pick(&[DType::I32, DType::I64]), shape), Init::Below(below))
}

pub fn gather(rng: &mut Rng) -> Case {
    let table = rng.shape(1, 3);
    let axis = axis(rng, &table);
    let ids_shape = rng.shape(0, 2);
    // Parts of a larger table too: some ids belong to others.
    let base = rng.between(0, 2);
    let extent = base + table[axis] + rng.between(0, 2);
    let ids = ids(rng, &ids_shape, extent);
    case(Gather { axis, base, extent }, vec![f64s(&table[..]), ids])
}

pub fn scatter_add(rng: &mut Rng) -> Case {
    let case_of_gather = gather(rng);
    let types = case_of_gather.input_types();
    let gathered = case_of_gather.output_types().remove(0);
    let shardwright_graph::Op::Gather(Gather { axis, base, extent }) = case_of_gather.op else {
        unreachable!("the generator above makes gathers")
    };
    let op = ScatterAdd { axis, base, extent, rows: types[0].shape[axis] };
    case(op, vec![case_of_gather.inputs[1].clone(), f64s(gathered.shape)])
}

pub fn lstm(rng: &mut Rng) -> Case {
    let (t, b, h) = (rng.pick(&[1, 1, 3]), rng.size(), rng.size());
    case(Lstm {}, vec![f64s([t, b, 4, h]), f64s([h, 4, h]), f64s([b, h]), f64s([b, h])])
}

pub fn lstm_grad(rng: &mut Rng) -> Case {
    let (t, b, h) = (rng.pick(&[1, 1, 3]), rng.size(), rng.size());
    let (dy, dc) = rng.pick(&[(true, false), (false, true), (true, true)]);
    let mut inputs = vec![f64s([h, 4, h]), f64s([b, h]), f64s([b, h])];
    inputs.extend([f64s([t, b, h]), f64s([t, b, h]), f64s([t, b, 4, h])]);
    inputs.extend((0..usize::from(dy) + usize::from(dc)).map(|_| f64s([t, b, h])));
    case(LstmGrad { dy, dc }, inputs)
}

pub fn one_hot(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 3);
    let dtype = rng.pick(&[DType::F64, DType::F32, DType::I32, DType::I64]);
    let (depth, base) = (rng.size(), rng.between(0, 2));
    let ids = ids(rng, &shape, depth + 4);
    case(OneHot { depth, base, dtype }, vec![ids])
}

pub fn pad(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 4);
    let rank = shape.len();
    let [mut low, mut high, mut interior] = [0; 3].map(|n: u64| Dims::from_elem(n, rank));
    for d in 0..rank {
        if rng.flip() {
            (low[d], high[d], interior[d]) = (rng.between(0, 2), rng.between(0, 2), rng.between(0, 2));
        }
    }
    case(Pad { low, high, interior, value: Real(0.5) }, vec![f64s(&shape[..])])
}

pub fn slice(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 4);
    let mut op = Slice::all(&shape);
    for (d, &size) in shape.iter().enumerate() {
        if rng.flip() {
            op.start[d] = rng.between(0, size - 1);
            op.limit[d] = rng.between(op.start[d] + 1, size);
            op.stride[d] = rng.between(1, 3);
        }
    }
    case(op, vec![f64s(&shape[..])])
}

pub fn top_k_mask(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 3);
    let k = rng.between(1, shape[shape.len() - 1]);
    case(TopKMask { k }, vec![f64s(&shape[..])])
}

fn order(rng: &mut Rng, rank: usize) -> SmallVec<[usize; 4]> {
    let mut perm: SmallVec<[usize; 4]> = (0..rank).collect();
    for i in 1..rank {
        perm.swap(i, rng.between(0, i as u64) as usize);
    }
    perm
}

pub fn transpose(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 5);
    case(Transpose { perm: order(rng, shape.len()) }, vec![f64s(&shape[..])])
}

pub fn transpose_grad(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 5);
    case(TransposeGrad { perm: order(rng, shape.len()) }, vec![f64s(Shape::new(&shape))])
}

/// A tensor, the sizes of a box in it, and starts, some of which put the box past the end.
fn boxed(rng: &mut Rng) -> (Vec<u64>, Vec<u64>, Vec<(TensorType, Init)>) {
    let shape = rng.shape(1, 4);
    let sizes = shape.iter().map(|&n| if rng.flip() { n } else { rng.between(1, n) }).collect();
    let starts = shape.iter().map(|&n| ids(rng, &[], n)).collect();
    (shape, sizes, starts)
}

pub fn dynamic_slice(rng: &mut Rng) -> Case {
    let (shape, sizes, starts) = boxed(rng);
    let inputs = std::iter::once(f64s(&shape[..])).chain(starts).collect();
    case(DynamicSlice { sizes: sizes.into() }, inputs)
}

pub fn dynamic_update(rng: &mut Rng) -> Case {
    let (shape, sizes, starts) = boxed(rng);
    case(DynamicUpdate {}, [f64s(&shape[..]), f64s(&sizes[..])].into_iter().chain(starts).collect())
}

pub fn take_along(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 3);
    let axis = axis(rng, &shape);
    let base = rng.between(0, 2);
    let extent = base + shape[axis] + rng.between(0, 2);
    let mut width = shape.clone();
    width[axis] = rng.size();
    let ids = ids(rng, &width, extent);
    case(TakeAlong { axis, base, extent }, vec![f64s(&shape[..]), ids])
}

pub fn put_along(rng: &mut Rng) -> Case {
    let taken = take_along(rng);
    let shardwright_graph::Op::TakeAlong(TakeAlong { axis, base, extent }) = taken.op else {
        unreachable!("the generator above takes")
    };
    let rows = taken.inputs[0].0.shape[axis];
    let from = f64s(taken.inputs[1].0.shape.clone());
    case(PutAlong { axis, base, extent, rows }, vec![taken.inputs[1].clone(), from])
}

pub fn reverse(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 4);
    let axes = (0..shape.len()).filter(|_| rng.between(0, 2) == 0).collect();
    case(Reverse { axes }, vec![f64s(&shape[..])])
}

pub fn sort(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 3);
    let axis = axis(rng, &shape);
    // Few different keys, so that ties are met.
    let keys = (TensorType::new(DType::I64, &shape[..]), Init::Below(4));
    let inputs = if rng.flip() { vec![f64s(&shape[..])] } else { vec![keys, f64s(&shape[..])] };
    case(Sort { axis, descending: rng.flip() }, inputs)
}

pub fn top_k(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 3);
    let k = rng.between(1, shape[shape.len() - 1]);
    case(TopK { k }, vec![f64s(&shape[..])])
}
