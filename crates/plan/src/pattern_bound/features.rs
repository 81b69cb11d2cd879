//! Groups of configs by what they do with interchangeable axes.

use rustc_hash::FxHashMap;
use shardwright_machine::Mesh;
use shardwright_space::{AxisUse, Config};
use smallvec::SmallVec;

/// Per class of interchangeable axes: how many of them have each use, four bits each.
pub(super) type Features = SmallVec<[u128; 2]>;

/// Bits per count of [`Features`].
const COUNT_BITS: usize = 4;
/// Counts per class of axes.
pub(super) const USES: usize = u128::BITS as usize / COUNT_BITS;

/// One axis more of a use. Uses beyond the last count as one.
pub(super) fn one_axis(used: usize) -> u128 {
    1 << (COUNT_BITS * used.min(USES - 1))
}

/// The number of axes of a use.
pub(super) fn count(features: u128, used: usize) -> u128 {
    features >> (COUNT_BITS * used) & ((1 << COUNT_BITS) - 1)
}

/// Per class of interchangeable axes: how many of them replicate, and split each factor.
pub(super) fn features(config: &Config, mesh: &Mesh) -> Features {
    let mut keys = Vec::new();
    let mut all = Features::new();
    for (axis, used) in mesh.axes().iter().zip(config.uses()) {
        let key = (axis.level, axis.size, axis.dim);
        let class = keys.iter().position(|known| *known == key).unwrap_or_else(|| {
            keys.push(key);
            all.push(0);
            keys.len() - 1
        });
        let at = match used {
            AxisUse::Split(factor) => usize::from(*factor) + 1,
            _ => 0,
        };
        all[class] += one_axis(at);
    }
    all
}

/// The use of more than half of a class's axes, if there is one.
pub(super) fn main_use(features: u128) -> Option<usize> {
    let axes: u128 = (0..USES).map(|at| count(features, at)).sum();
    (0..USES).find(|&at| 2 * count(features, at) > axes)
}

/// Configs in groups of equal keys, in order of first appearance.
pub(super) fn group_by<K: std::hash::Hash + Eq>(all: &[u32], key: impl Fn(u32) -> K) -> Vec<Vec<u32>> {
    let mut numbers: FxHashMap<K, usize> = FxHashMap::default();
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for &config in all {
        let next = groups.len();
        let number = *numbers.entry(key(config)).or_insert(next);
        if number == next {
            groups.push(Vec::new());
        }
        groups[number].push(config);
    }
    groups
}
