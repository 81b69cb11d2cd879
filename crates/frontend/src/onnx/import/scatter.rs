//! Putting elements where indices say.
//!
//! What is put is added up in a tensor of zeros, which has a gradient and may be split; elements of the data show through
//! where nothing was put. Where several elements are put in one place without being added up, ONNX leaves open what is
//! there.

use super::{
    Import,
    elementwise::{binary, number},
    gather::{flat_places, indices},
    movement::reshaped_view,
};
use crate::onnx::{
    align::elementwise,
    error::{Tried, Trouble},
    fold::axis_of,
    importer::Importer,
    literal::Literal,
    proto::Node,
    stored::MOST_FOLDED,
    view::View,
};
use shardwright_graph::{
    DType, Dims, Op, Real, TensorId, TensorType,
    ops::{BinaryFn, Cast, Compare, CompareFn, Fill, Pad, PutAlong, ScatterAdd, Select},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "ScatterElements" => scatter_elements,
        "ScatterND" => scatter_nd,
        _ => return None,
    })
}

/// How elements that are put join those that are there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Joined {
    Replaced,
    Added,
}

impl Joined {
    fn of(node: &Node) -> Tried<Self> {
        match node.text("reduction", "none")?.as_str() {
            "none" => Ok(Self::Replaced),
            "add" => Ok(Self::Added),
            other => Err(Trouble::unsupported(format!("reduction `{other}`"))),
        }
    }
}

/// Adds elements up at the places that ids name; elements that are no floats pass as such.
fn put(cx: &mut Importer<'_>, what: &str, op: impl Into<Op>, ids: TensorId, values: &View) -> Tried<View> {
    let dtype = cx.dtype(values);
    let mut values = cx.plain(values)?;
    if !dtype.is_float() {
        values = cx.emit("as_float", Cast { dtype: DType::F64 }, &[values])?;
    }
    let mut sums = cx.emit(what, op, &[ids, values])?;
    if !dtype.is_float() {
        sums = cx.emit("as_whole", Cast { dtype }, &[sums])?;
    }
    Ok(cx.seen(sums))
}

/// Where ids put something: the number of them is not zero.
fn touched(cx: &mut Importer<'_>, op: impl Into<Op>, ids: TensorId) -> Tried<View> {
    let ty = TensorType::new(DType::F32, cx.b.ty(ids).shape.clone());
    let ones = cx.emit("ones", Fill { value: Real(1.0), ty }, &[])?;
    let count = cx.emit("count", op, &[ids, ones])?;
    Ok(cx.seen(count))
}

fn is_positive(cx: &mut Importer<'_>, count: &View) -> Tried<View> {
    let zero = number(cx, "zero", DType::F32, 0.0)?;
    elementwise(cx, "is_put", Compare { f: CompareFn::Gt }, &[count.clone(), zero])
}

fn joined(cx: &mut Importer<'_>, data: &View, sums: View, is_put: Option<View>) -> Tried<View> {
    match is_put {
        None => binary(cx, "", BinaryFn::Add, data, &sums),
        Some(is_put) => elementwise(cx, "", Select {}, &[is_put, sums, data.clone()]),
    }
}

/// Rows that are named by several coordinates each.
fn scatter_nd(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let how = Joined::of(node)?;
    let (x, updates) = (cx.view(node, 0)?, cx.view(node, 2)?);
    let shape = x.shape();
    let ids = match cx.literal(node, 1)? {
        Some(literal) => literal.shape.clone(),
        None => cx.view(node, 1)?.shape(),
    };
    let coordinates = ids.last().map(|&k| k as usize).filter(|&k| k <= shape.len());
    let k = coordinates.ok_or_else(|| Trouble::wrong(format!("indices {ids:?} into {shape:?}")))?;
    let expected = [&ids[..ids.len() - 1], &shape[k..]].concat();
    if updates.shape() != expected {
        return Err(Trouble::wrong(format!("updates {:?} where {expected:?} are needed", updates.shape())));
    }
    let (places, known) = flat_places(cx, node, &shape[..k], 0)?;
    let rows: u64 = shape[..k].iter().product();
    let table = reshaped_view(cx, &x, &[&[rows], &shape[k..]].concat())?;
    let ids = cx.plain(&places)?;
    let op = ScatterAdd { axis: 0, base: 0, extent: rows, rows };
    let sums = put(cx, "put", op.clone(), ids, &updates)?;
    let mut column = vec![1; table.rank()];
    column[0] = rows;
    let is_put = match (how, known) {
        (Joined::Added, _) => None,
        (Joined::Replaced, Some(places)) if rows <= MOST_FOLDED as u64 => {
            let mut mask = vec![0; rows as usize];
            places.iter().for_each(|&p| mask[p as usize] = 1);
            let name = format!("{}.is_put", cx.name);
            Some(cx.constant(&name, &Literal::ints(DType::Bool, column, mask))?)
        }
        (Joined::Replaced, _) => {
            let count = touched(cx, op, ids)?;
            let is_put = is_positive(cx, &count)?;
            Some(reshaped_view(cx, &is_put, &column)?)
        }
    };
    let y = joined(cx, &table, sums, is_put)?;
    let y = reshaped_view(cx, &y, &shape)?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// Every index puts into its own row.
fn scatter_elements(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let how = Joined::of(node)?;
    let (x, updates) = (cx.view(node, 0)?, cx.view(node, 2)?);
    let axis = axis_of(node.int("axis", 0)?, x.rank())?;
    let extent = x.size(axis);
    let ids = indices(cx, node, extent)?;
    let fits = ids.shape() == updates.shape()
        && ids.rank() == x.rank()
        && (0..x.rank()).all(|d| d == axis || ids.size(d) <= x.size(d));
    if !fits {
        return Err(Trouble::wrong(format!(
            "indices {:?} and updates {:?} of {:?}",
            ids.shape(),
            updates.shape(),
            x.shape()
        )));
    }
    let ids = cx.plain(&ids)?;
    let op = PutAlong { axis, base: 0, extent, rows: extent };
    let mut sums = put(cx, "put", op.clone(), ids, &updates)?;
    let mut is_put = match how {
        Joined::Added => None,
        Joined::Replaced => Some(touched(cx, op, ids)?),
    };
    // In other dimensions there may be fewer indices than rows: nothing is put into the rest.
    let rest: Dims = (0..x.rank()).map(|d| x.size(d) - sums.size(d)).collect();
    if rest.iter().any(|&n| n > 0) {
        let none = Dims::from_elem(0, x.rank());
        for view in std::iter::once(&mut sums).chain(is_put.as_mut()) {
            let pad = Pad { low: none.clone(), high: rest.clone(), interior: none.clone(), value: Real(0.0) };
            let tensor = cx.plain(view)?;
            let padded = cx.emit("rest", pad, &[tensor])?;
            *view = cx.seen(padded);
        }
    }
    let is_put = is_put.map(|count| is_positive(cx, &count)).transpose()?;
    let y = joined(cx, &x, sums, is_put)?;
    cx.output_view(node, 0, y);
    Ok(())
}
