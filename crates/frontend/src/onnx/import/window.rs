//! Convolution and pooling.

use super::{
    Import,
    elementwise::{affine, apply, as_type, binary},
    rearrange::weighted,
    reduce::{Joined, over},
};
use crate::onnx::{
    error::{Tried, Trouble},
    importer::Importer,
    literal::Literal,
    proto::Node,
    stored::MOST_FOLDED,
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

/// How a window moves over each spatial dimension.
struct Window {
    kernel: Dims,
    stride: Dims,
    dilation: Dims,
    pad: Pads,
    /// Positions that ceil mode adds behind the padding.
    extra: SmallVec<[i64; 3]>,
}

fn per_dim(node: &Node, name: &str, rank: usize) -> Tried<Dims> {
    let given = node.ints(name)?;
    let sizes: Dims = match given {
        None => Dims::from_elem(1, rank),
        Some(sizes) => sizes.iter().map(|&s| u64::try_from(s).unwrap_or(0)).collect(),
    };
    if sizes.len() != rank || sizes.iter().any(|&s| s == 0 || s > 1 << 31) {
        return Err(Trouble::wrong(format!(
            "{name} {:?} for {rank} spatial dimensions",
            given.unwrap_or(&[])
        )));
    }
    Ok(sizes)
}

/// The file's pads: all low ones, then all high ones.
fn given_pads(node: &Node, rank: usize) -> Tried<Pads> {
    let pads = node.ints("pads")?.map_or_else(|| vec![0; 2 * rank], <[i64]>::to_vec);
    if pads.len() != 2 * rank || pads.iter().any(|&p| !(0..1 << 31).contains(&p)) {
        return Err(Trouble::wrong(format!("pads {pads:?} for {rank} spatial dimensions")));
    }
    Ok((0..rank).map(|d| (pads[d], pads[rank + d])).collect())
}

impl Window {
    fn of(node: &Node, input: &[u64], kernel: Dims) -> Tried<Self> {
        let rank = kernel.len();
        let (stride, dilation) = (per_dim(node, "strides", rank)?, per_dim(node, "dilations", rank)?);
        let span = |d: usize| (kernel[d] - 1).saturating_mul(dilation[d]).saturating_add(1) as i64;
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
            other => return Err(Trouble::wrong(format!("auto_pad `{other}`"))),
        }
        let mut extra: SmallVec<[i64; 3]> = SmallVec::from_elem(0, rank);
        if node.flag("ceil_mode", false)? {
            for d in 0..rank {
                let (low, high) = pad[d];
                let room = input[d] as i64 + low + high - span(d);
                let rest = room.max(0) % stride[d] as i64;
                // A last window that would begin in the padding behind is left out.
                let last = room - rest + stride[d] as i64;
                if rest != 0 && last < input[d] as i64 + low {
                    extra[d] = stride[d] as i64 - rest;
                }
            }
        }
        Ok(Self { kernel, stride, dilation, pad, extra })
    }

    /// The pads that ceil mode takes, too.
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

    /// How many positions of each window of one dimension count, the padding included or not.
    fn counted(&self, d: usize, input: u64, outputs: u64, padding: bool) -> Vec<u64> {
        let (low, high) = self.pad[d];
        let limits = if padding { -low..input as i64 + high } else { 0..input as i64 };
        let inside = |o: u64, k: u64| {
            let position = (o * self.stride[d]) as i64 - low + (k * self.dilation[d]) as i64;
            limits.contains(&position)
        };
        (0..outputs).map(|o| (0..self.kernel[d]).filter(|&k| inside(o, k)).count() as u64).collect()
    }
}

fn spatial(x: &View) -> Tried<Vec<u64>> {
    let shape = x.shape();
    if !(3..=5).contains(&shape.len()) {
        return Err(Trouble::unsupported(format!("{} spatial dimensions", shape.len() as i64 - 2)));
    }
    Ok(shape[2..].to_vec())
}

fn add_bias(cx: &mut Importer<'_>, node: &Node, y: View, spatial: usize) -> Tried {
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

fn conv(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let w = cx.tensor(node, 1)?;
    let rank = sizes.len();
    let kernel = Dims::from_slice(cx.b.shape(w).get(2..).unwrap_or(&[]));
    if kernel.len() != rank {
        return Err(Trouble::wrong(format!("input {:?} and weight {}", x.shape(), cx.b.ty(w))));
    }
    let window = Window::of(node, &sizes, kernel)?;
    let groups = u64::try_from(node.int("group", 1)?).unwrap_or(0);
    let geometry = ConvGeometry { stride: window.stride, pad: window.pad, dilation: window.dilation, groups };
    let x = cx.plain(&x)?;
    let y = cx.emit("", Conv { geometry }, &[x, w])?;
    let y = cx.seen(y);
    add_bias(cx, node, y, rank)
}

/// The derivative of a convolution by its input, which is what a transposed convolution computes.
fn conv_transpose(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let rank = sizes.len();
    let w = cx.tensor(node, 1)?;
    let kernel = Dims::from_slice(cx.b.shape(w).get(2..).unwrap_or(&[]));
    if kernel.len() != rank {
        return Err(Trouble::wrong(format!("input {:?} and weight {}", x.shape(), cx.b.ty(w))));
    }
    let (stride, dilation) = (per_dim(node, "strides", rank)?, per_dim(node, "dilations", rank)?);
    let extra = match node.ints("output_padding")? {
        Some(extra) if extra.len() == rank && extra.iter().all(|e| (0..1 << 31).contains(e)) => {
            extra.to_vec()
        }
        Some(extra) => return Err(Trouble::wrong(format!("output padding {extra:?}"))),
        None => vec![0; rank],
    };
    let span = |d: usize| (kernel[d] - 1).saturating_mul(dilation[d]).saturating_add(1) as i64;
    let full = |d: usize| stride[d] as i64 * (sizes[d] as i64 - 1) + span(d);
    let mut pad = given_pads(node, rank)?;
    let mode = node.text("auto_pad", "NOTSET")?;
    let target: Option<Vec<i64>> = match node.ints("output_shape")? {
        Some(shape) if shape.len() == rank => Some(shape.to_vec()),
        Some(shape) => return Err(Trouble::wrong(format!("output shape {shape:?}"))),
        None if mode.starts_with("SAME") => Some((0..rank).map(|d| (sizes[d] * stride[d]) as i64).collect()),
        None => None,
    };
    if let Some(target) = &target {
        for d in 0..rank {
            let total = full(d) + extra[d] - target[d];
            let (less, more) = (total.div_euclid(2), total - total.div_euclid(2));
            pad[d] = if mode == "SAME_UPPER" { (less, more) } else { (more, less) };
        }
    }
    // The convolution that this undoes reads `output` positions and makes `sizes`.
    let mut output = Dims::new();
    for d in 0..rank {
        let size = full(d) - pad[d].0 - pad[d].1 + extra[d];
        output.push(u64::try_from(size).map_err(|_| Trouble::wrong("an output of negative size"))?);
        pad[d].1 -= extra[d];
    }
    let groups = u64::try_from(node.int("group", 1)?).unwrap_or(0);
    let geometry = ConvGeometry { stride, pad, dilation, groups };
    let x = cx.plain(&x)?;
    let y = cx.emit("", ConvGradInput { geometry, input: output }, &[x, w])?;
    let y = cx.seen(y);
    add_bias(cx, node, y, rank)
}

/// The kernel of a pooling op.
fn pool_kernel(node: &Node, rank: usize) -> Tried<Dims> {
    if !node.has("kernel_shape") {
        return Err(Trouble::wrong("has no kernel_shape"));
    }
    per_dim(node, "kernel_shape", rank)
}

/// Whether a window is a single position that visits every other exactly once.
fn does_nothing(window: &Window) -> bool {
    let ones = |sizes: &Dims| sizes.iter().all(|&s| s == 1);
    ones(&window.kernel) && ones(&window.stride) && window.full_pad().iter().all(|&p| p == (0, 0))
}

fn max_pool(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    if node.output.get(1).is_some_and(|o| !o.is_empty()) {
        return Err(Trouble::unsupported("indices that are returned"));
    }
    let window = Window::of(node, &sizes, pool_kernel(node, sizes.len())?)?;
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
fn lp_pool(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let window = Window::of(node, &sizes, pool_kernel(node, sizes.len())?)?;
    let p = node.int("p", 2)?;
    if !(1..=1 << 20).contains(&p) {
        return Err(Trouble::wrong(format!("a norm of order {p}")));
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

/// Local response norm: each channel by the squares of its neighbours, summed by a matrix with a band of ones.
fn local_response(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let size = u64::try_from(node.int("size", 1)?).unwrap_or(0);
    let (alpha, beta) = (node.float("alpha", 1e-4)?, node.float("beta", 0.75)?);
    let channels = x.shape().get(1).copied().unwrap_or(0);
    if size == 0 || channels == 0 || channels.saturating_mul(channels) > MOST_FOLDED as u64 {
        return Err(Trouble::wrong(format!("{size} neighbours of {channels} channels")));
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

fn average_pool(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let sizes = spatial(&x)?;
    let rank = sizes.len();
    let window = Window::of(node, &sizes, pool_kernel(node, rank)?)?;
    if does_nothing(&window) {
        cx.output_view(node, 0, x);
        return Ok(());
    }
    let unpadded = window.full_pad().iter().all(|&p| p == (0, 0));
    if unpadded && window.kernel[..] == sizes[..] && window.dilation.iter().all(|&d| d == 1) {
        // One window over everything: a mean, which may be split.
        let dims: Vec<usize> = (2..x.rank()).collect();
        let y = over(cx, "", &x, &dims, Joined::Mean, true)?;
        cx.output_view(node, 0, y);
        return Ok(());
    }
    let tensor = cx.plain(&x)?;
    let y = cx.emit("", AvgPool { geometry: window.geometry() }, &[tensor])?;
    let mut y = cx.seen(y);
    let padding = node.flag("count_include_pad", false)?;
    let outputs = y.shape()[2..].to_vec();
    let counts: Vec<Vec<u64>> = (0..rank).map(|d| window.counted(d, sizes[d], outputs[d], padding)).collect();
    let whole: u64 = window.kernel.iter().product();
    if counts.iter().zip(&window.kernel).any(|(counts, &k)| counts.iter().any(|&c| c != k)) {
        // The op divides by the whole window: windows over the edge are scaled up.
        let mut factors = vec![whole as f64];
        for counts in &counts {
            factors = factors.iter().flat_map(|f| counts.iter().map(move |&c| f / c.max(1) as f64)).collect();
        }
        let literal = Literal::reals(cx.dtype(&y), outputs, factors);
        let name = format!("{}.edges", cx.name);
        let edges = cx.constant(&name, &literal)?;
        y = binary(cx, "edge_scale", BinaryFn::Mul, &y, &edges)?;
    }
    cx.output_view(node, 0, y);
    Ok(())
}
