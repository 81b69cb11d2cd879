//! Kernel of dropout: a counter-based hash of (seed, step, micro-batch, global position) decides each element.

use super::{Context, Kernel, Result, read, write};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::Dropout;
use shardwright_simd::vectorised;
use smallvec::SmallVec;

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit affects every output bit.
fn spread(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A 32-bit mixing permutation of shifts and multiplications only, so loops over it vectorise.
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Masks a run of elements that is contiguous in the whole tensor, from position `at` on.
pub(super) fn mask<T: Float>(op: &Dropout, step: u64, at: u64, x: &[T], y: &mut [T]) {
    // Rates below one give thresholds below 2^32, so some elements are always kept.
    let threshold = (op.rate.0 * 4_294_967_296.0) as u32;
    let scale = T::from_f64(1.0 / (1.0 - op.rate.0));
    let (mut at, mut done) = (at, 0);
    while done < x.len() {
        // Positions with the same upper half share their keys; the lower half is hashed.
        let (high, low) = (at >> 32, at as u32);
        let count = (x.len() - done).min(((1u64 << 32) - u64::from(low)) as usize);
        let key = spread(spread(spread(op.seed) ^ step) ^ high);
        let (first, second) = (key as u32, (key >> 32) as u32);
        let (x, y) = (&x[done..done + count], &mut y[done..done + count]);
        vectorised!({
            for (i, (y, &x)) in y.iter_mut().zip(x).enumerate() {
                let random = mix(mix(low.wrapping_add(i as u32) ^ first) ^ second);
                *y = if random >= threshold { x * scale } else { T::ZERO };
            }
        });
        at += count as u64;
        done += count;
    }
}

impl Kernel for Dropout {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let shape = inputs[0].shape;
        let (x, y) = (read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
        let mut strides: SmallVec<[u64; 6]> = SmallVec::from_elem(1, shape.len());
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d] * self.whole[d];
        }
        // Dimensions from `outer` on are contiguous in the whole tensor too: one run.
        let mut outer = shape.len();
        while outer > 0 {
            outer -= 1;
            if shape[outer] != self.whole[outer] {
                break;
            }
        }
        let run: usize = shape[outer..].iter().map(|&n| n as usize).product();
        let origin: u64 = self.origin.iter().zip(&strides).map(|(o, s)| o * s).sum();
        for (i, (x, y)) in x.chunks_exact(run).zip(y.chunks_exact_mut(run)).enumerate() {
            let (mut rest, mut at) = (i as u64, origin);
            for d in (0..outer).rev() {
                at += rest % shape[d] * strides[d];
                rest /= shape[d];
            }
            mask(self, context.draw(), at, x, y);
        }
        Ok(())
    }
}
