//! From a written plan back to the configs that it stands for, for a graph and a machine that have to be those
//! which it was made for.

use crate::{error::PlanError, plan::Plan};
use shardwright_graph::{FactorIndex, Graph, Rule};
use shardwright_machine::{AxisId, AxisSet, Machine, Mesh};
use shardwright_space::{AxisUse, Config};

/// FNV-1a, 64 bits, of the graph's JSON.
pub(crate) fn model_hash(graph: &Graph) -> String {
    let hash = graph.to_json().bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn mismatch(reason: String) -> PlanError {
    PlanError::Mismatch { reason }
}

impl Plan {
    /// The mesh that the plan's configs speak of: the machine's prime axes, glued as the plan's are.
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
        // Gluing would rename the only axis of a level.
        let glued = if same(primes) { Some(primes.clone()) } else { primes.glue(&groups).ok() };
        glued.filter(same).ok_or_else(|| {
            let axes: Vec<String> = self.axes.iter().map(|a| format!("{}:{}", a.name, a.size)).collect();
            mismatch(format!("machine {} has no axes {}; plan again", machine.name(), axes.join(" ")))
        })
    }

    /// The config of every op, in the graph's order.
    ///
    /// # Errors
    /// Where the graph is not the plan's, or an op cannot be split as the plan says.
    pub fn configs(&self, graph: &Graph, mesh: &Mesh) -> Result<Vec<Config>, PlanError> {
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
        graph
            .op_ids()
            .zip(&self.ops)
            .map(|(id, op)| {
                let rule = graph.rule(id);
                let uses = op.axes.iter().map(|used| axis_use(&rule, used.as_deref()));
                let config = uses.collect::<Result<Vec<AxisUse>, String>>().map(Config::new);
                let checked = config.and_then(|config| config.check(&rule, mesh).map(|()| config));
                checked.map_err(|reason| PlanError::Config { op: op.name.clone(), reason })
            })
            .collect()
    }
}

/// What the name that a plan gives an axis says: the inverse of what it wrote.
fn axis_use(rule: &Rule, name: Option<&str>) -> Result<AxisUse, String> {
    let Some(name) = name else { return Ok(AxisUse::Replicate) };
    if let Some(digit) = name.strip_prefix('@') {
        return digit.parse().map(AxisUse::Pin).map_err(|_| format!("`{name}` is no pin such as `@1`"));
    }
    rule.find(name).map(|f: FactorIndex| AxisUse::Split(f)).ok_or_else(|| {
        let known: Vec<&str> = rule.factors.iter().map(|f| f.name).collect();
        format!("there is no factor `{name}` to split; there are {}", known.join(", "))
    })
}
