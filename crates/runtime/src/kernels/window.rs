//! Sliding windows in the kernels' form: always three spatial axes (missing ones have size one), in `usize`.

use shardwright_graph::ops::Slides;
use std::ops::Range;

/// A window sliding along one axis: output `o` and kernel position `k` meet input `o*stride - pad + k*dilation`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    /// Size of the input.
    pub input: usize,
    /// Number of windows.
    pub output: usize,
    /// Positions per window.
    pub kernel: usize,
    /// Input positions from window to window.
    pub stride: usize,
    dilation: usize,
    pad: i64,
}

impl Axis {
    /// A missing axis.
    const NONE: Axis = Axis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, pad: 0 };

    /// The input position of output `o` and kernel position `k`; none in the padding.
    pub fn meet(&self, o: usize, k: usize) -> Option<usize> {
        let at = self.unclipped(o, k);
        (0..self.input as i64).contains(&at).then_some(at as usize)
    }

    /// The position of output `o` and kernel position `k` in the input or its padding.
    pub fn unclipped(&self, o: usize, k: usize) -> i64 {
        (o * self.stride + k * self.dilation) as i64 - self.pad
    }

    /// The outputs whose kernel position `k` is inside the input.
    pub fn inside(&self, k: usize) -> Range<usize> {
        let stride = self.stride as i64;
        let shift = self.pad - (k * self.dilation) as i64;
        let ceil = |n: i64| n.div_euclid(stride) + i64::from(n.rem_euclid(stride) != 0);
        let start = ceil(shift).clamp(0, self.output as i64);
        let end = ceil(shift + self.input as i64).clamp(start, self.output as i64);
        start as usize..end as usize
    }

    /// Whether windows are single consecutive positions of the input.
    fn is_identity(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.pad == 0 && self.input == self.output
    }
}

/// A window sliding along three axes, slowest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Depth, height, width.
    pub axes: [Axis; 3],
}

impl Windows {
    /// The window of these dimensions between an input and an output of these spatial sizes.
    pub fn new(slides: &Slides, input: &[u64], output: &[u64]) -> Self {
        let mut axes = [Axis::NONE; 3];
        let skip = axes.len() - slides.len();
        for (i, slide) in slides.iter().enumerate() {
            axes[skip + i] = Axis {
                input: input[i] as usize,
                output: output[i] as usize,
                kernel: slide.kernel as usize,
                stride: slide.stride as usize,
                dilation: slide.dilation as usize,
                pad: slide.pad.0,
            };
        }
        Self { axes }
    }

    fn product(&self, size: impl Fn(&Axis) -> usize) -> usize {
        self.axes.iter().map(size).product()
    }

    /// Positions of the input.
    pub fn inputs(&self) -> usize {
        self.product(|a| a.input)
    }

    /// Number of windows.
    pub fn outputs(&self) -> usize {
        self.product(|a| a.output)
    }

    /// Positions per window.
    pub fn positions(&self) -> usize {
        self.product(|a| a.kernel)
    }

    /// Whether every output reads exactly the input at its own position.
    pub fn is_identity(&self) -> bool {
        self.axes.iter().all(Axis::is_identity)
    }

    /// Visits all meetings of the outputs `part` with the input of one channel: kernel positions outermost,
    /// then outputs, in pieces of rows (rows run along the last axis).
    #[inline(always)]
    pub fn for_pieces(&self, part: Range<usize>, mut visit: impl FnMut(Piece)) {
        let [depth, height, width] = &self.axes;
        let mut position = 0;
        for kd in 0..depth.kernel {
            for kh in 0..height.kernel {
                for kw in 0..width.kernel {
                    let inside = width.inside(kw);
                    self.for_rows(part.clone(), |at, d, h, columns| {
                        let plane = depth.meet(d, kd).zip(height.meet(h, kh));
                        let (mut piece, mut input) = (columns.start..columns.start, 0);
                        if let Some((d, h)) = plane {
                            let start = inside.start.max(columns.start);
                            if start < inside.end.min(columns.end) {
                                piece = start..inside.end.min(columns.end);
                                let w = width.unclipped(start, kw) as usize;
                                input = (d * height.input + h) * width.input + w;
                            }
                        }
                        let skip = piece.start - columns.start;
                        visit(Piece { position, at, length: columns.len(), skip, met: piece.len(), input });
                    });
                    position += 1;
                }
            }
        }
    }

    /// Visits the input elements of a piece, each with its index in the piece.
    #[inline(always)]
    pub fn for_met<T: Copy>(&self, piece: &Piece, x: &[T], mut visit: impl FnMut(usize, T)) {
        // A piece that meets no input may start outside of it.
        let x = x.get(piece.input..).unwrap_or(&[]);
        match self.axes[2].stride {
            1 => x.iter().take(piece.met).enumerate().for_each(|(i, &x)| visit(i, x)),
            2 => {
                // In pairs, which compilers vectorise; the last one may be half a pair at the end of the input.
                let (pairs, rest) = x.as_chunks::<2>();
                let pairs = &pairs[..piece.met.min(pairs.len())];
                pairs.iter().enumerate().for_each(|(i, &[x, _])| visit(i, x));
                if let (true, Some(&x)) = (pairs.len() < piece.met, rest.first()) {
                    visit(pairs.len(), x);
                }
            }
            stride => x.iter().step_by(stride).take(piece.met).enumerate().for_each(|(i, &x)| visit(i, x)),
        }
    }

    /// Visits the outputs `part` row by row: how far into the part, depth, height, and the part of the row.
    #[inline(always)]
    fn for_rows(&self, part: Range<usize>, mut visit: impl FnMut(usize, usize, usize, Range<usize>)) {
        let [_, height, width] = self.axes.map(|a| a.output);
        let (row, mut column) = (part.start / width, part.start % width);
        let (mut d, mut h) = (row / height, row % height);
        let mut done = 0;
        while done < part.len() {
            let length = (part.len() - done).min(width - column);
            visit(done, d, h, column..column + length);
            (done, column, h) = (done + length, 0, h + 1);
            if h == height {
                (d, h) = (d + 1, 0);
            }
        }
    }
}

/// A run of outputs in one row that meet the input at steps of the last axis' stride.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Kernel position, last axis fastest.
    pub position: usize,
    /// Index of the run's first output among the visited outputs.
    pub at: usize,
    /// Its length.
    pub length: usize,
    /// Number of outputs at its start that meet only padding.
    pub skip: usize,
    /// Number of outputs after those that meet the input; the rest meets padding.
    pub met: usize,
    /// Input position of the first of them.
    pub input: usize,
}
