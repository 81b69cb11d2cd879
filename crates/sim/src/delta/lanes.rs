//! The devices that a simulation tells apart.
//!
//! Without pins all devices do the same, and one lane stands for all of them. Along axes that ops may be pinned on, every
//! digit has a lane of its own.

use shardwright_cost::{Layout, Placement};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_space::{AxisUse, Config};

/// The most lanes: a task's rank ends with its lane.
pub const MOST_LANES: usize = 32;
/// Bits of a rank that are the lane's.
pub const LANE_BITS: u32 = 5;

/// The lanes of a mesh.
#[derive(Clone, Debug)]
pub struct Lanes {
    /// Per axis: lanes from one digit to the next; zero for axes whose digits are all alike.
    strides: Vec<u32>,
    sizes: Vec<u32>,
    count: usize,
    /// Streams of a lane: computing, and one port per level.
    pub streams: usize,
}

impl Lanes {
    /// One lane per combination of digits on some axes; none if there are too many.
    pub fn new(mesh: &Mesh, levels: usize, apart: AxisSet) -> Option<Self> {
        let mut strides = vec![0; mesh.len()];
        let sizes: Vec<u32> = mesh.axes().iter().map(|axis| axis.size).collect();
        let (mut count, streams) = (1usize, levels + 1);
        for axis in apart.iter() {
            strides[axis.index()] = count as u32;
            count = count.saturating_mul(sizes[axis.index()] as usize);
        }
        let fits = count <= MOST_LANES && count * streams <= u64::BITS as usize;
        fits.then_some(Self { strides, sizes, count, streams })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// All lanes, as bits.
    pub fn all(&self) -> u64 {
        u64::MAX >> (u64::BITS as usize - self.count)
    }

    fn digit(&self, lane: usize, axis: usize) -> u32 {
        lane as u32 / self.strides[axis].max(1) % self.sizes[axis]
    }

    /// The lanes that keep all pins, as bits; none where digits of an axis are not told apart.
    fn keeping(&self, pins: impl Iterator<Item = (AxisId, u32)> + Clone) -> Option<u64> {
        if pins.clone().any(|(axis, _)| self.strides[axis.index()] == 0) {
            return None;
        }
        let keeps = |lane: &usize| pins.clone().all(|(axis, digit)| self.digit(*lane, axis.index()) == digit);
        Some((0..self.count).filter(keeps).fold(0, |lanes, lane| lanes | 1 << lane))
    }

    /// The lanes where an op under a config runs.
    pub fn of_config(&self, config: &Config) -> Option<u64> {
        let pins = config.uses().iter().enumerate().filter_map(|(axis, used)| match used {
            AxisUse::Pin(digit) => Some((AxisId(axis as u32), u32::from(*digit))),
            _ => None,
        });
        self.keeping(pins)
    }

    /// The lanes where a tensor is.
    pub fn of_layout(&self, layout: &Layout) -> u64 {
        let absent = layout.absent();
        let pins = absent.iter().filter_map(|axis| match layout.get(axis) {
            Placement::Absent(digit) => Some((axis, u32::from(digit))),
            _ => None,
        });
        self.keeping(pins).unwrap_or_else(|| self.all())
    }

    /// Lanes that act together along some axes, as bits; the first lane of each group ascends.
    pub fn groups(&self, axes: AxisSet) -> Vec<u64> {
        let apart: Vec<AxisId> = axes.iter().filter(|axis| self.strides[axis.index()] > 0).collect();
        let first = |lane: usize| {
            let own = |axis: &AxisId| self.digit(lane, axis.index()) * self.strides[axis.index()];
            lane - apart.iter().map(own).sum::<u32>() as usize
        };
        let leads = (0..self.count).filter(|&lane| first(lane) == lane);
        leads
            .map(|lead| (0..self.count).filter(|&l| first(l) == lead).fold(0, |lanes, l| lanes | 1 << l))
            .collect()
    }
}

/// The lanes of a set of bits.
pub fn lanes(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        lane
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;

    #[test]
    fn lanes_are_digits_of_the_axes_told_apart() {
        let machine = builtin("p100x16").unwrap();
        let mesh = machine.mesh();
        let apart: AxisSet = [AxisId(2), AxisId(3)].into_iter().collect();
        let found = Lanes::new(mesh, 2, apart).unwrap();
        assert_eq!((found.count(), found.all()), (4, 0b1111));
        let mut config = Config::replicated(4);
        config.set(AxisId(3), AxisUse::Pin(1));
        assert_eq!(found.of_config(&config), Some(0b1100));
        config.set(AxisId(0), AxisUse::Pin(0));
        assert_eq!(found.of_config(&config), None, "that axis' digits are all alike");
        assert_eq!(found.groups([AxisId(2)].into_iter().collect()), [0b0011, 0b1100]);
        assert_eq!(found.groups(AxisSet::EMPTY), [1, 2, 4, 8]);
        assert_eq!(lanes(0b1010).collect::<Vec<_>>(), [1, 3]);
        assert!(Lanes::new(mesh, 2, mesh.all()).is_some(), "16 lanes of 3 streams");
        assert!(Lanes::new(mesh, 4, mesh.all()).is_none());
    }
}
