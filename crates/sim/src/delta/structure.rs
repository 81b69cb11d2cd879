//! The parts of a step's task graph that do not depend on configs: fetch groups with their readers, and sums that may
//! run on partial results. Both come from [`shardwright_space::Transfers`].
//!
//! Everything is stated of instances ([`Unrolled`]); an [`Endpoint`] here names an instance instead of an op. The readers of a
//! fetch group are all in the body or all outside of it, so every copy of the body has groups of its own. What leaves the body
//! is the last copy's.

use crate::delta::{NONE, unrolled::Unrolled};
use shardwright_graph::{OpId, Phase};
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
    /// Whether the body fetches a tensor from outside of it.
    pub gathers: bool,
    /// The instance that produces the tensor; [`NONE`] for a tensor that exists from the start.
    pub producer: u32,
    pub needs: std::ops::Range<u32>,
}

/// All groups, and the instances that they depend on.
pub struct Structure {
    pub unrolled: Unrolled,
    pub groups: Vec<ReshardGroup>,
    pub needs: Vec<LayoutNeed>,
    /// Per instance: the number of its first operand, counted over all instances; one more entry at the end. In the body the
    /// last operand is no tensor, but the task that the instance follows.
    pub first_operand: Vec<u32>,
    /// Per instance: the start of its operands' and results' shapes; one more entry at the end.
    first_shape: Vec<u32>,
    shapes: Vec<u32>,
    first_group: Vec<u32>,
    groups_of: Vec<u32>,
    /// Per instance: whether it adds to a sum over micro-batches.
    accumulates: Vec<bool>,
    /// Per instance: the results that it sums, if it may run on partial results.
    pub sums: Vec<Option<Box<[Endpoint]>>>,
    /// Per instance: the sums that are the only readers of its results.
    pub summed_by: Vec<SmallVec<[u32; 1]>>,
}

impl Structure {
    /// The structure of a context's graph. `tensor_shapes` are the numbers of its tensors' shapes.
    pub fn new(context: &Context<'_>, unrolled: Unrolled, tensor_shapes: &[u32]) -> Self {
        let count = unrolled.len();
        let mut found = Self {
            groups: Vec::new(),
            needs: Vec::new(),
            first_operand: vec![0],
            first_shape: vec![0],
            shapes: Vec::new(),
            first_group: vec![0],
            groups_of: Vec::new(),
            accumulates: Vec::with_capacity(count),
            sums: vec![None; count],
            summed_by: vec![SmallVec::new(); count],
            unrolled,
        };
        for instance in 0..count {
            let node = &context.graph.ops[found.unrolled.op(instance)];
            found.accumulates.push(node.op.operator().accumulates());
            let follows = u32::from(found.unrolled.body().contains(&instance));
            let operands = node.inputs.len() as u32 + follows;
            found.first_operand.push(found.first_operand[found.first_operand.len() - 1] + operands);
            found.shapes.extend(node.inputs.iter().chain(&node.outputs).map(|t| tensor_shapes[t.index()]));
            found.first_shape.push(found.shapes.len() as u32);
        }
        found.make_groups(context, tensor_shapes);
        found.find_sums(context);
        found
    }

    /// The operands of an instance, numbered over all instances.
    #[inline]
    pub fn operands(&self, instance: usize) -> std::ops::Range<usize> {
        self.first_operand[instance] as usize..self.first_operand[instance + 1] as usize
    }

    /// Whether an instance is in the body: its last operand is the task that it follows.
    pub fn follows(&self, instance: usize) -> bool {
        self.unrolled.body().contains(&instance)
    }

    /// Whether an instance computes in the order of the program: one of the body that adds to no sum over micro-batches.
    pub fn is_ordered(&self, instance: usize) -> bool {
        self.follows(instance) && !self.accumulates[instance]
    }

    /// The number of tensors that an instance reads.
    pub fn inputs(&self, instance: usize) -> usize {
        self.operands(instance).len() - usize::from(self.follows(instance))
    }

    /// The shapes of an instance's operands and results.
    pub fn shapes(&self, instance: usize) -> &[u32] {
        &self.shapes[self.first_shape[instance] as usize..self.first_shape[instance + 1] as usize]
    }

    /// The groups that depend on an instance's config.
    pub fn groups_of(&self, instance: usize) -> &[u32] {
        &self.groups_of[self.first_group[instance] as usize..self.first_group[instance + 1] as usize]
    }

    /// An endpoint of a copy.
    fn end(&self, end: Endpoint, copy: usize) -> Endpoint {
        Endpoint { op: OpId::new(self.unrolled.instance(end.op.index(), copy)), ..end }
    }

    /// Builds the fetch groups with their needs, in the order of lowering.
    fn make_groups(&mut self, context: &Context<'_>, tensor_shapes: &[u32]) {
        let (graph, transfers) = (context.graph, &context.transfers);
        let mut by_instance: Vec<Vec<u32>> = vec![Vec::new(); self.unrolled.len()];
        for group in &transfers.groups {
            let t = group.tensor;
            let Some(source) = transfers.sources[t.index()] else { continue };
            if transfers.is_delivered[t.index()] {
                continue;
            }
            let readers = transfers.readers(group);
            let repeats = readers.iter().any(|end| graph.node(end.op).repeated);
            let last = self.unrolled.copies() - 1;
            for copy in if repeats { 0 } else { last }..=last {
                let first = self.needs.len() as u32;
                let source = self.end(source, copy);
                let mut ends: Vec<u32> = vec![source.op.0];
                let producer = graph.tensor(t).producer.map(|op| self.unrolled.instance(op.index(), copy));
                if let Some(producer) = producer {
                    // What is updated leaves as soon as it is there; a sum over micro-batches when it is read.
                    let complete = !self.follows(producer);
                    let result = u64::from(source.port) - self.inputs(producer) as u64;
                    let rank = ((producer as u64) << 32) | (COMPUTE + ((result + 1) << 16));
                    let updates =
                        readers.iter().filter(|end| complete && graph.node(end.op).phase == Phase::Update);
                    let returns = group.returns.iter().filter(|_| complete);
                    for &end in updates.chain(returns) {
                        self.need(rank, self.end(end, copy), NONE, &mut ends);
                    }
                }
                for &end in readers {
                    let end = self.end(end, copy);
                    let rank = (u64::from(end.op.0) << 32) | ((u64::from(end.port) + 1) << 16);
                    let operand = self.first_operand[end.op.index()] + end.port;
                    self.need(rank, end, operand, &mut ends);
                }
                if producer.is_some_and(|producer| self.follows(producer)) {
                    // It returns after the last op.
                    let position = graph.carries.iter().position(|carry| carry.new == t).unwrap_or(0) as u64;
                    let rank = ((self.unrolled.len() as u64) << 32) | (position << 8);
                    for &end in &group.returns {
                        self.need(rank, self.end(end, copy), NONE, &mut ends);
                    }
                }
                let needs = first..self.needs.len() as u32;
                if needs.is_empty() {
                    continue;
                }
                ends.sort_unstable();
                ends.dedup();
                let group = self.groups.len() as u32;
                ends.iter().for_each(|&instance| by_instance[instance as usize].push(group));
                let gathers = repeats && producer.is_none_or(|producer| !self.follows(producer));
                let (shape, producer) =
                    (tensor_shapes[t.index()], producer.map_or(NONE, |producer| producer as u32));
                self.groups.push(ReshardGroup { shape, source, gathers, producer, needs });
            }
        }
        for groups in by_instance {
            self.groups_of.extend(groups);
            self.first_group.push(self.groups_of.len() as u32);
        }
    }

    fn need(&mut self, rank: u64, end: Endpoint, operand: u32, ends: &mut Vec<u32>) {
        ends.push(end.op.0);
        self.needs.push(LayoutNeed { rank, end, operand });
    }

    /// Records the instances that may be sums of partial results.
    fn find_sums(&mut self, context: &Context<'_>) {
        for instance in 0..self.unrolled.len() {
            let Some(summands) = &context.transfers.partial_sums[self.unrolled.op(instance)] else {
                continue;
            };
            let copy = self.unrolled.copy(instance);
            let summands: Box<[Endpoint]> = summands.iter().map(|&end| self.end(end, copy)).collect();
            for end in &summands {
                self.summed_by[end.op.index()].push(instance as u32);
            }
            self.sums[instance] = Some(summands);
        }
    }
}
