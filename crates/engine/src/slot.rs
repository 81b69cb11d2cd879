//! A slot passes one buffer at a time from one thread to another, without locks.
//!
//! It is empty or holds one reference to a buffer. Filling and emptying are single atomic operations that move the
//! reference itself, so a buffer is never freed while another thread could still reach it.

use crate::buffer::Buffer;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Holds at most one buffer in transit.
#[derive(Default)]
pub struct Slot {
    /// Null, or a reference that the slot owns.
    buffer: AtomicPtr<Buffer>,
}

impl Slot {
    /// Puts a buffer in; false where the slot is full.
    pub fn put(&self, buffer: &Arc<Buffer>) -> bool {
        if !self.is_empty() {
            return false;
        }
        let reference = Arc::into_raw(buffer.clone()).cast_mut();
        // Release: the thread that takes the buffer sees everything that was written to it.
        match self.buffer.compare_exchange(ptr::null_mut(), reference, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => true,
            Err(_) => {
                // SAFETY: `reference` came from `Arc::into_raw` just above and no other thread has seen it.
                drop(unsafe { Arc::from_raw(reference) });
                false
            }
        }
    }

    /// Takes the buffer out; none where the slot is empty.
    pub fn take(&self) -> Option<Arc<Buffer>> {
        // Reading first leaves the cache line shared while the slot is empty.
        if self.is_empty() {
            return None;
        }
        let reference = self.buffer.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: a pointer that is not null was put there by `put`, which gave its reference to the slot. The swap took it
        // out, so no thread can take it a second time.
        (!reference.is_null()).then(|| unsafe { Arc::from_raw(reference) })
    }

    /// Whether the slot is empty.
    pub fn is_empty(&self) -> bool {
        self.buffer.load(Ordering::Relaxed).is_null()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_holds_one_buffer_and_gives_up_what_it_holds() {
        let slot = Slot::default();
        assert!(slot.take().is_none());
        let (a, b) = (Arc::new(Buffer::zeroed(64)), Arc::new(Buffer::zeroed(64)));
        assert!(slot.put(&a) && !slot.put(&b));
        assert_eq!((Arc::strong_count(&a), Arc::strong_count(&b)), (2, 1));
        assert!(Arc::ptr_eq(&slot.take().unwrap(), &a));
        assert!(slot.put(&b));
        drop(slot);
        assert_eq!((Arc::strong_count(&a), Arc::strong_count(&b)), (1, 1));
    }

    #[test]
    fn everything_passes_in_order_and_complete() {
        const COUNT: u64 = if cfg!(miri) { 50 } else { 20_000 };
        let slot = Slot::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..COUNT {
                    let mut buffer = Buffer::zeroed(64);
                    buffer.slice_mut::<u64>(8).fill(n);
                    let buffer = Arc::new(buffer);
                    while !slot.put(&buffer) {
                        std::thread::yield_now();
                    }
                }
            });
            for n in 0..COUNT {
                let buffer = loop {
                    match slot.take() {
                        Some(buffer) => break buffer,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(buffer.slice::<u64>(8), [n; 8]);
            }
        });
    }
}
