//! Element-wise ops on views: all operands are brought to the storage order of the largest.

use super::{
    error::NodeResult,
    fold::broadcast,
    importer::{Base, Importer},
    view::{DimAtoms, MOST_DIMS, View, common},
};
use shardwright_graph::{Op, Shape, TensorId};
use smallvec::SmallVec;

/// Adds an element-wise op with NumPy's broadcasting.
pub(crate) fn elementwise(
    cx: &mut Importer<'_>,
    what: &str,
    op: impl Into<Op>,
    views: &[View],
) -> NodeResult<View> {
    let mut views = views.to_vec();
    let mut shapes: Vec<Vec<u64>> = views.iter().map(View::shape).collect();
    let mut shape = broadcast(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>());
    if shape.is_err() || hides_batch(cx, &views) {
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
            let tensors = views.iter().map(|v| cx.plain(v)).collect::<NodeResult<Vec<_>>>()?;
            let result = cx.emit(what, op, &tensors)?;
            Ok(cx.seen(result))
        }
    }
}

/// Whether a stored tensor with the file's batch would broadcast a single sample to that batch.
fn hides_batch(cx: &Importer<'_>, views: &[View]) -> bool {
    let Some((old, 1)) = cx.rebatch.change else { return false };
    let rank = views.iter().map(View::rank).max().unwrap_or(0);
    let has = |view: &View, batch: u64| view.rank() == rank && rank > 1 && view.size(0) == batch;
    views.iter().any(|v| v.is_constant() && has(v, old))
        && views.iter().any(|v| !v.is_constant() && has(v, 1))
}

/// The operands as tensors that broadcast to the largest operand in its storage order, and that operand's view. `None` if
/// no operand has the result's shape, or if the operands have no common atoms.
fn aligned(
    cx: &mut Importer<'_>,
    views: &[View],
    shape: &[u64],
) -> NodeResult<Option<(Vec<TensorId>, View)>> {
    let rank = shape.len();
    // If both are large enough, a computed tensor leads rather than a stored one.
    let full = |v: &View| v.at_rank(rank).shape() == shape;
    let computed = views.iter().position(|v| full(v) && !cx.is_stored(v));
    let Some(place) = computed.or_else(|| views.iter().position(full)) else { return Ok(None) };
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
            // `dim_of` found the atom in this dimension.
            let within = view.dims[d].iter().take_while(|&&a| a != atom).count();
            leader.dims[d][within]
        };
        let mut view = view.clone();
        let mut targets: SmallVec<[u8; 6]> = (0..view.atoms.len() as u8).map(|a| target(&view, a)).collect();
        if !targets.is_sorted() {
            // Its storage order differs from the leader's, so it is transposed: it is not larger than the leader.
            let mut order: SmallVec<[u8; 6]> = (0..targets.len() as u8).collect();
            order.sort_by_key(|&a| targets[a as usize]);
            let turned = View { dims: order.iter().map(|&a| DimAtoms::from_slice(&[a])).collect(), ..view };
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
