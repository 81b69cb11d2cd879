//! Brute force over all legal reshard steps on tiny meshes, as an independent check in tests.
//!
//! The searches of `reshard` consider few candidate steps. Here every subset of axes may take any legal step at any
//! time, and shortest paths are computed between all arrangements. Both must agree.

use crate::collective::{Collective, Comm};
use crate::layout::{Arrangement, AxisList, Layout, Placement, Reduction, TensorShape};
use crate::reshard::Resharder;
use crate::reshard_step::{local_bytes, permuted};
use shardwright_machine::{AxisId, AxisSet, Bytes, Machine, builtin};
use std::collections::BTreeMap;

/// All orders of a few axes.
fn orders(axes: AxisSet) -> Vec<Vec<AxisId>> {
    let mut all = vec![vec![]];
    for axis in axes.iter() {
        all = all
            .iter()
            .flat_map(|order: &Vec<AxisId>| {
                (0..=order.len()).map(move |at| {
                    let mut order = order.clone();
                    order.insert(at, axis);
                    order
                })
            })
            .collect();
    }
    all
}

struct BruteForce<'a> {
    comm: &'a Comm,
    shape: TensorShape,
    all: Vec<Arrangement>,
}

/// The placements that take part besides replicated and sharded.
#[derive(Clone, Copy, PartialEq)]
enum With {
    Partial,
    PartialAndAbsent,
}

impl BruteForce<'_> {
    fn placements(rank: u8, with: With) -> Vec<Placement> {
        let mut all = vec![Placement::Replicated, Placement::Partial(Reduction::Sum)];
        all.extend((0..rank).map(Placement::Shard));
        if with == With::PartialAndAbsent {
            all.extend([Placement::Absent(0), Placement::Absent(1)]);
        }
        all
    }

    fn layouts(axes: usize, rank: u8, with: With) -> Vec<Layout> {
        let mut all = vec![vec![]];
        for _ in 0..axes {
            all = all
                .iter()
                .flat_map(|l: &Vec<Placement>| {
                    Self::placements(rank, with).into_iter().map(move |p| [l.clone(), vec![p]].concat())
                })
                .collect();
        }
        all.iter().map(|placements| Layout::new(placements)).collect()
    }

    fn new(comm: &Comm, shape: TensorShape, with: With) -> BruteForce<'_> {
        let mesh = comm.mesh();
        let mut all = Vec::new();
        for layout in Self::layouts(mesh.len(), shape.rank(), with) {
            if shape.check(mesh, &layout).is_err() {
                continue;
            }
            let mut some = vec![Arrangement::canonical(&layout)];
            for dim in 0..shape.rank() {
                let mut more = Vec::new();
                for at in &some {
                    for order in orders(layout.shards(dim)) {
                        let mut list = AxisList::empty();
                        order.iter().for_each(|&axis| list.push(axis));
                        let mut at = *at;
                        at.reorder(&list);
                        more.push(at);
                    }
                }
                some = more;
            }
            all.extend(some);
        }
        BruteForce { comm, shape, all }
    }

    /// The cheapest single step from one arrangement to another, if there is one.
    fn step(&self, a: &Arrangement, b: &Arrangement) -> Option<f64> {
        let mesh = self.comm.mesh();
        let (la, lb) = (a.layout(), b.layout());
        let changed: AxisSet = mesh.all().iter().filter(|&x| la.get(x) != lb.get(x)).collect();
        let (before, after) =
            (local_bytes(mesh, self.shape.bytes(), a), local_bytes(mesh, self.shape.bytes(), b));
        let price = |kind, axes, bytes| Some(self.comm.choose(kind, axes, la.absent(), Bytes(bytes)).1.0);
        let ranks = 0..self.shape.rank();
        // Owners change, nothing else.
        let sharded = |p: Placement| matches!(p, Placement::Shard(_));
        let mut best: Option<f64> = None;
        let mut offer = |cost: Option<f64>| best = [best, cost].into_iter().flatten().reduce(f64::min);
        let only_owners = changed
            .iter()
            .all(|x| [la.get(x), lb.get(x)].iter().all(|&p| sharded(p) || p == Placement::Replicated));
        if only_owners && ranks.clone().all(|dim| a.parts(mesh, dim) == b.parts(mesh, dim)) {
            offer(price(Collective::Permute, permuted(a, b), before));
        }
        // Otherwise one kind of change for all changed axes. They leave and join dimensions at the minor end, and the
        // other axes keep their order.
        let kinds: Vec<(Placement, Placement)> = changed.iter().map(|x| (la.get(x), lb.get(x))).collect();
        let Some(&(from, to)) = kinds.first() else {
            return best;
        };
        // Digits and dimensions may differ, but not the action.
        let digitless = |p: Placement| match p {
            Placement::Absent(_) => Placement::Absent(0),
            Placement::Shard(_) => Placement::Shard(0),
            other => other,
        };
        if kinds.iter().any(|k| (digitless(k.0), digitless(k.1)) != (digitless(from), digitless(to))) {
            return best;
        }
        for dim in ranks {
            let prefix = |list: Vec<AxisId>| -> Option<Vec<AxisId>> {
                let kept = list.iter().take_while(|&&x| !changed.contains(x)).count();
                list[kept..].iter().all(|&x| changed.contains(x)).then(|| list[..kept].to_vec())
            };
            match (prefix(a.axes_of(dim)), prefix(b.axes_of(dim))) {
                (Some(x), Some(y)) if x == y => {}
                _ => return best,
            }
        }
        use Placement::*;
        offer(match (from, to) {
            (Replicated, Shard(_)) | (Replicated, Absent(_)) => Some(0.0),
            (Partial(_), Replicated) => price(Collective::AllReduce, changed, before),
            (Partial(_), Shard(_)) => price(Collective::ReduceScatter, changed, before),
            (Partial(_), Absent(_)) => price(Collective::Reduce, changed, before),
            (Shard(_), Replicated) => price(Collective::AllGather, changed, after),
            (Shard(_), Absent(_)) => price(Collective::Gather, changed, after),
            // Between the same two dimensions; otherwise it is not an even exchange.
            (Shard(_), Shard(_)) if kinds.iter().all(|&k| k == (from, to)) => {
                price(Collective::AllToAll, changed, before)
            }
            (Absent(_), Replicated) => price(Collective::Broadcast, changed, before),
            (Absent(_), Shard(_)) => price(Collective::Scatter, changed, before),
            (Absent(_), Absent(_)) => price(Collective::Send, changed, before),
            _ => None,
        });
        best
    }

    /// All shortest distances between canonical layouts.
    fn distances(&self) -> BTreeMap<(Layout, Layout), f64> {
        let n = self.all.len();
        let edges: Vec<Vec<(usize, f64)>> = self
            .all
            .iter()
            .map(|a| {
                let to = self.all.iter().enumerate().filter(|(_, b)| *b != a);
                to.filter_map(|(at, b)| Some((at, self.step(a, b)?))).collect()
            })
            .collect();
        let canonical = |at: usize| self.all[at] == Arrangement::canonical(self.all[at].layout());
        let mut distances = BTreeMap::new();
        for start in (0..n).filter(|&at| canonical(at)) {
            let mut best = vec![f64::INFINITY; n];
            let mut done = vec![false; n];
            best[start] = 0.0;
            while let Some(at) = (0..n)
                .filter(|&at| !done[at] && best[at].is_finite())
                .min_by(|&a, &b| best[a].total_cmp(&best[b]))
            {
                done[at] = true;
                for &(next, cost) in &edges[at] {
                    best[next] = best[next].min(best[at] + cost);
                }
            }
            for end in (0..n).filter(|&at| canonical(at)) {
                distances.insert((*self.all[start].layout(), *self.all[end].layout()), best[end]);
            }
        }
        distances
    }
}

/// Compares both searches with brute force for every pair of layouts. Returns the goal-directed search's worst ratio and
/// the share of pairs where it misses the optimum.
fn compare(machine: &Machine, dims: &[u64], with: With) -> (f64, f64) {
    let resharder = Resharder::new(machine, machine.mesh());
    let shape = TensorShape::new(dims, 4).unwrap();
    let tensor = resharder.tensor(shape);
    let brute_force = BruteForce::new(resharder.comm(), shape, with);
    let (mut pairs, mut missed, mut worst) = (0, 0, 1f64);
    for ((from, to), &brute) in &brute_force.distances() {
        let found = resharder.seconds(&tensor, from, to);
        if brute.is_infinite() {
            assert!(found.is_err(), "{from:?} -> {to:?} is impossible");
            continue;
        }
        let (found, directed) = (found.unwrap().0, resharder.directed(&tensor, from, to));
        if with == With::Partial {
            assert!((found - brute).abs() <= brute * 1e-9, "{from:?} -> {to:?}: {found} is not {brute}");
        }
        let path = resharder.find(&tensor, from, to).unwrap();
        assert!(
            (path.seconds.0 - found).abs() <= found * 1e-9,
            "{from:?} -> {to:?}: {found} is not {path:?}"
        );
        let directed: f64 = directed.iter().map(|step| step.seconds.0).sum();
        assert!(directed >= brute * (1.0 - 1e-9), "{from:?} -> {to:?}: {directed} beats brute force {brute}");
        // Between digits the search sends directly; brute force may use other devices.
        let straight = |axis: AxisId| matches!((from.get(axis), to.get(axis)), (Placement::Absent(a), Placement::Absent(b)) if a != b);
        if machine.mesh().all().iter().any(straight) {
            continue;
        }
        pairs += 1;
        if directed > brute * (1.0 + 1e-9) {
            missed += 1;
            worst = worst.max(directed / brute);
        }
    }
    (worst, f64::from(missed) / f64::from(pairs))
}

#[test]
fn the_search_equals_brute_force_on_one_level() {
    for (machine, dims) in [("flat:4", &[8u64, 8][..]), ("flat:6", &[12, 12]), ("flat:8", &[4])] {
        let (worst, missed) = compare(&builtin(machine).unwrap(), dims, With::Partial);
        println!("{machine} {dims:?}: goal-directed at worst {worst:.2}, misses {:.1}%", missed * 100.0);
    }
}

#[test]
fn the_search_equals_brute_force_on_two_levels() {
    for dims in [[1024u64, 1024], [64, 8], [4096, 2]] {
        let (worst, missed) = compare(&builtin("p100x16:8").unwrap(), &dims, With::Partial);
        println!("p100x16:8 {dims:?}: goal-directed at worst {worst:.2}, misses {:.1}%", missed * 100.0);
    }
}

#[test]
fn with_absent_axes_the_search_stays_close_to_brute_force() {
    for (machine, dims) in [("flat:4", &[1024u64, 1024][..]), ("p100x16:8", &[1024, 1024])] {
        let (worst, missed) = compare(&builtin(machine).unwrap(), dims, With::PartialAndAbsent);
        println!("{machine} {dims:?} with absent axes: at worst {worst:.2}, misses {:.1}%", missed * 100.0);
        assert!(worst < 3.1 && missed < 0.3, "{worst} {missed}");
    }
}
