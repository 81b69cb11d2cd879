//! Kernels of convolution and its two derivatives, as matrix products over unfolded inputs.
//!
//! With the matrix `u` of one image and group (see [`super::unfold`]): `y = w · u`, `dw = dy · uᵀ`,
//! `du = wᵀ · dy`. Tiles of `u` stay in the second-level cache. Small images share a tile, so the products
//! keep a good size. Where windows are single positions (1×1, stride 1) of large images, the input itself is
//! `u` and nothing is copied. Groups of one or two channels are done directly.

use super::{
    Context, Kernel, KernelError, Result, conv_direct,
    gemm::{Matrix, gemm},
    read,
    unfold::{fold, parts, tile, tile_elements, unfold},
    window::Windows,
    write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{Conv, ConvGeometry, ConvGradInput, ConvGradWeight, ConvTile};
use std::ops::Range;

/// Groups with at most this many pairs of input and output channels are convolved without a matrix product.
const DIRECT_PAIRS: usize = 4;

/// The sizes of a convolution; channels are counted per group.
pub(super) struct Sizes {
    pub images: usize,
    pub groups: usize,
    /// Input channels.
    pub c: usize,
    /// Output channels.
    pub o: usize,
    pub windows: Windows,
    /// Input positions of a channel.
    pub inputs: usize,
    /// Output positions of a channel.
    pub outputs: usize,
    /// Kernel positions.
    pub positions: usize,
}

impl Sizes {
    fn new(geometry: &ConvGeometry, x: &[u64], w: &[u64], y: &[u64]) -> Result<Self> {
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

    fn is_direct(&self) -> bool {
        self.groups > 1 && self.c * self.o <= DIRECT_PAIRS
    }

    /// The range of channels of one image and group in an input.
    pub fn input(&self, image: usize, group: usize, channels: &Range<usize>) -> Range<usize> {
        let start = (image * self.groups + group) * self.c;
        (start + channels.start) * self.inputs..(start + channels.end) * self.inputs
    }

    /// The range of one image and group in an output.
    pub fn output(&self, image: usize, group: usize) -> Range<usize> {
        let length = self.o * self.outputs;
        let start = (image * self.groups + group) * length;
        start..start + length
    }

    /// Rows of the unfolded matrix, columns of a group's weight.
    fn depth(&self) -> usize {
        self.c * self.positions
    }

    /// A group's weight from a channel on: a row per output channel.
    fn weight(&self, group: usize, channel: usize) -> Matrix {
        Matrix::rows(group * self.o * self.depth() + channel * self.positions, self.depth())
    }

    /// An image's output from a position on: a row per channel.
    fn output_matrix(&self, image: usize, group: usize, position: usize) -> Matrix {
        Matrix::rows(self.output(image, group).start + position, self.outputs)
    }

    /// Unfolds channels of several images side by side; returns the row length.
    fn unfold<T: Float>(&self, x: &[T], group: usize, part: &Part, matrix: &mut [T]) -> usize {
        let length = part.positions.len();
        let row = part.images.len() * length;
        let matrix = &mut matrix[..part.channels.len() * self.positions * row];
        for (i, image) in part.images.clone().enumerate() {
            let x = &x[self.input(image, group, &part.channels)];
            unfold(&self.windows, x, part.positions.clone(), (matrix, row, i * length));
        }
        row
    }

    /// Copies the outputs of several images side by side: a row per channel.
    fn join<T: Float>(&self, y: &[T], group: usize, images: &Range<usize>, joined: &mut [T]) {
        let row = images.len() * self.outputs;
        for (i, image) in images.clone().enumerate() {
            let channels = y[self.output(image, group)].chunks_exact(self.outputs);
            for (channel, joined) in channels.zip(joined.chunks_exact_mut(row)) {
                joined[i * self.outputs..][..self.outputs].copy_from_slice(channel);
            }
        }
    }

    /// The inverse of [`Sizes::join`].
    fn spread<T: Float>(&self, joined: &[T], group: usize, images: &Range<usize>, y: &mut [T]) {
        let row = images.len() * self.outputs;
        for (i, image) in images.clone().enumerate() {
            let channels = y[self.output(image, group)].chunks_exact_mut(self.outputs);
            for (channel, joined) in channels.zip(joined.chunks_exact(row)) {
                channel.copy_from_slice(&joined[i * self.outputs..][..self.outputs]);
            }
        }
    }

    /// The tile sizes, and memory for one tile and for the outputs of its images side by side.
    fn plan<'a, T: Float>(&self, context: &'a mut Context) -> (ConvTile, &'a mut [T], &'a mut [T]) {
        let tile = tile::<T>(&self.windows, self.images, self.c);
        let elements = if self.reads_in_place(&tile) { 0 } else { tile_elements(&tile, &self.windows) };
        let joined = if tile.images > 1 { tile.images * self.o * self.outputs } else { 0 };
        let (matrix, joined) = context.scratch.take::<T>(elements + joined).split_at_mut(elements);
        (tile, matrix, joined)
    }

    /// Whether the input is the unfolded matrix.
    fn reads_in_place(&self, tile: &ConvTile) -> bool {
        self.windows.is_identity() && tile.images == 1
    }
}

/// The images, channels and positions of one tile.
struct Part {
    images: Range<usize>,
    channels: Range<usize>,
    positions: Range<usize>,
}

impl Kernel for Conv {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let sizes = Sizes::new(&self.geometry, inputs[0].shape, inputs[1].shape, outputs[0].shape)?;
        let (x, w) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let y = write::<T>(&mut outputs[0])?;
        if sizes.is_direct() {
            conv_direct::forward(&sizes, x, w, y);
            return Ok(());
        }
        let (tile, matrix, joined) = sizes.plan::<T>(context);
        for images in parts(sizes.images, tile.images) {
            for group in 0..sizes.groups {
                if sizes.reads_in_place(&tile) {
                    let x = &x[sizes.input(images.start, group, &(0..sizes.c))];
                    gemm(
                        [sizes.o, sizes.outputs, sizes.c],
                        (w, sizes.weight(group, 0)),
                        (x, Matrix::rows(0, sizes.inputs)),
                        (y, sizes.output_matrix(images.start, group, 0)),
                        false,
                    );
                    continue;
                }
                for positions in parts(sizes.outputs, tile.positions) {
                    for channels in parts(sizes.c, tile.channels) {
                        let channel = channels.start;
                        let part = Part { images: images.clone(), channels, positions: positions.clone() };
                        let row = sizes.unfold(x, group, &part, matrix);
                        let to = match images.len() {
                            1 => (&mut *y, sizes.output_matrix(images.start, group, positions.start)),
                            _ => (&mut *joined, Matrix::rows(0, row)),
                        };
                        gemm(
                            [sizes.o, row, part.channels.len() * sizes.positions],
                            (w, sizes.weight(group, channel)),
                            (matrix, Matrix::rows(0, row)),
                            to,
                            channel > 0,
                        );
                    }
                }
                if images.len() > 1 {
                    sizes.spread(joined, group, &images, y);
                }
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
    ) -> Result {
        let sizes = Sizes::new(&self.geometry, outputs[0].shape, inputs[1].shape, inputs[0].shape)?;
        let (dy, w) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let dx = write::<T>(&mut outputs[0])?;
        if sizes.is_direct() {
            conv_direct::grad_input(&sizes, dy, w, dx);
            return Ok(());
        }
        let (tile, matrix, joined) = sizes.plan::<T>(context);
        if !sizes.reads_in_place(&tile) {
            dx.fill(T::ZERO);
        }
        for images in parts(sizes.images, tile.images) {
            for group in 0..sizes.groups {
                if sizes.reads_in_place(&tile) {
                    gemm(
                        [sizes.c, sizes.outputs, sizes.o],
                        (w, sizes.weight(group, 0).transposed()),
                        (dy, sizes.output_matrix(images.start, group, 0)),
                        (
                            &mut dx[sizes.input(images.start, group, &(0..sizes.c))],
                            Matrix::rows(0, sizes.inputs),
                        ),
                        false,
                    );
                    continue;
                }
                if images.len() > 1 {
                    sizes.join(dy, group, &images, joined);
                }
                for positions in parts(sizes.outputs, tile.positions) {
                    let row = images.len() * positions.len();
                    let from = match images.len() {
                        1 => (dy, sizes.output_matrix(images.start, group, positions.start)),
                        _ => (&*joined, Matrix::rows(0, row)),
                    };
                    for channels in parts(sizes.c, tile.channels) {
                        let depth = channels.len() * sizes.positions;
                        gemm(
                            [depth, row, sizes.o],
                            (w, sizes.weight(group, channels.start).transposed()),
                            from,
                            (matrix, Matrix::rows(0, row)),
                            false,
                        );
                        for (i, image) in images.clone().enumerate() {
                            let dx = &mut dx[sizes.input(image, group, &channels)];
                            let matrix = (&matrix[..depth * row], row, i * positions.len());
                            fold(&sizes.windows, matrix, positions.clone(), dx);
                        }
                    }
                }
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
    ) -> Result {
        let sizes = Sizes::new(&self.geometry, inputs[0].shape, outputs[0].shape, inputs[1].shape)?;
        let (x, dy) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let dw = write::<T>(&mut outputs[0])?;
        if sizes.is_direct() {
            conv_direct::grad_weight(&sizes, x, dy, dw);
            return Ok(());
        }
        let (tile, matrix, joined) = sizes.plan::<T>(context);
        for group in 0..sizes.groups {
            if sizes.reads_in_place(&tile) {
                for image in 0..sizes.images {
                    let x = &x[sizes.input(image, group, &(0..sizes.c))];
                    gemm(
                        [sizes.o, sizes.c, sizes.outputs],
                        (dy, sizes.output_matrix(image, group, 0)),
                        (x, Matrix::rows(0, sizes.inputs).transposed()),
                        (dw, sizes.weight(group, 0)),
                        image > 0,
                    );
                }
                continue;
            }
            // A strip of the weight stays in cache while all images add to it.
            for channels in parts(sizes.c, tile.channels) {
                for images in parts(sizes.images, tile.images) {
                    if images.len() > 1 {
                        sizes.join(dy, group, &images, joined);
                    }
                    for positions in parts(sizes.outputs, tile.positions) {
                        let first = images.start == 0 && positions.start == 0;
                        let position = positions.start;
                        let part = Part { images: images.clone(), channels: channels.clone(), positions };
                        let row = sizes.unfold(x, group, &part, matrix);
                        let from = match images.len() {
                            1 => (dy, sizes.output_matrix(images.start, group, position)),
                            _ => (&*joined, Matrix::rows(0, row)),
                        };
                        gemm(
                            [sizes.o, channels.len() * sizes.positions, row],
                            from,
                            (matrix, Matrix::rows(0, row).transposed()),
                            (dw, sizes.weight(group, channels.start)),
                            !first,
                        );
                    }
                }
            }
        }
        Ok(())
    }
}
