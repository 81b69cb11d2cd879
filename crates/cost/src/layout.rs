//! The layout of a tensor on a mesh: one [`Placement`] per axis.
//!
//! If several axes shard one dimension, the outermost axis is the major one, so that device digits in axis order form
//! the block number. A [`Layout`] always means this canonical order. Between the steps of a reshard the axes of a
//! dimension may have another order: that is an [`Arrangement`].

use shardwright_graph::Block;
pub use shardwright_graph::Reduction;
use shardwright_machine::{AxisId, AxisSet, DeviceId, MAX_AXES, Mesh};
use std::{fmt, ops::Range};

/// The most dimensions of a tensor. Fixed, so that cache keys need no allocation.
pub const MAX_DIMS: usize = 8;

/// The placement of a tensor along one mesh axis. The *digit* of a device is its position along the axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placement {
    /// Every digit holds the same data.
    Replicated,
    /// Every digit holds a full-sized part; the tensor is their reduction.
    Partial(Reduction),
    /// Every digit holds its block of this dimension.
    Shard(u8),
    /// Only this digit holds the tensor.
    Absent(u16),
}

/// Placements are packed into 16 bits, so that comparison and hash need no branches.
const SHARD: u16 = 16;
const ABSENT: u16 = 256;

fn pack(placement: Placement) -> u16 {
    match placement {
        Placement::Replicated => 0,
        Placement::Partial(Reduction::Sum) => 1,
        Placement::Partial(Reduction::Max) => 2,
        Placement::Partial(Reduction::LogSumExp) => 3,
        Placement::Shard(dim) => SHARD + u16::from(dim),
        Placement::Absent(digit) => ABSENT.saturating_add(digit),
    }
}

fn unpack(code: u16) -> Placement {
    match code {
        0 => Placement::Replicated,
        1 => Placement::Partial(Reduction::Sum),
        2 => Placement::Partial(Reduction::Max),
        3 => Placement::Partial(Reduction::LogSumExp),
        code if code < ABSENT => Placement::Shard((code - SHARD) as u8),
        code => Placement::Absent(code - ABSENT),
    }
}

/// The layout of a tensor on a mesh, in canonical order. 42 bytes, cheap to copy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layout {
    codes: [u16; MAX_AXES],
    len: u8,
}

impl Layout {
    /// Replicated on a mesh with this number of axes.
    pub fn replicated(axes: usize) -> Layout {
        debug_assert!(axes <= MAX_AXES, "no mesh has {axes} axes");
        Layout { codes: [0; MAX_AXES], len: axes.min(MAX_AXES) as u8 }
    }

    /// A layout of one placement per axis, outermost first.
    pub fn new(placements: &[Placement]) -> Layout {
        let mut layout = Layout::replicated(placements.len());
        for (at, &placement) in placements.iter().enumerate().take(MAX_AXES) {
            layout.codes[at] = pack(placement);
        }
        layout
    }

    /// The layout with another placement on one axis.
    #[must_use]
    pub fn with(mut self, axis: AxisId, placement: Placement) -> Layout {
        self.codes[axis.index()] = pack(placement);
        self
    }

    /// The placement along an axis.
    pub fn get(&self, axis: AxisId) -> Placement {
        unpack(self.codes[axis.index()])
    }

    /// Number of axes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are no axes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The axes whose placement meets a condition.
    pub fn axes_where(&self, holds: impl Fn(Placement) -> bool) -> AxisSet {
        self.codes_where(|code| holds(unpack(code)))
    }

    /// The axes that shard a dimension.
    pub fn shards(&self, dim: u8) -> AxisSet {
        self.codes_where(|code| code == SHARD + u16::from(dim))
    }

    fn codes_where(&self, holds: impl Fn(u16) -> bool) -> AxisSet {
        let codes = self.codes[..self.len as usize].iter().enumerate();
        AxisSet(codes.fold(0, |bits, (at, &code)| bits | u32::from(holds(code)) << at))
    }

    /// The axes of which only one digit holds the tensor.
    pub fn absent(&self) -> AxisSet {
        self.codes_where(|code| code >= ABSENT)
    }

    /// Whether a device holds a block: it has the digit of every axis that is absent elsewhere.
    pub fn is_on(&self, mesh: &Mesh, device: DeviceId) -> bool {
        let present = |axis| self.get(axis) == Placement::Absent(mesh.digit(device, axis) as u16);
        self.absent().iter().all(present)
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for axis in 0..u32::from(self.len) {
            let space = if axis > 0 { " " } else { "" };
            match self.get(AxisId(axis)) {
                Placement::Replicated => write!(f, "{space}R")?,
                Placement::Partial(Reduction::Sum) => write!(f, "{space}P+")?,
                Placement::Partial(Reduction::Max) => write!(f, "{space}P^")?,
                Placement::Partial(Reduction::LogSumExp) => write!(f, "{space}P~")?,
                Placement::Shard(dim) => write!(f, "{space}S{dim}")?,
                Placement::Absent(digit) => write!(f, "{space}@{digit}")?,
            }
        }
        Ok(())
    }
}

/// A tensor's size: dimensions and bytes per element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorShape {
    dims: [u64; MAX_DIMS],
    rank: u8,
    bytes: u64,
}

/// Why a layout or a shape is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// More dimensions than supported.
    #[error("a tensor of {rank} dimensions: at most {MAX_DIMS} are supported")]
    TooManyDims {
        /// Its dimensions.
        rank: usize,
    },
    /// More bytes than 64 bits can count.
    #[error("a tensor of {dims:?} elements of {element_bytes} bytes does not fit 2^63 bytes")]
    TooLarge {
        /// Its dimensions.
        dims: Vec<u64>,
        /// Bytes per element.
        element_bytes: u32,
    },
    /// The layout is for another mesh.
    #[error("a layout of {layout} axes does not fit a mesh of {mesh} axes")]
    WrongMesh {
        /// Axes of the layout.
        layout: usize,
        /// Axes of the mesh.
        mesh: usize,
    },
    /// A dimension that the tensor does not have.
    #[error("axis {axis} shards dimension {dim} of a tensor of {rank} dimensions")]
    NoSuchDim {
        /// The axis.
        axis: String,
        /// The dimension.
        dim: u8,
        /// The tensor's rank.
        rank: u8,
    },
    /// A digit that the axis does not have.
    #[error("axis {axis} of size {size} has no digit {digit}")]
    NoSuchDigit {
        /// The axis.
        axis: String,
        /// The digit.
        digit: u16,
        /// The axis's size.
        size: u32,
    },
    /// A reshard to a partial placement. Partial sums come from operators only.
    #[error("no reshard makes the tensor a partial reduction along axis {axis}: it is not one before")]
    CannotBecomePartial {
        /// The axis.
        axis: String,
    },
    /// A dimension that cannot be split into equal blocks.
    #[error("dimension {dim} of size {size} cannot be split into {parts} equal blocks")]
    Indivisible {
        /// The dimension.
        dim: u8,
        /// Its size.
        size: u64,
        /// Number of blocks in the layout.
        parts: u64,
    },
}

impl TensorShape {
    /// A shape from its dimensions and the bytes per element.
    pub fn new(dims: &[u64], element_bytes: u32) -> Result<TensorShape, LayoutError> {
        if dims.len() > MAX_DIMS {
            return Err(LayoutError::TooManyDims { rank: dims.len() });
        }
        let bytes = dims.iter().try_fold(u64::from(element_bytes), |n, &d| n.checked_mul(d));
        let Some(bytes) = bytes.filter(|&bytes| bytes < 1 << 63) else {
            return Err(LayoutError::TooLarge { dims: dims.to_vec(), element_bytes });
        };
        let mut padded = [1; MAX_DIMS];
        padded[..dims.len()].copy_from_slice(dims);
        Ok(TensorShape { dims: padded, rank: dims.len() as u8, bytes })
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of dimensions.
    pub fn rank(&self) -> u8 {
        self.rank
    }

    /// Size of a dimension; 1 beyond the last.
    pub fn dim(&self, dim: u8) -> u64 {
        debug_assert!(usize::from(dim) < MAX_DIMS, "no tensor has dimension {dim}");
        self.dims[usize::from(dim) % MAX_DIMS]
    }

    /// Checks a layout of this shape on a mesh: dimensions and digits exist, blocks are equal.
    pub fn check(&self, mesh: &Mesh, layout: &Layout) -> Result<(), LayoutError> {
        if layout.len() != mesh.len() {
            return Err(LayoutError::WrongMesh { layout: layout.len(), mesh: mesh.len() });
        }
        let mut parts = [1u64; MAX_DIMS];
        for (at, axis) in mesh.axes().iter().enumerate() {
            match layout.get(AxisId(at as u32)) {
                Placement::Shard(dim) if dim >= self.rank => {
                    return Err(LayoutError::NoSuchDim { axis: axis.name.clone(), dim, rank: self.rank });
                }
                Placement::Shard(dim) => parts[usize::from(dim)] *= u64::from(axis.size),
                Placement::Absent(digit) if u32::from(digit) >= axis.size => {
                    return Err(LayoutError::NoSuchDigit { axis: axis.name.clone(), digit, size: axis.size });
                }
                _ => {}
            }
        }
        for dim in 0..self.rank {
            let (size, parts) = (self.dim(dim), parts[usize::from(dim)]);
            if !size.is_multiple_of(parts) {
                return Err(LayoutError::Indivisible { dim, size, parts });
            }
        }
        Ok(())
    }
}

/// A layout whose sharded dimensions may have their axes in any order.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arrangement {
    layout: Layout,
    /// Position of a shard axis among those of its dimension, major first; 0 for others.
    rank: [u8; MAX_AXES],
}

/// The axes of one dimension, major first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AxisList {
    axes: [u8; MAX_AXES],
    len: u8,
}

impl AxisList {
    pub(crate) fn empty() -> AxisList {
        AxisList { axes: [0; MAX_AXES], len: 0 }
    }

    pub(crate) fn push(&mut self, axis: AxisId) {
        self.axes[self.len as usize] = axis.0 as u8;
        self.len += 1;
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = AxisId> + ExactSizeIterator + Clone + '_ {
        self.axes[..self.len as usize].iter().map(|&axis| AxisId(u32::from(axis)))
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }
}

impl FromIterator<AxisId> for AxisList {
    fn from_iter<I: IntoIterator<Item = AxisId>>(axes: I) -> AxisList {
        let mut list = AxisList::empty();
        axes.into_iter().for_each(|axis| list.push(axis));
        list
    }
}

impl Arrangement {
    /// The canonical arrangement of a layout: outermost axis major.
    pub fn canonical(layout: &Layout) -> Arrangement {
        let mut next = [0u8; MAX_DIMS];
        let mut rank = [0; MAX_AXES];
        for (at, slot) in rank.iter_mut().enumerate().take(layout.len()) {
            if let Placement::Shard(dim) = layout.get(AxisId(at as u32)) {
                let next = &mut next[usize::from(dim) % MAX_DIMS];
                *slot = *next;
                *next += 1;
            }
        }
        Arrangement { layout: *layout, rank }
    }

    /// The placement along each axis.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The axes that shard a dimension, major first.
    pub fn axes_of(&self, dim: u8) -> Vec<AxisId> {
        self.list(dim).iter().collect()
    }

    pub(crate) fn list(&self, dim: u8) -> AxisList {
        let mut list = AxisList::empty();
        for axis in self.layout.shards(dim).iter() {
            let rank = self.rank[axis.index()] as usize;
            list.axes[rank] = axis.0 as u8;
            list.len += 1;
        }
        list
    }

    /// Sets the placement of an axis that no longer shards.
    pub(crate) fn set(&mut self, axis: AxisId, placement: Placement) {
        self.layout = self.layout.with(axis, placement);
        self.rank[axis.index()] = 0;
    }

    /// Adds axes at the minor end of a dimension, in the given order.
    pub(crate) fn append(&mut self, dim: u8, axes: impl Iterator<Item = AxisId>) {
        let next = self.layout.shards(dim).len() as u8;
        for (rank, axis) in (next..).zip(axes) {
            self.layout = self.layout.with(axis, Placement::Shard(dim));
            self.rank[axis.index()] = rank;
        }
    }

    /// The arrangement after an all-gather along these axes, which must be the minor-most ones of their dimensions.
    pub fn gathered(mut self, axes: AxisSet) -> Arrangement {
        axes.iter().for_each(|axis| self.set(axis, Placement::Replicated));
        self
    }

    /// Puts the axes of a dimension in another order.
    pub(crate) fn reorder(&mut self, order: &AxisList) {
        for (rank, axis) in order.iter().enumerate() {
            self.rank[axis.index()] = rank as u8;
        }
    }

    /// The arrangement with other numbers for the dimensions.
    pub(crate) fn renumber(&self, number: impl Fn(u8) -> u8) -> Arrangement {
        let mut layout = self.layout;
        for code in &mut layout.codes[..usize::from(layout.len)] {
            if let Placement::Shard(dim) = unpack(*code) {
                *code = pack(Placement::Shard(number(dim)));
            }
        }
        Arrangement { layout, rank: self.rank }
    }

    /// Swaps two axes.
    pub(crate) fn swap(&mut self, a: AxisId, b: AxisId) {
        let (at, bt) = (self.layout.get(a), self.layout.get(b));
        self.layout = self.layout.with(a, bt).with(b, at);
        self.rank.swap(a.index(), b.index());
    }

    /// The number of the block of a dimension that a device holds.
    pub fn block(&self, mesh: &Mesh, device: DeviceId, dim: u8) -> u64 {
        self.list(dim).iter().fold(0, |block, axis| {
            block * u64::from(mesh.axis(axis).size) + u64::from(mesh.digit(device, axis))
        })
    }

    /// The range of a dimension of this size that a device holds, in positions of the whole tensor.
    pub fn range(&self, mesh: &Mesh, device: DeviceId, dim: u8, size: u64) -> Range<u64> {
        let length = size / self.parts(mesh, dim).max(1);
        let start = self.block(mesh, device, dim) * length;
        start..start + length
    }

    /// The block of a tensor of this shape that a device holds; none where the tensor is absent from it.
    pub fn device_block(&self, mesh: &Mesh, device: DeviceId, shape: &[u64]) -> Option<Block> {
        let range = |(dim, &size): (usize, &u64)| self.range(mesh, device, dim as u8, size);
        self.layout.is_on(mesh, device).then(|| shape.iter().enumerate().map(range).collect())
    }

    /// Number of blocks of a dimension.
    pub fn parts(&self, mesh: &Mesh, dim: u8) -> u64 {
        u64::from(mesh.group_size(self.layout.shards(dim)))
    }
}

impl fmt::Debug for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.layout)?;
        for dim in 0..MAX_DIMS as u8 {
            let list = self.list(dim);
            if list.iter().zip(list.iter().skip(1)).any(|(a, b)| a > b) {
                write!(f, " ({dim}:{:?})", list.iter().map(|axis| axis.0).collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }
}
