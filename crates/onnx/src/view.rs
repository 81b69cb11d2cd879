//! Views: tensors seen through reshapes and transposes that are not executed.
//!
//! Exporters write `Reshape` and `Transpose` wherever their framework had a view: around every linear layer and
//! throughout attention. Here they only change how a tensor is *seen*. A [`View`] factors the tensor's elements into
//! atoms and lists the atoms of each dimension. Ops that are independent of the order of dimensions (products,
//! element-wise functions, sums, norms) work in storage order and move nothing. Other ops need a plain tensor; only then
//! a reshape and a transpose enter the graph. So a model has the same graph however its exporter ordered dimensions.

use super::importer::Base;
use smallvec::SmallVec;

/// The atoms of a dimension, major first.
pub(crate) type DimAtoms = SmallVec<[u8; 2]>;
/// Sizes of atoms or dimensions.
pub(crate) type Sizes = SmallVec<[u64; 6]>;

/// A tensor seen through reshapes and transpositions.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct View {
    /// The tensor behind the view.
    pub base: Base,
    /// The base's elements as a row-major array of these sizes; no size is 1.
    pub atoms: Sizes,
    /// The atoms of each dimension. Every atom is in exactly one dimension. A dimension without atoms has size 1.
    pub dims: SmallVec<[DimAtoms; 6]>,
    /// A factor to be applied to every element.
    pub scale: f64,
}

impl View {
    /// Whether it shows a tensor of the file, rather than an input or a result.
    pub fn is_constant(&self) -> bool {
        matches!(self.base, Base::Stored(_))
    }

    /// The row-major view of a tensor.
    pub fn plain(base: Base, shape: &[u64]) -> Self {
        let mut atoms = Sizes::new();
        let dims = shape
            .iter()
            .map(|&size| {
                if size == 1 {
                    return DimAtoms::new();
                }
                atoms.push(size);
                DimAtoms::from_slice(&[(atoms.len() - 1) as u8])
            })
            .collect();
        Self { base, atoms, dims, scale: 1.0 }
    }

    /// The same view of another tensor with the same storage order.
    pub fn of(&self, base: Base) -> Self {
        Self { base, scale: 1.0, ..self.clone() }
    }

    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// The size of a dimension.
    pub fn size(&self, dim: usize) -> u64 {
        self.dims[dim].iter().map(|&a| self.atoms[a as usize]).product()
    }

    pub fn shape(&self) -> Vec<u64> {
        (0..self.rank()).map(|d| self.size(d)).collect()
    }

    pub fn elements(&self) -> u64 {
        self.atoms.iter().product()
    }

    pub fn is_smaller_than(&self, other: &Self) -> bool {
        self.elements() < other.elements()
    }

    /// The sizes of a dimension's atoms.
    pub fn sizes(&self, dim: usize) -> Sizes {
        self.dims[dim].iter().map(|&a| self.atoms[a as usize]).collect()
    }

    /// All atoms in the order of the view's dimensions.
    pub fn order(&self) -> SmallVec<[u8; 8]> {
        self.dims.iter().flatten().copied().collect()
    }

    /// Whether every dimension has at most one atom, the atoms are in order, and the scale is one.
    pub fn is_plain(&self) -> bool {
        self.scale == 1.0 && self.in_order() && self.dims.iter().all(|dim| dim.len() <= 1)
    }

    /// Whether the view has the elements in storage order.
    pub fn in_order(&self) -> bool {
        self.order().iter().enumerate().all(|(i, &a)| i == a as usize)
    }

    /// Dimension `i` of the result is dimension `perm[i]`.
    pub fn transpose(&self, perm: &[usize]) -> Self {
        Self { dims: perm.iter().map(|&p| self.dims[p].clone()).collect(), ..self.clone() }
    }

    /// Splits an atom in two. The first has size `major`, which must divide it.
    fn cut(&mut self, atom: u8, major: u64) {
        let minor = self.atoms[atom as usize] / major;
        self.atoms[atom as usize] = major;
        self.atoms.insert(atom as usize + 1, minor);
        for dim in &mut self.dims {
            for a in dim.iter_mut().filter(|a| **a > atom) {
                *a += 1;
            }
            if let Some(i) = dim.iter().position(|&a| a == atom) {
                dim.insert(i + 1, atom + 1);
            }
        }
    }

    /// Splits a dimension's atoms into these sizes; returns false if they do not divide.
    pub fn refine(&mut self, dim: usize, sizes: &[u64]) -> bool {
        for (i, &size) in sizes.iter().enumerate() {
            let Some(&atom) = self.dims[dim].get(i) else { return false };
            let have = self.atoms[atom as usize];
            if have == size {
                continue;
            }
            if size < 2 || !have.is_multiple_of(size) {
                return false;
            }
            self.cut(atom, size);
        }
        self.dims[dim].len() == sizes.len()
    }

    /// The same elements in another shape; `None` if the shapes have no common atoms.
    pub fn reshape(&self, shape: &[u64]) -> Option<Self> {
        let mut view = self.clone();
        view.dims = SmallVec::from_elem(DimAtoms::new(), 1);
        view.dims[0] = self.dims.iter().flatten().copied().collect();
        let mut dims: SmallVec<[DimAtoms; 6]> = SmallVec::new();
        // At first there is one long dimension; each new dimension takes its atoms from the front.
        for &size in shape {
            let mut rest = size;
            let mut dim = DimAtoms::new();
            while rest > 1 {
                let &atom = view.dims[0].first()?;
                let have = view.atoms[atom as usize];
                if rest % have != 0 {
                    if !have.is_multiple_of(rest) {
                        return None;
                    }
                    // Also renumbers the atoms of the finished dimensions.
                    view.dims.extend(dims.drain(..));
                    view.dims.push(dim);
                    view.cut(atom, rest);
                    dim = view.dims.pop()?;
                    dims = view.dims.drain(1..).collect();
                }
                let atom = view.dims[0].remove(0);
                rest /= view.atoms[atom as usize];
                dim.push(atom);
            }
            dims.push(dim);
        }
        let complete = view.dims[0].is_empty();
        view.dims = dims;
        complete.then_some(view)
    }

    /// Merges atoms that are adjacent both in storage and in one dimension.
    pub fn coalesced(&self) -> Self {
        let mut view = self.clone();
        let mut atom = 0;
        while atom + 1 < view.atoms.len() {
            let (a, next) = (atom as u8, atom as u8 + 1);
            let joined = view.dims.iter_mut().any(|dim| {
                let at = dim.windows(2).position(|pair| pair == [a, next]);
                at.map(|i| dim.remove(i + 1)).is_some()
            });
            if !joined {
                atom += 1;
                continue;
            }
            view.atoms[atom] *= view.atoms[atom + 1];
            view.atoms.remove(atom + 1);
            for other in view.dims.iter_mut().flatten().filter(|other| **other > a) {
                *other -= 1;
            }
        }
        view
    }

    /// The same view with leading dimensions of size 1, up to this rank.
    pub fn at_rank(&self, rank: usize) -> Self {
        let mut view = self.clone();
        while view.rank() < rank {
            view.dims.insert(0, DimAtoms::new());
        }
        view
    }

    /// The dimension of an atom.
    pub fn dim_of(&self, atom: u8) -> usize {
        let dim = self.dims.iter().position(|dim| dim.contains(&atom));
        debug_assert!(dim.is_some(), "every atom is in one dimension");
        dim.unwrap_or(0)
    }
}

/// The most dimensions of a tensor built from a view: the limit of layouts.
pub(crate) const MOST_DIMS: usize = 8;

/// The coarsest common refinement of two lists of sizes with equal product; `None` if there is none.
pub(crate) fn common(a: &[u64], b: &[u64]) -> Option<Sizes> {
    let (mut a, mut b) = (a.iter().copied(), b.iter().copied());
    let mut sizes = Sizes::new();
    let (mut x, mut y) = (1u64, 1u64);
    // One stands for the end of a list: no size is one.
    loop {
        if x == 1 {
            x = a.next().unwrap_or(1);
        }
        if y == 1 {
            y = b.next().unwrap_or(1);
        }
        match (x, y) {
            (1, 1) => return Some(sizes),
            (1, _) | (_, 1) => return None,
            _ => {}
        }
        let part = x.min(y);
        if x % part != 0 || y % part != 0 {
            return None;
        }
        sizes.push(part);
        x /= part;
        y /= part;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn view(shape: &[u64]) -> View {
        View::plain(Base::Stored(0), shape)
    }

    /// The storage position of each element of the view.
    fn places(view: &View) -> Vec<u64> {
        let order = view.order();
        let mut strides = vec![1u64; view.atoms.len()];
        for i in (1..view.atoms.len()).rev() {
            strides[i - 1] = strides[i] * view.atoms[i];
        }
        let mut all = vec![0];
        for &atom in &order {
            let next = all.iter().flat_map(|&p| (0..view.atoms[atom as usize]).map(move |i| (p, i)));
            all = next.map(|(p, i)| p + i * strides[atom as usize]).collect();
        }
        all
    }

    #[test]
    fn attention_shuffles_cancel_out() {
        let x = view(&[8, 128, 768]);
        let heads = x.reshape(&[8, 128, 12, 64]).unwrap().transpose(&[0, 2, 1, 3]);
        assert_eq!(heads.shape(), [8, 12, 128, 64]);
        assert!(!heads.in_order());
        // An exporter's transpose of the last two dimensions.
        let merged = heads.reshape(&[96, 128, 64]).unwrap().transpose(&[0, 2, 1]);
        let keys = merged.reshape(&[8, 12, 64, 128]).unwrap();
        assert_eq!(keys, heads.transpose(&[0, 1, 3, 2]));
        let back = heads.transpose(&[0, 2, 1, 3]).reshape(&[8, 128, 768]).unwrap();
        assert!(back.in_order());
        assert_eq!(back.coalesced(), x);
    }

    #[test]
    fn shapes_without_common_atoms_are_not_views() {
        assert_eq!(view(&[6, 6]).reshape(&[4, 9]), None);
        assert_eq!(common(&[6, 6], &[4, 9]), None);
        assert_eq!(common(&[12, 2], &[3, 8]).unwrap().as_slice(), [3, 4, 2]);
    }

    proptest! {
        /// Reshapes and transposes of a view move elements as those of a tensor do.
        #[test]
        fn views_see_what_tensors_would_hold(
            shape in prop::collection::vec(1u64..5, 1..5),
            perm_seed in any::<u64>(),
            cut in 0usize..4,
        ) {
            let x = view(&shape);
            let elements = x.elements();
            let mut perm: Vec<usize> = (0..shape.len()).collect();
            for i in (1..perm.len()).rev() {
                perm.swap(i, (perm_seed >> (8 * i)) as usize % (i + 1));
            }
            let turned = x.transpose(&perm);
            let places_turned = places(&turned);
            prop_assert_eq!(places_turned.len() as u64, elements);
            // Merging any adjacent dimensions is a reshape that keeps the order of elements.
            let cut = cut.min(shape.len());
            let seen = turned.shape();
            let regrouped = [seen[..cut].iter().product(), seen[cut..].iter().product()];
            let merged = turned.reshape(&regrouped).unwrap();
            prop_assert_eq!(merged.shape(), regrouped.to_vec());
            prop_assert_eq!(&places(&merged), &places_turned);
            let again = merged.reshape(&seen).unwrap();
            prop_assert_eq!(again.shape(), seen);
            prop_assert_eq!(&places(&again), &places_turned);
            prop_assert_eq!(&places(&again.coalesced()), &places_turned);
        }
    }
}
