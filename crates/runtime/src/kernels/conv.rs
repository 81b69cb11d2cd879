//! Kernels of convolution and its two derivatives, as matrix products over unfolded inputs.
//!
//! For one image and group, the matrix `columns[c*k, p]` holds what output position `p` reads through kernel
//! position `k` of channel `c`. Then `y = w · columns`, `dw = dy · columnsᵀ`, `d(columns) = wᵀ · dy`. The
//! matrix is never made whole: a tile of it, some channels by some positions, stays in the second-level cache.
//! Where windows are single positions (1×1, stride 1) the input is the matrix and nothing is copied.

use super::{
    Context, Kernel, KernelError,
    gemm::{Matrix, gemm},
    read,
    window::Windows,
    write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{Conv, ConvGeometry, ConvGradInput, ConvGradWeight};
use std::ops::Range;

/// Bytes of a tile of the unfolded input: half of a common second-level cache, since the matrix product needs
/// room as well.
const TILE_BYTES: usize = 512 << 10;
/// Output positions of a tile, unless there are few channels.
const TILE_POSITIONS: usize = 256;

/// The sizes of a convolution, per group.
struct Sizes {
    images: usize,
    groups: usize,
    /// Input channels of a group.
    c: usize,
    /// Output channels of a group.
    o: usize,
    windows: Windows,
    /// Input positions of a channel.
    inputs: usize,
    /// Output positions of a channel.
    outputs: usize,
    /// Kernel positions.
    positions: usize,
}

impl Sizes {
    fn new(geometry: &ConvGeometry, x: &[u64], w: &[u64], y: &[u64]) -> Result<Self, KernelError> {
        let slides = geometry.slides(&w[2..]).map_err(|e| KernelError::BadValue(e.to_string()))?;
        let windows = Windows::new(&slides, &x[2..], &y[2..]);
        let groups = geometry.groups as usize;
        Ok(Self {
            images: x[0] as usize,
            groups,
            c: w[1] as usize,
            o: w[0] as usize / groups,
            inputs: windows.inputs(),
            outputs: windows.outputs(),
            positions: windows.positions(),
            windows,
        })
    }

    /// The part of an input that belongs to one image and group.
    fn input(&self, image: usize, group: usize) -> Range<usize> {
        let length = self.c * self.inputs;
        let start = (image * self.groups + group) * length;
        start..start + length
    }

    /// Where one image and group of the output starts.
    fn output(&self, image: usize, group: usize) -> usize {
        (image * self.groups + group) * self.o * self.outputs
    }

    /// Columns of a group's weight matrix.
    fn depth(&self) -> usize {
        self.c * self.positions
    }

    /// A group's weight matrix, from this column on.
    fn weight(&self, group: usize, column: usize) -> Matrix {
        Matrix::rows(group * self.o * self.depth() + column, self.depth())
    }

    /// A group's output matrix, from this position on.
    fn output_matrix(&self, image: usize, group: usize, position: usize) -> Matrix {
        Matrix::rows(self.output(image, group) + position, self.outputs)
    }

    /// How many channels and output positions a tile has.
    fn tile<T>(&self) -> (usize, usize) {
        let elements = TILE_BYTES / size_of::<T>();
        let wanted = TILE_POSITIONS.max(elements / self.depth()).min(self.outputs);
        let channels = (elements / (wanted * self.positions)).clamp(1, self.c);
        // One channel of a large kernel may already be too much: then fewer positions.
        let positions = (elements / (channels * self.positions)).clamp(1, wanted);
        (channels, positions)
    }

    /// Visits the tiles: channels outermost.
    fn for_tiles<T>(&self, mut visit: impl FnMut(Range<usize>, Range<usize>)) {
        let (channels, positions) = self.tile::<T>();
        for c in (0..self.c).step_by(channels) {
            for p in (0..self.outputs).step_by(positions) {
                visit(c..(c + channels).min(self.c), p..(p + positions).min(self.outputs));
            }
        }
    }
}

/// Copies what the output positions `part` read of `channels` into the rows of `columns`.
fn unfold<T: Float>(
    windows: &Windows,
    x: &[T],
    channels: Range<usize>,
    part: Range<usize>,
    columns: &mut [T],
) {
    let (length, stride) = (part.len(), windows.axes[2].stride);
    let blocks = columns.chunks_exact_mut(windows.positions() * length);
    for (x, columns) in x.chunks_exact(windows.inputs()).skip(channels.start).zip(blocks) {
        windows.for_pieces(part.clone(), |piece| {
            let row = &mut columns[piece.position * length + piece.at..][..piece.length];
            let (before, row) = row.split_at_mut(piece.skip);
            let (row, after) = row.split_at_mut(piece.met);
            before.fill(T::ZERO);
            after.fill(T::ZERO);
            if row.is_empty() {
            } else if stride == 1 {
                row.copy_from_slice(&x[piece.input..][..piece.met]);
            } else {
                row.iter_mut().zip(x[piece.input..].iter().step_by(stride)).for_each(|(y, &x)| *y = x);
            }
        });
    }
}

/// Adds each element of `columns` to where [`unfold`] would have read it.
fn fold<T: Float>(windows: &Windows, columns: &[T], channels: Range<usize>, part: Range<usize>, x: &mut [T]) {
    let (length, stride) = (part.len(), windows.axes[2].stride);
    let blocks = columns.chunks_exact(windows.positions() * length);
    for (x, columns) in x.chunks_exact_mut(windows.inputs()).skip(channels.start).zip(blocks) {
        windows.for_pieces(part.clone(), |piece| {
            let row = &columns[piece.position * length + piece.at + piece.skip..][..piece.met];
            if row.is_empty() {
            } else if stride == 1 {
                let x = &mut x[piece.input..][..piece.met];
                x.iter_mut().zip(row).for_each(|(x, &y)| *x += y);
            } else {
                x[piece.input..].iter_mut().step_by(stride).zip(row).for_each(|(x, &y)| *x += y);
            }
        });
    }
}

impl Kernel for Conv {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result<(), KernelError> {
        let sizes = Sizes::new(&self.geometry, inputs[0].shape, inputs[1].shape, outputs[0].shape)?;
        let (x, w) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let y = write::<T>(&mut outputs[0])?;
        let (channels, positions) = sizes.tile::<T>();
        let columns = context.scratch.take::<T>(channels * sizes.positions * positions);
        for image in 0..sizes.images {
            for group in 0..sizes.groups {
                let x = &x[sizes.input(image, group)];
                if sizes.windows.is_identity() {
                    gemm(
                        [sizes.o, sizes.outputs, sizes.c],
                        (w, sizes.weight(group, 0)),
                        (x, Matrix::rows(0, sizes.inputs)),
                        (y, sizes.output_matrix(image, group, 0)),
                        false,
                    );
                    continue;
                }
                sizes.for_tiles::<T>(|c, p| {
                    unfold(&sizes.windows, x, c.clone(), p.clone(), columns);
                    gemm(
                        [sizes.o, p.len(), c.len() * sizes.positions],
                        (w, sizes.weight(group, c.start * sizes.positions)),
                        (columns, Matrix::rows(0, p.len())),
                        (y, sizes.output_matrix(image, group, p.start)),
                        c.start > 0,
                    );
                });
            }
        }
        Ok(())
    }
}

impl Kernel for ConvGradInput {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result<(), KernelError> {
        let sizes = Sizes::new(&self.geometry, outputs[0].shape, inputs[1].shape, inputs[0].shape)?;
        let (dy, w) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let dx = write::<T>(&mut outputs[0])?;
        let (channels, positions) = sizes.tile::<T>();
        let columns = context.scratch.take::<T>(channels * sizes.positions * positions);
        for image in 0..sizes.images {
            for group in 0..sizes.groups {
                let dx = &mut dx[sizes.input(image, group)];
                if sizes.windows.is_identity() {
                    gemm(
                        [sizes.c, sizes.outputs, sizes.o],
                        (w, sizes.weight(group, 0).transposed()),
                        (dy, sizes.output_matrix(image, group, 0)),
                        (dx, Matrix::rows(0, sizes.inputs)),
                        false,
                    );
                    continue;
                }
                dx.fill(T::ZERO);
                sizes.for_tiles::<T>(|c, p| {
                    gemm(
                        [c.len() * sizes.positions, p.len(), sizes.o],
                        (w, sizes.weight(group, c.start * sizes.positions).transposed()),
                        (dy, sizes.output_matrix(image, group, p.start)),
                        (columns, Matrix::rows(0, p.len())),
                        false,
                    );
                    fold(&sizes.windows, &columns[..c.len() * sizes.positions * p.len()], c, p, dx);
                });
            }
        }
        Ok(())
    }
}

impl Kernel for ConvGradWeight {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result<(), KernelError> {
        let sizes = Sizes::new(&self.geometry, inputs[0].shape, outputs[0].shape, inputs[1].shape)?;
        let (x, dy) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let dw = write::<T>(&mut outputs[0])?;
        let (channels, positions) = sizes.tile::<T>();
        let columns = context.scratch.take::<T>(channels * sizes.positions * positions);
        for group in 0..sizes.groups {
            for c in (0..sizes.c).step_by(channels) {
                let c = c..(c + channels).min(sizes.c);
                let width = c.len() * sizes.positions;
                // A strip of the weight stays in cache while all images add to it.
                let strip = sizes.weight(group, c.start * sizes.positions);
                for image in 0..sizes.images {
                    let x = &x[sizes.input(image, group)];
                    for p in (0..sizes.outputs).step_by(positions) {
                        let p = p..(p + positions).min(sizes.outputs);
                        let unfolded = if sizes.windows.is_identity() {
                            (x, Matrix::rows(c.start * sizes.inputs + p.start, sizes.inputs))
                        } else {
                            unfold(&sizes.windows, x, c.clone(), p.clone(), columns);
                            (&*columns, Matrix::rows(0, p.len()))
                        };
                        gemm(
                            [sizes.o, width, p.len()],
                            (dy, sizes.output_matrix(image, group, p.start)),
                            (unfolded.0, unfolded.1.transposed()),
                            (dw, strip),
                            image > 0 || p.start > 0,
                        );
                    }
                }
            }
        }
        Ok(())
    }
}
