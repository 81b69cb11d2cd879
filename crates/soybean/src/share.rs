//! What the two sides of a cut hold of a tensor, and how many elements must travel until they hold something else.
//!
//! SoyBean's conversion costs (`Region::ConvertCost2` of the authors' code) in one formula. A cut divides the
//! devices that share a *region* of a tensor into two sides. Where `have` is what they have and `want` what they
//! want, each side lacks `|want| - |want ∩ have|` elements. Of these, what lies outside the region that the
//! sides share comes from other devices altogether, and one copy of it has been counted by an earlier
//! cut; it is taken off. With equal regions of `A` elements: cut to the same cut 0, replicated to anything 0, cut to
//! another cut `A/2`, cut to replicated `A`, partial sums to a cut `A`, partial sums to replicated `2A`.

use shardwright_graph::Block;

/// How one cut divides a tensor's region: the stored tilings of SoyBean.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Tiling {
    /// Each side holds half of this dimension.
    Cut(u8),
    /// Each side holds everything.
    Replicated,
}

/// What the two sides of a cut hold, or want.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// What both sides together are about.
    region: Block,
    /// What each side has of it; may overlap (windows).
    sides: [Block; 2],
    /// Each side has a summand of the region, not the region.
    partial: bool,
}

impl Share {
    /// Of a stored tensor.
    pub fn stored(region: &Block, tiling: Tiling) -> Self {
        let sides = match tiling {
            Tiling::Cut(dim) => halves(region, usize::from(dim)),
            Tiling::Replicated => [region.clone(), region.clone()],
        };
        Self { region: region.clone(), sides, partial: false }
    }

    /// Of an op's operand or result.
    pub fn of_op(region: Block, sides: [Block; 2]) -> Self {
        Self { region, sides, partial: false }
    }

    /// Of a result that must be added up over the sides.
    pub fn partial(region: Block) -> Self {
        Self { sides: [region.clone(), region.clone()], region, partial: true }
    }

    /// The paper's letters: `R` and `C` for cuts of dimensions 0 and 1, `r` for replicated, `red` for partial sums.
    #[cfg(test)]
    pub fn letters(&self) -> String {
        let cut = |dim: &usize| self.sides == halves(&self.region, *dim);
        match (0..self.region.len()).find(cut) {
            _ if self.partial => "red".into(),
            _ if self.is_replicated() => "r".into(),
            Some(dim) => ["R", "C", "H", "W"][dim].into(),
            None => "?".into(),
        }
    }

    fn is_replicated(&self) -> bool {
        self.sides.iter().all(|side| *side == self.region)
    }

    /// Elements that travel between the sides until each has what it wants.
    pub fn to(&self, want: &Share) -> u64 {
        if self.partial {
            return if want.is_replicated() { 2 * elements(&self.region) } else { elements(&self.region) };
        }
        let lacks = |side: usize| {
            elements(&want.sides[side]).saturating_sub(common(&want.sides[side], &self.sides[side]))
        };
        let foreign = elements(&want.region).saturating_sub(common(&want.region, &self.region));
        (lacks(0) + lacks(1)).saturating_sub(foreign)
    }
}

/// The two halves of a block along a dimension of even size.
pub(crate) fn halves(block: &Block, dim: usize) -> [Block; 2] {
    let (mut low, mut high) = (block.clone(), block.clone());
    let middle = block[dim].start + (block[dim].end - block[dim].start) / 2;
    low[dim].end = middle;
    high[dim].start = middle;
    [low, high]
}

fn elements(block: &Block) -> u64 {
    block.iter().map(|r| r.end - r.start).product()
}

fn common(a: &Block, b: &Block) -> u64 {
    let both = a.iter().zip(b).map(|(a, b)| a.end.min(b.end).saturating_sub(a.start.max(b.start)));
    both.product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(ranges: &[(u64, u64)]) -> Block {
        ranges.iter().map(|&(a, b)| a..b).collect()
    }

    #[test]
    fn equal_regions_cost_what_the_paper_says() {
        let region = block(&[(0, 6), (0, 4)]);
        let stored = |t| Share::stored(&region, t);
        let (rows, columns, whole) =
            (stored(Tiling::Cut(0)), stored(Tiling::Cut(1)), stored(Tiling::Replicated));
        let partial = Share::partial(region.clone());
        for (from, to, cost) in [
            (&rows, &rows, 0),
            (&rows, &columns, 12),
            (&rows, &whole, 24),
            (&whole, &rows, 0),
            (&whole, &whole, 0),
            (&partial, &columns, 24),
            (&partial, &whole, 48),
        ] {
            assert_eq!(from.to(to), cost, "{from:?} to {to:?}");
        }
    }

    #[test]
    fn four_devices_that_gather_a_quarter_each_move_three_times_the_tensor() {
        // First cut: halves to everything, A. Second: within each half's group quarters to everything, A each.
        let whole = block(&[(0, 8)]);
        let first = Share::stored(&whole, Tiling::Cut(0)).to(&Share::stored(&whole, Tiling::Replicated));
        let half = block(&[(0, 4)]);
        let second = Share::stored(&half, Tiling::Cut(0)).to(&Share::stored(&whole, Tiling::Replicated));
        assert_eq!(first + 2 * second, 3 * 8);
    }

    /// The authors' formula, case by case, for tilings of two regions.
    fn authors(r1: &Block, s1: Tiling, r2: &Block, s2: Tiling) -> u64 {
        let [x, y] = match s2 {
            Tiling::Cut(d) => halves(r2, d.into()),
            Tiling::Replicated => [r2.clone(), r2.clone()],
        };
        let fetched = match s1 {
            Tiling::Replicated => 0,
            Tiling::Cut(d) => {
                let [a, b] = halves(r1, d.into());
                common(&a, &y) + common(&b, &x)
            }
        };
        fetched + if s2 == Tiling::Replicated { elements(r2) - common(r1, r2) } else { 0 }
    }

    proptest! {
        #[test]
        fn one_formula_is_the_authors_four_cases(
            a in prop::array::uniform2((0u64..4, 1u64..5)),
            b in prop::array::uniform2((0u64..4, 1u64..5)),
            s in prop::array::uniform2(0u8..3),
        ) {
            let even = |r: [(u64, u64); 2]| block(&r.map(|(start, half)| (start, start + 2 * half)));
            let tiling = |s| if s < 2 { Tiling::Cut(s) } else { Tiling::Replicated };
            let (r1, r2, s1, s2) = (even(a), even(b), tiling(s[0]), tiling(s[1]));
            prop_assert_eq!(Share::stored(&r1, s1).to(&Share::stored(&r2, s2)), authors(&r1, s1, &r2, s2));
        }
    }
}
