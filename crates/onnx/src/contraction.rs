//! Products of views: every atom that two operands share becomes one letter of an einsum.

use super::{
    error::{NodeError, NodeResult},
    importer::{Base, Importer},
    view::{DimAtoms, MOST_DIMS, Sizes, View, common},
};
use shardwright_graph::{
    Real, Shape,
    ops::{Contract, Unary, UnaryFn},
};
use smallvec::SmallVec;

/// A product of two views: a label for each dimension of the operands and the result. A label that the result lacks is
/// summed over; a dimension of size 1 broadcasts.
pub(crate) struct Product<'a> {
    pub labels: [&'a [u8]; 2],
    pub result: &'a [u8],
    /// Labels whose dimensions must be cut at least into these sizes.
    pub cuts: &'a [(u8, Sizes)],
}

/// The preferred letters of a label's atoms, so that dimensions keep their names from layer to layer.
fn names(label: u8, atoms: usize) -> &'static [u8] {
    match (label, atoms) {
        (_, 0) => b"",
        (b'n', 2) => b"ns",
        (b'n', 3) => b"nst",
        (b'c' | b'o', 2) => b"hd",
        (b'c' | b'o', 3) => b"ghd",
        _ => b"",
    }
}

/// The letters in use.
#[derive(Default)]
struct Letters {
    used: SmallVec<[u8; 16]>,
}

impl Letters {
    fn take(&mut self, wanted: u8) -> NodeResult<u8> {
        let others = b"xyzabefgijlmpruvwnsthdcoqkABCDEFGHIJKLMNOPQRSTUVWXYZ".iter().copied();
        let letter = std::iter::once(wanted).chain(others).find(|c| !self.used.contains(c));
        let letter = letter.ok_or_else(|| {
            NodeError::invalid("a product of too many dimensions for the letters of an einsum")
        })?;
        self.used.push(letter);
        Ok(letter)
    }
}

/// Adds the product. The result's dimensions are in the order of `result`.
pub(crate) fn product(
    cx: &mut Importer<'_>,
    what: &str,
    a: &View,
    b: &View,
    spec: &Product<'_>,
) -> NodeResult<View> {
    let mut views = [a.clone(), b.clone()];
    let mut letters = Letters::default();
    // Label by label: common atoms, then a letter for each.
    let mut of_label: Vec<(u8, SmallVec<[u8; 4]>, Sizes)> = Vec::new();
    let all = spec.result.iter().chain(spec.labels[0]).chain(spec.labels[1]);
    for &label in all {
        if of_label.iter().any(|(l, ..)| *l == label) {
            continue;
        }
        let places = spec.labels.map(|labels| labels.iter().position(|&l| l == label));
        let here = |views: &[View; 2], i: usize| places[i].filter(|&d| views[i].size(d) != 1);
        let mut sizes: Option<Sizes> = None;
        let wanted = spec.cuts.iter().find(|(l, _)| *l == label).map(|(_, sizes)| sizes.clone());
        for i in 0..2 {
            let Some(d) = here(&views, i) else { continue };
            let own = views[i].sizes(d);
            let own = wanted.as_ref().and_then(|w| common(&own, w)).unwrap_or(own);
            sizes = Some(match sizes {
                None => own,
                Some(known) => {
                    if known.iter().product::<u64>() != own.iter().product::<u64>() {
                        return Err(NodeError::invalid(format!(
                            "shapes {:?} and {:?} cannot be multiplied",
                            a.shape(),
                            b.shape()
                        )));
                    }
                    match common(&known, &own) {
                        Some(finer) => finer,
                        None => return uncommon(cx, what, a, b, spec),
                    }
                }
            });
        }
        // A label whose dimensions all have size one has no atoms.
        let sizes = sizes.unwrap_or_default();
        for i in 0..2 {
            if let Some(d) = here(&views, i)
                && !views[i].refine(d, &sizes)
            {
                return uncommon(cx, what, a, b, spec);
            }
        }
        let named = names(label, sizes.len());
        let given = (0..sizes.len())
            .map(|i| letters.take(named.get(i).copied().unwrap_or(label)))
            .collect::<NodeResult<SmallVec<[u8; 4]>>>()?;
        of_label.push((label, given, sizes));
    }
    let find = |label: u8| of_label.iter().find(|(l, ..)| *l == label);
    // Each operand's atoms in storage order.
    let mut operands: SmallVec<[SmallVec<[u8; 8]>; 2]> = SmallVec::new();
    for (view, labels) in views.iter().zip(spec.labels) {
        let mut lying: SmallVec<[u8; 8]> = SmallVec::from_elem(b'?', view.atoms.len());
        for (dim, &label) in view.dims.iter().zip(labels) {
            let Some((_, letters, _)) = find(label) else { continue };
            for (&atom, &letter) in dim.iter().zip(letters) {
                lying[atom as usize] = letter;
            }
        }
        operands.push(lying);
    }
    let result: SmallVec<[u8; 8]> =
        spec.result.iter().filter_map(|&l| find(l)).flat_map(|(_, g, _)| g.clone()).collect();
    let most = operands.iter().map(|o| o.len()).max().unwrap_or(0).max(result.len());
    if most > MOST_DIMS && !(a.is_plain() && b.is_plain()) {
        return uncommon(cx, what, a, b, spec);
    }
    let tensors = scaled_operands(cx, &mut views)?;
    let product = cx.emit(what, Contract { operands, result, eight_bit: false }, &tensors)?;
    let mut atoms = Sizes::new();
    let dims = spec
        .result
        .iter()
        .map(|&label| {
            // Every label of the result has an entry; see above.
            let sizes = find(label).map(|(_, _, sizes)| sizes.clone()).unwrap_or_default();
            let dim: DimAtoms = (0..sizes.len()).map(|i| (atoms.len() + i) as u8).collect();
            atoms.extend(sizes);
            dim
        })
        .collect();
    Ok(View { base: Base::Tensor(product), atoms, dims, scale: 1.0 })
}

/// The operands in storage order. Both scales are applied at once, to the smaller operand that is not a weight: attention
/// that scales query and key, as exporters write it, then costs one scaling.
fn scaled_operands(
    cx: &mut Importer<'_>,
    views: &mut [View; 2],
) -> NodeResult<[shardwright_graph::TensorId; 2]> {
    let scale = views[0].scale * views[1].scale;
    let before = views[1].is_smaller_than(&views[0]) && !cx.is_stored(&views[1]) || cx.is_stored(&views[0]);
    let scaled = usize::from(before);
    views.iter_mut().for_each(|v| v.scale = 1.0);
    let mut tensors = [
        cx.resolve(&views[0], &Shape::new(&views[0].atoms))?,
        cx.resolve(&views[1], &Shape::new(&views[1].atoms))?,
    ];
    if scale != 1.0 {
        let f = UnaryFn::Affine { scale: Real(scale), shift: Real(0.0) };
        tensors[scaled] = cx.emit("scale", Unary { f }, &[tensors[scaled]])?;
    }
    Ok(tensors)
}

/// Multiplies operands without common atoms: both are made plain first.
fn uncommon(cx: &mut Importer<'_>, what: &str, a: &View, b: &View, spec: &Product<'_>) -> NodeResult<View> {
    let plain = [cx.plain(a)?, cx.plain(b)?].map(|t| cx.seen(t));
    if plain[0] == *a && plain[1] == *b {
        return Err(NodeError::invalid(format!(
            "shapes {:?} and {:?} cannot be multiplied",
            a.shape(),
            b.shape()
        )));
    }
    product(cx, what, &plain[0], &plain[1], &Product { cuts: &[], ..*spec })
}
