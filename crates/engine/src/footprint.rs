//! The memory that a run takes, from the types of its values: checked before the run, since an allocation that fails ends the
//! process.

use shardwright_graph::{Graph, TensorId};
use shardwright_lower::{ParallelGraph, Work};
use shardwright_machine::DeviceId;

/// Bytes of values that all devices of a program hold at once, each device at its fullest. Workspaces of kernels and
/// messages on their way are not counted.
pub fn held_bytes(graph: &Graph, program: &ParallelGraph) -> u64 {
    program.devices().fold(0u64, |sum, device| sum.saturating_add(device_bytes(graph, program, device)))
}

fn device_bytes(graph: &Graph, program: &ParallelGraph, device: DeviceId) -> u64 {
    let bytes =
        |value: usize| program.values[value].local_type(&program.mesh, device).map_or(0, |ty| ty.bytes());
    let mut memory = Memory::new(program.values.len());
    // A view holds its operand's memory.
    let mut owner: Vec<usize> = (0..program.values.len()).collect();
    for (at, instruction) in program.instructions.iter().enumerate() {
        if let Work::Compute { op, .. } = instruction.work
            && graph.node(op).op.operator().is_view()
        {
            owner[instruction.writes[0].index()] = owner[instruction.reads[0].index()];
        }
        for value in instruction.reads.iter().chain(&instruction.writes) {
            memory.last_use[owner[value.index()]] = at;
        }
    }
    for at in (0..program.values.len()).filter(|&at| program.values[at].kept) {
        memory.last_use[owner[at]] = usize::MAX;
    }
    for source in &program.sources {
        memory.last_use[source.value.index()] = usize::MAX;
        memory.hold(bytes(source.value.index()));
    }
    for (at, instruction) in program.instructions.iter().enumerate() {
        for value in &instruction.writes {
            if owner[value.index()] == value.index() {
                memory.hold(bytes(value.index()));
            }
        }
        let used = instruction.reads.iter().chain(&instruction.writes).map(|value| owner[value.index()]);
        memory.release(at, used, bytes);
    }
    memory.most
}

/// Bytes of tensors that the serial program holds at once.
pub fn serial_bytes(graph: &Graph) -> u64 {
    let bytes = |tensor: usize| graph.tensors[tensor].ty.bytes();
    let mut memory = Memory::new(graph.tensors.len());
    for (at, node) in graph.ops.iter().enumerate() {
        for tensor in node.inputs.iter().chain(&node.outputs) {
            memory.last_use[tensor.index()] = at;
        }
    }
    let carried = graph.carries.iter().map(|carry| carry.new);
    let sources = graph.tensors.iter().enumerate().filter(|(_, tensor)| tensor.producer.is_none());
    for tensor in sources.map(|(at, _)| TensorId::new(at)).chain(graph.outputs.iter().copied()).chain(carried)
    {
        memory.last_use[tensor.index()] = usize::MAX;
    }
    for at in 0..graph.tensors.len() {
        if graph.tensors[at].producer.is_none() {
            memory.hold(bytes(at));
        }
    }
    for (at, node) in graph.ops.iter().enumerate() {
        for tensor in &node.outputs {
            memory.hold(bytes(tensor.index()));
        }
        let used = node.inputs.iter().chain(&node.outputs).map(|tensor| tensor.index());
        memory.release(at, used, bytes);
    }
    memory.most
}

/// Bytes held now, and the most held at once.
struct Memory {
    now: u64,
    most: u64,
    /// Per value: the position of its last use; `usize::MAX` once it is released, or if it outlives the step.
    last_use: Vec<usize>,
}

impl Memory {
    fn new(values: usize) -> Self {
        Self { now: 0, most: 0, last_use: vec![0; values] }
    }

    fn hold(&mut self, bytes: u64) {
        self.now = self.now.saturating_add(bytes);
        self.most = self.most.max(self.now);
    }

    /// Releases the values that are used last at this position.
    fn release(&mut self, at: usize, used: impl Iterator<Item = usize>, bytes: impl Fn(usize) -> u64) {
        for value in used {
            if self.last_use[value] == at {
                self.last_use[value] = usize::MAX;
                self.now = self.now.saturating_sub(bytes(value));
            }
        }
    }
}
