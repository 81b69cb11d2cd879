//! What a step's tasks have in common whatever the configs: which tensors are brought to whom, and which ops may be sums of
//! partial results.

use crate::delta::NONE;
use shardwright_graph::{OpId, Phase, Role, TensorId};
use shardwright_plan::Problem;
use smallvec::SmallVec;

/// Ranks within an op: fetches of operands, then the op, then what its results set off.
pub const COMPUTE: u64 = 0xf000_0000;
/// Ranks within an operand: re-layouts, then windows.
pub const WINDOWS: u64 = 0x8000;

/// A place where a tensor has a layout: an operand of an op, or, counted on, a result.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub op: u32,
    pub slot: u32,
}

/// A layout that a group has to offer.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// The rank of the first task that is made for it, if it is the first to ask.
    pub rank: u64,
    /// Whose layout; none: partial sums of the home added up.
    pub end: Option<End>,
    /// The operand that gets it, counted over all ops; [`NONE`] where somebody only wants it made early.
    pub operand: u32,
}

/// The re-layouts of a tensor (of a weight: of one pass).
pub struct Group {
    pub shape: u32,
    pub home: End,
    /// The op's task that makes the tensor; [`NONE`] for what is there from the start.
    pub maker: u32,
    pub needs: std::ops::Range<u32>,
}

/// All groups, and the ops that depend on them.
#[derive(Default)]
pub struct Structure {
    pub groups: Vec<Group>,
    pub needs: Vec<Need>,
    /// Per op: where its operands start, counted over all ops; one more at the end.
    pub first_operand: Vec<u32>,
    /// Per op: where the shapes of its operands and results start; one more at the end.
    first_shape: Vec<u32>,
    shapes: Vec<u32>,
    first_group: Vec<u32>,
    groups_of: Vec<u32>,
    /// Per op: whether it is a sum that nobody but it reads the operands of, and what makes those.
    pub sums: Vec<Option<Box<[End]>>>,
    /// Per op: the sums that read its results and that nothing else reads.
    pub summed_by: Vec<SmallVec<[u32; 1]>>,
}

impl Structure {
    /// That of a problem; `tensor_shapes` are the numbers of its tensors' shapes.
    pub fn new(problem: &Problem<'_>, tensor_shapes: &[u32]) -> Self {
        let ops = problem.graph.ops.len();
        let mut found = Self {
            first_operand: vec![0],
            first_shape: vec![0],
            first_group: vec![0],
            sums: vec![None; ops],
            summed_by: vec![SmallVec::new(); ops],
            ..Self::default()
        };
        for node in &problem.graph.ops {
            found
                .first_operand
                .push(found.first_operand[found.first_operand.len() - 1] + node.inputs.len() as u32);
            found.shapes.extend(node.inputs.iter().chain(&node.outputs).map(|t| tensor_shapes[t.index()]));
            found.first_shape.push(found.shapes.len() as u32);
        }
        found.make_groups(problem, tensor_shapes);
        found.find_sums(problem);
        found
    }

    /// The operands of an op, counted over all ops.
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

    /// Who needs which tensor, in the order in which lowering comes to it.
    fn make_groups(&mut self, problem: &Problem<'_>, tensor_shapes: &[u32]) {
        let graph = problem.graph;
        let consumers = graph.consumers();
        let result = |op: OpId, t: TensorId| {
            let node = graph.node(op);
            let o = node.outputs.iter().position(|&out| out == t).unwrap_or(0);
            (o, End { op: op.0, slot: (node.inputs.len() + o) as u32 })
        };
        let mut back: Vec<Option<TensorId>> = vec![None; graph.tensors.len()];
        for carry in &graph.carries {
            back[carry.new.index()] = Some(carry.old);
        }
        let homes: Vec<Option<End>> = graph
            .tensor_ids()
            .map(|t| {
                let home = problem.transfers.homes[t.index()]?;
                Some(match graph.tensor(t).producer {
                    Some(op) => result(op, t).1,
                    None => End { op: home.op.0, slot: home.slot },
                })
            })
            .collect();
        let mut by_op: Vec<Vec<u32>> = vec![Vec::new(); graph.ops.len()];
        for t in graph.tensor_ids() {
            let tensor = graph.tensor(t);
            let Some(home) = homes[t.index()] else { continue };
            let delivered = tensor.producer.is_none() && matches!(tensor.role, Role::Input | Role::Constant);
            if delivered {
                continue;
            }
            let mut ops = consumers.of(t).to_vec();
            ops.dedup();
            let slots = |op: OpId| {
                let inputs = graph.node(op).inputs.iter().enumerate();
                inputs.filter(|(_, input)| **input == t).map(move |(i, _)| (op, i)).collect::<Vec<_>>()
            };
            let readers: Vec<(OpId, usize)> = ops.iter().flat_map(|&op| slots(op)).collect();
            let passes: &[Option<Phase>] = match tensor.producer {
                Some(_) => &[None],
                None => &[Some(Phase::Forward), Some(Phase::Backward), Some(Phase::Update)],
            };
            for pass in passes {
                let first = self.needs.len() as u32;
                let mut ends: Vec<u32> = vec![home.op];
                if let Some(op) = tensor.producer {
                    let (o, _) = result(op, t);
                    let rank = (u64::from(op.0) << 32) | (COMPUTE + ((o as u64 + 1) << 16));
                    let update = readers.iter().filter(|(op, _)| graph.node(*op).phase == Phase::Update);
                    for &(op, i) in update {
                        let end = End { op: op.0, slot: i as u32 };
                        self.needs.push(Need { rank, end: Some(end), operand: NONE });
                    }
                    if let Some(old) = back[t.index()] {
                        let end = homes[old.index()];
                        ends.extend(end.map(|end| end.op));
                        self.needs.push(Need { rank, end, operand: NONE });
                    }
                }
                for &(op, i) in
                    readers.iter().filter(|(op, _)| pass.is_none_or(|p| graph.node(*op).phase == p))
                {
                    let rank = (u64::from(op.0) << 32) | ((i as u64 + 1) << 16);
                    let operand = self.first_operand[op.index()] + i as u32;
                    let end = End { op: op.0, slot: i as u32 };
                    self.needs.push(Need { rank, end: Some(end), operand });
                    ends.push(op.0);
                }
                let needs = first..self.needs.len() as u32;
                if needs.is_empty() {
                    continue;
                }
                ends.sort_unstable();
                ends.dedup();
                let group = self.groups.len() as u32;
                ends.iter().for_each(|&op| by_op[op as usize].push(group));
                let maker = tensor.producer.map_or(NONE, |op| op.0);
                let shape = tensor_shapes[t.index()];
                self.groups.push(Group { shape, home, maker, needs });
            }
        }
        for groups in by_op {
            self.groups_of.extend(groups);
            self.first_group.push(self.groups_of.len() as u32);
        }
    }

    /// Finds the ops that may be sums of partial results, for all that does not depend on configs.
    fn find_sums(&mut self, problem: &Problem<'_>) {
        let graph = problem.graph;
        let consumers = graph.consumers();
        for op in graph.op_ids() {
            let node = graph.node(op);
            let Some(&result) = node.outputs.first() else { continue };
            let maker = |&t: &TensorId| {
                let tensor = graph.tensor(t);
                let alone = consumers.of(t).iter().all(|&reader| reader == op);
                let fits = alone && tensor.ty == graph.tensor(result).ty;
                let by = graph.node(tensor.producer.filter(|_| fits)?);
                let o = by.outputs.iter().position(|&out| out == t)?;
                Some(End { op: tensor.producer?.0, slot: (by.inputs.len() + o) as u32 })
            };
            let makers: Option<Box<[End]>> = node.inputs.iter().map(maker).collect();
            if let Some(makers) = makers.filter(|makers| node.op.operator().is_sum() && !makers.is_empty()) {
                makers.iter().for_each(|end| self.summed_by[end.op as usize].push(op.0));
                self.sums[op.index()] = Some(makers);
            }
        }
    }
}
