//! Reads the step's variant, the mesh and the assignment of a plan file, and checks that graph and machine are the plan's.

use crate::{error::PlanError, plan::Plan};
use shardwright_graph::{Graph, OpId, remat};
use shardwright_machine::{AxisId, AxisSet, Machine, Mesh};
use shardwright_space::Assignment;
use std::collections::BTreeMap;

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

    /// The step that the plan is for: the model's graph with the plan's ops recomputed.
    ///
    /// # Errors
    /// Where the model has no such ops, or they cannot be recomputed.
    pub fn step(&self, model: Graph) -> Result<Graph, PlanError> {
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
        remat(&model, &ops).map_err(|error| mismatch(format!("{error}; plan again")))
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
        Ok(Assignment::from_axis_names(graph, mesh, written)?)
    }
}
