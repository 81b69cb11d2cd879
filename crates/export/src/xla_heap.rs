//! How XLA's buffer assignment shares memory. It takes the largest buffers first. A result has an allocation of its own, in
//! which whatever fits may lie as long as the result is not there. Everything else goes into one heap, which has few
//! holes: it is as large as what is there at once.

use std::cmp::Reverse;
use std::ops::Range;

/// A piece of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub bytes: u64,
    /// When it is needed.
    pub live: Range<usize>,
    /// Whether it is handed out in the end.
    pub result: bool,
}

/// What lies in a result's memory before that is made, by when it ends: no two at once.
struct Lodgers(Vec<Range<usize>>);

impl Lodgers {
    fn take(&mut self, live: &Range<usize>) -> bool {
        let at = self.0.partition_point(|other| other.end <= live.start);
        let free = self.0.get(at).is_none_or(|next| live.end <= next.start);
        if free {
            self.0.insert(at, live.clone());
        }
        free
    }
}

/// Bytes that all results and the heap take together.
pub(crate) fn pack(mut buffers: Vec<Buffer>) -> u64 {
    buffers.sort_by_key(|buffer| (Reverse(buffer.bytes), !buffer.result, buffer.live.start, buffer.live.end));
    let mut results: Vec<Lodgers> = Vec::new();
    let mut total: u64 = 0;
    let mut heap: Vec<(usize, i128)> = Vec::new();
    for buffer in buffers.into_iter().filter(|buffer| buffer.bytes > 0) {
        if buffer.result {
            total = total.saturating_add(buffer.bytes);
            results.push(Lodgers(vec![buffer.live]));
        // Results that are there already are at least as large.
        } else if !results.iter_mut().rev().any(|result| result.take(&buffer.live)) {
            heap.push((buffer.live.start, i128::from(buffer.bytes)));
            heap.push((buffer.live.end, -i128::from(buffer.bytes)));
        }
    }
    // What ends goes first.
    heap.sort_unstable();
    let held = heap.iter().scan(0i128, |now, (_, change)| {
        *now += change;
        Some(*now)
    });
    total.saturating_add(u64::try_from(held.max().unwrap_or(0)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(bytes: u64, live: Range<usize>) -> Buffer {
        Buffer { bytes, live, result: false }
    }

    #[test]
    fn memory_is_used_again() {
        assert_eq!(pack(vec![buffer(4, 0..2), buffer(4, 2..4)]), 4);
        assert_eq!(pack(vec![buffer(4, 0..3), buffer(4, 2..4)]), 8);
        assert_eq!(pack(Vec::new()), 0);
    }

    #[test]
    fn what_fits_lies_in_a_result_until_that_is_made() {
        let result = |bytes, live| Buffer { result: true, ..buffer(bytes, live) };
        assert_eq!(pack(vec![result(8, 5..9), buffer(8, 0..5)]), 8);
        assert_eq!(pack(vec![result(8, 4..9), buffer(8, 0..5)]), 16);
        assert_eq!(pack(vec![result(8, 5..9), buffer(9, 0..5)]), 17);
        assert_eq!(pack(vec![result(8, 5..9), buffer(8, 0..3), buffer(8, 2..5)]), 16);
        assert_eq!(pack(vec![result(8, 5..9), buffer(8, 0..2), buffer(8, 2..5), buffer(7, 1..3)]), 15);
    }
}
