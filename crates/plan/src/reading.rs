//! Reads the step's variant, the mesh and the assignment of a plan file, and checks that graph and machine are the plan's.

use crate::{
    error::PlanError,
    plan::{Plan, PlanPipeline},
};
use shardwright_graph::{Graph, OpId, microbatch, remat_whole};
use shardwright_machine::{AxisId, AxisSet, Machine, Mesh};
use shardwright_space::{Assignment, Pipeline};
use shardwright_stages::schedule::Schedule;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// The hash that identifies a plan's model: FNV-1a, 64 bits, of the graph's JSON.
pub fn model_hash(graph: &Graph) -> String {
    let hash = graph.to_json().bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn mismatch(reason: String) -> PlanError {
    PlanError::Mismatch { reason }
}

impl PlanPipeline {
    /// The pipeline that is written here.
    fn read(&self, graph: &Graph, mesh: &Mesh) -> Result<Pipeline, PlanError> {
        let schedule = Schedule::parse(&self.schedule, Some(self.chunks));
        let schedule = schedule.map_err(|error| mismatch(format!("its pipeline: {error}; plan again")))?;
        let mut axes = AxisSet::EMPTY;
        for name in &self.axes {
            let axis = mesh.axis_named(name).ok_or_else(|| {
                mismatch(format!(
                    "its pipeline is over axis `{}`, which it lacks; plan again",
                    name.escape_debug()
                ))
            })?;
            axes = axes.with(axis);
        }
        let by_name: BTreeMap<&str, usize> =
            graph.layers.iter().enumerate().map(|(at, layer)| (layer.name.as_str(), at)).collect();
        let mut stages: Vec<Option<u32>> = vec![None; graph.layers.len()];
        for (stage, written) in self.stages.iter().enumerate() {
            for name in &written.layers {
                let layer = by_name.get(name.as_str()).copied();
                let free = layer.filter(|&layer| stages[layer].is_none());
                let layer = free.ok_or_else(|| {
                    let reason = if layer.is_some() { "is on two stages" } else { "is not in the model" };
                    mismatch(format!("layer `{}` of its pipeline {reason}; plan again", name.escape_debug()))
                })?;
                stages[layer] = Some(stage as u32);
            }
        }
        let missing = |at: usize| {
            let name = graph.layers[at].name.escape_debug();
            mismatch(format!("its pipeline has no stage for layer `{name}`; plan again"))
        };
        let stages = stages.into_iter().enumerate().map(|(at, stage)| stage.ok_or_else(|| missing(at)));
        Ok(Pipeline { axes, schedule, stages: stages.collect::<Result<_, _>>()? })
    }
}

impl Plan {
    /// The mesh that the plan's configs refer to: the machine's prime axes, merged as the plan's are.
    ///
    /// # Errors
    /// Where the machine is not the plan's.
    pub fn mesh(&self, machine: &Machine) -> Result<Mesh, PlanError> {
        if machine.fingerprint().to_string() != self.machine_fingerprint {
            return Err(mismatch(format!(
                "it was made for machine {}, and {} is another or was changed since; plan again",
                self.machine,
                machine.name()
            )));
        }
        let primes = machine.mesh();
        let mut next = 0;
        let mut groups = Vec::with_capacity(self.axes.len());
        for axis in &self.axes {
            let (mut group, mut size) = (AxisSet::EMPTY, 1u64);
            while size < u64::from(axis.size) && next < primes.len() {
                size *= u64::from(primes.axes()[next].size);
                group = group.with(AxisId(next as u32));
                next += 1;
            }
            groups.push(group);
        }
        let same = |mesh: &Mesh| {
            let axes = mesh.axes().iter().map(|axis| (&axis.name, axis.size));
            axes.eq(self.axes.iter().map(|axis| (&axis.name, axis.size)))
        };
        // Merging would rename the only axis of a level.
        let merged = if same(primes) { Some(primes.clone()) } else { primes.merge_axes(&groups).ok() };
        merged.filter(same).ok_or_else(|| {
            let axes: Vec<String> = self.axes.iter().map(|a| format!("{}:{}", a.name, a.size)).collect();
            mismatch(format!("machine {} has no axes {}; plan again", machine.name(), axes.join(" ")))
        })
    }

    /// The step that the plan is for: the model's graph in the plan's micro-batches, with the plan's ops recomputed.
    ///
    /// # Errors
    /// Where the model cannot be divided, has no such ops, or they cannot be recomputed.
    pub fn step(&self, model: Graph) -> Result<Graph, PlanError> {
        let Some(count) = NonZeroU32::new(self.micro_batches) else {
            return Err(mismatch("it has 0 micro-batches; plan again".into()));
        };
        let model = match count.get() {
            1 => model,
            _ => microbatch(&model, count).map_err(|error| mismatch(error.to_string()))?.graph,
        };
        if self.recompute.ops.is_empty() {
            return Ok(model);
        }
        let by_name: BTreeMap<&str, OpId> =
            model.op_ids().map(|op| (model.node(op).name.as_str(), op)).collect();
        let find = |name: &String| {
            by_name.get(name.as_str()).copied().ok_or_else(|| {
                mismatch(format!(
                    "it recomputes op `{}`, which the model does not have; it was made for {}: name the same model with the same options",
                    name.escape_debug(),
                    self.model
                ))
            })
        };
        let ops = self.recompute.ops.iter().map(find).collect::<Result<Vec<OpId>, PlanError>>()?;
        // A plan names the ops that have clones, needed or not.
        remat_whole(&model, &ops).map_err(|error| mismatch(format!("{error}; plan again")))
    }

    /// The plan's assignment.
    ///
    /// # Errors
    /// Where the graph is not the plan's, or an op cannot be split as the plan says.
    pub fn assignment(&self, graph: &Graph, mesh: &Mesh) -> Result<Assignment, PlanError> {
        let names = graph.ops.iter().map(|node| (&node.name[..], node.op.kind()));
        let planned = self.ops.iter().map(|op| (&op.name[..], &op.kind[..]));
        if let Some((own, other)) = planned.zip(names).find(|(own, other)| own != other) {
            return Err(mismatch(format!(
                "it has op `{}` ({}) where the model has `{}` ({}); it was made for {}: name the same model with the same options",
                own.0, own.1, other.0, other.1, self.model
            )));
        }
        if self.ops.len() != graph.ops.len() {
            return Err(mismatch(format!(
                "it has {} ops and the model {}; it was made for {}: name the same model with the same options",
                self.ops.len(),
                graph.ops.len(),
                self.model
            )));
        }
        if self.model_hash != model_hash(graph) {
            return Err(mismatch(format!(
                "the model has the ops of {} but differs in shapes or attributes (hash {} instead of {}): name the same model with the same options, or plan again",
                self.model,
                model_hash(graph),
                self.model_hash
            )));
        }
        let written = self.ops.iter().map(|op| &op.axes[..]);
        let assignment = Assignment::from_axis_names(graph, mesh, written)?;
        let pipeline = self.pipeline.as_ref().map(|written| written.read(graph, mesh)).transpose()?;
        if let Some(pipeline) = &pipeline {
            pipeline.check(graph, &assignment.configs, mesh)?;
        }
        Ok(Assignment { pipeline, ..assignment })
    }
}
