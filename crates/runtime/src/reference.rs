//! The reference executor: runs a lowered program on one thread, device by device, with naive collectives.
//!
//! Slow and obviously right: every block is assembled piece by piece from [`ParallelGraph::pieces`]. Fast engines are
//! compared with it, and it is compared with the serial interpreter.

use crate::{
    init::initial_block,
    kernels::{Context, KernelError, evaluate, log_add_exp},
    serial::RunError,
    tensor::{Data, HostTensor},
};
use shardwright_graph::{
    Block, DType, Graph, TensorId, TensorType,
    block::{elements, extents, relative_to, start},
    ops::{Binary, BinaryFn},
};
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, Reduction, ValueId, Work, blocks};
use shardwright_machine::DeviceId;

/// A run of a lowered program, step after step.
pub struct Reference<'p> {
    graph: &'p Graph,
    program: &'p ParallelGraph,
    /// By value, then device.
    values: Vec<Vec<Option<HostTensor>>>,
    /// By instruction: bytes that devices received from others in the last step.
    moved: Vec<u64>,
    context: Context,
}

fn join(reduction: Reduction, a: &HostTensor, b: &HostTensor) -> Result<HostTensor, KernelError> {
    let f = match reduction {
        Reduction::Sum => BinaryFn::Add,
        Reduction::Max => BinaryFn::Max,
        Reduction::LogSumExp => {
            let pairs = a.to_f64_vec().into_iter().zip(b.to_f64_vec());
            // In the precision of the engine: results are compared bit by bit.
            let dtype = a.ty().dtype;
            let both = |(a, b): (f64, f64)| match dtype {
                DType::F64 => log_add_exp(a, b),
                _ => f64::from(log_add_exp(a as f32, b as f32)),
            };
            let values: Vec<f64> = pairs.map(both).collect();
            return Ok(HostTensor::new(a.shape().clone(), Data::of_reals(dtype, values)));
        }
    };
    Ok(evaluate(&Binary { f }.into(), &[a, b], &mut Context::default())?.remove(0))
}

impl<'p> Reference<'p> {
    /// Prepares a run: computes every device's blocks of the tensors that no op produces. `program` was lowered from `graph`,
    /// and has the bodies of all micro-batches ([`ParallelGraph::unrolled`]).
    pub fn new(graph: &'p Graph, program: &'p ParallelGraph, seed: u64) -> Self {
        let devices = program.mesh.devices() as usize;
        let mut values = vec![vec![None; devices]; program.values.len()];
        for source in &program.sources {
            for device in program.devices() {
                let block = source.block(program, device);
                values[source.value.index()][device.index()] =
                    block.map(|block| initial_block(seed, &graph.whole_tensor(source.tensor), &block));
            }
        }
        let moved = vec![0; program.instructions.len()];
        Self { graph, program, values, moved, context: Context::default() }
    }

    /// A device's block of a value; none where the device holds none at present.
    pub fn block(&self, value: ValueId, device: DeviceId) -> Option<&HostTensor> {
        self.values[value.index()][device.index()].as_ref()
    }

    /// Bytes that devices received from others in the last step, by instruction. An all-reduce counts as if every device
    /// received the whole tensor from every other.
    pub fn moved(&self) -> &[u64] {
        &self.moved
    }

    /// A whole tensor, assembled from the devices' blocks; none where a block is missing.
    pub fn whole(&self, value: ValueId) -> Option<HostTensor> {
        let (pieces, reduction) = blocks::assemble(&self.program.mesh, self.program.value(value));
        let mut whole = HostTensor::zeros(&self.program.value(value).ty);
        let mut seen: Vec<Block> = Vec::new();
        for piece in pieces {
            let part = self.block(value, piece.from)?;
            let part = match reduction.filter(|_| seen.contains(&piece.block)) {
                Some(reduction) => join(reduction, &whole.block(&piece.block), part).ok()?,
                None => part.clone(),
            };
            whole.set_block(&start(&piece.block), &part);
            seen.push(piece.block);
        }
        Some(whole)
    }

    /// The value of one of the graph's outputs after a step.
    pub fn output(&self, tensor: TensorId) -> Option<HostTensor> {
        let output = self.program.outputs.iter().find(|output| output.tensor == tensor)?;
        self.whole(output.value)
    }

    /// The loss of the last step, if the graph computes one.
    pub fn loss(&self) -> Option<f64> {
        self.output(self.graph.loss()?)?.to_f64_vec().first().copied()
    }

    /// Runs one step without the carries: a second call repeats it.
    pub fn evaluate(&mut self) -> Result<(), RunError> {
        for (at, instruction) in self.program.instructions.iter().enumerate() {
            self.context.micro_batch = u64::from(self.program.micro_batch_of(InstructionId(at as u32)));
            self.moved[at] = 0;
            match &instruction.work {
                Work::Compute { op, .. } => {
                    let name = &self.graph.node(*op).name;
                    self.compute(instruction)
                        .map_err(|reason| RunError::Kernel { op: name.clone(), reason })?;
                }
                Work::Reshard(_) | Work::HaloExchange { .. } => {
                    let tensor = self.program.value(instruction.reads[0]).tensor;
                    self.moved[at] = self.move_blocks(instruction).map_err(|reason| RunError::Value {
                        tensor: self.graph.tensor(tensor).name.clone(),
                        reason: reason.to_string(),
                    })?;
                }
            }
            for value in instruction.reads.iter().chain(&instruction.writes) {
                let of = self.program.value(*value);
                let over = of.last_read.or(of.made_by).is_none_or(|last| last.index() <= at);
                if over && !of.kept {
                    self.values[value.index()].fill(None);
                }
            }
        }
        Ok(())
    }

    /// Runs one training step: evaluates, then new weights and optimizer state replace the old.
    pub fn step(&mut self) -> Result<(), RunError> {
        self.evaluate()?;
        for carry in &self.program.carries {
            self.values[carry.old.index()] = self.values[carry.new.index()].clone();
        }
        self.context.step += 1;
        Ok(())
    }

    fn compute(&mut self, instruction: &Instruction) -> Result<(), KernelError> {
        for device in self.program.devices() {
            let Some(op) = self.program.local_op(instruction, device) else { continue };
            let missing = || KernelError::BadValue(format!("device {} lacks an operand", device.0));
            let held = |v: &ValueId| self.values[v.index()][device.index()].as_ref().ok_or_else(missing);
            let inputs = instruction.reads.iter().map(held);
            let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
            let outputs = evaluate(&op, &inputs, &mut self.context)?;
            for (v, output) in instruction.writes.iter().zip(outputs) {
                self.values[v.index()][device.index()] = Some(output);
            }
        }
        Ok(())
    }

    /// Assembles every device's new blocks; returns the bytes that came from other devices.
    fn move_blocks(&mut self, instruction: &Instruction) -> Result<u64, KernelError> {
        let mesh = &self.program.mesh;
        let mut moved = 0;
        for (which, (&before, &after)) in instruction.reads.iter().zip(&instruction.writes).enumerate() {
            let dtype = self.program.value(after).ty.dtype;
            for device in self.program.devices() {
                let Some(wanted) = self.program.value(after).block(mesh, device) else { continue };
                let mut made = HostTensor::zeros(&TensorType { dtype, shape: extents(&wanted) });
                for (nth, piece) in self.program.pieces(instruction, which, device).iter().enumerate() {
                    let missing = || KernelError::BadValue(format!("device {} has no block", piece.from.0));
                    let held = self.program.value(before).block(mesh, piece.from).ok_or_else(missing)?;
                    let source = self.block(before, piece.from).ok_or_else(missing)?;
                    let mut part = source.block(&relative_to(&piece.block, &held));
                    let place = relative_to(&piece.block, &wanted);
                    if let Work::Reshard(step) = &instruction.work
                        && let Some(reduction) = step.reduction.filter(|_| nth > 0)
                    {
                        part = join(reduction, &made.block(&place), &part)?;
                    }
                    made.set_block(&start(&place), &part);
                    if piece.from != device {
                        moved += elements(&piece.block) * dtype.bytes();
                    }
                }
                self.values[after.index()][device.index()] = Some(made);
            }
        }
        Ok(moved)
    }
}
