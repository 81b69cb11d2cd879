//! What lowering makes: one program for all devices, written once.
//!
//! Every device walks the same list of [`Instruction`]s. What differs between devices is which block of a
//! [`Value`] each holds ([`Value::block`]), which local op it runs ([`ParallelGraph::local_op`]), and whether it takes
//! part at all: a device that a value is absent from neither reads nor writes it, and one that takes part in nothing
//! of an instruction skips it.

use crate::local::SplitOp;
use shardwright_cost::{Action, Arrangement, Placement, Reduction};
use shardwright_graph::{Block, OpId, TensorId, TensorType};
use shardwright_machine::{AxisSet, Bytes, DeviceId, Mesh, Seconds};
use shardwright_space::WindowCut;
use smallvec::SmallVec;
use std::fmt;

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
/// A tensor of the graph as it lies on the devices at some point of the step. Written once.
#[derive(Clone, Debug)]
pub struct Value {
    /// The tensor that it is.
    pub tensor: TensorId,
    /// Element type and shape of the whole tensor.
    pub ty: TensorType,
    /// What each axis does to it: shards a dimension, repeats it, holds partial results, or leaves it to one digit.
    pub at: Arrangement,
    /// Dimensions that are not in equal blocks, because they were fetched for windows: these ranges hold
    /// instead, and neighbours overlap.
    pub cuts: SmallVec<[WindowCut; 1]>,
    /// The instruction that writes it; none for sources, which are there before the first.
    pub made_by: Option<InstructionId>,
    /// The last instruction that reads it; none if nobody does.
    pub last_read: Option<InstructionId>,
    /// Whether it must outlive the step: results and what is carried over, and sources.
    pub kept: bool,
}

impl Value {
    /// Whether a device has a block of it.
    pub fn is_on(&self, mesh: &Mesh, device: DeviceId) -> bool {
        let layout = self.at.layout();
        layout
            .absent()
            .iter()
            .all(|axis| layout.get(axis) == Placement::Absent(mesh.digit(device, axis) as u16))
    }

    /// The block that a device holds, in positions of the whole tensor; none where it is absent.
    pub fn block(&self, mesh: &Mesh, device: DeviceId) -> Option<Block> {
        if !self.is_on(mesh, device) {
            return None;
        }
        let range = |(d, &size): (usize, &u64)| {
            if let Some(cut) = self.cuts.iter().find(|cut| usize::from(cut.dim) == d) {
                return cut.range(mesh, device);
            }
            let length = size / self.at.parts(mesh, d as u8).max(1);
            let start = self.at.block(mesh, device, d as u8) * length;
            start..start + length
        };
        Some(self.ty.shape.iter().enumerate().map(range).collect())
    }

    /// Element type and shape of the block that a device holds.
    pub fn local_type(&self, mesh: &Mesh, device: DeviceId) -> Option<TensorType> {
        let block = self.block(mesh, device)?;
        Some(TensorType { dtype: self.ty.dtype, shape: block.iter().map(|r| r.end - r.start).collect() })
    }

    /// The axes along which devices hold parts that must still be reduced, and how; none if there are none.
    pub fn partial(&self) -> Option<(Reduction, AxisSet)> {
        [Reduction::Sum, Reduction::Max]
            .map(|kind| (kind, self.at.layout().axes_where(|p| p == Placement::Partial(kind))))
            .into_iter()
            .find(|(_, axes)| !axes.is_empty())
    }
}

/// What an instruction does.
#[derive(Clone, Debug)]
pub enum Work {
    /// Runs an op of the graph: every device that has the results runs its own local op on its own blocks.
    Compute {
        /// The op.
        op: OpId,
    },
    /// Changes how values lie: `reads[i]` becomes `writes[i]`. Several at once only for all-reduces.
    Relayout(Relayout),
    /// Fetches what windows reach for: `reads[0]` becomes `writes[0]`, whose dimension `dim` is cut as its
    /// [`Value::cuts`] say. Devices get from each other along `axes` what they lack, and drop what they do not need.
    Window {
        /// The dimension.
        dim: u8,
        /// The axes along which devices differ in what they read of it. Local where nothing is stored in blocks.
        axes: AxisSet,
        /// How long it is predicted to take.
        seconds: Seconds,
    },
}

/// A step from one arrangement to another: see [`Action`].
#[derive(Clone, Copy, Debug)]
pub struct Relayout {
    /// Which step. [`Action::Slice`] and [`Action::Drop`] are local, all others are collectives.
    pub action: Action,
    /// The axes that span a group: devices that agree on all other axes.
    pub axes: AxisSet,
    /// Bytes of the larger side on one device, all values together.
    pub message: Bytes,
    /// How long it is predicted to take.
    pub seconds: Seconds,
    /// How partial results are joined, if the step does that.
    pub reduction: Option<Reduction>,
}

/// One entry of the program.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// What it does.
    pub work: Work,
    /// What it reads; an op's operands in their order.
    pub reads: SmallVec<[ValueId; 4]>,
    /// What it writes; an op's results in their order.
    pub writes: SmallVec<[ValueId; 2]>,
}

/// A tensor that no op makes: each device makes its own block, from seed and name, before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The tensor. Data and constants may have several sources, one per layout that they are read in.
    pub tensor: TensorId,
    /// Its value.
    pub value: ValueId,
}

/// A result of the step; may lie in any way, as partial results too. [`crate::blocks::assemble`] says how to read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// The tensor.
    pub tensor: TensorId,
    /// Its value.
    pub value: ValueId,
}

/// At the end of a step `new` takes the place of `old`: both lie in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carry {
    /// A source.
    pub old: ValueId,
    /// What the step made of it.
    pub new: ValueId,
}

/// The program of all devices of a mesh for one training step.
#[derive(Clone, Debug)]
pub struct ParallelGraph {
    /// The axes that everything speaks of.
    pub mesh: Mesh,
    /// All values.
    pub values: Vec<Value>,
    /// The program: each instruction after those whose values it reads.
    pub instructions: Vec<Instruction>,
    /// The graph's ops, in its order, and how they are split.
    pub ops: Vec<SplitOp>,
    /// What is there before the first step.
    pub sources: Vec<Source>,
    /// What somebody wants to see after a step; the loss first.
    pub outputs: Vec<Output>,
    /// What a step hands to the next.
    pub carries: Vec<Carry>,
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
