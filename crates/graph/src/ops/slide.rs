//! One spatial dimension of a sliding window: the geometry shared by convolutions and pooling.
//!
//! Output position `o` and kernel position `k` meet input position `o*stride - pad.0 + k*dilation`; positions
//! outside the input read as nothing (zero, or minus infinity for a maximum). Pads may be negative: the first
//! window then starts inside the input. The high pad only decides how many windows there are.

use crate::{
    operator::OpError,
    require,
    rule::{DimMap, FactorIndex, Reach, Window},
};
use std::ops::Range;

/// Strides, dilations, window extents and pads beyond this are refused; below it nothing overflows.
const MAX_REACH: u64 = 1 << 40;

/// How a window slides along one dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slide {
    /// Kernel positions.
    pub kernel: u64,
    /// Input positions from one window to the next.
    pub stride: u64,
    /// Input positions from one kernel position to the next.
    pub dilation: u64,
    /// Positions added before and after the input; negative: left out.
    pub pad: (i64, i64),
}

/// Names of the factors of the spatial dimensions, for one to three of them.
pub(crate) fn spatial_names(rank: usize) -> &'static [&'static str] {
    const NAMES: [&str; 3] = ["d", "h", "w"];
    &NAMES[NAMES.len() - rank..]
}

/// Names of the factors of the kernel positions, for one to three of them.
pub(crate) fn kernel_names(rank: usize) -> &'static [&'static str] {
    const NAMES: [&str; 3] = ["kd", "kh", "kw"];
    &NAMES[NAMES.len() - rank..]
}

impl Slide {
    /// Puts the dimensions of a geometry together; refuses lists of different lengths and absurd numbers.
    pub(crate) fn list(
        kernel: &[u64],
        stride: &[u64],
        dilation: &[u64],
        pad: &[(i64, i64)],
    ) -> Result<Slides, OpError> {
        let rank = kernel.len();
        require!((1..=3).contains(&rank), "one to three spatial dimensions are supported, got {rank}");
        require!(
            [stride.len(), dilation.len(), pad.len()] == [rank; 3],
            "{rank} spatial dimensions, but {} strides, {} dilations, {} pads",
            stride.len(),
            dilation.len(),
            pad.len()
        );
        let slides: Slides = (0..rank)
            .map(|i| Slide { kernel: kernel[i], stride: stride[i], dilation: dilation[i], pad: pad[i] })
            .collect();
        slides.iter().try_for_each(Slide::check)?;
        Ok(slides)
    }

    fn check(&self) -> Result<(), OpError> {
        let Slide { kernel, stride, dilation, pad } = *self;
        require!(kernel > 0, "the kernel is empty");
        require!((1..=MAX_REACH).contains(&stride), "stride {stride} must be from 1 to 2^40");
        require!((1..=MAX_REACH).contains(&dilation), "dilation {dilation} must be from 1 to 2^40");
        let extent = (kernel - 1).checked_mul(dilation).filter(|&n| n < MAX_REACH);
        require!(extent.is_some(), "kernel {kernel} with dilation {dilation} spans over 2^40 positions");
        for p in [pad.0, pad.1] {
            require!(p.unsigned_abs() <= MAX_REACH, "pad {p} is out of range");
        }
        Ok(())
    }

    /// Positions that one window covers.
    pub fn extent(&self) -> u64 {
        (self.kernel - 1) * self.dilation + 1
    }

    /// How many windows fit an input of this size.
    pub fn outputs(&self, size: u64) -> Result<u64, OpError> {
        let padded = size as i64 + self.pad.0 + self.pad.1;
        let extent = self.extent() as i64;
        require!(
            padded >= extent,
            "a window of {extent} positions does not fit {size} padded by {} and {}",
            self.pad.0,
            self.pad.1
        );
        Ok((padded - extent) as u64 / self.stride + 1)
    }

    /// Whether each window is its own single position of the input: then a split needs no halo.
    fn is_identity(&self) -> bool {
        self.extent() == 1 && self.stride == 1 && self.pad == (0, 0)
    }

    /// How a dimension that the window slides over follows `factor`.
    pub(crate) fn map(&self, factor: FactorIndex, reach: Reach) -> DimMap {
        if self.is_identity() {
            return DimMap::of(factor);
        }
        DimMap::window(factor, Window { reach, stride: self.stride, pad: self.pad.0, extent: self.extent() })
    }

    /// The same window on a part: output positions `outputs`, which start from input position `inputs.start`.
    ///
    /// The high pad is chosen so that the part has exactly its number of windows.
    pub(crate) fn local(&self, inputs: &Range<u64>, outputs: &Range<u64>) -> Slide {
        let (stride, length) = (self.stride as i64, (inputs.end - inputs.start) as i64);
        let windows = (outputs.end - outputs.start) as i64;
        let low = self.pad.0 + inputs.start as i64 - outputs.start as i64 * stride;
        let high = (windows - 1) * stride + self.extent() as i64 - length - low;
        Slide { pad: (low, high), ..*self }
    }
}

/// The spatial dimensions of a window.
pub type Slides = smallvec::SmallVec<[Slide; 3]>;

pub(super) mod examples {
    use super::*;
    use crate::{examples::Rng, types::Dims};

    /// One spatial dimension.
    pub(in crate::ops) struct Dim {
        pub slide: Slide,
        pub input: u64,
        pub output: u64,
    }

    /// A random one.
    pub(in crate::ops) fn dim(rng: &mut Rng) -> Dim {
        loop {
            let simple = rng.between(0, 3) == 0;
            let slide = Slide {
                kernel: rng.between(1, 3),
                stride: rng.between(1, 3),
                dilation: if simple { 1 } else { rng.between(1, 2) },
                pad: if simple {
                    (0, 0)
                } else {
                    (rng.between(0, 5) as i64 - 2, rng.between(0, 5) as i64 - 2)
                },
            };
            let input = rng.size() + if rng.flip() { 6 } else { 0 };
            if let Ok(output) = slide.outputs(input) {
                return Dim { slide, input, output };
            }
        }
    }

    /// One number per dimension.
    pub(in crate::ops) fn list<T: FromIterator<U>, U>(dims: &[Dim], f: impl Fn(&Dim) -> U) -> T {
        dims.iter().map(f).collect()
    }

    /// A shape of two sizes and the spatial ones.
    pub(in crate::ops) fn shape(a: u64, b: u64, rest: &Dims) -> Vec<u64> {
        [a, b].into_iter().chain(rest.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_geometries_are_refused() {
        let list = |kernel: u64, stride: u64, dilation: u64, pad: (i64, i64)| {
            Slide::list(&[kernel], &[stride], &[dilation], &[pad]).map(|s| s[0].outputs(8))
        };
        assert!(list(3, 1, 1, (1, 1)).is_ok());
        assert!(list(0, 1, 1, (0, 0)).is_err());
        assert!(list(3, 0, 1, (0, 0)).is_err());
        assert!(list(3, 1, 0, (0, 0)).is_err());
        assert!(list(3, u64::MAX, 1, (0, 0)).is_err());
        assert!(list(u64::MAX, 1, u64::MAX, (0, 0)).is_err());
        assert!(list(2, 1, 1 << 41, (0, 0)).is_err());
        assert!(list(3, 1, 1, (i64::MIN, 0)).is_err());
        assert!(list(3, 1, 1, (0, i64::MAX)).is_err());
        assert!(list(9, 1, 1, (0, 0)).unwrap().is_err(), "the window is larger than the input");
        assert!(list(3, 1, 1, (-4, -4)).unwrap().is_err(), "nothing is left of the input");
        assert_eq!(list(3, 2, 1, (-1, 0)).unwrap(), Ok(3));
        assert!(Slide::list(&[], &[], &[], &[]).is_err());
        assert!(Slide::list(&[1; 4], &[1; 4], &[1; 4], &[(0, 0); 4]).is_err());
        assert!(Slide::list(&[1, 1], &[1], &[1, 1], &[(0, 0); 2]).is_err());
    }

    /// The two directions agree: a part's local window covers the positions of the whole window.
    #[test]
    fn a_local_window_meets_the_same_positions() {
        for (kernel, stride, dilation, pad, size) in [
            (3, 1, 1, (1, 1), 8u64),
            (3, 2, 2, (4, 3), 9),
            (1, 3, 1, (0, 0), 10),
            (2, 2, 1, (-1, -2), 12),
            (2, 1, 1, (5, 7), 4),
        ] {
            let whole = Slide { kernel, stride, dilation, pad };
            let count = whole.outputs(size).unwrap();
            let window = |reach| Window { reach, stride, pad: pad.0, extent: whole.extent() };
            for start in 0..count {
                for end in start + 1..=count {
                    let part = start..end;
                    let block = window(Reach::Forward).range(&part, size);
                    let local = whole.local(&block, &part);
                    assert_eq!(local.outputs(block.end - block.start), Ok(end - start));
                    assert_eq!(local.pad.0 - pad.0, block.start as i64 - (start * stride) as i64);
                }
            }
            for start in 0..size {
                for end in start + 1..=size {
                    let part = start..end;
                    let block = window(Reach::Backward).range(&part, count);
                    let local = whole.local(&part, &block);
                    assert_eq!(local.outputs(end - start), Ok(block.end - block.start));
                }
            }
        }
    }
}
