//! The allocation budget of an import.
//!
//! A few bytes of a file can ask for terabytes: a range, a mask, a loop of loops. Every value that an import computes is
//! charged here, by the bytes that it holds and by the elements that it takes to compute. The budget grows with the file.

use super::error::{NodeError, NodeResult};

/// Bytes that any file may use: models of a few kilobytes build attention masks of many megabytes.
const BASE_BYTES: u64 = 512 << 20;
/// Further bytes per byte of the file. A packed `u8` becomes an `i64`, and a constant may be copied a few times.
const BYTES_PER_FILE_BYTE: u64 = 64;
/// Elements visited per byte of the budget.
const WORK_PER_BYTE: u64 = 4;
/// Bytes of an element of a [`super::literal::Literal`].
const ELEMENT_BYTES: u64 = 8;
/// The most nodes that an import visits, iterations of loops counted each.
const MOST_NODES: u64 = 1_000_000;

/// What an import may still allocate, visit and import.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    limit: u64,
    bytes: u64,
    work: u64,
    nodes: u64,
}

impl Budget {
    /// The budget of a file of this many bytes.
    pub fn of_file(file_bytes: usize) -> Self {
        let limit = (file_bytes as u64).saturating_mul(BYTES_PER_FILE_BYTE).saturating_add(BASE_BYTES);
        Self { limit, bytes: limit, work: limit.saturating_mul(WORK_PER_BYTE), nodes: MOST_NODES }
    }

    /// Takes bytes.
    pub fn bytes(&mut self, bytes: usize) -> NodeResult {
        let left = self.bytes.checked_sub(bytes as u64);
        self.bytes = left.ok_or_else(|| {
            NodeError::invalid(format!(
                "the model's constants exceed {} MiB, the limit for a file of this size",
                self.limit >> 20
            ))
        })?;
        Ok(())
    }

    /// Takes the bytes of a value with this many elements.
    pub fn elements(&mut self, elements: usize) -> NodeResult {
        self.work(elements)?;
        self.bytes(elements.saturating_mul(ELEMENT_BYTES as usize))
    }

    /// Takes the time to visit this many elements.
    pub fn work(&mut self, elements: usize) -> NodeResult {
        let left = self.work.checked_sub(elements as u64);
        self.work = left.ok_or_else(|| {
            NodeError::invalid("computing the model's constants takes too long for a file of this size")
        })?;
        Ok(())
    }

    /// Takes one node.
    pub fn node(&mut self) -> NodeResult {
        let left = self.nodes.checked_sub(1);
        self.nodes =
            left.ok_or_else(|| NodeError::invalid("the model's loops expand to over a million nodes"))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_ends_and_never_wraps() {
        let mut budget = Budget::of_file(1 << 20);
        assert!(budget.bytes(usize::MAX).is_err());
        assert!(budget.elements(usize::MAX).is_err());
        assert!(budget.elements(1 << 20).is_ok());
        let all = std::iter::from_fn(|| budget.elements(1 << 22).ok()).take(1000).count();
        assert!((10..100).contains(&all), "{all} tensors of 32 MiB");
        // Larger files may hold more.
        assert!(Budget::of_file(1 << 30).bytes(1 << 33).is_ok());
    }
}
