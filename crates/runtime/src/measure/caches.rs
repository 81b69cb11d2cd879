//! What a core's caches hold, and so where an op finds what it reads.

/// Where an operand is when an op begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    /// In the core's own caches.
    Own,
    /// In the cache that all cores share.
    Shared,
    /// In memory.
    Memory,
}

/// Bytes of a core's own caches, and of its share of the one that all have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caches {
    /// Its own.
    pub own: u64,
    /// Its share.
    pub share: u64,
}

impl Caches {
    /// Those of this computer where so many cores work at once, as Linux tells it; where it does not, those of a usual one.
    pub fn of_cores(workers: usize) -> Self {
        let own = size(2).unwrap_or(1 << 20);
        let share = size(3).unwrap_or(32 << 20) / workers.max(1) as u64;
        Self { own, share: share.max(own) }
    }

    /// Where something is that was last touched so many bytes ago.
    pub fn reach(&self, distance: u64) -> Reach {
        match distance {
            near if near <= self.own => Reach::Own,
            far if far <= self.share => Reach::Shared,
            _ => Reach::Memory,
        }
    }
}

/// The size of a level of the first core's caches.
fn size(level: u32) -> Option<u64> {
    let text =
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size")).ok()?;
    let kilobytes: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
    // A virtual machine may tell of caches that nobody has.
    (64..=1 << 20).contains(&kilobytes).then_some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_touched_long_ago_is_farther() {
        let caches = Caches { own: 100, share: 1000 };
        let found = [0, 100, 101, 1000, 1001, u64::MAX].map(|distance| caches.reach(distance));
        use Reach::{Memory, Own, Shared};
        assert_eq!(found, [Own, Own, Shared, Shared, Memory, Memory]);
        let (few, many) = (Caches::of_cores(1), Caches::of_cores(1 << 20));
        assert!(few.own == many.own && few.share >= many.share && many.share >= many.own, "{few:?} {many:?}");
    }
}
