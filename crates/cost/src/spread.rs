//! One tensor brought into several layouts: readers share what they fetch.
//!
//! Each layout is made from the tensor as it was, or from a layout that some other reader wants anyway, whichever
//! is cheaper: partial sums that one reader wants scattered and another whole are scattered first and gathered
//! then, which together is one all-reduce. The tree is grown by always adding the layout that is cheapest to reach.

use crate::collective::Traffic;
use crate::layout::{Layout, LayoutError};
use crate::relayout::{Relayout, Relayouts, Tensor};

/// One layout of several, and how it is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Branch {
    /// The layout.
    pub to: Layout,
    /// The earlier branch that it is made from; none: the tensor as it was.
    pub from: Option<usize>,
    /// How.
    pub way: Relayout,
}

impl Relayouts {
    /// Ways from one layout of a tensor to several, in an order in which they can be carried out. Layouts named
    /// twice, and the one that is there, are left out; the order in which they are named does not matter.
    pub fn spread(&self, tensor: &Tensor, from: &Layout, to: &[Layout]) -> Result<Vec<Branch>, LayoutError> {
        let mut open: Vec<Layout> = to.iter().filter(|&layout| layout != from).copied().collect();
        open.sort_unstable();
        open.dedup();
        let mut branches: Vec<Branch> = Vec::with_capacity(open.len());
        while !open.is_empty() {
            let mut best: Option<(f64, Option<usize>, usize)> = None;
            // The tensor itself first: it wins ties.
            for source in std::iter::once(None).chain((0..branches.len()).map(Some)) {
                let times = self.times(tensor, source.map_or(from, |at| &branches[at].to))?;
                for (at, layout) in open.iter().enumerate() {
                    let seconds = times.to(layout)?.0;
                    if best.is_none_or(|(least, ..)| seconds < least) {
                        best = Some((seconds, source, at));
                    }
                }
            }
            let Some((_, source, at)) = best else { break };
            let to = open.remove(at);
            let way = self.find(tensor, source.map_or(from, |at| &branches[at].to), &to)?;
            branches.push(Branch { to, from: source, way });
        }
        Ok(branches)
    }
}

/// The bytes that all branches send.
pub fn spread_traffic(branches: &[Branch]) -> Traffic {
    let mut traffic = Traffic::default();
    branches.iter().for_each(|branch| traffic.merge(&branch.way.traffic));
    traffic
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Placement, Reduction, TensorShape};
    use crate::step::Action;
    use shardwright_machine::builtin;

    #[test]
    fn scattered_for_one_and_whole_for_another_is_one_all_reduce() {
        let machine = builtin("flat:4").unwrap();
        let relayouts = Relayouts::new(&machine, &machine.mesh().per_level());
        let tensor = relayouts.tensor(TensorShape::new(&[1 << 20], 4).unwrap());
        let layout = |p| Layout::new(&[p]);
        let (partial, whole, shard) = (
            layout(Placement::Partial(Reduction::Sum)),
            layout(Placement::Replicated),
            layout(Placement::Shard(0)),
        );
        let branches = relayouts.spread(&tensor, &partial, &[whole, shard, whole, partial]).unwrap();
        let shown: Vec<_> = branches.iter().map(|b| (b.to, b.from, b.way.steps[0].action)).collect();
        assert_eq!(shown, [(shard, None, Action::ReduceScatter), (whole, Some(0), Action::AllGather)]);
        let direct = relayouts.find(&tensor, &partial, &whole).unwrap();
        assert_eq!(spread_traffic(&branches), direct.traffic);
    }
}
