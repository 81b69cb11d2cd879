//! A pipeline: stages of layers on groups of devices, and the schedule of their passes.
//!
//! Some mesh axes number the groups: devices that agree on these axes form a group. A stage is a set of layers that runs on one
//! group; every op of a layer, forward, backward or update, runs there, except sums of gradients (`Pipeline::op_stages`). The configs say so too: they pin the pipeline's axes to
//! the group's digits, so that prices, layouts and programs need no other rule. With several chunks per group, stages wrap
//! around the groups or turn back in a V ([`Schedule::place`]).

use crate::{
    assignment::AssignmentError,
    config::{AxisUse, Config},
};
use shardwright_graph::{Graph, LayerId, OpId, Phase, Role, TensorId};
use shardwright_machine::{AxisId, AxisSet, DeviceId, Mesh};
use shardwright_stages::schedule::Schedule;

/// Stages on groups of devices, and their schedule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pipeline {
    /// The mesh axes that number the groups, the outermost digit first.
    pub axes: AxisSet,
    /// Per layer of the graph: its stage. Stages are numbered along the forward pass.
    pub stages: Vec<u32>,
    /// The order of every group's passes.
    pub schedule: Schedule,
}

/// Per layer: whether its forward op reads data or results of ops that do. Other layers, such as casts of weights, run before
/// all micro-batches.
pub fn reads_data(graph: &Graph) -> Vec<bool> {
    let mut data: Vec<bool> =
        graph.tensors.iter().map(|t| t.producer.is_none() && t.role == Role::Input).collect();
    for node in &graph.ops {
        if node.inputs.iter().any(|t| data[t.index()]) {
            node.outputs.iter().for_each(|t| data[t.index()] = true);
        }
    }
    let forward = graph.layers.iter().map(|layer| graph.node(layer.forward));
    forward.map(|node| node.inputs.iter().any(|t| data[t.index()])).collect()
}

/// The ops whose results an op of the backward pass sums: all are gradients of one type.
fn summands(graph: &Graph, op: OpId) -> Option<impl Iterator<Item = OpId>> {
    let node = graph.node(op);
    let [sum] = node.outputs[..] else { return None };
    let ty = &graph.tensor(sum).ty;
    let gradient = |t: &TensorId| {
        let tensor = graph.tensor(*t);
        let made = tensor.producer.is_some_and(|producer| graph.node(producer).phase == Phase::Backward);
        made && tensor.ty == *ty
    };
    let sums = node.phase == Phase::Backward && node.inputs.len() > 1 && node.inputs.iter().all(gradient);
    sums.then(|| node.inputs.iter().filter_map(|t| graph.tensor(*t).producer))
}

impl Pipeline {
    /// The pipeline whose layers that read data are on the given stages. Every other layer is on the first stage that reads its
    /// results.
    pub fn new(graph: &Graph, axes: AxisSet, schedule: Schedule, stage_of: impl Fn(LayerId) -> u32) -> Self {
        let of_data = reads_data(graph);
        let given = |(at, &data): (usize, &bool)| data.then(|| stage_of(LayerId::new(at)));
        let mut stages: Vec<Option<u32>> = of_data.iter().enumerate().map(given).collect();
        let consumers = graph.consumers();
        for op in graph.op_ids().rev() {
            let node = graph.node(op);
            if of_data[node.layer.index()] || graph.layers[node.layer.index()].forward != op {
                continue;
            }
            let readers = node.outputs.iter().flat_map(|&t| consumers.of(t));
            let readers =
                readers.map(|&reader| graph.node(reader)).filter(|node| node.phase == Phase::Forward);
            stages[node.layer.index()] = readers.filter_map(|node| stages[node.layer.index()]).min();
        }
        Self { axes, schedule, stages: stages.into_iter().map(|stage| stage.unwrap_or(0)).collect() }
    }

    /// The number of groups.
    pub fn groups(&self, mesh: &Mesh) -> u32 {
        mesh.group_size(self.axes)
    }

    /// The number of stages: chunks times groups.
    pub fn stage_count(&self, mesh: &Mesh) -> u32 {
        self.groups(mesh).saturating_mul(self.schedule.chunks())
    }

    /// The stage of every op: its layer's. Gradients of a tensor that several layers of a later stage read are summed there,
    /// so that one tensor is sent back and not one per reader.
    pub fn op_stages(&self, graph: &Graph) -> Vec<u32> {
        let mut stages: Vec<u32> = Vec::with_capacity(graph.ops.len());
        for op in graph.op_ids() {
            let own = self.stages[graph.node(op).layer.index()];
            let later = summands(graph, op).map(|producers| producers.map(|p| stages[p.index()]).min());
            stages.push(later.flatten().map_or(own, |later| own.max(later)));
        }
        stages
    }

    /// The group that a device belongs to.
    pub fn group_of(&self, mesh: &Mesh, device: DeviceId) -> u32 {
        self.axes.iter().fold(0, |group, axis| group * mesh.axis(axis).size + mesh.digit(device, axis))
    }

    /// The digit of every pipeline axis that a stage's group has, outermost axis first.
    pub fn digits(&self, mesh: &Mesh, stage: u32) -> Vec<(AxisId, u16)> {
        let (mut group, _) = self.schedule.place(self.groups(mesh).max(1), stage);
        let axes: Vec<AxisId> = self.axes.iter().collect();
        let mut digits: Vec<(AxisId, u16)> = Vec::with_capacity(axes.len());
        for axis in axes.into_iter().rev() {
            let size = mesh.axis(axis).size;
            digits.push((axis, (group % size) as u16));
            group /= size;
        }
        digits.reverse();
        digits
    }

    /// Pins an op's config to a stage's group.
    pub fn pin(&self, mesh: &Mesh, stage: u32, config: &mut Config) {
        for (axis, digit) in self.digits(mesh, stage) {
            config.set(axis, AxisUse::Pin(digit));
        }
    }

    /// The names of a stage's layers, in the order of their forward ops.
    pub fn layer_names<'g>(&self, graph: &'g Graph, stage: u32) -> Vec<&'g str> {
        let layers = graph.layers.iter().zip(&self.stages).filter(|(_, own)| **own == stage);
        layers.map(|(layer, _)| layer.name.as_str()).collect()
    }

    /// For people: the schedule, the axes, and the layers of every stage.
    pub fn show(&self, graph: &Graph, mesh: &Mesh) -> String {
        let axes: Vec<&str> = self.axes.iter().map(|axis| mesh.axis(axis).name.as_str()).collect();
        let stages = (0..self.stage_count(mesh)).map(|stage| self.layer_names(graph, stage).join(" "));
        let stages: Vec<String> = stages.collect();
        format!("{} over {}: {}", self.schedule.name(), axes.join(" "), stages.join(" | "))
    }

    /// Checks that the pipeline is one of this graph on this mesh, and that the configs keep it.
    ///
    /// # Errors
    /// Where the schedule does not exist for these counts, a stage has no layer, an op is not pinned to its stage's group, or
    /// a tensor flows against the order of stages: forwards to an earlier one, or backwards to a later one.
    pub fn check(&self, graph: &Graph, configs: &[Config], mesh: &Mesh) -> Result<(), AssignmentError> {
        let refuse = |reason: String| Err(AssignmentError::Pipeline { reason });
        if self.axes.minus(mesh.all()) != AxisSet::EMPTY || self.groups(mesh) < 2 {
            return refuse("it needs mesh axes of at least two digits".into());
        }
        if let Err(error) = self.schedule.check(self.groups(mesh), graph.micro_batches.get()) {
            return refuse(error.to_string());
        }
        if self.stages.len() != graph.layers.len() {
            let (stages, layers) = (self.stages.len(), graph.layers.len());
            return refuse(format!("it has stages for {stages} layers, and the graph has {layers}"));
        }
        let mut filled = vec![false; self.stage_count(mesh) as usize];
        for (layer, &stage) in graph.layers.iter().zip(&self.stages) {
            let Some(filled) = filled.get_mut(stage as usize) else {
                let (name, count) = (layer.name.escape_debug(), self.stage_count(mesh));
                return refuse(format!("layer `{name}` is on stage {stage} of {count}, counted from 0"));
            };
            *filled = true;
        }
        if let Some(stage) = filled.iter().position(|filled| !filled) {
            return refuse(format!("stage {stage} has no layers"));
        }
        let digits: Vec<Vec<(AxisId, u16)>> =
            (0..self.stage_count(mesh)).map(|stage| self.digits(mesh, stage)).collect();
        let stages = self.op_stages(graph);
        for op in graph.op_ids() {
            let (node, stage) = (graph.node(op), stages[op.index()]);
            let pinned =
                |&(axis, digit): &(AxisId, u16)| configs[op.index()].get(axis) == AxisUse::Pin(digit);
            if !digits[stage as usize].iter().all(pinned) {
                let name = node.name.escape_debug();
                return refuse(format!("op `{name}` is not pinned to the devices of its stage {stage}"));
            }
            let producers = node.inputs.iter().filter_map(|&t| graph.tensor(t).producer);
            // What runs once per step runs before or after all passes.
            let in_pass = |op: &OpId| graph.node(*op).repeated || graph.micro_batches.get() == 1;
            for producer in producers.filter(|producer| in_pass(producer) && in_pass(&op)) {
                let (from, before) = (graph.node(producer), stages[producer.index()]);
                let flows = match (from.phase, node.phase) {
                    (Phase::Forward, Phase::Forward) => before <= stage,
                    (Phase::Backward, Phase::Backward) => before >= stage,
                    (Phase::Backward | Phase::Update, Phase::Forward) => false,
                    _ => true,
                };
                if !flows {
                    let (from, name) = (from.name.escape_debug(), node.name.escape_debug());
                    let phase = if node.phase == Phase::Forward { "forward" } else { "backward" };
                    return refuse(format!(
                        "op `{name}` of stage {stage} reads op `{from}` of stage {before}, against the {phase} order of stages"
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Assignment, OpShapes};
    use shardwright_graph::{
        DType, GraphBuilder, Init, Optimizer, Real, TensorType, microbatch,
        ops::{Binary, BinaryFn, Contract, Reduce},
        train,
    };
    use shardwright_machine::builtin;
    use std::num::NonZeroU32;

    /// A chain of four products in some micro-batches.
    fn chain(micro_batches: u32) -> Graph {
        let mut b = GraphBuilder::new("chain");
        let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
        let mut x = b.source("x", ty(&[8, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
        for layer in 0..4 {
            let name = format!("w{layer}");
            let w = b.source(&name, ty(&[4, 4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap();
            x = b.emit(&format!("fc{layer}"), Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap();
        }
        let loss = b.emit("loss", Reduce::sum(smallvec::smallvec![0, 1]), &[x]).unwrap();
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
        b.output(loss);
        microbatch(&b.finish(), NonZeroU32::new(micro_batches).unwrap()).unwrap().graph
    }

    fn check(graph: &Graph, pipeline: Pipeline, mesh: &Mesh) -> Result<(), String> {
        let mut assignment = Assignment::replicated(graph, mesh);
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        if pipeline.stages.len() == graph.layers.len() {
            for (config, stage) in assignment.configs.iter_mut().zip(pipeline.op_stages(graph)) {
                pipeline.pin(mesh, stage, config);
            }
        }
        let assignment = Assignment { pipeline: Some(pipeline), ..assignment };
        assignment.check(graph, &shapes, mesh).map_err(|error| error.to_string())
    }

    fn by_number(graph: &Graph, layer: LayerId) -> u32 {
        graph.layers[layer.index()].name.strip_prefix("fc").map_or(3, |number| number.parse().unwrap())
    }

    #[test]
    fn held_weights_follow_their_first_reader() {
        let (graph, machine) = (chain(4), builtin("flat:4").unwrap());
        let mesh = machine.mesh();
        let schedule = Schedule::OneForwardOneBackward;
        let pipeline = Pipeline::new(&graph, mesh.all(), schedule, |layer| by_number(&graph, layer));
        let text = pipeline.show(&graph, mesh);
        assert_eq!(text, "1f1b over gpu.0 gpu.1: w0.held fc0 | w1.held fc1 | w2.held fc2 | w3.held fc3 loss");
        assert_eq!(check(&graph, pipeline.clone(), mesh), Ok(()));
        let digits: Vec<u16> = pipeline.digits(mesh, 2).into_iter().map(|(_, digit)| digit).collect();
        assert_eq!((digits, pipeline.group_of(mesh, DeviceId(2))), (vec![1, 0], 2));
    }

    /// A residual block: the sum and the product read `x`, whose gradients are added up.
    #[test]
    fn gradients_are_summed_on_the_stage_of_their_readers() {
        let mut b = GraphBuilder::new("residual");
        let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
        let weight = |b: &mut GraphBuilder, name: &str| {
            b.source(name, ty(&[4, 4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap()
        };
        let x = b.source("x", ty(&[8, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
        let [w0, w1] = ["w0", "w1"].map(|name| weight(&mut b, name));
        let product = || Contract::parse("nc,co->no").unwrap();
        let y = b.emit("fc0", product(), &[x, w0]).unwrap();
        let z = b.emit("fc1", product(), &[y, w1]).unwrap();
        let sum = b.emit("fc1.residual", Binary { f: BinaryFn::Add }, &[y, z]).unwrap();
        let loss = b.emit("loss", Reduce::sum(smallvec::smallvec![0, 1]), &[sum]).unwrap();
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
        b.output(loss);
        let graph = microbatch(&b.finish(), NonZeroU32::new(4).unwrap()).unwrap().graph;
        let machine = builtin("flat:2").unwrap();
        let first = |layer: LayerId| u32::from(graph.layers[layer.index()].name != "fc0");
        let schedule = Schedule::OneForwardOneBackward;
        let pipeline = Pipeline::new(&graph, machine.mesh().all(), schedule, first);
        let stages = pipeline.op_stages(&graph);
        let moved: Vec<&str> = graph
            .op_ids()
            .filter(|op| stages[op.index()] != pipeline.stages[graph.node(*op).layer.index()])
            .map(|op| graph.node(op).name.as_str())
            .collect();
        assert_eq!(moved, ["fc0.grad_sum"]);
        assert_eq!(check(&graph, pipeline, machine.mesh()), Ok(()));
    }

    #[test]
    fn stages_turn_back_in_a_v_or_wrap_around() {
        let (graph, machine) = (chain(4), builtin("flat:2").unwrap());
        let mesh = machine.mesh();
        for (schedule, groups) in
            [(Schedule::ZbV, [0, 1, 1, 0]), (Schedule::Interleaved { chunks: 2 }, [0, 1, 0, 1])]
        {
            let pipeline = Pipeline::new(&graph, mesh.all(), schedule, |layer| by_number(&graph, layer));
            let own: Vec<u16> = (0..4).map(|stage| pipeline.digits(mesh, stage)[0].1).collect();
            assert_eq!(own, groups);
            assert_eq!(check(&graph, pipeline, mesh), Ok(()));
        }
    }

    #[test]
    fn pipelines_against_the_order_of_layers_are_refused() {
        let (graph, machine) = (chain(4), builtin("flat:2").unwrap());
        let mesh = machine.mesh();
        let schedule = Schedule::GPipe;
        let with = |of: &dyn Fn(u32) -> u32| {
            Pipeline::new(&graph, mesh.all(), schedule, |layer| of(by_number(&graph, layer)))
        };
        let refused = |pipeline| check(&graph, pipeline, mesh).unwrap_err();
        assert!(refused(with(&|layer| u32::from(layer < 2))).contains("against the forward order"));
        assert!(refused(with(&|_| 0)).contains("stage 1 has no layers"));
        assert!(refused(Pipeline { stages: vec![0], ..with(&|layer| layer / 2) }).contains("1 layers"));
        assert!(refused(Pipeline { axes: AxisSet::EMPTY, ..with(&|_| 0) }).contains("at least two digits"));
        let interleaved = Schedule::Interleaved { chunks: 2 };
        let odd = chain(1);
        let pipeline = Pipeline::new(&odd, mesh.all(), interleaved, |layer| by_number(&odd, layer));
        assert!(check(&odd, pipeline, mesh).unwrap_err().contains("multiple of 2"));
        // An op that is pinned elsewhere.
        let pipeline = with(&|layer| layer / 2);
        let assignment = Assignment { pipeline: Some(pipeline), ..Assignment::replicated(&graph, mesh) };
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
        let error = assignment.check(&graph, &shapes, mesh).unwrap_err().to_string();
        assert!(error.contains("is not pinned to the devices of its stage"), "{error}");
    }
}
