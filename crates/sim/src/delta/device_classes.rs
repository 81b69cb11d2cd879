//! The device classes of a delta simulation.
//!
//! Without pins all devices do the same work, and one class represents all of them. Along axes that ops may be pinned
//! on, every digit has a separate class.

use shardwright_cost::{Layout, Placement};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_space::{AxisUse, Config};

/// The most device classes: the last bits of a task's rank are its class.
pub const MOST_CLASSES: usize = 32;
/// Number of bits of the class in a rank.
pub const CLASS_BITS: u32 = 5;

/// The device classes of a mesh.
#[derive(Clone, Debug)]
pub struct DeviceClasses {
    /// Per axis: distance between the classes of neighbouring digits; zero for axes without pins.
    strides: Vec<u32>,
    sizes: Vec<u32>,
    count: usize,
    /// Streams of a class: the compute stream, and one port per level.
    pub streams: usize,
}

impl DeviceClasses {
    /// One class per combination of digits on some axes; none if there are too many.
    pub fn new(mesh: &Mesh, levels: usize, apart: AxisSet) -> Option<Self> {
        let mut strides = vec![0; mesh.len()];
        let sizes: Vec<u32> = mesh.axes().iter().map(|axis| axis.size).collect();
        let (mut count, streams) = (1usize, levels + 1);
        for axis in apart.iter() {
            strides[axis.index()] = count as u32;
            count = count.saturating_mul(sizes[axis.index()] as usize);
        }
        let fits = count <= MOST_CLASSES && count * streams <= u64::BITS as usize;
        fits.then_some(Self { strides, sizes, count, streams })
    }

    /// Number of classes.
    pub fn count(&self) -> usize {
        self.count
    }

    /// All device classes, as bits.
    pub fn all(&self) -> u64 {
        u64::MAX >> (u64::BITS as usize - self.count)
    }

    fn digit(&self, class: usize, axis: usize) -> u32 {
        class as u32 / self.strides[axis].max(1) % self.sizes[axis]
    }

    /// The device classes that match all pins, as bits; none where an axis has no separate classes.
    fn matching(&self, pins: impl Iterator<Item = (AxisId, u32)> + Clone) -> Option<u64> {
        if pins.clone().any(|(axis, _)| self.strides[axis.index()] == 0) {
            return None;
        }
        let keeps =
            |class: &usize| pins.clone().all(|(axis, digit)| self.digit(*class, axis.index()) == digit);
        Some((0..self.count).filter(keeps).fold(0, |device_classes, class| device_classes | 1 << class))
    }

    /// The device classes on which an op runs under a config.
    pub fn of_config(&self, config: &Config) -> Option<u64> {
        let pins = config.uses().iter().enumerate().filter_map(|(axis, used)| match used {
            AxisUse::Pin(digit) => Some((AxisId(axis as u32), u32::from(*digit))),
            _ => None,
        });
        self.matching(pins)
    }

    /// The device classes that hold a tensor.
    pub fn of_layout(&self, layout: &Layout) -> u64 {
        let absent = layout.absent();
        let pins = absent.iter().filter_map(|axis| match layout.get(axis) {
            Placement::Absent(digit) => Some((axis, u32::from(digit))),
            _ => None,
        });
        self.matching(pins).unwrap_or_else(|| self.all())
    }

    /// Groups of device classes that act together along some axes, as bits. Groups are in order of their first class.
    pub fn groups(&self, axes: AxisSet) -> Vec<u64> {
        let apart: Vec<AxisId> = axes.iter().filter(|axis| self.strides[axis.index()] > 0).collect();
        let first = |class: usize| {
            let own = |axis: &AxisId| self.digit(class, axis.index()) * self.strides[axis.index()];
            class - apart.iter().map(own).sum::<u32>() as usize
        };
        let leads = (0..self.count).filter(|&class| first(class) == class);
        leads
            .map(|lead| {
                (0..self.count)
                    .filter(|&l| first(l) == lead)
                    .fold(0, |device_classes, l| device_classes | 1 << l)
            })
            .collect()
    }
}

/// The device classes of a set of bits.
pub fn device_classes(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let class = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        class
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;

    #[test]
    fn device_classes_are_digits_of_the_pinned_axes() {
        let machine = builtin("p100x16").unwrap();
        let mesh = machine.mesh();
        let apart: AxisSet = [AxisId(2), AxisId(3)].into_iter().collect();
        let found = DeviceClasses::new(mesh, 2, apart).unwrap();
        assert_eq!((found.count(), found.all()), (4, 0b1111));
        let mut config = Config::replicated(4);
        config.set(AxisId(3), AxisUse::Pin(1));
        assert_eq!(found.of_config(&config), Some(0b1100));
        config.set(AxisId(0), AxisUse::Pin(0));
        assert_eq!(found.of_config(&config), None, "that axis has no separate classes");
        assert_eq!(found.groups([AxisId(2)].into_iter().collect()), [0b0011, 0b1100]);
        assert_eq!(found.groups(AxisSet::EMPTY), [1, 2, 4, 8]);
        assert_eq!(device_classes(0b1010).collect::<Vec<_>>(), [1, 3]);
        assert!(DeviceClasses::new(mesh, 2, mesh.all()).is_some(), "16 device classes of 3 streams");
        assert!(DeviceClasses::new(mesh, 4, mesh.all()).is_none());
    }
}
