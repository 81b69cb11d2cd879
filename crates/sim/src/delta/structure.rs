//! The parts of a step's task graph that do not depend on configs: fetch groups with their readers, and sums that may
//! run on partial results. Both come from [`shardwright_space::Transfers`].

use crate::delta::NONE;
use shardwright_graph::Phase;
use shardwright_plan::Context;
use shardwright_space::Endpoint;
use smallvec::SmallVec;

/// Ranks within an op: operand fetches, then the op, then eager reshards of its results.
pub const COMPUTE: u64 = 0xf000_0000;
/// Ranks within an op after [`COMPUTE`]: the reduction of a result, then the completion.
pub const COMPLETION: u64 = 0x8000;
/// Ranks within an operand: reshards, then halo exchanges.
pub const HALOS: u64 = 0x8000;

/// A layout that a fetch group provides.
#[derive(Clone, Copy, Debug)]
pub struct LayoutNeed {
    /// The rank of its first task, if it is the first need of this layout.
    pub rank: u64,
    /// The endpoint whose layout is needed.
    pub end: Endpoint,
    /// The operand that reads it, numbered over all ops; [`NONE`] for an eager reshard.
    pub operand: u32,
}

/// The reshards of a tensor (of a weight: of one pass).
pub struct ReshardGroup {
    pub shape: u32,
    /// The endpoint that decides the stored layout.
    pub source: Endpoint,
    /// The op's task that produces the tensor; [`NONE`] for a tensor that exists from the start.
    pub producer: u32,
    pub needs: std::ops::Range<u32>,
}

/// All groups, and the ops that they depend on.
#[derive(Default)]
pub struct Structure {
    pub groups: Vec<ReshardGroup>,
    pub needs: Vec<LayoutNeed>,
    /// Per op: the number of its first operand, counted over all ops; one more entry at the end.
    pub first_operand: Vec<u32>,
    /// Per op: the start of its operands' and results' shapes; one more entry at the end.
    first_shape: Vec<u32>,
    shapes: Vec<u32>,
    first_group: Vec<u32>,
    groups_of: Vec<u32>,
    /// Per op: the results that it sums, if it may run on partial results.
    pub sums: Vec<Option<Box<[Endpoint]>>>,
    /// Per op: the sums that are the only readers of its results.
    pub summed_by: Vec<SmallVec<[u32; 1]>>,
}

impl Structure {
    /// The structure of a context's graph. `tensor_shapes` are the numbers of its tensors' shapes.
    pub fn new(context: &Context<'_>, tensor_shapes: &[u32]) -> Self {
        let ops = context.graph.ops.len();
        let mut found = Self {
            first_operand: vec![0],
            first_shape: vec![0],
            first_group: vec![0],
            sums: vec![None; ops],
            summed_by: vec![SmallVec::new(); ops],
            ..Self::default()
        };
        for node in &context.graph.ops {
            found
                .first_operand
                .push(found.first_operand[found.first_operand.len() - 1] + node.inputs.len() as u32);
            found.shapes.extend(node.inputs.iter().chain(&node.outputs).map(|t| tensor_shapes[t.index()]));
            found.first_shape.push(found.shapes.len() as u32);
        }
        found.make_groups(context, tensor_shapes);
        found.find_sums(context);
        found
    }

    /// The operands of an op, numbered over all ops.
    #[inline]
    pub fn operands(&self, op: usize) -> std::ops::Range<usize> {
        self.first_operand[op] as usize..self.first_operand[op + 1] as usize
    }

    /// The shapes of an op's operands and results.
    pub fn shapes(&self, op: usize) -> &[u32] {
        &self.shapes[self.first_shape[op] as usize..self.first_shape[op + 1] as usize]
    }

    /// The groups that depend on an op's config.
    pub fn groups_of(&self, op: usize) -> &[u32] {
        &self.groups_of[self.first_group[op] as usize..self.first_group[op + 1] as usize]
    }

    /// Builds the fetch groups with their needs, in the order of lowering.
    fn make_groups(&mut self, context: &Context<'_>, tensor_shapes: &[u32]) {
        let (graph, transfers) = (context.graph, &context.transfers);
        let mut by_op: Vec<Vec<u32>> = vec![Vec::new(); graph.ops.len()];
        for group in &transfers.groups {
            let t = group.tensor;
            let Some(source) = transfers.sources[t.index()] else { continue };
            if transfers.is_delivered[t.index()] {
                continue;
            }
            let readers = transfers.readers(group);
            let first = self.needs.len() as u32;
            let mut ends: Vec<u32> = vec![source.op.0];
            if let Some(op) = graph.tensor(t).producer {
                let result = u64::from(source.port) - graph.node(op).inputs.len() as u64;
                let rank = (u64::from(op.0) << 32) | (COMPUTE + ((result + 1) << 16));
                let updates = readers.iter().filter(|end| graph.node(end.op).phase == Phase::Update);
                for &end in updates.chain(&group.returns) {
                    ends.push(end.op.0);
                    self.needs.push(LayoutNeed { rank, end, operand: NONE });
                }
            }
            for &end in readers {
                let rank = (u64::from(end.op.0) << 32) | ((u64::from(end.port) + 1) << 16);
                let operand = self.first_operand[end.op.index()] + end.port;
                self.needs.push(LayoutNeed { rank, end, operand });
                ends.push(end.op.0);
            }
            let needs = first..self.needs.len() as u32;
            if needs.is_empty() {
                continue;
            }
            ends.sort_unstable();
            ends.dedup();
            let group = self.groups.len() as u32;
            ends.iter().for_each(|&op| by_op[op as usize].push(group));
            let producer = graph.tensor(t).producer.map_or(NONE, |op| op.0);
            self.groups.push(ReshardGroup { shape: tensor_shapes[t.index()], source, producer, needs });
        }
        for groups in by_op {
            self.groups_of.extend(groups);
            self.first_group.push(self.groups_of.len() as u32);
        }
    }

    /// Records the ops that may be sums of partial results.
    fn find_sums(&mut self, context: &Context<'_>) {
        self.sums.clone_from(&context.transfers.partial_sums);
        for (op, summands) in self.sums.iter().enumerate() {
            for end in summands.iter().flatten() {
                self.summed_by[end.op.index()].push(op as u32);
            }
        }
    }
}
