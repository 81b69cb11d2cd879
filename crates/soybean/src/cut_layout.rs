//! The blocks of a tensor that the two sides of a cut hold, and the elements that a conversion between two such layouts
//! moves.
//!
//! One formula covers SoyBean's conversion costs (`Region::ConvertCost2` of the authors' code). A cut divides the
//! devices that share a *region* of a tensor into two sides. To convert layout `have` to layout `want`, each side lacks
//! `|want| - |want ∩ have|` elements. Elements outside the shared region come from devices beyond both sides; an
//! earlier cut already counted one copy of them, so they are subtracted. With equal regions of `A` elements:
//!
//! | from | to | elements moved |
//! |---|---|---|
//! | cut | same cut | 0 |
//! | replicated | anything | 0 |
//! | cut | another cut | `A/2` |
//! | cut | replicated | `A` |
//! | partial sums | cut | `A` |
//! | partial sums | replicated | `2A` |

use shardwright_graph::Block;

/// How one cut divides the region of a stored tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Tiling {
    /// Each side holds half of this dimension.
    Cut(u8),
    /// Each side holds the whole region.
    Replicated,
}

/// The blocks of a tensor that the two sides of a cut hold or need.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CutLayout {
    /// The region that the two sides share.
    region: Block,
    /// The block of each side. The two overlap for windows.
    sides: [Block; 2],
    /// Whether each side holds a summand of the region.
    partial: bool,
}

impl CutLayout {
    /// The layout of a stored tensor.
    pub fn stored(region: &Block, tiling: Tiling) -> Self {
        let sides = match tiling {
            Tiling::Cut(dim) => halves(region, usize::from(dim)),
            Tiling::Replicated => [region.clone(), region.clone()],
        };
        Self { region: region.clone(), sides, partial: false }
    }

    /// The layout of an op's operand or result.
    pub fn of_op(region: Block, sides: [Block; 2]) -> Self {
        Self { region, sides, partial: false }
    }

    /// The layout of a result whose sides must be summed.
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

    /// Elements that move between the sides when this layout becomes `want`.
    pub fn to(&self, want: &CutLayout) -> u64 {
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
        let stored = |t| CutLayout::stored(&region, t);
        let (rows, columns, whole) =
            (stored(Tiling::Cut(0)), stored(Tiling::Cut(1)), stored(Tiling::Replicated));
        let partial = CutLayout::partial(region.clone());
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
        // First cut: halves become whole, A elements. Second: in each group quarters become whole, A elements each.
        let whole = block(&[(0, 8)]);
        let first =
            CutLayout::stored(&whole, Tiling::Cut(0)).to(&CutLayout::stored(&whole, Tiling::Replicated));
        let half = block(&[(0, 4)]);
        let second =
            CutLayout::stored(&half, Tiling::Cut(0)).to(&CutLayout::stored(&whole, Tiling::Replicated));
        assert_eq!(first + 2 * second, 3 * 8);
    }

    /// The authors' formula for tilings of two regions, case by case.
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
            prop_assert_eq!(CutLayout::stored(&r1, s1).to(&CutLayout::stored(&r2, s2)), authors(&r1, s1, &r2, s2));
        }
    }
}
