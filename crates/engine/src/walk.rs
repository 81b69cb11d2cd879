//! Copies and reductions of an n-dimensional block that lies in several tensors at once.
//!
//! A block is a contiguous run of elements, repeated along a few strided dimensions. Dimensions that are contiguous in all of the
//! tensors are merged, so runs are as long as possible.

use half::{bf16, f16};
use shardwright_cost::Reduction;
use shardwright_graph::{DType, Dims};
use shardwright_runtime::kernels::log_add_exp;
use smallvec::SmallVec;

/// The position of a block in one tensor.
#[derive(Clone, Copy, Debug)]
pub struct BlockView<'a> {
    /// The tensor's shape.
    pub shape: &'a [u64],
    /// The block's first index in it.
    pub origin: &'a [u64],
}

/// The same block in several tensors. All numbers count elements.
#[derive(Clone, Debug)]
pub struct Walk {
    /// Number of elements that are contiguous in all tensors.
    run: usize,
    /// Sizes of the outer dimensions, outermost first.
    counts: SmallVec<[usize; 4]>,
    /// Per tensor: the block's first element, and the stride of each outer dimension.
    tensors: SmallVec<[Strides; 2]>,
}

#[derive(Clone, Debug)]
struct Strides {
    start: usize,
    outer: SmallVec<[usize; 4]>,
}

fn strides(shape: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

impl Walk {
    /// The walk over a block of these sizes, at these positions. The caller has checked that it lies inside each tensor.
    pub fn new(block: &[u64], views: &[BlockView<'_>]) -> Self {
        let full: Vec<Dims> = views.iter().map(|view| strides(view.shape)).collect();
        // Dimensions of the walk, innermost first: a size, and its stride in each tensor.
        let mut dims: Vec<(u64, SmallVec<[u64; 2]>)> = Vec::new();
        for d in (0..block.len()).rev().filter(|&d| block[d] != 1) {
            let here: SmallVec<[u64; 2]> = full.iter().map(|strides| strides[d]).collect();
            match dims.last_mut() {
                // This dimension is contiguous with the one inside it.
                Some((size, inner)) if inner.iter().zip(&here).all(|(i, h)| i * *size == *h) => {
                    *size *= block[d];
                }
                _ => dims.push((block[d], here)),
            }
        }
        let dense = dims.first().is_some_and(|(_, strides)| strides.iter().all(|&s| s == 1));
        let run = if dense { dims.remove(0).0 } else { 1 };
        dims.reverse();
        let tensors = views.iter().zip(&full).enumerate().map(|(t, (view, full))| Strides {
            start: view.origin.iter().zip(full).map(|(o, s)| o * s).sum::<u64>() as usize,
            outer: dims.iter().map(|(_, strides)| strides[t] as usize).collect(),
        });
        Self {
            run: run as usize,
            tensors: tensors.collect(),
            counts: dims.iter().map(|(count, _)| *count as usize).collect(),
        }
    }

    /// Number of elements of the block.
    pub fn elements(&self) -> usize {
        self.run * self.counts.iter().product::<usize>()
    }

    /// Calls `visit` with the position of each run in every tensor.
    fn runs(&self, mut visit: impl FnMut(&[usize])) {
        let mut at: SmallVec<[usize; 8]> = self.tensors.iter().map(|t| t.start).collect();
        let mut index: SmallVec<[usize; 4]> = SmallVec::from_elem(0, self.counts.len());
        'all: loop {
            visit(&at);
            for d in (0..self.counts.len()).rev() {
                index[d] += 1;
                let back = if index[d] < self.counts[d] { 0 } else { self.counts[d] };
                for (at, tensor) in at.iter_mut().zip(&self.tensors) {
                    *at = *at + tensor.outer[d] - back * tensor.outer[d];
                }
                if back == 0 {
                    continue 'all;
                }
                index[d] = 0;
            }
            return;
        }
    }

    /// Copies the block of the second tensor to the first; elements have `size` bytes.
    pub fn copy(&self, target: &mut [u8], source: &[u8], size: usize) {
        let run = self.run * size;
        match (self.run, size) {
            // Single elements are copied as numbers: a call of memcpy for each would be slow.
            (1, 4) => self.copy_singles::<u32>(target, source),
            (1, 8) => self.copy_singles::<u64>(target, source),
            _ => self.runs(|at| {
                let (to, from) = (at[0] * size, at[1] * size);
                target[to..to + run].copy_from_slice(&source[from..from + run]);
            }),
        }
    }

    fn copy_singles<T: bytemuck::Pod>(&self, target: &mut [u8], source: &[u8]) {
        match (bytemuck::try_cast_slice_mut::<u8, T>(target), bytemuck::try_cast_slice::<u8, T>(source)) {
            (Ok(target), Ok(source)) => self.runs(|at| target[at[0]] = source[at[1]]),
            _ => {
                let size = size_of::<T>();
                self.runs(|at| {
                    let (to, from) = (at[0] * size, at[1] * size);
                    target[to..to + size].copy_from_slice(&source[from..from + size]);
                });
            }
        }
    }

    /// Reduces the blocks of the other tensors into the first, always in the given order.
    pub fn combine(&self, dtype: DType, how: Reduction, target: &mut [u8], sources: &[&[u8]]) {
        match (dtype, how) {
            (DType::F32, Reduction::Sum) => self.fold::<f32>(target, sources, |a, b| a + b),
            (DType::F32, Reduction::Max) => self.fold::<f32>(target, sources, f32::max),
            (DType::F64, Reduction::Sum) => self.fold::<f64>(target, sources, |a, b| a + b),
            (DType::F64, Reduction::Max) => self.fold::<f64>(target, sources, f64::max),
            (DType::F32, Reduction::LogSumExp) => self.fold::<f32>(target, sources, log_add_exp),
            (DType::F64, Reduction::LogSumExp) => self.fold::<f64>(target, sources, log_add_exp),
            (DType::I32, Reduction::Sum) => self.fold(target, sources, i32::wrapping_add),
            (DType::I32, Reduction::Max) => self.fold::<i32>(target, sources, Ord::max),
            (DType::I64, Reduction::Sum) => self.fold(target, sources, i64::wrapping_add),
            (DType::I64, Reduction::Max) => self.fold::<i64>(target, sources, Ord::max),
            // Truth values, 0 or 1: both reductions tell whether any is true.
            (DType::Bool, _) => self.fold::<u8>(target, sources, |a, b| a | b),
            (DType::Bf16, Reduction::Sum) => self.fold_wide::<bf16>(target, sources, |a, b| a + b),
            (DType::Bf16, Reduction::Max) => self.fold_wide::<bf16>(target, sources, f32::max),
            (DType::F16, Reduction::Sum) => self.fold_wide::<f16>(target, sources, |a, b| a + b),
            (DType::F16, Reduction::Max) => self.fold_wide::<f16>(target, sources, f32::max),
            (DType::Bf16, Reduction::LogSumExp) => self.fold_wide::<bf16>(target, sources, log_add_exp),
            (DType::F16, Reduction::LogSumExp) => self.fold_wide::<f16>(target, sources, log_add_exp),
            (DType::I32 | DType::I64, Reduction::LogSumExp) => {
                debug_assert!(false, "logarithms are no whole numbers");
            }
        }
    }

    /// Calls `visit` tile by tile, so that the accumulated tile stays in the cache.
    fn tiles(&self, mut visit: impl FnMut(usize, usize, &[usize])) {
        const TILE: usize = 2048;
        self.runs(|at| {
            for from in (0..self.run).step_by(TILE) {
                visit(from, TILE.min(self.run - from), at);
            }
        });
    }

    fn fold<T: bytemuck::Pod>(&self, target: &mut [u8], sources: &[&[u8]], f: impl Fn(T, T) -> T + Copy) {
        let target: &mut [T] = bytemuck::cast_slice_mut(target);
        let sources: SmallVec<[&[T]; 16]> = sources.iter().map(|s| bytemuck::cast_slice(s)).collect();
        self.tiles(|from, count, at| {
            let target = &mut target[at[0] + from..][..count];
            let Some((first, rest)) = sources.split_first() else { return };
            target.copy_from_slice(&first[at[1] + from..][..count]);
            for (source, at) in rest.iter().zip(&at[2..]) {
                let source = &source[at + from..][..count];
                target.iter_mut().zip(source).for_each(|(t, &s)| *t = f(*t, s));
            }
        });
    }

    /// Reduces narrow floats in `f32` and rounds once.
    fn fold_wide<T: bytemuck::Pod + Into<f32> + FromF32>(
        &self,
        target: &mut [u8],
        sources: &[&[u8]],
        f: impl Fn(f32, f32) -> f32 + Copy,
    ) {
        let target: &mut [T] = bytemuck::cast_slice_mut(target);
        let sources: SmallVec<[&[T]; 16]> = sources.iter().map(|s| bytemuck::cast_slice(s)).collect();
        let mut wide = [0f32; 2048];
        self.tiles(|from, count, at| {
            for (nth, (source, at)) in sources.iter().zip(&at[1..]).enumerate() {
                let source = &source[at + from..][..count];
                for (w, &s) in wide.iter_mut().zip(source) {
                    *w = if nth == 0 { s.into() } else { f(*w, s.into()) };
                }
            }
            let target = &mut target[at[0] + from..][..count];
            target.iter_mut().zip(&wide).for_each(|(t, &w)| *t = T::from_f32(w));
        });
    }
}

trait FromF32 {
    fn from_f32(x: f32) -> Self;
}

impl FromF32 for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl FromF32 for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}
