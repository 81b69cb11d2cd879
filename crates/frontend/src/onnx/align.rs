//! Element-wise ops on views: all operands are brought to lie as the largest does.

use super::{
    error::Tried,
    fold::broadcast,
    importer::{Base, Importer},
    view::{Dim, MOST_DIMS, View, common},
};
use shardwright_graph::{Op, Shape, TensorId};
use smallvec::SmallVec;

/// Adds an element-wise op with NumPy's broadcasting.
pub(crate) fn elementwise(
    cx: &mut Importer<'_>,
    what: &str,
    op: impl Into<Op>,
    views: &[View],
) -> Tried<View> {
    let mut views = views.to_vec();
    let mut shapes: Vec<Vec<u64>> = views.iter().map(View::shape).collect();
    let mut shape = broadcast(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>());
    if shape.is_err() {
        for view in &mut views {
            if let Some(other) = cx.rebatched(view)? {
                *view = other;
            }
        }
        shapes = views.iter().map(View::shape).collect();
        shape = broadcast(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }
    let shape = shape?;
    match aligned(cx, &views, &shape)? {
        Some((tensors, leader)) => {
            let result = cx.emit(what, op, &tensors)?;
            Ok(leader.of(Base::Tensor(result)))
        }
        None => {
            let tensors = views.iter().map(|v| cx.plain(v)).collect::<Tried<Vec<_>>>()?;
            let result = cx.emit(what, op, &tensors)?;
            Ok(cx.seen(result))
        }
    }
}

/// The operands as tensors that broadcast to the largest as it lies, and its view. None if no operand has the
/// result's shape, or if they have no common atoms.
fn aligned(cx: &mut Importer<'_>, views: &[View], shape: &[u64]) -> Tried<Option<(Vec<TensorId>, View)>> {
    let rank = shape.len();
    // A tensor that was computed rather than a stored one, if both are large enough.
    let full = |v: &&View| v.at_rank(rank).shape() == shape;
    let leader = views.iter().filter(full).find(|v| !cx.is_stored(v)).or_else(|| views.iter().find(full));
    let Some(leader) = leader else { return Ok(None) };
    let place = views.iter().position(|v| std::ptr::eq(v, leader)).unwrap_or(0);
    let mut all: Vec<View> = views.iter().map(|v| v.at_rank(rank)).collect();
    for d in 0..rank {
        let mut sizes = all[place].sizes(d);
        for view in all.iter().filter(|v| v.size(d) != 1) {
            match common(&sizes, &view.sizes(d)) {
                Some(finer) => sizes = finer,
                None => return Ok(None),
            }
        }
        for view in all.iter_mut().filter(|v| v.size(d) != 1) {
            if !view.refine(d, &sizes) {
                return Ok(None);
            }
        }
    }
    let leader = all[place].clone();
    let (lying, positions) = cx.natural(&leader);
    if lying.rank() > MOST_DIMS {
        return Ok(None);
    }
    let mut tensors = Vec::with_capacity(all.len());
    for (i, view) in all.iter().enumerate() {
        if i == place {
            tensors.push(cx.resolve(view, &lying)?);
            continue;
        }
        let target = |view: &View, atom: u8| {
            let d = view.dim_of(atom);
            let within = view.dims[d].iter().position(|&a| a == atom).unwrap_or(0);
            leader.dims[d][within]
        };
        let mut view = view.clone();
        let mut targets: SmallVec<[u8; 6]> = (0..view.atoms.len() as u8).map(|a| target(&view, a)).collect();
        if !targets.is_sorted() {
            // It lies in another order than the leader: moved, being the smaller one or as good as the other.
            let mut order: SmallVec<[u8; 6]> = (0..targets.len() as u8).collect();
            order.sort_by_key(|&a| targets[a as usize]);
            let turned = View { dims: order.iter().map(|&a| Dim::from_slice(&[a])).collect(), ..view };
            let tensor = cx.plain(&turned)?;
            targets.sort_unstable();
            view = cx.seen(tensor);
        }
        let mut sizes = vec![1; lying.rank()];
        for (&atom, &size) in targets.iter().zip(&view.atoms) {
            sizes[positions[atom as usize]] = size;
        }
        let leading = sizes.iter().take_while(|&&s| s == 1).count();
        tensors.push(cx.resolve(&view, &Shape::new(&sizes[leading..]))?);
    }
    Ok(Some((tensors, leader)))
}
