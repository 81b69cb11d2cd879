//! The ops of a step with several micro-batches written out, in the order of the unrolled program
//! ([`shardwright_lower::ParallelGraph::unrolled_to`]): those before the body, the body once per copy, those after it.
//!
//! An op of the body has one *instance* per copy. All instances of an op have its config.

use shardwright_graph::Graph;
use std::ops::Range;

/// The instances of all ops.
#[derive(Clone, Debug)]
pub struct Unrolled {
    ops: usize,
    body: Range<usize>,
    copies: usize,
}

impl Unrolled {
    /// A step whose body is written out so many times, at least once.
    pub fn new(graph: &Graph, copies: u32) -> Self {
        let body = if graph.micro_batches.get() > 1 { graph.body() } else { 0..0 };
        Self { ops: graph.ops.len(), body, copies: copies.max(1) as usize }
    }

    /// Number of instances.
    pub fn len(&self) -> usize {
        self.ops + (self.copies - 1) * self.body.len()
    }

    /// Copies of the body.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// The instances of the body, of all copies.
    pub fn body(&self) -> Range<usize> {
        self.body.start..self.body.start + self.copies * self.body.len()
    }

    /// Ops of the body.
    pub fn body_ops(&self) -> usize {
        self.body.len()
    }

    /// The op of an instance.
    pub fn op(&self, instance: usize) -> usize {
        let body = self.body();
        match instance {
            _ if instance < body.start => instance,
            _ if instance < body.end => self.body.start + (instance - body.start) % self.body.len(),
            _ => instance - (body.len() - self.body.len()),
        }
    }

    /// The copy of the body that an instance belongs to. Ops before the body belong to the first, those after it to the last.
    pub fn copy(&self, instance: usize) -> usize {
        let copy = instance.saturating_sub(self.body.start) / self.body.len().max(1);
        copy.min(self.copies - 1)
    }

    /// The instance of an op in a copy; ops outside of the body have one.
    pub fn instance(&self, op: usize, copy: usize) -> usize {
        match op {
            _ if op < self.body.start => op,
            _ if op < self.body.end => op + copy * self.body.len(),
            _ => op + (self.copies - 1) * self.body.len(),
        }
    }

    /// All instances of an op.
    pub fn instances(&self, op: usize) -> impl Iterator<Item = usize> {
        let copies = if self.body.contains(&op) { self.copies } else { 1 };
        (0..copies).map(move |copy| self.instance(op, copy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_and_ops_belong_together() {
        let unrolled = Unrolled { ops: 7, body: 2..5, copies: 3 };
        let ops: Vec<usize> = (0..unrolled.len()).map(|instance| unrolled.op(instance)).collect();
        assert_eq!(ops, [0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 6]);
        let copies: Vec<usize> = (2..11).map(|instance| unrolled.copy(instance)).collect();
        assert_eq!(copies, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
        assert_eq!((unrolled.copy(0), unrolled.copy(12)), (0, 2));
        for op in 0..7 {
            assert!(unrolled.instances(op).all(|instance| unrolled.op(instance) == op));
        }
        assert_eq!(unrolled.instances(4).collect::<Vec<_>>(), [4, 7, 10]);
        assert_eq!(unrolled.instances(5).collect::<Vec<_>>(), [11]);
        let plain = Unrolled { ops: 3, body: 0..0, copies: 1 };
        assert_eq!(
            (0..plain.len()).map(|at| (plain.op(at), plain.copy(at))).collect::<Vec<_>>(),
            [(0, 0), (1, 0), (2, 0)]
        );
    }
}
