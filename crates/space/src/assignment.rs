//! An assignment: every choice for a training step. All stages share it: search, pricing, simulation, lowering,
//! execution, export.
//!
//! It holds a config per op, the number of micro-batches, and the pipeline. Which forward ops are recomputed is part of the
//! graph that the configs belong to ([`shardwright_graph::remat`]): a clone is an op with a config. Comparison, hashing,
//! printing and parsing of assignments live here.

use crate::{
    config::{AxisUse, Config},
    layout::{OpShapes, output_layout},
    pipeline::Pipeline,
};
use shardwright_cost::{Placement, Reduction};
use shardwright_graph::{Graph, OpId, Rule};
use shardwright_machine::{AxisSet, Mesh};
use std::num::NonZeroU32;

/// Every choice for a training step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// Per op, in the graph's order: the use of each mesh axis.
    pub configs: Vec<Config>,
    /// Equal passes over parts of the batch before one update.
    pub micro_batches: NonZeroU32,
    /// The pipeline; none: all devices run all layers.
    pub pipeline: Option<Pipeline>,
}

/// Why an assignment does not match a graph on a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignmentError {
    /// Another number of configs than ops.
    #[error("{configs} configs for a graph of {ops} ops: give one config per op, in the graph's order")]
    Count {
        /// Configs given.
        configs: usize,
        /// Ops of the graph.
        ops: usize,
    },
    /// A config that the op cannot have.
    #[error("op `{op}`: {reason}; plan again for this graph and machine")]
    Config {
        /// The op.
        op: String,
        /// What is wrong.
        reason: String,
    },
    /// Another number of micro-batches than the graph's.
    #[error("an assignment of {assigned} micro-batches for a step of {graph}: divide the step first")]
    MicroBatches {
        /// The assignment's.
        assigned: u32,
        /// The graph's.
        graph: u32,
    },
    /// A pipeline that the graph cannot have on this mesh.
    #[error("the pipeline cannot be: {reason}; plan again for this graph and machine")]
    Pipeline {
        /// What is wrong.
        reason: String,
    },
}

impl Assignment {
    /// One config per op, one micro-batch, no pipeline.
    pub fn new(configs: Vec<Config>) -> Self {
        Self { configs, micro_batches: NonZeroU32::MIN, pipeline: None }
    }

    /// One config per op of a graph, in the graph's micro-batches; no pipeline.
    pub fn of(graph: &Graph, configs: Vec<Config>) -> Self {
        Self { micro_batches: graph.micro_batches, ..Self::new(configs) }
    }

    /// Every device runs every op of the graph.
    pub fn replicated(graph: &Graph, mesh: &Mesh) -> Self {
        Self::of(graph, vec![Config::replicated(mesh.len()); graph.ops.len()])
    }

    /// The config of an op.
    pub fn config(&self, op: OpId) -> &Config {
        &self.configs[op.index()]
    }

    /// Whether some op runs on part of the machine only.
    pub fn has_pins(&self) -> bool {
        self.configs.iter().any(|config| config.uses().iter().any(|used| matches!(used, AxisUse::Pin(_))))
    }

    /// Checks that every op has a valid config on the mesh.
    ///
    /// # Errors
    /// Where a config is invalid.
    pub fn check(&self, graph: &Graph, shapes: &[OpShapes], mesh: &Mesh) -> Result<(), AssignmentError> {
        if self.configs.len() != graph.ops.len() {
            return Err(AssignmentError::Count { configs: self.configs.len(), ops: graph.ops.len() });
        }
        for ((node, shapes), config) in graph.ops.iter().zip(shapes).zip(&self.configs) {
            let error = |reason| AssignmentError::Config { op: node.name.clone(), reason };
            config.check(&shapes.rule, mesh).map_err(error)?;
        }
        if self.micro_batches != graph.micro_batches {
            let (assigned, graph) = (self.micro_batches.get(), graph.micro_batches.get());
            return Err(AssignmentError::MicroBatches { assigned, graph });
        }
        if let Some(pipeline) = &self.pipeline {
            pipeline.check(graph, &self.configs, mesh)?;
        }
        for op in graph.op_ids() {
            if let Some(axis) = self.impossible_sums(graph, shapes, mesh, op).iter().next() {
                let reason = format!("its operand is no partial sum along axis `{}`", mesh.axis(axis).name);
                return Err(AssignmentError::Config { op: graph.node(op).name.clone(), reason });
            }
        }
        Ok(())
    }

    /// The axes along which an op would take partial sums of an operand that has none.
    fn impossible_sums(&self, graph: &Graph, shapes: &[OpShapes], mesh: &Mesh, op: OpId) -> AxisSet {
        let node = graph.node(op);
        let mut impossible = AxisSet::EMPTY;
        for (map, &t) in shapes[op.index()].rule.inputs.iter().zip(&node.inputs) {
            let Some(factor) = map.partial else { continue };
            let given = graph.tensor(t).producer.and_then(|producer| {
                let o = graph.node(producer).outputs.iter().position(|&made| made == t)?;
                Some(output_layout(&shapes[producer.index()], o, self.config(producer), mesh))
            });
            let partial = |axis| given.is_some_and(|l| l.get(axis) == Placement::Partial(Reduction::Sum));
            let taken = mesh.all().iter().zip(self.config(op).uses());
            let taken = taken.filter(|&(axis, used)| *used == AxisUse::Split(factor) && !partial(axis));
            impossible = taken.map(|(axis, _)| axis).collect::<AxisSet>().union(impossible);
        }
        impossible
    }

    /// Replicates ops along axes where they would take partial sums of an operand that has none.
    pub fn without_impossible_sums(mut self, graph: &Graph, shapes: &[OpShapes], mesh: &Mesh) -> Self {
        for op in graph.op_ids() {
            for axis in self.impossible_sums(graph, shapes, mesh, op).iter() {
                self.configs[op.index()].set(axis, AxisUse::Replicate);
            }
        }
        self
    }

    /// The written form of an op's config: per axis the factor that it splits, `@` and the digit of a pin, or none.
    pub fn axis_names(&self, op: OpId, rule: &Rule) -> Vec<Option<String>> {
        let name = |used: &AxisUse| match *used {
            AxisUse::Split(f) => Some(rule.factors[f as usize].name.to_string()),
            AxisUse::Replicate => None,
            AxisUse::Pin(digit) => Some(format!("@{digit}")),
        };
        self.config(op).uses().iter().map(name).collect()
    }

    /// Reads the written form of every op's config, in the graph's order.
    ///
    /// # Errors
    /// Where an op cannot be split as written.
    pub fn from_axis_names<'n>(
        graph: &Graph,
        mesh: &Mesh,
        written: impl IntoIterator<Item = &'n [Option<String>]>,
    ) -> Result<Self, AssignmentError> {
        let mut configs = Vec::with_capacity(graph.ops.len());
        for (op, names) in graph.op_ids().zip(written) {
            let rule = graph.rule(op);
            let error = |reason| AssignmentError::Config { op: graph.node(op).name.clone(), reason };
            let uses = names.iter().map(|name| axis_use(&rule, name.as_deref()));
            let config = Config::new(uses.collect::<Result<Vec<AxisUse>, String>>().map_err(error)?);
            config.check(&rule, mesh).map_err(error)?;
            configs.push(config);
        }
        if configs.len() != graph.ops.len() {
            return Err(AssignmentError::Count { configs: configs.len(), ops: graph.ops.len() });
        }
        Ok(Self::of(graph, configs))
    }
}

/// The inverse of [`Assignment::axis_names`] for one axis.
fn axis_use(rule: &Rule, name: Option<&str>) -> Result<AxisUse, String> {
    let Some(name) = name else { return Ok(AxisUse::Replicate) };
    if let Some(digit) = name.strip_prefix('@') {
        return digit.parse().map(AxisUse::Pin).map_err(|_| format!("`{name}` is no pin such as `@1`"));
    }
    rule.find(name).map(AxisUse::Split).ok_or_else(|| {
        let known: Vec<&str> = rule.factors.iter().map(|f| f.name).collect();
        format!("there is no factor `{name}` to split; there are {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{DType, GraphBuilder, Init, Real, Role, TensorType, ops::Contract};
    use shardwright_machine::builtin;

    fn product() -> Graph {
        let mut b = GraphBuilder::new("product");
        let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
        let x = b.source("x", ty(&[8, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
        let w = b.source("w", ty(&[4, 4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap();
        let y = b.emit("fc", Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap();
        b.output(y);
        b.finish()
    }

    #[test]
    fn what_is_written_reads_back_equal() {
        let (graph, machine) = (product(), builtin("flat:8").unwrap());
        let (mesh, rule) = (machine.mesh(), graph.rule(OpId(0)));
        for config in crate::configs_with_pins(&rule, mesh) {
            let assignment = Assignment::new(vec![config]);
            let written = assignment.axis_names(OpId(0), &rule);
            let read = Assignment::from_axis_names(&graph, mesh, [&written[..]]).unwrap();
            assert_eq!(read, assignment);
        }
    }

    #[test]
    fn wrong_counts_names_and_unsupported_choices_are_refused() {
        let (graph, machine) = (product(), builtin("flat:2").unwrap());
        let mesh = machine.mesh();
        let read = |axes: &[Option<String>]| Assignment::from_axis_names(&graph, mesh, [axes]);
        assert!(read(&[Some("q".into())]).unwrap_err().to_string().contains("there is no factor `q`"));
        assert!(read(&[Some("@x".into())]).unwrap_err().to_string().contains("no pin"));
        assert!(read(&[]).unwrap_err().to_string().contains("speaks of 0 axes"));
        let shapes = [OpShapes::of(&graph, OpId(0))];
        let whole = Assignment::replicated(&graph, mesh);
        assert_eq!(whole.check(&graph, &shapes, mesh), Ok(()));
        let few = Assignment::new(Vec::new());
        assert_eq!(few.check(&graph, &shapes, mesh), Err(AssignmentError::Count { configs: 0, ops: 1 }));
        let two = Assignment { micro_batches: NonZeroU32::new(2).unwrap(), ..whole };
        assert!(two.check(&graph, &shapes, mesh).is_err());
    }
}
