//! How every op of the forward pass is split, for engines that run op by op and move tensors between ops themselves,
//! such as PyTorch's DTensor.

use crate::shardings::ExportError;
use crate::tensor_paths::PlanLayouts;
use serde::{Serialize, Serializer};
use shardwright_cost::{Layout, Placement, Reduction, Resharder};
use shardwright_graph::{Graph, OpId, Phase, Role};
use shardwright_machine::{AxisId, Mesh};
use shardwright_space::{Assignment, AxisUse, Config};
use std::collections::BTreeMap;

/// Per axis of the mesh: `R` the same everywhere, `S1` a block of dimension 1, `P` a part of a sum, `M` of a maximum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placements(pub Vec<Placement>);

impl Placements {
    pub(crate) fn of(layout: &Layout, mesh: &Mesh) -> Self {
        Self((0..mesh.len() as u32).map(|axis| layout.get(AxisId(axis))).collect())
    }
}

impl Serialize for Placements {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|placement| match placement {
            Placement::Replicated => "R".into(),
            Placement::Shard(dim) => format!("S{dim}"),
            Placement::Partial(Reduction::Max) => "M".into(),
            Placement::Partial(_) => "P".into(),
            // Refused before.
            Placement::Absent(digit) => format!("A{digit}"),
        }))
    }
}

/// An op's tensors.
#[derive(Clone, Debug, Serialize)]
pub struct OpLayouts {
    /// How it needs what it reads.
    pub inputs: Vec<Placements>,
    /// How it leaves what it makes.
    pub outputs: Vec<Placements>,
    /// The axes along which devices do different parts of it.
    pub split: Vec<usize>,
}

/// How everything lies.
#[derive(Clone, Debug, Serialize)]
pub struct Layouts {
    /// Ops of the forward pass by name.
    pub ops: BTreeMap<String, OpLayouts>,
    /// Weights by name: how they lie between steps.
    pub stored: BTreeMap<String, Placements>,
}

impl Layouts {
    /// Those of a graph whose ops have these configs, on the mesh of `resharder`.
    ///
    /// # Errors
    /// Where the configs pin ops to devices, other than to the stages of a pipeline. Of a pipeline, layouts are those among the
    /// devices of a stage: they are replicated along the pipeline's axes.
    pub fn of(graph: &Graph, resharder: &Resharder, assignment: &Assignment) -> Result<Self, ExportError> {
        let Some(pipeline) = &assignment.pipeline else {
            return Ok(Self::from(graph, &PlanLayouts::of(graph, resharder, assignment)?));
        };
        let within = |config: &Config| {
            let mut config = config.clone();
            pipeline.axes.iter().for_each(|axis| config.set(axis, AxisUse::Replicate));
            config
        };
        let inner = Assignment::of(graph, assignment.configs.iter().map(within).collect());
        Ok(Self::from(graph, &PlanLayouts::of(graph, resharder, &inner)?))
    }

    pub(crate) fn from(graph: &Graph, known: &PlanLayouts<'_>) -> Self {
        let stored = graph.sources(Role::Parameter).filter_map(|t| {
            let stored = known.layouts.tensors[t.index()].stored?;
            Some((graph.tensor(t).name.clone(), Placements::of(&stored, known.mesh)))
        });
        let forward = graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward);
        Self {
            ops: forward.map(|op| (graph.node(op).name.clone(), layouts(graph, known, op))).collect(),
            stored: stored.collect(),
        }
    }
}

fn layouts(graph: &Graph, known: &PlanLayouts<'_>, op: OpId) -> OpLayouts {
    let (node, mesh, shapes) = (graph.node(op), known.mesh, &known.shapes[op.index()]);
    let config = &known.layouts.configs[op.index()];
    let input = |i: usize| known.layouts.input(op, i, shapes, mesh);
    let split = |axis: &usize| matches!(config.get(AxisId(*axis as u32)), AxisUse::Split(_));
    OpLayouts {
        inputs: (0..node.inputs.len()).map(|i| Placements::of(&input(i), mesh)).collect(),
        outputs: (0..node.outputs.len())
            .map(|o| Placements::of(&known.layouts.output(op, o, shapes, mesh), mesh))
            .collect(),
        split: (0..mesh.len()).filter(split).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;
    use shardwright_zoo::{self as zoo, BuildOptions};

    #[test]
    fn a_split_sum_leaves_parts_and_windows_stay_in_blocks() {
        let graph = zoo::build("lenet5:batch=8", &BuildOptions::default()).unwrap();
        let graph = Graph { op_by_op: true, ..graph };
        let machine = builtin("flat:2").unwrap();
        let resharder = Resharder::new(&machine, machine.mesh());
        let name = |op: OpId| graph.node(op).name.as_str();
        let split = |op: OpId, factor: &str| {
            let found = graph.rule(op).find(factor);
            Config::new([found.map_or(AxisUse::Replicate, AxisUse::Split)])
        };
        let first = |kind: &str| graph.op_ids().find(|&op| graph.node(op).op.kind() == kind).unwrap();
        let (conv, product) = (first("conv"), first("contract"));
        let configs: Vec<Config> = graph
            .op_ids()
            .map(|op| match op {
                op if op == conv => split(op, "o"),
                op if op == product => split(op, "c"),
                _ => Config::replicated(1),
            })
            .collect();
        let found = Layouts::of(&graph, &resharder, &Assignment::new(configs)).unwrap();
        let json = |op: OpId| serde_json::to_value(&found.ops[name(op)]).unwrap();
        assert_eq!(json(conv)["outputs"], serde_json::json!([["S1"]]));
        assert_eq!(json(conv)["split"], serde_json::json!([0]));
        assert_eq!(json(product)["outputs"], serde_json::json!([["P"]]));
        assert!(
            split(conv, "h").check(&graph.rule(conv), machine.mesh()).is_err(),
            "its windows would reach"
        );
        let weights = graph.parameters().count();
        assert_eq!(found.stored.len(), weights);
    }
}
