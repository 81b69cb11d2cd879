//! Cache sizes of a core, and which cache holds an operand.

/// Where an operand is when an op begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    /// In the core's private caches.
    Own,
    /// In the cache that all cores share.
    Shared,
    /// In memory.
    Memory,
}

/// Bytes of a core's private caches, and of its share of the shared cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caches {
    /// Private caches.
    pub own: u64,
    /// Share of the cache that all cores share.
    pub share: u64,
}

impl Caches {
    /// The caches of this computer as Linux reports them, shared by `workers` cores. Where Linux reports none, 1 MiB private and
    /// 32 MiB shared, as most server processors have.
    pub fn of_cores(workers: usize) -> Self {
        let own = size(2).unwrap_or(1 << 20);
        let share = size(3).unwrap_or(32 << 20) / workers.max(1) as u64;
        Self { own, share: share.max(own) }
    }

    /// Where an operand is that was last touched `distance` bytes ago.
    pub fn reach(&self, distance: u64) -> Reach {
        match distance {
            near if near <= self.own => Reach::Own,
            far if far <= self.share => Reach::Shared,
            _ => Reach::Memory,
        }
    }
}

/// Bytes of a cache level of the first core; none where Linux does not report it.
fn size(level: u32) -> Option<u64> {
    let text =
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size")).ok()?;
    let kilobytes: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
    // A virtual machine may report impossible caches.
    (64..=1 << 20).contains(&kilobytes).then_some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_touched_long_ago_are_farther() {
        let caches = Caches { own: 100, share: 1000 };
        let found = [0, 100, 101, 1000, 1001, u64::MAX].map(|distance| caches.reach(distance));
        use Reach::{Memory, Own, Shared};
        assert_eq!(found, [Own, Own, Shared, Shared, Memory, Memory]);
        let (few, many) = (Caches::of_cores(1), Caches::of_cores(1 << 20));
        assert!(few.own == many.own && few.share >= many.share && many.share >= many.own, "{few:?} {many:?}");
    }
}
