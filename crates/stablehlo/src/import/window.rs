//! Reductions over sliding windows: pooling, running sums, and the derivative of max pooling.

use super::{
    super::{error::Result, syntax::Attribute},
    Importer, ResolvedOperation,
    draft::Slot,
    reduce::{body_function, is_neutral},
    value::SymbolicValue,
};
use shardwright_graph::{
    Dims, Op, Real, Shape,
    ops::{AvgPool, BinaryFn, Cumsum, MaxPool, MaxPoolGrad, PoolGeometry, UnaryFn},
};
use smallvec::SmallVec;

/// A window over all dimensions.
struct PoolWindow {
    size: Dims,
    stride: Dims,
    dilation: Dims,
    pad: SmallVec<[(i64, i64); 6]>,
}

impl PoolWindow {
    fn read(op: &ResolvedOperation<'_, '_>, rank: usize) -> Result<Self> {
        let pad = op.pairs("padding", rank)?;
        Ok(Self {
            size: op.sizes_or_ones("window_dimensions", rank)?,
            stride: op.sizes_or_ones("window_strides", rank)?,
            dilation: op.sizes_or_ones("window_dilations", rank)?,
            pad,
        })
    }

    /// The dimensions along which the window has more than one element, or moves.
    fn spatial(&self) -> SmallVec<[usize; 4]> {
        (0..self.size.len())
            .filter(|&d| self.size[d] > 1 || self.stride[d] > 1 || self.pad[d] != (0, 0))
            .collect()
    }

    fn geometry(&self, spatial: &[usize]) -> PoolGeometry {
        PoolGeometry {
            kernel: spatial.iter().map(|&d| self.size[d]).collect(),
            stride: spatial.iter().map(|&d| self.stride[d]).collect(),
            pad: spatial.iter().map(|&d| self.pad[d]).collect(),
            dilation: spatial.iter().map(|&d| self.dilation[d]).collect(),
        }
    }
}

/// The order `[n, c, spatial...]` of a tensor: the first dimension that no window covers, then all others that none
/// covers, then the spatial ones.
struct SpatialOrder {
    perm: SmallVec<[usize; 4]>,
    spatial: SmallVec<[usize; 4]>,
}

impl SpatialOrder {
    fn new(rank: usize, spatial: &[usize]) -> Self {
        let rest = (0..rank).filter(|d| !spatial.contains(d));
        Self { perm: rest.chain(spatial.iter().copied()).collect(), spatial: spatial.into() }
    }

    /// The shape `[n, c, spatial...]` of a tensor of this shape.
    fn shape(&self, shape: &Shape) -> Shape {
        let rest = self.perm.len() - self.spatial.len();
        let n = if rest > 0 { shape[self.perm[0]] } else { 1 };
        let c = self.perm[..rest].iter().skip(1).map(|&d| shape[d]).product();
        [n, c].into_iter().chain(self.spatial.iter().map(|&d| shape[d])).collect()
    }
}

impl<'a> Importer<'a> {
    /// Brings a tensor to `[n, c, spatial...]`.
    fn channels_first(&mut self, slot: Slot, order: &SpatialOrder) -> Result<Slot> {
        let shape = order.shape(&self.draft.ty(slot).shape);
        let moved = self.draft.transpose(slot, &order.perm)?;
        self.draft.reshape(moved, &shape)
    }

    /// The inverse, for a result that was computed from a tensor of this shape.
    fn original_order(&mut self, slot: Slot, order: &SpatialOrder, from: &Shape) -> Result<Slot> {
        let made = &self.draft.ty(slot).shape;
        let rest = order.perm.len() - order.spatial.len();
        let ordered: Shape =
            order.perm[..rest].iter().map(|&d| from[d]).chain(made[2..].iter().copied()).collect();
        let whole = self.draft.reshape(slot, &ordered)?;
        let mut back: SmallVec<[usize; 4]> = SmallVec::from_elem(0, order.perm.len());
        for (i, &d) in order.perm.iter().enumerate() {
            back[d] = i;
        }
        self.draft.transpose(whole, &back)
    }

    pub fn reduce_window(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        if op.operands.len() != 2 {
            return self.opaque(op, "reduce_window", "it reduces several tensors at once");
        }
        let ty = op.types[0].ty.clone();
        let window = PoolWindow::read(op, ty.rank())?;
        let f = op.operation.regions.first().and_then(body_function);
        let init = op.operands[1].splat();
        let plain = op.ints_or("base_dilations", 1, ty.rank())?.iter().all(|&n| n == 1);
        let (Some(f), Some(init), true) = (f, init, plain) else {
            return self.opaque(op, "reduce_window", "its body, initial value or dilation is not supported");
        };
        let spatial = window.spatial();
        if spatial.is_empty() && is_neutral(f, init, ty.dtype) {
            return Ok(vec![op.operands[0].clone()]);
        }
        if let (BinaryFn::Add, [axis], true) = (f, &spatial[..], is_neutral(f, init, ty.dtype)) {
            let (d, n) = (*axis, ty.shape[*axis]);
            let running = window.size[d] == n && window.stride[d] == 1 && window.dilation[d] == 1;
            let ends = [(n as i64 - 1, 0), (0, n as i64 - 1)];
            if running && n > 1 && ends.contains(&window.pad[d]) {
                let x = op.slot(0, &mut self.draft)?;
                let cumsum = Cumsum { axis: d, exclusive: false, reverse: window.pad[d].1 > 0 };
                return Ok(vec![SymbolicValue::Tensor(self.draft.one(cumsum, &[x])?)]);
            }
        }
        let pools = ty.dtype.is_float() && (1..=3).contains(&spatial.len()) && is_neutral(f, init, ty.dtype);
        if !pools || !matches!(f, BinaryFn::Add | BinaryFn::Max | BinaryFn::Min) {
            return self.opaque(op, "reduce_window", "this window is not pooling");
        }
        let geometry = window.geometry(&spatial);
        let order = SpatialOrder::new(ty.rank(), &spatial);
        let x = op.operand(0)?.clone();
        let x = if f == BinaryFn::Min { self.unary(UnaryFn::Neg, &x)? } else { x };
        let slot = x.slot(&mut self.draft)?;
        let x = self.channels_first(slot, &order)?;
        let made = match f {
            BinaryFn::Add => {
                let count: u64 = geometry.kernel.iter().fold(1, |n, &k| n.saturating_mul(k));
                let mean = SymbolicValue::Tensor(self.draft.one(AvgPool { geometry }, &[x])?);
                self.unary(UnaryFn::Affine { scale: Real(count as f64), shift: Real(0.0) }, &mean)?
            }
            _ => SymbolicValue::Tensor(self.draft.add(Op::from(MaxPool { geometry }), &[x])?[0]),
        };
        let made = if f == BinaryFn::Min { self.unary(UnaryFn::Neg, &made)? } else { made };
        let made = made.slot(&mut self.draft)?;
        Ok(vec![SymbolicValue::Tensor(self.original_order(made, &order, &ty.shape)?)])
    }

    /// The derivative of max pooling: the gradient goes to the largest element of each window, the first of equals.
    pub fn select_and_scatter(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(3)?;
        let ty = op.types[0].ty.clone();
        if op.types[1].ty.rank() != ty.rank() || op.types[2].ty.rank() != 0 {
            let [source, init] = [&op.types[1].ty, &op.types[2].ty];
            return Err(op.error(format!(
                "source {source} and initial value {init} do not fit operand {ty}: expected the operand's rank and a scalar"
            )));
        }
        let window = PoolWindow::read(op, ty.rank())?;
        let [select, scatter] = &op.operation.regions[..] else {
            return Err(op.error("the operation needs two bodies"));
        };
        let picks = select.operations.first().is_some_and(|first| {
            let direction = first.attribute("comparison_direction");
            let at_least = matches!(direction, Some(Attribute::Dialect(_, text)) if text.ends_with(" GE"));
            let named =
                |i: usize| first.operands.get(i).map(|v| v.name) == select.arguments.get(i).map(|a| a.name);
            first.name == "stablehlo.compare"
                && at_least
                && named(0)
                && named(1)
                && select.operations.len() == 2
        });
        let spatial = window.spatial();
        let zero = op.operands[2].splat() == Some(0.0);
        let pools = ty.dtype.is_float() && (1..=3).contains(&spatial.len());
        if !picks || !zero || !pools || body_function(scatter) != Some(BinaryFn::Add) {
            return self.opaque(op, "select_and_scatter", "it is not the derivative of max pooling");
        }
        let geometry = window.geometry(&spatial);
        let order = SpatialOrder::new(ty.rank(), &spatial);
        let [x, dy] = [op.slot(0, &mut self.draft)?, op.slot(1, &mut self.draft)?];
        let [x, dy] = [self.channels_first(x, &order)?, self.channels_first(dy, &order)?];
        let pooled = self.draft.add(Op::from(MaxPool { geometry: geometry.clone() }), &[x])?;
        let input = Dims::from_slice(&self.draft.ty(x).shape[2..]);
        let dx = self.draft.one(MaxPoolGrad { geometry, input }, &[dy, pooled[1]])?;
        Ok(vec![SymbolicValue::Tensor(self.original_order(dx, &order, &ty.shape)?)])
    }
}
