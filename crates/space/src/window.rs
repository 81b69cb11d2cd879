//! Windows that reach past a part's own block: the rows that each part reads, and the halos that it fetches.

use crate::{
    config::Config,
    layout::{OpShapes, input_layout},
};
use shardwright_cost::Traffic;
use shardwright_machine::{AxisId, AxisSet, Bytes, DeviceId, Mesh};
use smallvec::SmallVec;
use std::ops::Range;

/// The ranges of a windowed dimension that positions along some axes read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowCut {
    /// The dimension.
    pub dim: u8,
    /// The axes that split its factor.
    pub axes: AxisSet,
    /// The range that each position reads. Positions are counted along the axes, outermost major. Neighbours may
    /// overlap.
    pub ranges: Vec<Range<u64>>,
}

impl WindowCut {
    /// The range that a device reads.
    pub fn range(&self, mesh: &Mesh, device: DeviceId) -> Range<u64> {
        let digit =
            |at: usize, axis: AxisId| at * mesh.axis(axis).size as usize + mesh.digit(device, axis) as usize;
        self.ranges[self.axes.iter().fold(0, digit)].clone()
    }
}

/// The ranges that an op's parts read of its `i`-th input, for every windowed dimension that is split.
pub fn window_cuts(shapes: &OpShapes, i: usize, config: &Config, mesh: &Mesh) -> SmallVec<[WindowCut; 2]> {
    let (rule, map, ty) = (&shapes.rule, &shapes.rule.inputs[i], &shapes.inputs[i]);
    let mut cuts = SmallVec::new();
    for (d, dim) in map.dims.iter().enumerate() {
        let (Some(window), Some(&factor)) = (dim.window, dim.factors.first()) else { continue };
        let axes = config.axes_of(factor);
        if axes.is_empty() {
            continue;
        }
        let parts = u64::from(mesh.group_size(axes));
        let part = rule.factors[factor as usize].size / parts;
        let range = |at: u64| window.range(&(at * part..(at + 1) * part), ty.shape[d]);
        cuts.push(WindowCut { dim: d as u8, axes, ranges: (0..parts).map(range).collect() });
    }
    cuts
}

/// Rows of a windowed input that parts fetch from each other along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halo {
    /// The axes along which the dimension is stored in blocks.
    pub axes: AxisSet,
    /// The most bytes that a part receives from later parts.
    pub down: Bytes,
    /// The most bytes that a part receives from earlier parts.
    pub up: Bytes,
    /// The bytes sent over each axis, all devices together.
    pub traffic: Traffic,
}

/// The halos that the parts of an op's `i`-th input fetch before the op can run: one exchange per windowed dimension,
/// in order. A later exchange also carries the rows of earlier ones, so corners need no extra messages.
///
/// Each row comes from the device that stores it, which need not be the neighbour. The bytes are exact.
pub fn halos(shapes: &OpShapes, i: usize, config: &Config, mesh: &Mesh) -> SmallVec<[Halo; 2]> {
    let ty = &shapes.inputs[i];
    let cuts = window_cuts(shapes, i, config, mesh);
    if cuts.is_empty() {
        return SmallVec::new();
    }
    let stored = input_layout(shapes, i, config, mesh);
    let block = |dim: usize| ty.shape[dim] / u64::from(mesh.group_size(stored.shards(dim as u8)));
    let cut_axes = cuts.iter().fold(AxisSet::EMPTY, |axes, cut| axes.union(cut.axes));
    let repeated = mesh.group_size(mesh.all().minus(cut_axes).minus(stored.absent()));
    // Lengths of the dimensions so far: the longest of any part, and the sum over all parts.
    let mut longest: SmallVec<[u64; 4]> = (0..ty.rank()).map(block).collect();
    let mut summed: SmallVec<[u128; 4]> = longest.iter().map(|&n| u128::from(n)).collect();
    for cut in &cuts {
        summed[usize::from(cut.dim)] *= cut.ranges.len() as u128;
    }
    let mut found = SmallVec::new();
    for cut in &cuts {
        let d = usize::from(cut.dim);
        let others = (0..ty.rank()).filter(|&other| other != d);
        let row = others.clone().fold(ty.dtype.bytes(), |n, other| n.saturating_mul(longest[other]));
        let rows = others.fold(u128::from(ty.dtype.bytes()) * u128::from(repeated), |n, other| {
            n.saturating_mul(summed[other])
        });
        let axes = stored.shards(cut.dim);
        let (mut down, mut up, mut traffic) = (0, 0, Traffic::default());
        for (at, needed) in cut.ranges.iter().enumerate() {
            let own = stored_block(at as u64, cut.axes, axes, mesh);
            let (mut before, mut after) = (0, 0);
            let (first, last) = (needed.start / block(d), (needed.end - 1) / block(d));
            for other in (first..=last).filter(|&other| other != own) {
                let start = needed.start.max(other * block(d));
                let count = needed.end.min((other + 1) * block(d)) - start;
                *(if other < own { &mut before } else { &mut after }) += count;
                traffic.add(crossed(own, other, axes, mesh), rows.saturating_mul(u128::from(count)));
            }
            (down, up) = (down.max(after), up.max(before));
        }
        debug_assert!(!cut.ranges.is_empty(), "axes have at least one position");
        longest[d] = cut.ranges.iter().map(|r| r.end - r.start).max().unwrap_or(0);
        summed[d] = cut.ranges.iter().map(|r| u128::from(r.end - r.start)).sum();
        if down > 0 || up > 0 {
            let bytes = |rows: u64| Bytes(row.saturating_mul(rows));
            found.push(Halo { axes, down: bytes(down), up: bytes(up), traffic });
        }
    }
    found
}

/// The stored block at a position along the axes of a cut: its index along the axes that shard the dimension.
fn stored_block(position: u64, cut: AxisSet, shards: AxisSet, mesh: &Mesh) -> u64 {
    let (mut rest, mut block, mut weight) = (position, 0, 1);
    for axis in cut.iter().rev() {
        let size = u64::from(mesh.axis(axis).size);
        if shards.contains(axis) {
            block += rest % size * weight;
            weight *= size;
        }
        rest /= size;
    }
    block
}

/// The outermost axis on which the indices of two blocks differ.
fn crossed(a: u64, b: u64, axes: AxisSet, mesh: &Mesh) -> AxisId {
    let (mut a, mut b, mut outermost) = (a, b, AxisId(0));
    for axis in axes.iter().rev() {
        let size = u64::from(mesh.axis(axis).size);
        if a % size != b % size {
            outermost = axis;
        }
        (a, b) = (a / size, b / size);
    }
    outermost
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::AxisUse,
        layout::{output_layout, tests::conv},
    };
    use shardwright_machine::{LevelId, builtin};

    #[test]
    fn a_three_by_three_window_reaches_one_row_each_way() {
        let mesh = builtin("flat:2").unwrap().mesh().clone();
        let s = conv(8, 3, 1, 1);
        let config = Config::new([AxisUse::Split(s.rule.find("h").unwrap())]);
        assert_eq!(format!("{:?}", input_layout(&s, 0, &config, &mesh)), "S2");
        // One row of 4 samples, 2 channels, 8 columns of floats.
        let row = Bytes(4 * 2 * 8 * 4);
        let mut traffic = Traffic::default();
        traffic.add(AxisId(0), 2 * u128::from(row.0));
        assert_eq!(
            halos(&s, 0, &config, &mesh)[..],
            [Halo { axes: mesh.all(), down: row, up: row, traffic }]
        );
        assert!(halos(&s, 1, &config, &mesh).is_empty(), "the weight has no windows");
    }

    #[test]
    fn neighbours_in_other_nodes_are_reached_through_the_outer_axes() {
        let mesh = builtin("p100x16").unwrap().mesh().clone();
        let s = conv(16, 3, 1, 1);
        let config = Config::new([AxisUse::Split(s.rule.find("h").unwrap()); 4]);
        let halo = halos(&s, 0, &config, &mesh)[0];
        let row = 4 * 2 * 16 * 4;
        // 16 parts in a row: 3 borders between nodes, 12 within, each crossed both ways.
        assert_eq!(halo.traffic.level(&mesh, LevelId(0)), Bytes(3 * 2 * row));
        assert_eq!(halo.traffic.level(&mesh, LevelId(1)), Bytes(12 * 2 * row));
    }

    #[test]
    fn corners_travel_with_the_second_exchange() {
        let mesh = builtin("flat:4").unwrap().mesh().clone();
        let s = conv(8, 3, 1, 1);
        let split = |name: &str| AxisUse::Split(s.rule.find(name).unwrap());
        let found = halos(&s, 0, &Config::new([split("h"), split("w")]), &mesh);
        // One row of 4 columns each; then one column of 4 + 1 rows each, of 4 samples, 2 channels, 4 bytes.
        let totals: Vec<u64> = found.iter().map(|h| h.traffic.total().0).collect();
        assert_eq!(totals, [4 * 4 * 32, 4 * 5 * 32]);
    }

    #[test]
    fn windows_may_reach_past_the_neighbour() {
        let mesh = builtin("flat:4").unwrap().mesh().clone();
        // Windows of five rows around each of four: with a row per part, all but the farthest are needed.
        let s = conv(4, 5, 1, 2);
        let config = Config::new([AxisUse::Split(s.rule.find("h").unwrap()); 2]);
        let halo = halos(&s, 0, &config, &mesh)[0];
        let row = 4 * 2 * 4 * 4;
        assert_eq!((halo.down, halo.up), (Bytes(2 * row), Bytes(2 * row)));
        assert_eq!(halo.traffic.total(), Bytes((2 + 3 + 3 + 2) * row));
    }

    #[test]
    fn an_input_that_does_not_divide_is_needed_whole() {
        let mesh = builtin("flat:2").unwrap().mesh().clone();
        // Nine rows make four windows of three with stride two: the windows can be halved, the rows cannot.
        let s = conv(9, 3, 2, 0);
        let config = Config::new([AxisUse::Split(s.rule.find("h").unwrap())]);
        assert_eq!(format!("{:?}", input_layout(&s, 0, &config, &mesh)), "R");
        assert_eq!(format!("{:?}", output_layout(&s, 0, &config, &mesh)), "S2");
        assert!(halos(&s, 0, &config, &mesh).is_empty());
    }
}
