//! Convolutions and their derivatives.
//!
//! JAX writes all three as one operation. The derivative by the input is a convolution of the dilated gradient with the
//! reversed kernel; the derivative by the weight is a convolution of the input with the gradient as its kernel. Each is
//! converted back to its op by these rules, which are identities:
//! - a dilated left side, or a reversed kernel, means a derivative by the input;
//! - batch groups, or a kernel larger than the result, mean a derivative by the weight.

use super::{super::error::Result, Importer, ResolvedOperation, draft::Slot, value::SymbolicValue};
use shardwright_graph::{
    Dims, Op, Real, Shape,
    ops::{Conv, ConvGeometry, ConvGradInput, ConvGradWeight, Pad, Reverse},
};
use smallvec::SmallVec;

/// The positions of a tensor's batch (or output), feature (or input) and spatial dimensions.
type Order = SmallVec<[usize; 4]>;

/// Parses `[b, f, 0, 1]` into the positions of the two letters, then of the spatial dimensions in order.
fn order(text: &str, letters: [&str; 2], rank: usize) -> Option<Order> {
    let items: Vec<&str> =
        text.trim().strip_prefix('[')?.strip_suffix(']')?.split(',').map(str::trim).collect();
    if items.len() != rank || rank < 2 {
        return None;
    }
    let spatial = (0..rank - 2).map(|i| i.to_string());
    let wanted = letters.into_iter().map(str::to_string).chain(spatial);
    wanted.map(|want| items.iter().position(|item| *item == want)).collect()
}

impl<'a> Importer<'a> {
    pub fn convolution(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(2)?;
        let rank = op.types[0].ty.rank();
        let spatial = rank.saturating_sub(2);
        if !(1..=3).contains(&spatial) || op.types[1].ty.rank() != rank {
            return Err(op.error("only one to three spatial dimensions are supported"));
        }
        let numbers = op.body("dimension_numbers")?;
        let orders = numbers.split_once("]x[").and_then(|(lhs, rest)| {
            let (rhs, out) = rest.split_once("->")?;
            Some((
                order(&format!("{lhs}]"), ["b", "f"], rank)?,
                order(&format!("[{rhs}"), ["o", "i"], rank)?,
                order(out, ["b", "f"], rank)?,
            ))
        });
        let (lhs_order, rhs_order, out_order) =
            orders.ok_or_else(|| op.error(format!("`{numbers}` does not order the dimensions")))?;
        let window = ConvWindow {
            stride: op.sizes_or_ones("window_strides", spatial)?,
            lhs_dilation: op.sizes_or_ones("lhs_dilation", spatial)?,
            rhs_dilation: op.sizes_or_ones("rhs_dilation", spatial)?,
            pad: op.pairs("padding", spatial)?.into_iter().collect(),
        };
        if window.pad.iter().any(|p| p.0.unsigned_abs().max(p.1.unsigned_abs()) > 1 << 40) {
            return Err(op.error("the padding is out of range"));
        }
        let count = |name: &str| -> Result<u64> {
            u64::try_from(op.int_or(name, 1)?)
                .ok()
                .filter(|&n| n > 0)
                .ok_or_else(|| op.error(format!("`{name}` must be positive")))
        };
        let groups = [count("feature_group_count")?, count("batch_group_count")?];
        let reversal = op.flags("window_reversal", spatial)?;

        let lhs = op.slot(0, &mut self.draft)?;
        let lhs = self.draft.transpose(lhs, &lhs_order)?;
        let (rhs, reversed) = self.kernel(op, &rhs_order, &reversal)?;
        let result = op.result()?.ty.clone();
        let out: Option<Shape> = out_order.iter().map(|&d| result.shape.get(d).copied()).collect();
        let out =
            out.ok_or_else(|| op.error(format!("the result must have {rank} dimensions, got {result}")))?;

        let made = if window.lhs_dilation.iter().any(|&n| n > 1) || reversed {
            self.input_gradient(op, &window, groups, lhs, rhs, reversed, &out)?
        } else {
            let kernel: u64 = self.draft.ty(rhs).shape[2..].iter().product();
            let made: u64 = out[2..].iter().product();
            if groups[1] > 1 || (groups[0] == 1 && kernel > made) {
                self.weight_gradient(op, &window, groups, lhs, rhs, &out)?
            } else {
                let geometry = ConvGeometry {
                    stride: window.stride.clone(),
                    pad: window.pad.clone(),
                    dilation: window.rhs_dilation.clone(),
                    groups: groups[0],
                };
                self.draft.one(Conv { geometry }, &[lhs, rhs])?
            }
        };
        // Back to the dimension order of the text.
        let mut back: Order = SmallVec::from_elem(0, rank);
        for (i, &d) in out_order.iter().enumerate() {
            back[d] = i;
        }
        let made = self.draft.transpose(made, &back)?;
        Ok(vec![self.cast(&SymbolicValue::Tensor(made), result.dtype)?])
    }

    /// The kernel as `[o, i, spatial...]` without a preceding reversal, and whether it is reversed in all spatial dimensions.
    fn kernel(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        order: &Order,
        reversal: &[bool],
    ) -> Result<(Slot, bool)> {
        let slot = op.slot(1, &mut self.draft)?;
        let shape = self.draft.ty(slot).shape.clone();
        // A reversal has no effect on dimensions of size one.
        let turned = |i: usize, flipped: bool| flipped || shape[order[i + 2]] == 1;
        let mut flips: SmallVec<[bool; 4]> = reversal.into();
        let mut from = slot;
        if let Some(op) = self.draft.producer(slot)
            && let Op::Reverse(reverse) = &op.op
            && reverse.axes.iter().all(|d| order[2..].contains(d))
        {
            from = op.inputs[0];
            for (i, flip) in flips.iter_mut().enumerate() {
                *flip ^= reverse.axes.contains(&order[i + 2]);
            }
        }
        let any = flips.iter().any(|&f| f);
        let all = flips.iter().enumerate().all(|(i, &f)| turned(i, f));
        if any && !all {
            // A reversal in some dimensions only is executed.
            let mut axes: SmallVec<[usize; 4]> =
                flips.iter().enumerate().filter(|(_, f)| **f).map(|(i, _)| order[i + 2]).collect();
            axes.sort_unstable();
            from = self.draft.one(Reverse { axes }, &[from])?;
        }
        Ok((self.draft.transpose(from, order)?, any && all))
    }

    /// `lhs` is the gradient of the result, `rhs` the kernel as `[channels of x, channels of y, ...]`.
    #[allow(clippy::too_many_arguments)]
    fn input_gradient(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        window: &ConvWindow,
        groups: [u64; 2],
        lhs: Slot,
        rhs: Slot,
        reversed: bool,
        out: &Shape,
    ) -> Result<Slot> {
        let spatial = window.stride.len();
        let kernel = Dims::from_slice(&self.draft.ty(rhs).shape[2..]);
        let dy = self.draft.ty(lhs).shape.clone();
        if groups[1] > 1 || window.stride.iter().any(|&n| n > 1) {
            return self.dilated(op, window, groups, lhs, rhs, reversed);
        }
        let mut pad = SmallVec::new();
        for d in 0..spatial {
            // Position i of the input meets position p of the gradient where i = p*stride - pad + k*dilation.
            let (stride, dilation) = (window.lhs_dilation[d] as i64, window.rhs_dilation[d] as i64);
            let reach = (kernel[d] as i64 - 1).checked_mul(dilation).filter(|&n| n < 1 << 40);
            let reach = reach.ok_or_else(|| op.error("the window is out of range"))?;
            let low = reach - window.pad[d].0;
            let last = (dy[d + 2] as i64 - 1).checked_mul(stride).filter(|&n| n < 1 << 48);
            let last = last.ok_or_else(|| op.error("the window is out of range"))?;
            pad.push((low, last + reach + 1 - out[d + 2] as i64 - low));
        }
        let geometry = ConvGeometry {
            stride: window.lhs_dilation.clone(),
            pad,
            dilation: window.rhs_dilation.clone(),
            groups: groups[0],
        };
        let mut w = rhs;
        if !reversed {
            let axes: SmallVec<[usize; 4]> = (0..spatial).filter(|&d| kernel[d] > 1).map(|d| d + 2).collect();
            if !axes.is_empty() {
                w = self.draft.one(Reverse { axes }, &[w])?;
            }
        }
        w = self.swapped(op, w, groups[0])?;
        self.draft.one(ConvGradInput { geometry, input: Dims::from_slice(&out[2..]) }, &[lhs, w])
    }

    /// A kernel with its two channel dimensions swapped group by group: `[g c, o, ..]` becomes `[g o, c, ..]`.
    fn swapped(&mut self, op: &ResolvedOperation<'_, 'a>, w: Slot, groups: u64) -> Result<Slot> {
        let shape = self.draft.ty(w).shape.clone();
        if !shape[0].is_multiple_of(groups) {
            return Err(op.error(format!("{} channels cannot be divided into {groups} groups", shape[0])));
        }
        if groups == 1 {
            let perm: Order = [1, 0].into_iter().chain(2..shape.rank()).collect();
            return self.draft.transpose(w, &perm);
        }
        let (c, o) = (shape[0] / groups, shape[1]);
        let with = |head: &[u64]| head.iter().chain(&shape[2..]).copied().collect::<Shape>();
        let split = self.draft.reshape(w, &with(&[groups, c, o]))?;
        let perm: Order = [0, 2, 1].into_iter().chain(3..shape.rank() + 1).collect();
        let turned = self.draft.transpose(split, &perm)?;
        self.draft.reshape(turned, &with(&[groups * o, c]))
    }

    /// `lhs` is `[channels of x, samples, ..]`, `rhs` `[channels of y, samples, ..]`.
    fn weight_gradient(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        window: &ConvWindow,
        groups: [u64; 2],
        lhs: Slot,
        rhs: Slot,
        out: &Shape,
    ) -> Result<Slot> {
        if groups[0] > 1 {
            return Err(op.error("batch groups combined with feature groups are not supported"));
        }
        let swap: Order = [1, 0].into_iter().chain(2..out.rank()).collect();
        let [x, dy] = [self.draft.transpose(lhs, &swap)?, self.draft.transpose(rhs, &swap)?];
        let (x_shape, dy_shape) = (self.draft.ty(x).shape.clone(), self.draft.ty(dy).shape.clone());
        let mut pad = SmallVec::new();
        for d in 0..window.stride.len() {
            let (stride, dilation) = (window.rhs_dilation[d] as i64, window.stride[d] as i64);
            let last = (dy_shape[d + 2] as i64 - 1).checked_mul(stride).filter(|&n| n < 1 << 48);
            let reach = (out[d + 2] as i64 - 1).checked_mul(dilation).filter(|&n| n < 1 << 48);
            let (Some(last), Some(reach)) = (last, reach) else {
                return Err(op.error("the window is out of range"));
            };
            let low = window.pad[d].0;
            pad.push((low, last + reach + 1 - x_shape[d + 2] as i64 - low));
        }
        let geometry = ConvGeometry {
            stride: window.rhs_dilation.clone(),
            pad,
            dilation: window.stride.clone(),
            groups: groups[1],
        };
        let dw =
            self.draft.one(ConvGradWeight { geometry, kernel: Dims::from_slice(&out[2..]) }, &[x, dy])?;
        // `[o, c, ..]` are the result's features and batch.
        self.draft.transpose(dw, &swap)
    }

    /// Cases that neither derivative covers: inserts zeros between the elements, then convolves.
    fn dilated(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        window: &ConvWindow,
        groups: [u64; 2],
        lhs: Slot,
        rhs: Slot,
        reversed: bool,
    ) -> Result<Slot> {
        if groups[1] > 1 {
            return Err(op.error("batch groups of a dilated input are not supported"));
        }
        let rank = window.stride.len() + 2;
        let mut pad = Pad {
            low: Dims::from_elem(0, rank),
            high: Dims::from_elem(0, rank),
            interior: Dims::from_elem(0, rank),
            value: Real(0.0),
        };
        for (d, &n) in window.lhs_dilation.iter().enumerate() {
            pad.interior[d + 2] = n - 1;
        }
        let lhs = if pad.interior.iter().any(|&n| n > 0) { self.draft.one(pad, &[lhs])? } else { lhs };
        let mut w = rhs;
        if reversed {
            let axes: SmallVec<[usize; 4]> = (2..rank).filter(|&d| self.draft.ty(rhs).shape[d] > 1).collect();
            w = self.draft.one(Reverse { axes }, &[w])?;
        }
        let geometry = ConvGeometry {
            stride: window.stride.clone(),
            pad: window.pad.clone(),
            dilation: window.rhs_dilation.clone(),
            groups: groups[0],
        };
        self.draft.one(Conv { geometry }, &[lhs, w])
    }
}

/// The window of a convolution, as in the text.
struct ConvWindow {
    stride: Dims,
    lhs_dilation: Dims,
    rhs_dilation: Dims,
    pad: SmallVec<[(i64, i64); 3]>,
}
