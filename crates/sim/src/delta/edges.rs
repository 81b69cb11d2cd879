//! Dependencies of tasks. Each slot holds a predecessor; slots with the same predecessor are linked, which lists its
//! successors.

use crate::delta::NONE;

/// The owner of a slot, and its neighbours among the slots of the same predecessor.
#[derive(Clone, Copy, Debug)]
struct Links {
    owner: u32,
    next: u32,
    previous: u32,
}

/// All slots. The slots of one task are contiguous.
#[derive(Clone, Debug, Default)]
pub struct Edges {
    /// Per slot: the predecessor, or [`NONE`].
    sources: Vec<u32>,
    links: Vec<Links>,
    /// Per task: the first slot with it as predecessor.
    first: Vec<u32>,
}

impl Edges {
    /// Adds a task.
    pub fn add_task(&mut self) {
        self.first.push(NONE);
    }

    /// Adds an empty slot.
    pub fn add_slot(&mut self, owner: u32) -> u32 {
        self.sources.push(NONE);
        self.links.push(Links { owner, next: NONE, previous: NONE });
        self.sources.len() as u32 - 1
    }

    /// The predecessors in a range of slots.
    #[inline]
    pub fn sources(&self, slots: std::ops::Range<usize>) -> &[u32] {
        &self.sources[slots]
    }

    /// The predecessor in a slot.
    #[inline]
    pub fn source(&self, slot: u32) -> u32 {
        self.sources[slot as usize]
    }

    /// The task that owns a slot.
    #[inline]
    pub fn owner(&self, slot: u32) -> u32 {
        self.links[slot as usize].owner
    }

    /// Sets or clears the predecessor in a slot.
    pub fn set(&mut self, slot: u32, source: u32) {
        let old = std::mem::replace(&mut self.sources[slot as usize], source);
        if old != NONE {
            let Links { next, previous, .. } = self.links[slot as usize];
            match previous {
                NONE => self.first[old as usize] = next,
                previous => self.links[previous as usize].next = next,
            }
            if next != NONE {
                self.links[next as usize].previous = previous;
            }
        }
        if source != NONE {
            let next = std::mem::replace(&mut self.first[source as usize], slot);
            let links = &mut self.links[slot as usize];
            (links.next, links.previous) = (next, NONE);
            if next != NONE {
                self.links[next as usize].previous = slot;
            }
        }
    }

    /// The successors of a task, once per slot.
    #[inline]
    pub fn readers(&self, task: u32) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.first[task as usize];
        std::iter::from_fn(move || {
            let links = self.links.get(at as usize)?;
            at = links.next;
            Some(links.owner)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_follow_their_slots() {
        let mut edges = Edges::default();
        (0..3).for_each(|_| edges.add_task());
        let slots: Vec<u32> = (0..4).map(|owner| edges.add_slot(owner)).collect();
        let readers = |edges: &Edges, task| {
            let mut readers: Vec<u32> = edges.readers(task).collect();
            readers.sort_unstable();
            readers
        };
        slots.iter().for_each(|&slot| edges.set(slot, 1));
        assert_eq!(readers(&edges, 1), [0, 1, 2, 3]);
        edges.set(slots[3], 2);
        edges.set(slots[0], NONE);
        edges.set(slots[1], 2);
        assert_eq!(
            (readers(&edges, 0), readers(&edges, 1), readers(&edges, 2)),
            (vec![], vec![2], vec![1, 3])
        );
        edges.set(slots[1], 1);
        assert_eq!((readers(&edges, 1), readers(&edges, 2)), (vec![1, 2], vec![3]));
        assert_eq!(edges.sources(0..4), [NONE, 1, 1, 2]);
    }
}
