//! Reshards of one tensor into several layouts, with shared steps.
//!
//! Each layout is made from the source layout or from a layout that another reader needs, whichever is cheaper. For
//! example, if one reader needs partial sums scattered and another needs them whole, they are scattered first and then
//! gathered, which together is one all-reduce. The tree grows greedily by the layout that is cheapest to reach.

use crate::collective::Traffic;
use crate::layout::{Layout, LayoutError};
use crate::reshard::{ReshardPath, ReshardTensor, Resharder};

/// Paths from one layout of a tensor to several others; later paths may start at the ends of earlier ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReshardTree {
    branches: Vec<ReshardBranch>,
}

/// The path to one layout of a tree.
#[derive(Clone, Debug, PartialEq)]
pub struct ReshardBranch {
    /// The layout.
    pub to: Layout,
    /// The earlier branch whose layout the path starts from; `None`: the source layout.
    pub from: Option<usize>,
    /// The path.
    pub path: ReshardPath,
}

impl ReshardTree {
    /// The branches, in an order in which they can be performed.
    pub fn branches(&self) -> &[ReshardBranch] {
        &self.branches
    }

    /// The branches, by value.
    pub fn into_branches(self) -> Vec<ReshardBranch> {
        self.branches
    }

    /// The bytes that all branches send over each axis.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        self.branches.iter().for_each(|branch| traffic.merge(&branch.path.traffic));
        traffic
    }
}

impl Resharder {
    /// Reshards a tensor from one layout to several. Duplicates and the source layout itself get no branch; the order
    /// of `to` does not matter.
    pub fn reshard_many(
        &self,
        tensor: &ReshardTensor,
        from: &Layout,
        to: &[Layout],
    ) -> Result<ReshardTree, LayoutError> {
        let mut open: Vec<Layout> = to.iter().filter(|&layout| layout != from).copied().collect();
        open.sort_unstable();
        open.dedup();
        let mut branches: Vec<ReshardBranch> = Vec::with_capacity(open.len());
        while !open.is_empty() {
            let mut best: Option<(f64, Option<usize>, usize)> = None;
            // The source layout comes first, so it wins ties.
            for source in std::iter::once(None).chain((0..branches.len()).map(Some)) {
                let times = self.times(tensor, source.map_or(from, |at| &branches[at].to))?;
                for (at, layout) in open.iter().enumerate() {
                    let seconds = times.to(layout)?.0;
                    if best.is_none_or(|(least, ..)| seconds < least) {
                        best = Some((seconds, source, at));
                    }
                }
            }
            let Some((_, source, at)) = best else {
                debug_assert!(false, "the source layout reaches every open layout");
                break;
            };
            let to = open.remove(at);
            let path = self.find(tensor, source.map_or(from, |at| &branches[at].to), &to)?;
            branches.push(ReshardBranch { to, from: source, path });
        }
        Ok(ReshardTree { branches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Placement, Reduction, TensorShape};
    use crate::reshard_step::Action;
    use shardwright_machine::builtin;

    #[test]
    fn scattered_for_one_and_whole_for_another_is_one_all_reduce() {
        let machine = builtin("flat:4").unwrap();
        let resharder = Resharder::new(&machine, &machine.mesh().per_level());
        let tensor = resharder.tensor(TensorShape::new(&[1 << 20], 4).unwrap());
        let layout = |p| Layout::new(&[p]);
        let (partial, whole, shard) = (
            layout(Placement::Partial(Reduction::Sum)),
            layout(Placement::Replicated),
            layout(Placement::Shard(0)),
        );
        let tree = resharder.reshard_many(&tensor, &partial, &[whole, shard, whole, partial]).unwrap();
        let shown: Vec<_> = tree.branches().iter().map(|b| (b.to, b.from, b.path.steps[0].action)).collect();
        assert_eq!(shown, [(shard, None, Action::ReduceScatter), (whole, Some(0), Action::AllGather)]);
        let direct = resharder.find(&tensor, &partial, &whole).unwrap();
        assert_eq!(tree.traffic(), direct.traffic);
    }
}
