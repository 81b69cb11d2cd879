//! The lowered program: one list of instructions for all devices.
//!
//! Every device runs through the same list of [`Instruction`]s. Devices differ in their block of a [`Value`]
//! ([`Value::block`]) and in their local op ([`ParallelGraph::local_op`]). A device that a value is absent from neither
//! reads nor writes it. A device that takes no part in an instruction skips it.

use crate::local::SplitOp;
use crate::pipeline::ProgramPipeline;
use shardwright_cost::{Action, Arrangement, Placement, Reduction};
use shardwright_graph::{Block, OpId, TensorId, TensorType, block::extents};
use shardwright_machine::{AxisSet, Bytes, DeviceId, Mesh, Seconds};
use shardwright_space::WindowCut;
use smallvec::SmallVec;
use std::{fmt, num::NonZeroU32, ops::Range};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// The position in the vector that this id points into.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A value of the program.
    ValueId, "%"
);
id!(
    /// An instruction of the program: its position.
    InstructionId, "!"
);
/// A tensor of the graph in one layout, at some point of the step. Written once.
#[derive(Clone, Debug)]
pub struct Value {
    /// The tensor.
    pub tensor: TensorId,
    /// Element type and shape of the whole tensor.
    pub ty: TensorType,
    /// Its arrangement. Per axis: sharded, replicated, partial, or absent except on one digit.
    pub at: Arrangement,
    /// Windowed dimensions after a halo exchange. Their blocks are these ranges instead of equal ones, and neighbours
    /// overlap.
    pub cuts: SmallVec<[WindowCut; 1]>,
    /// The instruction that writes it; none for sources, which exist before the first instruction.
    pub made_by: Option<InstructionId>,
    /// The last instruction that reads it; none if no instruction does.
    pub last_read: Option<InstructionId>,
    /// Whether it outlives the step: outputs, carried values and sources.
    pub kept: bool,
}

impl Value {
    /// Whether a device has a block of it.
    pub fn is_on(&self, mesh: &Mesh, device: DeviceId) -> bool {
        self.at.layout().is_on(mesh, device)
    }

    /// The block that a device holds, in positions of the whole tensor; none where it is absent.
    pub fn block(&self, mesh: &Mesh, device: DeviceId) -> Option<Block> {
        let mut block = self.at.device_block(mesh, device, &self.ty.shape)?;
        for cut in &self.cuts {
            block[usize::from(cut.dim)] = cut.range(mesh, device);
        }
        Some(block)
    }

    /// Element type and shape of the block that a device holds.
    pub fn local_type(&self, mesh: &Mesh, device: DeviceId) -> Option<TensorType> {
        let block = self.block(mesh, device)?;
        Some(TensorType { dtype: self.ty.dtype, shape: extents(&block) })
    }

    /// The axes of partial results and their reduction; none if the value is complete.
    pub fn partial(&self) -> Option<(Reduction, AxisSet)> {
        Reduction::ALL
            .map(|kind| (kind, self.at.layout().axes_where(|p| p == Placement::Partial(kind))))
            .into_iter()
            .find(|(_, axes)| !axes.is_empty())
    }
}

/// The work of an instruction.
#[derive(Clone, Debug)]
pub enum Work {
    /// Runs an op of the graph. Every device that holds the results runs its local op on its blocks.
    Compute {
        /// The op.
        op: OpId,
        /// Whether this is the op's completion ([`shardwright_graph::Operator::completion`]), after its parts.
        completes: bool,
    },
    /// Changes layouts: `reads[i]` becomes `writes[i]`. Only all-reduces have several values.
    Reshard(Reshard),
    /// Exchanges halos: `reads[0]` becomes `writes[0]`, whose dimension `dim` is cut by its [`Value::cuts`]. Devices
    /// receive the rows that they lack from each other along `axes`, and drop rows that they do not need.
    HaloExchange {
        /// The dimension.
        dim: u8,
        /// The axes along which devices read different ranges of it. The exchange is local where nothing is stored in
        /// blocks.
        axes: AxisSet,
        /// Predicted duration.
        seconds: Seconds,
    },
}

/// A step from one arrangement to another ([`Action`]).
#[derive(Clone, Copy, Debug)]
pub struct Reshard {
    /// The action. [`Action::Slice`] and [`Action::Drop`] are local, all others are collectives.
    pub action: Action,
    /// The axes that span a group: devices that agree on all other axes.
    pub axes: AxisSet,
    /// Bytes of the larger side on one device, all values together.
    pub message: Bytes,
    /// Predicted duration.
    pub seconds: Seconds,
    /// The reduction of partial results, if the step reduces.
    pub reduction: Option<Reduction>,
}

/// One entry of the program.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// Its work.
    pub work: Work,
    /// The values that it reads; an op's operands in their order.
    pub reads: SmallVec<[ValueId; 4]>,
    /// The values that it writes; an op's results in their order.
    pub writes: SmallVec<[ValueId; 2]>,
}

/// A tensor that no op produces. Each device generates its block from seed and name, before the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The tensor. Data and constants may have several sources, one per layout that readers need.
    pub tensor: TensorId,
    /// Its value. Of data that micro-batches slice, it stands for one slice at a time.
    pub value: ValueId,
    /// The dimension that micro-batches slice the tensor along, if they do.
    pub sliced: Option<u8>,
    /// The micro-batches whose slices of the data it stands for, and which are all in memory; `0..1` where nothing is sliced.
    pub slices: Range<u32>,
}

impl Source {
    /// The block of the whole tensor, with the samples of all micro-batches, that a device holds for the first slice.
    pub fn block(&self, program: &ParallelGraph, device: DeviceId) -> Option<Block> {
        let value = program.value(self.value);
        let mut block = value.block(&program.mesh, device)?;
        if let Some(dim) = self.sliced.map(usize::from) {
            let before = value.ty.shape[dim].saturating_mul(u64::from(self.slices.start));
            block[dim] = block[dim].start + before..block[dim].end + before;
        }
        Some(block)
    }
}

/// A result of the step, in any layout, partial results included. [`crate::blocks::assemble`] reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// The tensor.
    pub tensor: TensorId,
    /// Its value.
    pub value: ValueId,
}

/// A carry: at the end of a step `new` replaces `old`. Both have the same layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carry {
    /// A source.
    pub old: ValueId,
    /// Its value after the step.
    pub new: ValueId,
}

/// The program of all devices of a mesh for one training step.
#[derive(Clone, Debug)]
pub struct ParallelGraph {
    /// The mesh of all arrangements.
    pub mesh: Mesh,
    /// All values.
    pub values: Vec<Value>,
    /// The instructions, each after the writers of its operands.
    pub instructions: Vec<Instruction>,
    /// The graph's ops and their splits, in the graph's order.
    pub ops: Vec<SplitOp>,
    /// Values that exist before the first step.
    pub sources: Vec<Source>,
    /// Results of a step; the loss first.
    pub outputs: Vec<Output>,
    /// Values that a step passes to the next.
    pub carries: Vec<Carry>,
    /// How often a step runs the body, before the instructions after it.
    pub micro_batches: NonZeroU32,
    /// The body: positions of the instructions of a micro-batch, or of [`ParallelGraph::copies`] micro-batches. Empty where a
    /// step has one micro-batch.
    pub body: Range<usize>,
    /// How many micro-batches the body has: 1, or as many as [`ParallelGraph::unrolled`] made.
    pub copies: u32,
    /// The pipeline whose schedule orders the body; none where every micro-batch follows the one before.
    pub pipeline: Option<ProgramPipeline>,
}

impl ParallelGraph {
    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// An instruction.
    pub fn instruction(&self, id: InstructionId) -> &Instruction {
        &self.instructions[id.index()]
    }

    /// All devices.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = DeviceId> + use<> {
        (0..self.mesh.devices()).map(DeviceId)
    }
}
