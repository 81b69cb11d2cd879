//! Memory for tensors: aligned buffers that many devices may read and one may write, and the pool that reuses them.
//!
//! A buffer is shared by reference counting. The holder of the only reference may write, which the compiler checks. A device
//! that has given its result to others can reuse the memory once the last of them has read it.

use half::{bf16, f16};
use shardwright_graph::{DType, TensorType};
use shardwright_runtime::{Data, Elements, ElementsMut, HostTensor};
use std::sync::Arc;

/// One cache line. Buffers consist of lines, so every buffer starts on a cache line boundary.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: 64 bytes without padding, and any bytes are a valid value, zeros among them.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; the type is `Copy`, `'static` and has no interior mutability.
unsafe impl bytemuck::Pod for Line {}

/// Bytes on cache line boundaries.
pub struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    /// A buffer of at least `bytes` bytes, all zero.
    pub fn zeroed(bytes: usize) -> Self {
        Self { lines: vec![Line([0; 64]); bytes.div_ceil(64)] }
    }

    /// A copy of another buffer.
    pub fn copy_of(other: &Self) -> Self {
        Self { lines: other.lines.clone() }
    }

    /// Number of bytes: the requested number, rounded up to whole cache lines.
    pub fn len(&self) -> usize {
        self.lines.len() * 64
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }

    /// The first `count` elements of a type.
    pub fn slice<T: bytemuck::Pod>(&self, count: usize) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..count]
    }

    /// The first `count` elements of a type, for writing.
    pub fn slice_mut<T: bytemuck::Pod>(&mut self, count: usize) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..count]
    }

    /// The elements of a tensor of this type, as kernels read them.
    pub fn elements(&self, ty: &TensorType) -> Elements<'_> {
        let count = ty.shape.elements() as usize;
        match ty.dtype {
            DType::F32 => Elements::F32(self.slice(count)),
            DType::F64 => Elements::F64(self.slice(count)),
            DType::Bf16 => Elements::Bf16(self.slice::<bf16>(count)),
            DType::F16 => Elements::F16(self.slice::<f16>(count)),
            DType::I32 => Elements::I32(self.slice(count)),
            DType::I64 => Elements::I64(self.slice(count)),
            DType::Bool => Elements::Bool(self.slice(count)),
        }
    }

    /// The elements of a tensor of this type, as kernels write them.
    pub fn elements_mut(&mut self, ty: &TensorType) -> ElementsMut<'_> {
        let count = ty.shape.elements() as usize;
        match ty.dtype {
            DType::F32 => ElementsMut::F32(self.slice_mut(count)),
            DType::F64 => ElementsMut::F64(self.slice_mut(count)),
            DType::Bf16 => ElementsMut::Bf16(self.slice_mut::<bf16>(count)),
            DType::F16 => ElementsMut::F16(self.slice_mut::<f16>(count)),
            DType::I32 => ElementsMut::I32(self.slice_mut(count)),
            DType::I64 => ElementsMut::I64(self.slice_mut(count)),
            DType::Bool => ElementsMut::Bool(self.slice_mut(count)),
        }
    }

    /// A copy of the tensor of this type in the buffer.
    pub fn to_tensor(&self, ty: &TensorType) -> HostTensor {
        let data = match self.elements(ty) {
            Elements::F32(x) => Data::F32(x.to_vec()),
            Elements::F64(x) => Data::F64(x.to_vec()),
            Elements::Bf16(x) => Data::Bf16(x.to_vec()),
            Elements::F16(x) => Data::F16(x.to_vec()),
            Elements::I32(x) => Data::I32(x.to_vec()),
            Elements::I64(x) => Data::I64(x.to_vec()),
            Elements::Bool(x) => Data::Bool(x.to_vec()),
        };
        HostTensor::new(ty.shape.clone(), data)
    }

    /// Writes a tensor, which must fit.
    pub fn write(&mut self, value: &HostTensor) {
        let bytes: &[u8] = match value.data() {
            Data::F32(x) => bytemuck::cast_slice(x),
            Data::F64(x) => bytemuck::cast_slice(x),
            Data::Bf16(x) => bytemuck::cast_slice(x),
            Data::F16(x) => bytemuck::cast_slice(x),
            Data::I32(x) => bytemuck::cast_slice(x),
            Data::I64(x) => bytemuck::cast_slice(x),
            Data::Bool(x) => x,
        };
        self.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    }
}

/// The memory of one device: its buffers, those in use and those that wait for reuse.
///
/// Released buffers are kept for results of the same size, as long as all buffers together fit the budget. Beyond it
/// they are freed.
pub struct Pool {
    /// Buffers that were given back, smallest first. Other devices may still read them.
    idle: Vec<Arc<Buffer>>,
    /// Bytes of all buffers.
    held: u64,
    peak: u64,
    budget: u64,
}

impl Default for Pool {
    fn default() -> Self {
        Self::within(u64::MAX)
    }
}

impl Pool {
    /// A pool that frees idle buffers before it holds more than `budget` bytes.
    pub fn within(budget: u64) -> Self {
        Self { idle: Vec::new(), held: 0, peak: 0, budget }
    }

    /// A buffer of at least `bytes` bytes and unspecified content, with no other holder.
    pub fn take(&mut self, bytes: usize) -> Arc<Buffer> {
        let bytes = bytes.div_ceil(64) * 64;
        let first = self.idle.partition_point(|b| b.len() < bytes);
        let mut same_size = self.idle[first..].iter_mut().take_while(|b| b.len() == bytes);
        match same_size.position(|b| Arc::get_mut(b).is_some()) {
            Some(at) => self.idle.remove(first + at),
            None => {
                self.add(bytes);
                Arc::new(Buffer::zeroed(bytes))
            }
        }
    }

    /// Counts a buffer of this many bytes that the device holds from now on.
    pub fn add(&mut self, bytes: usize) {
        self.make_room(bytes as u64);
        self.held += bytes as u64;
        self.peak = self.peak.max(self.held);
    }

    /// Counts memory that a kernel holds while it runs.
    pub fn add_workspace(&mut self, bytes: u64) {
        self.make_room(bytes);
        self.peak = self.peak.max(self.held.saturating_add(bytes));
    }

    /// Frees idle buffers until `bytes` more fit the budget, or none is left: the smallest one that is enough, else the
    /// largest.
    fn make_room(&mut self, bytes: u64) {
        loop {
            let over = self.held.saturating_add(bytes).saturating_sub(self.budget);
            if over == 0 {
                return;
            }
            let free: Vec<usize> =
                (0..self.idle.len()).filter(|&at| Arc::get_mut(&mut self.idle[at]).is_some()).collect();
            let enough = free.iter().copied().find(|&at| self.idle[at].len() as u64 >= over);
            let Some(at) = enough.or(free.last().copied()) else { return };
            self.held -= self.idle.remove(at).len() as u64;
        }
    }

    /// Takes a buffer back, for reuse once its last reader has dropped it. A buffer that several values share may be given
    /// back once for each of them.
    pub fn give(&mut self, buffer: Arc<Buffer>) {
        let at = self.idle.partition_point(|b| b.len() < buffer.len());
        let mut same_size = self.idle[at..].iter().take_while(|b| b.len() == buffer.len());
        if !same_size.any(|b| Arc::ptr_eq(b, &buffer)) {
            self.idle.insert(at, buffer);
        }
    }

    /// The most bytes that this pool has held at once.
    pub fn peak(&self) -> u64 {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_once_its_readers_are_gone() {
        let mut pool = Pool::default();
        let first = pool.take(1000);
        let reader = first.clone();
        let address = first.bytes().as_ptr();
        assert_eq!(address.align_offset(64), 0);
        pool.give(first);
        let second = pool.take(1000);
        assert_ne!(second.bytes().as_ptr(), address, "still being read");
        drop(reader);
        assert_eq!(pool.take(1010).bytes().as_ptr(), address, "same cache lines");
        assert_eq!(pool.peak(), 2048);
    }

    #[test]
    fn a_buffer_that_was_given_back_twice_is_there_once() {
        let mut pool = Pool::default();
        let buffer = pool.take(100);
        pool.give(buffer.clone());
        assert!(!Arc::ptr_eq(&pool.take(100), &buffer), "one of the two is still in use");
        let address = buffer.bytes().as_ptr();
        pool.give(buffer);
        assert_eq!(pool.take(100).bytes().as_ptr(), address);
    }

    #[test]
    fn idle_buffers_of_other_sizes_are_freed_where_the_budget_needs_their_memory() {
        let mut pool = Pool::within(1 << 20);
        let large = pool.take(1 << 19);
        let small = pool.take(1 << 10);
        pool.give(large);
        pool.give(small);
        let address = pool.idle[1].bytes().as_ptr();
        assert_eq!(pool.take(1 << 18).len(), 1 << 18);
        assert_eq!(pool.idle.len(), 2, "there is room for all three");
        let next = pool.take(1 << 19);
        assert_eq!(next.bytes().as_ptr(), address, "the same size is reused");
        pool.give(next);
        assert_eq!(pool.take((1 << 19) + 64).len(), (1 << 19) + 64);
        assert_eq!(pool.idle.len(), 1, "the large one made room");
        pool.add_workspace(1 << 17);
        assert!(pool.peak() <= 1 << 20);
    }
}
