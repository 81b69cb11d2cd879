//! Convolution and pooling.

use super::{
    Import,
    elementwise::{affine, apply, as_type, binary},
    rearrange::weighted,
    reduce::{ReduceKind, over},
};
use crate::{
    error::{NodeError, NodeResult},
    importer::Importer,
    literal::{Literal, count},
    proto::Node,
    storage::MOST_FOLDED,
    view::View,
};
use shardwright_graph::{
    DType, Dims, Real,
    ops::{AvgPool, BinaryFn, Conv, ConvGeometry, ConvGradInput, MaxPool, PoolGeometry, UnaryFn},
};
use smallvec::SmallVec;

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Conv" => conv,
        "ConvTranspose" => conv_transpose,
        "MaxPool" => max_pool,
        "AveragePool" => average_pool,
        "LpPool" => lp_pool,
        "LRN" => local_response,
        _ => return None,
    })
}

type Pads = SmallVec<[(i64, i64); 3]>;

/// The geometry of a window over the spatial dimensions.
struct WindowGeometry {
    kernel: Dims,
    stride: Dims,
    dilation: Dims,
    pad: Pads,
    /// Positions that ceil mode adds after the padding.
    extra: SmallVec<[i64; 3]>,
}

fn per_dim(node: &Node, name: &str, rank: usize) -> NodeResult<Dims> {
    let given = node.ints(name)?;
    let sizes: Dims = match given {
        None => Dims::from_elem(1, rank),
        // Zero stands for a negative size; both are refused below.
        Some(sizes) => sizes.iter().map(|&s| u64::try_from(s).unwrap_or(0)).collect(),
    };
    if sizes.len() != rank || sizes.iter().any(|&s| s == 0 || s > 1 << 31) {
        return Err(NodeError::invalid(format!(
            "`{name}` {:?} does not fit {rank} spatial dimensions",
            given.unwrap_or(&[])
        )));
    }
    Ok(sizes)
}

/// The file's pads: all low ones, then all high ones.
fn given_pads(node: &Node, rank: usize) -> NodeResult<Pads> {
    let pads = node.ints("pads")?.map_or_else(|| vec![0; 2 * rank], <[i64]>::to_vec);
    if pads.len() != 2 * rank || pads.iter().any(|&p| !(0..1 << 31).contains(&p)) {
        return Err(NodeError::invalid(format!("pads {pads:?} do not fit {rank} spatial dimensions")));
    }
    Ok((0..rank).map(|d| (pads[d], pads[rank + d])).collect())
}

/// The input positions that the window covers per dimension. All arithmetic on windows stays far below `i64::MAX` if these
/// do: sizes are at most 2^48, strides and pads 2^31.
fn spans(kernel: &[u64], dilation: &[u64]) -> NodeResult<SmallVec<[i64; 3]>> {
    let span = |(&k, &d): (&u64, &u64)| k.checked_sub(1)?.checked_mul(d).filter(|&n| n < 1 << 40);
    let spans: Option<SmallVec<_>> =
        kernel.iter().zip(dilation).map(|pair| span(pair).map(|n| n as i64 + 1)).collect();
    spans.ok_or_else(|| {
        NodeError::invalid(format!("a window of {kernel:?}, dilated by {dilation:?}, is too large"))
    })
}

impl WindowGeometry {
    fn of(node: &Node, input: &[u64], kernel: Dims) -> NodeResult<Self> {
        let rank = kernel.len();
        let (stride, dilation) = (per_dim(node, "strides", rank)?, per_dim(node, "dilations", rank)?);
        let spans = spans(&kernel, &dilation)?;
        let span = |d: usize| spans[d];
        let mut pad: Pads = SmallVec::from_elem((0, 0), rank);
        match node.text("auto_pad", "NOTSET")?.as_str() {
            "NOTSET" => pad = given_pads(node, rank)?,
            "VALID" => {}
            mode @ ("SAME_UPPER" | "SAME_LOWER") => {
                for d in 0..rank {
                    let outputs = input[d].div_ceil(stride[d]) as i64;
                    let reach = (outputs - 1) * stride[d] as i64 + span(d);
                    let total = (reach - input[d] as i64).max(0);
                    let (less, more) = (total / 2, total - total / 2);
                    pad[d] = if mode == "SAME_UPPER" { (less, more) } else { (more, less) };
                }
            }
            other => return Err(NodeError::invalid(format!("unknown auto_pad `{other}`"))),
        }
        let mut extra: SmallVec<[i64; 3]> = SmallVec::from_elem(0, rank);
        if node.flag("ceil_mode", false)? {
            for d in 0..rank {
                let (low, high) = pad[d];
                let room = input[d] as i64 + low + high - span(d);
                let rest = room.max(0) % stride[d] as i64;
                // A last window that would begin in the trailing padding is left out.
                let last = room - rest + stride[d] as i64;
                if rest != 0 && last < input[d] as i64 + low {
                    extra[d] = stride[d] as i64 - rest;
                }
            }
        }
        Ok(Self { kernel, stride, dilation, pad, extra })
    }

    /// The pads, including the positions that ceil mode adds.
    fn full_pad(&self) -> Pads {
        self.pad.iter().zip(&self.extra).map(|(&(low, high), extra)| (low, high + extra)).collect()
    }

    fn geometry(&self) -> PoolGeometry {
        PoolGeometry {
            kernel: self.kernel.clone(),
            stride: self.stride.clone(),
            pad: self.full_pad(),
            dilation: self.dilation.clone(),
        }
    }

    /// Whether windows may reach over the positions that count, with or without padding.
    fn has_edges(&self, padding: bool) -> bool {
        let reaches = |d: usize| self.extra[d] != 0 || !padding && self.pad[d] != (0, 0);
        (0..self.kernel.len()).any(reaches)
    }

    /// The number of positions of each window of one dimension that count, with or without padding.
    fn counted(&self, d: usize, input: u64, outputs: u64, padding: bool) -> Vec<u64> {
        let (low, high) = self.pad[d];
        let limits = if padding { -low..input as i64 + high } else { 0..input as i64 };
        let (stride, dilation, kernel) =
            (self.stride[d] as i64, self.dilation[d] as i64, self.kernel[d] as i64);
        // The number of window positions before an input position.
        let before = |start: i64, limit: i64| {
            let distance = (limit - start).max(0) as u64;
            distance.div_ceil(dilation as u64).min(kernel as u64)
        };
        let count = |o: u64| {
            let start = o as i64 * stride - low;
            before(start, limits.end) - before(start, limits.start)
        };
        (0..outputs).map(count).collect()
    }
}

fn spatial(x: &View) -> NodeResult<Vec<u64>> {
    let shape = x.shape();
    if !(3..=5).contains(&shape.len()) {
        return Err(NodeError::unsupported(format!("{} spatial dimensions", shape.len() as i64 - 2)));
    }
    Ok(shape[2..].to_vec())
}

fn add_bias(cx: &mut Importer<'_>, node: &Node, y: View, spatial: usize) -> NodeResult {
    if !cx.given(node, 2) {
        cx.output_view(node, 0, y);
        return Ok(());
    }
    let bias = cx.view(node, 2)?;
    let mut sizes = bias.shape();
    sizes.resize(sizes.len() + spatial, 1);
    let bias = super::movement::reshaped_view(cx, &bias, &sizes)?;
    let y = binary(cx, "add_bias", BinaryFn::Add, &y, &bias)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn conv(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let w = cx.tensor(node, 1)?;
    let rank = sizes.len();
    let kernel = Dims::from_slice(cx.b.shape(w).get(2..).unwrap_or(&[]));
    if kernel.len() != rank {
        return Err(NodeError::invalid(format!(
            "an input of shape {:?} does not fit weight {}",
            x.shape(),
            cx.b.ty(w)
        )));
    }
    let window = WindowGeometry::of(node, &sizes, kernel)?;
    let groups = node.size("group", 1)?;
    let geometry = ConvGeometry { stride: window.stride, pad: window.pad, dilation: window.dilation, groups };
    let x = cx.plain(&x)?;
    let y = cx.emit("", Conv { geometry }, &[x, w])?;
    let y = cx.seen(y);
    add_bias(cx, node, y, rank)
}

/// The output sizes of a transposed convolution that are not computed from its pads.
fn output_sizes(node: &Node, sizes: &[u64], stride: &[u64]) -> NodeResult<Vec<Option<i64>>> {
    let wrong = |shape: &[i64]| NodeError::invalid(format!("output shape {shape:?} does not fit"));
    match node.ints("output_shape")? {
        Some(shape) if shape.len() == sizes.len() && shape.iter().all(|s| (1..1 << 48).contains(s)) => {
            Ok(shape.iter().map(|&s| Some(s)).collect())
        }
        Some(shape) => Err(wrong(shape)),
        None if node.text("auto_pad", "NOTSET")?.starts_with("SAME") => {
            let scaled = sizes.iter().zip(stride).map(|(&size, &stride)| {
                size.checked_mul(stride).and_then(|n| i64::try_from(n).ok().filter(|&n| n < 1 << 48))
            });
            let scaled: Option<Vec<_>> = scaled.map(|size| size.map(Some)).collect();
            scaled.ok_or_else(|| NodeError::invalid("the output is too large"))
        }
        None => Ok(vec![None; sizes.len()]),
    }
}

/// The pads of a transposed convolution whose output size is given; `total` positions of the full output are left out.
///
/// As in ONNX's reference: `SAME` halves the pads and rounds down. Otherwise given pads leave the rest to the end. Without
/// pads, positions are left out at both ends, and missing ones added at the end.
fn target_pads(node: &Node, given: (i64, i64), total: i128, stride: u64) -> NodeResult<(i64, i64)> {
    let total = i64::try_from(total).ok().filter(|n| n.unsigned_abs() < 1 << 48);
    let total = total.ok_or_else(|| NodeError::invalid("the output shape does not fit the input"))?;
    let (less, more) = (total.div_euclid(2), total - total.div_euclid(2));
    Ok(match node.text("auto_pad", "NOTSET")?.as_str() {
        "SAME_UPPER" => (less, more),
        "SAME_LOWER" => (more, less),
        _ if node.has("pads") => (given.0, total - given.0),
        _ if total >= 0 => (more, less),
        _ if total.unsigned_abs() < stride => (0, total),
        _ => {
            return Err(NodeError::invalid(format!(
                "the output shape exceeds the convolution's by {}, which is not below the stride {stride}",
                -total
            )));
        }
    })
}

/// A transposed convolution, which is the derivative of a convolution by its input.
fn conv_transpose(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let rank = sizes.len();
    let w = cx.tensor(node, 1)?;
    let kernel = Dims::from_slice(cx.b.shape(w).get(2..).unwrap_or(&[]));
    if kernel.len() != rank {
        return Err(NodeError::invalid(format!(
            "an input of shape {:?} does not fit weight {}",
            x.shape(),
            cx.b.ty(w)
        )));
    }
    let (stride, dilation) = (per_dim(node, "strides", rank)?, per_dim(node, "dilations", rank)?);
    let extra = match node.ints("output_padding")? {
        Some(extra) if extra.len() == rank && extra.iter().all(|e| (0..1 << 31).contains(e)) => {
            extra.to_vec()
        }
        Some(extra) => return Err(NodeError::invalid(format!("output padding {extra:?} does not fit"))),
        None => vec![0; rank],
    };
    let spans = spans(&kernel, &dilation)?;
    let (mut pad, mut output) = (Pads::new(), Dims::new());
    let target = output_sizes(node, &sizes, &stride)?;
    let given = given_pads(node, rank)?;
    for d in 0..rank {
        let full =
            i128::from(stride[d]) * (i128::from(sizes[d]) - 1) + i128::from(spans[d]) + i128::from(extra[d]);
        let pads = match target[d] {
            None => given[d],
            Some(size) => target_pads(node, given[d], full - i128::from(size), stride[d])?,
        };
        let size = full - i128::from(pads.0) - i128::from(pads.1);
        let size = u64::try_from(size).ok().filter(|&n| (1..=shardwright_graph::MAX_ELEMENTS).contains(&n));
        output.push(size.ok_or_else(|| NodeError::invalid("the output is empty or too large"))?);
        // The inverse convolution reads `output` positions and computes `sizes`.
        pad.push((pads.0, pads.1 - extra[d]));
    }
    let groups = node.size("group", 1)?;
    let geometry = ConvGeometry { stride, pad, dilation, groups };
    let x = cx.plain(&x)?;
    let y = cx.emit("", ConvGradInput { geometry, input: output }, &[x, w])?;
    let y = cx.seen(y);
    add_bias(cx, node, y, rank)
}

/// The kernel of a pooling op.
fn pool_kernel(node: &Node, rank: usize) -> NodeResult<Dims> {
    if !node.has("kernel_shape") {
        return Err(NodeError::invalid("`kernel_shape` is missing"));
    }
    per_dim(node, "kernel_shape", rank)
}

/// Whether the window is a single position that visits every position once.
fn does_nothing(window: &WindowGeometry) -> bool {
    let ones = |sizes: &Dims| sizes.iter().all(|&s| s == 1);
    ones(&window.kernel) && ones(&window.stride) && window.full_pad().iter().all(|&p| p == (0, 0))
}

fn max_pool(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    if node.output.get(1).is_some_and(|o| !o.is_empty()) {
        return Err(NodeError::unsupported("an output of the indices"));
    }
    let window = WindowGeometry::of(node, &sizes, pool_kernel(node, sizes.len())?)?;
    if does_nothing(&window) {
        cx.output_view(node, 0, x);
        return Ok(());
    }
    let dtype = cx.dtype(&x);
    let float = if dtype.is_float() { dtype } else { DType::F64 };
    let x = as_type(cx, &x, float)?;
    let x = cx.plain(&x)?;
    let y = cx.add("", MaxPool { geometry: window.geometry() }, &[x])?[0];
    let y = cx.seen(y);
    let y = as_type(cx, &y, dtype)?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// The p-norm of each window.
fn lp_pool(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let window = WindowGeometry::of(node, &sizes, pool_kernel(node, sizes.len())?)?;
    let p = node.int("p", 2)?;
    if !(1..=1 << 20).contains(&p) {
        return Err(NodeError::invalid(format!("a norm of order {p} is not allowed")));
    }
    let size = apply(cx, "size", UnaryFn::Abs, &x)?;
    let power = if p == 1 { size } else { apply(cx, "power", UnaryFn::Power(Real(p as f64)), &size)? };
    let tensor = cx.plain(&power)?;
    let mean = cx.emit("mean", AvgPool { geometry: window.geometry() }, &[tensor])?;
    let mean = cx.seen(mean);
    let sum = affine(cx, "sum", &mean, window.kernel.iter().product::<u64>() as f64, 0.0)?;
    let y = if p == 1 { sum } else { apply(cx, "", UnaryFn::Power(Real(1.0 / p as f64)), &sum)? };
    cx.output_view(node, 0, y);
    Ok(())
}

/// Local response norm: divides each channel by a power of the summed squares of its neighbours. A banded matrix of ones
/// computes the sums.
fn local_response(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let size = node.size("size", 1)?;
    let (alpha, beta) = (node.float("alpha", 1e-4)?, node.float("beta", 0.75)?);
    let channels = x.shape().get(1).copied().unwrap_or(0);
    if size == 0 || channels == 0 || channels.saturating_mul(channels) > MOST_FOLDED as u64 {
        return Err(NodeError::invalid(format!("a window of {size} does not fit {channels} channels")));
    }
    let (before, behind) = ((size - 1) / 2, size / 2);
    let neighbours = |c: u64| {
        let range = c.saturating_sub(before)..=c.saturating_add(behind).min(channels - 1);
        range.map(|i| (i, 1.0)).collect::<Vec<_>>()
    };
    let weights: Vec<_> = (0..channels).map(neighbours).collect();
    let square = apply(cx, "square", UnaryFn::Square, &x)?;
    let sum = weighted(cx, "sum", &square, 1, &weights)?;
    let scale = affine(cx, "scale", &sum, alpha / size as f64, node.float("bias", 1.0)?)?;
    let divisor = apply(cx, "divisor", UnaryFn::Power(Real(beta)), &scale)?;
    let y = binary(cx, "", BinaryFn::Div, &x, &divisor)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn average_pool(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let rank = sizes.len();
    let window = WindowGeometry::of(node, &sizes, pool_kernel(node, rank)?)?;
    if does_nothing(&window) {
        cx.output_view(node, 0, x);
        return Ok(());
    }
    let unpadded = window.full_pad().iter().all(|&p| p == (0, 0));
    if unpadded && window.kernel[..] == sizes[..] && window.dilation.iter().all(|&d| d == 1) {
        // One window over the whole image: a mean, which may be split.
        let dims: Vec<usize> = (2..x.rank()).collect();
        let y = over(cx, "", &x, &dims, ReduceKind::Mean, true)?;
        cx.output_view(node, 0, y);
        return Ok(());
    }
    let tensor = cx.plain(&x)?;
    let y = cx.emit("", AvgPool { geometry: window.geometry() }, &[tensor])?;
    let mut y = cx.seen(y);
    let padding = node.flag("count_include_pad", false)?;
    if window.has_edges(padding) {
        // The op divides by the whole window, so windows over the edge are scaled up.
        let outputs = y.shape()[2..].to_vec();
        if count(&outputs).is_none_or(|n| n > MOST_FOLDED) {
            return Err(NodeError::unsupported("padding of an average over more than four million windows"));
        }
        let whole: u64 = window.kernel.iter().product();
        let mut factors = vec![whole as f64];
        for d in 0..rank {
            let counts = window.counted(d, sizes[d], outputs[d], padding);
            factors = factors.iter().flat_map(|f| counts.iter().map(move |&c| f / c.max(1) as f64)).collect();
        }
        if factors.iter().any(|&f| f != 1.0) {
            let literal = Literal::reals(cx.dtype(&y), outputs, factors);
            let name = format!("{}.edges", cx.name);
            let edges = cx.constant(&name, &literal)?;
            y = binary(cx, "edge_scale", BinaryFn::Mul, &y, &edges)?;
        }
    }
    cx.output_view(node, 0, y);
    Ok(())
}
