//! Looking things up by their indices.

use super::{Import, movement::take};
use crate::onnx::{
    error::{Tried, Trouble},
    fold::{axis_of, index_into},
    importer::{Base, Importer},
    literal::Literal,
    proto::Node,
    view::View,
};
use shardwright_graph::{
    Init, Real,
    ops::{Gather, TakeAlong},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Gather" => gather,
        "GatherElements" => gather_elements,
        _ => return None,
    })
}

/// Embeddings start like those of most language models.
const EMBEDDING_DEVIATION: f64 = 0.02;

fn gather(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let dim = axis_of(node.int("axis", 0)?, x.rank())?;
    if let Some(ids) = cx.literal(node, 1)?.filter(|l| !l.assumed)
        && let Some(part) = consecutive(cx, &x, dim, &ids)?
    {
        cx.output_view(node, 0, part);
        return Ok(());
    }
    let extent = x.size(dim);
    let ids = indices(cx, node, extent)?;
    cx.starts_as(&x, Init::Normal(Real(EMBEDDING_DEVIATION)));
    let table = cx.plain(&x)?;
    let (shape, _) = cx.natural(&ids);
    // Ids as they lie: their dimensions take the place of the table's, in whatever order.
    let lying = cx.resolve(&ids, &shape)?;
    let y = cx.emit("", Gather { axis: dim, base: 0, extent }, &[table, lying])?;
    let flat = cx.seen(y);
    let seen = if ids.in_order() {
        let mut sizes = x.shape()[..dim].to_vec();
        sizes.extend(ids.shape());
        sizes.extend(&x.shape()[dim + 1..]);
        flat.reshape(&sizes)
    } else {
        None
    };
    match seen {
        Some(view) => cx.output_view(node, 0, view),
        None => {
            let ids = cx.plain(&ids)?;
            let y = cx.emit("", Gather { axis: dim, base: 0, extent }, &[table, ids])?;
            cx.output(node, 0, y);
        }
    }
    Ok(())
}

/// The second input, which counts along a dimension of this size; negative numbers that are known count from its end.
fn indices(cx: &mut Importer<'_>, node: &Node, extent: u64) -> Tried<View> {
    let ids = match cx.literal(node, 1)? {
        Some(literal) if literal.as_ints()?.iter().any(|&i| i < 0) => {
            let positive = literal.as_ints()?.iter().map(|&i| Ok(index_into(i, extent)? as i64));
            let literal =
                Literal::ints(literal.dtype, literal.shape.clone(), positive.collect::<Tried<_>>()?);
            let name = format!("{}.ids", cx.name);
            cx.constant(&name, &literal)?
        }
        _ => cx.view(node, 1)?,
    };
    cx.indexes(&ids, extent);
    Ok(ids)
}

/// Every index takes from its own row.
fn gather_elements(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let mut x = cx.view(node, 0)?;
    let axis = axis_of(node.int("axis", 0)?, x.rank())?;
    let extent = x.size(axis);
    let ids = indices(cx, node, extent)?;
    if ids.rank() != x.rank() {
        return Err(Trouble::wrong(format!(
            "indices of rank {} for a tensor of rank {}",
            ids.rank(),
            x.rank()
        )));
    }
    // In other dimensions there may be fewer indices than rows: the first rows are meant.
    for dim in (0..x.rank()).filter(|&dim| dim != axis) {
        if ids.size(dim) > x.size(dim) {
            return Err(Trouble::wrong(format!("more indices than rows in dimension {dim}")));
        }
        if ids.size(dim) < x.size(dim) {
            x = take(cx, "rows", &x, dim, 0, ids.size(dim))?;
        }
    }
    let (x, ids) = (cx.plain(&x)?, cx.plain(&ids)?);
    let y = cx.emit("", TakeAlong { axis, base: 0, extent }, &[x, ids])?;
    cx.output(node, 0, y);
    Ok(())
}

/// One index, or several in a row, take a slice.
fn consecutive(cx: &mut Importer<'_>, x: &View, dim: usize, ids: &Literal) -> Tried<Option<View>> {
    let extent = x.size(dim);
    if ids.shape.len() > 1 || ids.len() == 0 {
        return Ok(None);
    }
    let ids_list = ids.as_ints()?.iter().map(|&i| index_into(i, extent)).collect::<Tried<Vec<_>>>()?;
    if ids_list.windows(2).any(|w| w[1] != w[0] + 1) {
        return Ok(None);
    }
    let mut part = take(cx, "", x, dim, ids_list[0], ids_list.len() as u64)?;
    if ids.shape.is_empty() {
        // The dimension is gone, and so is its last atom.
        if !part.dims[dim].is_empty() {
            return Err(Trouble::wrong("an index that does not take one position"));
        }
        part.dims.remove(dim);
    }
    debug_assert!(matches!(part.base, Base::Tensor(_) | Base::Stored(_)));
    Ok(Some(part))
}
