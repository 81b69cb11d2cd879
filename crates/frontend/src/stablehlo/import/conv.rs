//! Convolutions, forwards and backwards.
//!
//! JAX writes all three as one operation: the derivative by the input is a convolution of the dilated gradient with
//! the reversed kernel, the one by the weight a convolution of the input with the gradient as its kernel. Each is
//! turned back into the op that it is, since every form is an identity of the three:
//! - whatever dilates its left side, or reads a reversed kernel, is a derivative by the input;
//! - whatever groups its batch, or has a kernel larger than its result, is a derivative by the weight.

use super::{super::error::Result, Importer, Reading, steps::Slot, value::Value};
use shardwright_graph::{
    Dims, Op, Real, Shape,
    ops::{Conv, ConvGeometry, ConvGradInput, ConvGradWeight, Pad, Reverse},
};
use smallvec::SmallVec;

/// Where batch (or output), feature (or input) and spatial dimensions of a tensor are.
type Order = SmallVec<[usize; 4]>;

/// Reads `[b, f, 0, 1]`: positions of the first letter, the second, then the spatial dimensions in order.
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
    pub fn convolution(&mut self, op: &Reading<'_, 'a>) -> Result<Vec<Value>> {
        op.arity(2)?;
        let rank = op.types[0].ty.rank();
        let spatial = rank.saturating_sub(2);
        if !(1..=3).contains(&spatial) || op.types[1].ty.rank() != rank {
            return Err(op.fault("one to three spatial dimensions are supported"));
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
            orders.ok_or_else(|| op.fault(format!("`{numbers}` does not order the dimensions")))?;
        let window = Window {
            stride: op.sizes_or_ones("window_strides", spatial)?,
            lhs_dilation: op.sizes_or_ones("lhs_dilation", spatial)?,
            rhs_dilation: op.sizes_or_ones("rhs_dilation", spatial)?,
            pad: op.pairs("padding", spatial)?.into_iter().collect(),
        };
        if window.pad.iter().any(|p| p.0.unsigned_abs().max(p.1.unsigned_abs()) > 1 << 40) {
            return Err(op.fault("absurd padding"));
        }
        let count = |name: &str| -> Result<u64> {
            u64::try_from(op.int_or(name, 1)?)
                .ok()
                .filter(|&n| n > 0)
                .ok_or_else(|| op.fault(format!("`{name}` must be positive")))
        };
        let groups = [count("feature_group_count")?, count("batch_group_count")?];
        let reversal = op.flags("window_reversal", spatial)?;

        let lhs = op.slot(0, &mut self.steps)?;
        let lhs = self.steps.transpose(lhs, &lhs_order)?;
        let (rhs, reversed) = self.kernel(op, &rhs_order, &reversal)?;
        let result = op.result()?.ty.clone();
        let out: Shape = out_order.iter().map(|&d| result.shape.get(d).copied().unwrap_or(0)).collect();

        let made = if window.lhs_dilation.iter().any(|&n| n > 1) || reversed {
            self.input_gradient(op, &window, groups, lhs, rhs, reversed, &out)?
        } else {
            let kernel: u64 = self.steps.ty(rhs).shape[2..].iter().product();
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
                self.steps.one(Conv { geometry }, &[lhs, rhs])?
            }
        };
        // Back to the order of the text.
        let mut back: Order = SmallVec::from_elem(0, rank);
        for (i, &d) in out_order.iter().enumerate() {
            back[d] = i;
        }
        let made = self.steps.transpose(made, &back)?;
        Ok(vec![self.cast(&Value::Tensor(made), result.dtype)?])
    }

    /// The kernel as `[o, i, spatial...]`, and whether it is turned around in all spatial dimensions; a reversal
    /// before is taken out.
    fn kernel(&mut self, op: &Reading<'_, 'a>, order: &Order, reversal: &[bool]) -> Result<(Slot, bool)> {
        let slot = op.slot(1, &mut self.steps)?;
        let shape = self.steps.ty(slot).shape.clone();
        // Dimensions of size one are turned around already.
        let turned = |i: usize, flipped: bool| flipped || shape[order[i + 2]] == 1;
        let mut flips: SmallVec<[bool; 4]> = reversal.into();
        let mut from = slot;
        if let Some(step) = self.steps.maker(slot)
            && let Op::Reverse(reverse) = &step.op
            && reverse.axes.iter().all(|d| order[2..].contains(d))
        {
            from = step.inputs[0];
            for (i, flip) in flips.iter_mut().enumerate() {
                *flip ^= reverse.axes.contains(&order[i + 2]);
            }
        }
        let any = flips.iter().any(|&f| f);
        let all = flips.iter().enumerate().all(|(i, &f)| turned(i, f));
        if any && !all {
            // Turned around in some dimensions only: do it.
            let mut axes: SmallVec<[usize; 4]> =
                flips.iter().enumerate().filter(|(_, f)| **f).map(|(i, _)| order[i + 2]).collect();
            axes.sort_unstable();
            from = self.steps.one(Reverse { axes }, &[from])?;
        }
        Ok((self.steps.transpose(from, order)?, any && all))
    }

    /// `lhs` is the gradient of the result, `rhs` the kernel as `[channels of x, channels of y, ...]`.
    #[allow(clippy::too_many_arguments)]
    fn input_gradient(
        &mut self,
        op: &Reading<'_, 'a>,
        window: &Window,
        groups: [u64; 2],
        lhs: Slot,
        rhs: Slot,
        reversed: bool,
        out: &Shape,
    ) -> Result<Slot> {
        let spatial = window.stride.len();
        let kernel = Dims::from_slice(&self.steps.ty(rhs).shape[2..]);
        let dy = self.steps.ty(lhs).shape.clone();
        if groups[1] > 1 || window.stride.iter().any(|&n| n > 1) {
            return self.dilated(op, window, groups, lhs, rhs, reversed);
        }
        let mut pad = SmallVec::new();
        for d in 0..spatial {
            // Position i of the input meets position p of the gradient where i = p*stride - pad + k*dilation.
            let (stride, dilation) = (window.lhs_dilation[d] as i64, window.rhs_dilation[d] as i64);
            let reach = (kernel[d] as i64 - 1).checked_mul(dilation).filter(|&n| n < 1 << 40);
            let reach = reach.ok_or_else(|| op.fault("an absurd window"))?;
            let low = reach - window.pad[d].0;
            let last = (dy[d + 2] as i64 - 1).checked_mul(stride).filter(|&n| n < 1 << 48);
            let last = last.ok_or_else(|| op.fault("an absurd window"))?;
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
                w = self.steps.one(Reverse { axes }, &[w])?;
            }
        }
        w = self.swapped(op, w, groups[0])?;
        self.steps.one(ConvGradInput { geometry, input: Dims::from_slice(&out[2..]) }, &[lhs, w])
    }

    /// A kernel with the two channel dimensions in each other's place, group by group: `[g c, o, ..]` becomes
    /// `[g o, c, ..]`.
    fn swapped(&mut self, op: &Reading<'_, 'a>, w: Slot, groups: u64) -> Result<Slot> {
        let shape = self.steps.ty(w).shape.clone();
        if !shape[0].is_multiple_of(groups) {
            return Err(op.fault(format!("{} channels do not fall into {groups} groups", shape[0])));
        }
        if groups == 1 {
            let perm: Order = [1, 0].into_iter().chain(2..shape.rank()).collect();
            return self.steps.transpose(w, &perm);
        }
        let (c, o) = (shape[0] / groups, shape[1]);
        let with = |head: &[u64]| head.iter().chain(&shape[2..]).copied().collect::<Shape>();
        let split = self.steps.reshape(w, &with(&[groups, c, o]))?;
        let perm: Order = [0, 2, 1].into_iter().chain(3..shape.rank() + 1).collect();
        let turned = self.steps.transpose(split, &perm)?;
        self.steps.reshape(turned, &with(&[groups * o, c]))
    }

    /// `lhs` is `[channels of x, samples, ..]`, `rhs` `[channels of y, samples, ..]`.
    fn weight_gradient(
        &mut self,
        op: &Reading<'_, 'a>,
        window: &Window,
        groups: [u64; 2],
        lhs: Slot,
        rhs: Slot,
        out: &Shape,
    ) -> Result<Slot> {
        if groups[0] > 1 {
            return Err(op.fault("batch and feature groups at once are not supported"));
        }
        let swap: Order = [1, 0].into_iter().chain(2..out.rank()).collect();
        let [x, dy] = [self.steps.transpose(lhs, &swap)?, self.steps.transpose(rhs, &swap)?];
        let (x_shape, dy_shape) = (self.steps.ty(x).shape.clone(), self.steps.ty(dy).shape.clone());
        let mut pad = SmallVec::new();
        for d in 0..window.stride.len() {
            let (stride, dilation) = (window.rhs_dilation[d] as i64, window.stride[d] as i64);
            let last = (dy_shape[d + 2] as i64 - 1).checked_mul(stride).filter(|&n| n < 1 << 48);
            let reach = (out[d + 2] as i64 - 1).checked_mul(dilation).filter(|&n| n < 1 << 48);
            let (Some(last), Some(reach)) = (last, reach) else { return Err(op.fault("an absurd window")) };
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
            self.steps.one(ConvGradWeight { geometry, kernel: Dims::from_slice(&out[2..]) }, &[x, dy])?;
        // `[o, c, ..]` is the result's features and batch.
        self.steps.transpose(dw, &swap)
    }

    /// What neither derivative covers: zeros between the elements, then a plain convolution.
    fn dilated(
        &mut self,
        op: &Reading<'_, 'a>,
        window: &Window,
        groups: [u64; 2],
        lhs: Slot,
        rhs: Slot,
        reversed: bool,
    ) -> Result<Slot> {
        if groups[1] > 1 {
            return Err(op.fault("batch groups of a dilated input are not supported"));
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
        let lhs = if pad.interior.iter().any(|&n| n > 0) { self.steps.one(pad, &[lhs])? } else { lhs };
        let mut w = rhs;
        if reversed {
            let axes: SmallVec<[usize; 4]> = (2..rank).filter(|&d| self.steps.ty(rhs).shape[d] > 1).collect();
            w = self.steps.one(Reverse { axes }, &[w])?;
        }
        let geometry = ConvGeometry {
            stride: window.stride.clone(),
            pad: window.pad.clone(),
            dilation: window.rhs_dilation.clone(),
            groups: groups[0],
        };
        self.steps.one(Conv { geometry }, &[lhs, w])
    }
}

/// How the kernel moves, in the words of the text.
struct Window {
    stride: Dims,
    lhs_dilation: Dims,
    rhs_dilation: Dims,
    pad: SmallVec<[(i64, i64); 3]>,
}
