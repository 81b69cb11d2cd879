//! Memory for tensors: aligned buffers that many may read and one may write, and the pool that hands them out.
//!
//! A buffer is shared by counting references. Whoever holds the only one may write, which the compiler checks; so
//! a device that has given its result to others gets the memory back exactly when the last of them has read it.

use half::{bf16, f16};
use shardwright_graph::{DType, TensorType};
use shardwright_runtime::{Data, Elements, ElementsMut, Value};
use std::sync::Arc;

/// One cache line: what buffers are made of, so that every buffer starts on one.
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
    /// At least so many bytes, all zero.
    pub fn zeroed(bytes: usize) -> Self {
        Self { lines: vec![Line([0; 64]); bytes.div_ceil(64)] }
    }

    /// How many bytes there are: the number asked for, rounded up to whole cache lines.
    pub fn len(&self) -> usize {
        self.lines.len() * 64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }

    /// The first `count` elements of a type.
    pub fn slice<T: bytemuck::Pod>(&self, count: usize) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..count]
    }

    /// The first `count` elements of a type, to be written.
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

    /// A copy of the tensor of this type that lies here.
    pub fn to_value(&self, ty: &TensorType) -> Value {
        let data = match self.elements(ty) {
            Elements::F32(x) => Data::F32(x.to_vec()),
            Elements::F64(x) => Data::F64(x.to_vec()),
            Elements::Bf16(x) => Data::Bf16(x.to_vec()),
            Elements::F16(x) => Data::F16(x.to_vec()),
            Elements::I32(x) => Data::I32(x.to_vec()),
            Elements::I64(x) => Data::I64(x.to_vec()),
            Elements::Bool(x) => Data::Bool(x.to_vec()),
        };
        Value::new(ty.shape.clone(), data)
    }

    /// Writes a tensor here, which must fit.
    pub fn write(&mut self, value: &Value) {
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

/// Buffers that one device uses again and again: after the first steps, memory is no longer asked for.
#[derive(Default)]
pub struct Pool {
    /// Given back, though others may still be reading; by size, smallest first.
    idle: Vec<Arc<Buffer>>,
    held: u64,
}

impl Pool {
    /// A buffer of at least so many bytes and unspecified content, which nobody else holds.
    pub fn take(&mut self, bytes: usize) -> Arc<Buffer> {
        let bytes = bytes.div_ceil(64) * 64;
        // A buffer may be an eighth larger than needed: enough to serve similar sizes, too little to waste much.
        let most = bytes + bytes / 8;
        let first = self.idle.partition_point(|b| b.len() < bytes);
        let fitting = self.idle[first..].iter_mut().take_while(|b| b.len() <= most);
        let found = fitting.enumerate().find_map(|(at, b)| Arc::get_mut(b).map(|_| first + at));
        match found {
            Some(at) => self.idle.remove(at),
            None => {
                self.held += bytes as u64;
                Arc::new(Buffer::zeroed(bytes))
            }
        }
    }

    /// Takes a buffer back, for use once nobody reads it any more. One that several values share may be given back
    /// for each of them.
    pub fn give(&mut self, buffer: Arc<Buffer>) {
        let at = self.idle.partition_point(|b| b.len() < buffer.len());
        let mut same_size = self.idle[at..].iter().take_while(|b| b.len() == buffer.len());
        if !same_size.any(|b| Arc::ptr_eq(b, &buffer)) {
            self.idle.insert(at, buffer);
        }
    }

    /// Bytes that this pool has asked the system for.
    pub fn held(&self) -> u64 {
        self.held
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
        assert_eq!(pool.held(), 2048);
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
    fn buffers_much_larger_than_needed_are_left_for_others() {
        let mut pool = Pool::default();
        let large = pool.take(1 << 20);
        pool.give(large);
        assert_eq!(pool.take(64).len(), 64);
        assert_eq!(pool.take((1 << 20) - 64).len(), 1 << 20);
    }
}
