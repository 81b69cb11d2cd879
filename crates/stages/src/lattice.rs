//! Suffixes of a partial order: the sets of groups that contain all successors of their members.
//!
//! A pipeline's stages cut the groups into a chain of suffixes. [`Lattice::all`] enumerates every suffix; [`Lattice::chain`]
//! only those of one topological order, for graphs with too many.

use rustc_hash::FxHashMap;

/// Groups of layers with precedence between them. Groups are numbered from zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    successors: Vec<Vec<u32>>,
    predecessors: Vec<Vec<u32>>,
}

impl Order {
    /// An order of `groups` groups with these precedences. Repeated and reflexive pairs are ignored.
    pub fn new(groups: usize, precedences: impl IntoIterator<Item = (u32, u32)>) -> Order {
        let mut order =
            Order { successors: vec![Vec::new(); groups], predecessors: vec![Vec::new(); groups] };
        for (before, after) in precedences {
            if before != after {
                order.successors[before as usize].push(after);
                order.predecessors[after as usize].push(before);
            }
        }
        for list in order.successors.iter_mut().chain(&mut order.predecessors) {
            list.sort_unstable();
            list.dedup();
        }
        order
    }

    /// The number of groups.
    pub fn groups(&self) -> usize {
        self.successors.len()
    }

    /// The direct successors of a group.
    pub fn successors(&self, group: u32) -> &[u32] {
        &self.successors[group as usize]
    }

    /// The direct predecessors of a group.
    pub fn predecessors(&self, group: u32) -> &[u32] {
        &self.predecessors[group as usize]
    }

    /// A topological order: always the ready group with the smallest number. A group on a cycle is returned as the error.
    pub fn topological(&self) -> Result<Vec<u32>, u32> {
        let mut open: Vec<usize> = self.predecessors.iter().map(Vec::len).collect();
        let mut ready: std::collections::BTreeSet<u32> =
            (0..self.groups() as u32).filter(|&group| open[group as usize] == 0).collect();
        let mut order = Vec::with_capacity(self.groups());
        while let Some(group) = ready.pop_first() {
            order.push(group);
            for &next in self.successors(group) {
                open[next as usize] -= 1;
                if open[next as usize] == 0 {
                    ready.insert(next);
                }
            }
        }
        if order.len() == self.groups() {
            return Ok(order);
        }
        // Every unfinished group has an unfinished predecessor; walking backwards from any of them meets a cycle.
        let mut group = open.iter().position(|&count| count > 0).unwrap_or(0) as u32;
        for _ in 0..self.groups() {
            let unfinished = |&&before: &&u32| open[before as usize] > 0;
            group = self.predecessors(group).iter().find(unfinished).copied().unwrap_or(group);
        }
        Err(group)
    }

    /// A topological order that runs every group as late as possible: depth first from the last groups.
    pub fn latest(&self) -> Vec<u32> {
        let mut open: Vec<usize> = self.successors.iter().map(Vec::len).collect();
        let mut ready: Vec<u32> =
            (0..self.groups() as u32).filter(|&group| open[group as usize] == 0).collect();
        let mut order = Vec::with_capacity(self.groups());
        while let Some(group) = ready.pop() {
            order.push(group);
            for &before in self.predecessors(group) {
                open[before as usize] -= 1;
                if open[before as usize] == 0 {
                    ready.push(before);
                }
            }
        }
        order.reverse();
        order
    }
}

/// A set of suffixes, sorted by size. Suffix 0 is empty, and the last one has all groups.
#[derive(Clone, Debug)]
pub struct Lattice {
    words: usize,
    groups: usize,
    bits: Vec<u64>,
    /// Start of every suffix's extensions in `extensions`.
    starts: Vec<u32>,
    /// Suffixes with one group more.
    extensions: Vec<u32>,
    /// A smaller suffix, and the group that it lacks. Unused for the empty suffix.
    origin: Vec<(u32, u32)>,
}

/// The order has more suffixes than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManySuffixes;

impl Lattice {
    /// All suffixes of an order, if there are at most `limit`, and `stop` never returns true.
    pub fn all(order: &Order, limit: usize, stop: &dyn Fn() -> bool) -> Result<Lattice, TooManySuffixes> {
        let words = order.groups().div_ceil(64).max(1);
        let mut lattice = Lattice {
            words,
            groups: order.groups(),
            bits: vec![0; words],
            starts: vec![0],
            extensions: Vec::new(),
            origin: vec![(0, 0)],
        };
        let mut level = 0..1;
        let mut known: FxHashMap<Box<[u64]>, u32> = FxHashMap::default();
        // Groups that may extend a suffix of the level: kept per suffix, so that no step looks at all groups.
        let last: Vec<u32> =
            (0..order.groups() as u32).filter(|&group| order.successors(group).is_empty()).collect();
        let mut ready: Vec<Vec<u32>> = vec![last];
        while !level.is_empty() {
            known.clear();
            let next = level.end;
            let mut next_ready: Vec<Vec<u32>> = Vec::new();
            for (suffix, ready) in level.clone().zip(&ready) {
                if suffix % 1024 == 0 && stop() {
                    return Err(TooManySuffixes);
                }
                for &group in ready {
                    let mut set: Box<[u64]> = lattice.set(suffix).into();
                    set[group as usize / 64] |= 1 << (group % 64);
                    let id = match known.get(&set) {
                        Some(&id) => id,
                        None => {
                            let id = lattice.origin.len();
                            if id >= limit {
                                return Err(TooManySuffixes);
                            }
                            lattice.bits.extend_from_slice(&set);
                            lattice.origin.push((suffix as u32, group));
                            let mut more: Vec<u32> = ready.iter().copied().filter(|&g| g != group).collect();
                            let inside = |&g: &u32| set[g as usize / 64] >> (g % 64) & 1 == 1;
                            more.extend(
                                order
                                    .predecessors(group)
                                    .iter()
                                    .filter(|&&before| order.successors(before).iter().all(inside)),
                            );
                            next_ready.push(more);
                            known.insert(set, id as u32);
                            id as u32
                        }
                    };
                    lattice.extensions.push(id);
                }
                lattice.starts.push(lattice.extensions.len() as u32);
            }
            ready = next_ready;
            level = next..lattice.origin.len();
        }
        Ok(lattice)
    }

    /// The suffixes of one topological order.
    pub fn chain(order: &[u32]) -> Lattice {
        let groups = order.len();
        let words = groups.div_ceil(64).max(1);
        let mut bits = vec![0; words];
        let mut origin = vec![(0, 0)];
        for (size, &group) in order.iter().rev().enumerate() {
            bits.extend_from_within(size * words..);
            bits[(size + 1) * words + group as usize / 64] |= 1 << (group % 64);
            origin.push((size as u32, group));
        }
        let starts = (0..=groups as u32).chain([groups as u32]).collect();
        Lattice { words, groups, bits, starts, extensions: (1..=groups as u32).collect(), origin }
    }

    /// The number of suffixes.
    pub fn len(&self) -> usize {
        self.origin.len()
    }

    /// Whether there is no suffix; never, since the empty one is always there.
    pub fn is_empty(&self) -> bool {
        self.origin.is_empty()
    }

    /// The suffix with all groups.
    pub fn full(&self) -> usize {
        self.len() - 1
    }

    fn set(&self, suffix: usize) -> &[u64] {
        &self.bits[suffix * self.words..(suffix + 1) * self.words]
    }

    /// Whether a suffix has a group.
    pub fn contains(&self, suffix: usize, group: u32) -> bool {
        self.bits[suffix * self.words + group as usize / 64] >> (group % 64) & 1 == 1
    }

    /// The suffixes with one group more.
    pub fn extensions(&self, suffix: usize) -> &[u32] {
        &self.extensions[self.starts[suffix] as usize..self.starts[suffix + 1] as usize]
    }

    /// A suffix with one group less, and that group. Not for the empty suffix.
    pub fn origin(&self, suffix: usize) -> (usize, u32) {
        let (smaller, group) = self.origin[suffix];
        (smaller as usize, group)
    }

    /// The groups of a suffix that are not in its tail, in ascending order.
    pub fn difference(&self, whole: usize, tail: usize) -> impl Iterator<Item = u32> {
        let groups = self.groups as u32;
        self.set(whole).iter().zip(self.set(tail)).enumerate().flat_map(move |(word, (whole, tail))| {
            let mut left = whole & !tail;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(word as u32 * 64 + bit)
            })
            .take_while(move |&group| group < groups)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(groups: usize, edges: &[(u32, u32)]) -> usize {
        Lattice::all(&Order::new(groups, edges.iter().copied()), 1 << 20, &|| false).unwrap().len()
    }

    #[test]
    fn a_chain_has_one_suffix_more_than_groups() {
        assert_eq!(count(5, &[(0, 1), (1, 2), (2, 3), (3, 4)]), 6);
        assert_eq!(count(0, &[]), 1);
    }

    #[test]
    fn an_antichain_has_all_subsets_and_a_diamond_six() {
        assert_eq!(count(10, &[]), 1024);
        assert_eq!(count(4, &[(0, 1), (0, 2), (1, 3), (2, 3)]), 6);
    }

    #[test]
    fn every_suffix_contains_the_successors_of_its_groups() {
        let order =
            Order::new(70, (0..69u32).filter(|i| i % 30 != 3).map(|i| (i, i + 1)).chain([(3, 60), (2, 69)]));
        let lattice = Lattice::all(&order, 1 << 20, &|| false).unwrap();
        for suffix in 0..lattice.len() {
            for group in lattice.difference(suffix, 0) {
                assert!(order.successors(group).iter().all(|&next| lattice.contains(suffix, next)));
            }
            for &larger in lattice.extensions(suffix) {
                assert_eq!(lattice.difference(larger as usize, suffix).count(), 1);
                assert_eq!(lattice.difference(suffix, larger as usize).count(), 0);
            }
        }
        assert_eq!(lattice.difference(lattice.full(), 0).count(), 70);
        let chain = Lattice::chain(&order.topological().unwrap());
        assert_eq!(chain.len(), 71);
        assert_eq!(chain.difference(71 - 1, 69).count(), 1);
        assert!(chain.extensions(70).is_empty());
    }

    #[test]
    fn a_cycle_is_named_and_limits_hold() {
        let order = Order::new(4, [(0, 1), (1, 2), (2, 1), (2, 3)]);
        assert!([1, 2].contains(&order.topological().unwrap_err()));
        assert!(Lattice::all(&Order::new(30, []), 1000, &|| false).is_err());
        let order = Order::new(4, [(0, 3), (1, 3)]);
        assert_eq!(order.latest().len(), 4);
    }
}
