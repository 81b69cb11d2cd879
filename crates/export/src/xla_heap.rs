//! XLA's buffer assignment. It layouts the largest buffers first. A result has its own allocation, which smaller buffers
//! may use while the result is not live. All other buffers share one heap. The heap has few holes, so that its size is
//! the largest sum of bytes that are live at once.

use std::cmp::Reverse;
use std::ops::Range;

/// A buffer of the compiled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub bytes: u64,
    /// The times at which it is live.
    pub live: Range<usize>,
    /// Whether it is a result of the step.
    pub result: bool,
}

/// The live ranges of all buffers in a result's allocation, in order; they do not overlap.
struct Allocation(Vec<Range<usize>>);

impl Allocation {
    /// Adds a buffer if its range is free.
    fn place(&mut self, live: &Range<usize>) -> bool {
        let at = self.0.partition_point(|other| other.end <= live.start);
        let free = self.0.get(at).is_none_or(|next| live.end <= next.start);
        if free {
            self.0.insert(at, live.clone());
        }
        free
    }
}

/// Bytes of all results and the heap.
pub(crate) fn pack(mut buffers: Vec<Buffer>) -> u64 {
    buffers.sort_by_key(|buffer| (Reverse(buffer.bytes), !buffer.result, buffer.live.start, buffer.live.end));
    let mut results: Vec<Allocation> = Vec::new();
    let mut total: u64 = 0;
    let mut heap: Vec<(usize, i128)> = Vec::new();
    for buffer in buffers.into_iter().filter(|buffer| buffer.bytes > 0) {
        if buffer.result {
            total = total.saturating_add(buffer.bytes);
            results.push(Allocation(vec![buffer.live]));
        // Results placed before are at least as large.
        } else if !results.iter_mut().rev().any(|result| result.place(&buffer.live)) {
            heap.push((buffer.live.start, i128::from(buffer.bytes)));
            heap.push((buffer.live.end, -i128::from(buffer.bytes)));
        }
    }
    // At equal times, buffers that end come before those that start.
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
