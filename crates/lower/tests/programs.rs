//! Programs of small graphs, line by line.

use shardwright_cost::{Action, Resharder};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Optimizer, Phase, Real, Role, TensorId, TensorType,
    ops::{Contract, Conv, ConvGeometry, Reduce, Unary, UnaryFn},
    train,
};
use shardwright_lower::{LowerError, ParallelGraph, Work, lower};
use shardwright_machine::builtin;
use shardwright_space::{Assignment, AssignmentError, AxisUse, Config};

fn source(b: &mut GraphBuilder, name: &str, shape: &[u64], role: Role) -> TensorId {
    b.source(name, TensorType::new(DType::F32, shape), role, Init::Normal(Real(1.0))).unwrap()
}

fn product(b: &mut GraphBuilder, name: &str, x: TensorId, w: TensorId) -> TensorId {
    b.emit(name, Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap()
}

/// Two products with a rectifier between them, by the same weight or by two, ready for training.
fn perceptron(shared: bool) -> Graph {
    let mut b = GraphBuilder::new("perceptron");
    let x = source(&mut b, "x", &[8, 4], Role::Input);
    let v = source(&mut b, "v", &[4, 4], Role::Parameter);
    let w = if shared { v } else { source(&mut b, "w", &[4, 4], Role::Parameter) };
    let h = product(&mut b, "fc1", x, v);
    let h = b.emit("relu", Unary { f: UnaryFn::Relu }, &[h]).unwrap();
    let y = product(&mut b, "fc2", h, w);
    let loss = b.emit("loss", Reduce::mean((0..2).collect(), &[8, 4]), &[y]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.finish()
}

/// A program for two devices: every op is split along the first of the factors that it has.
fn program(graph: &Graph, factors: impl Fn(Phase) -> &'static [&'static str]) -> ParallelGraph {
    let machine = builtin("flat:2").unwrap();
    let resharder = Resharder::new(&machine, machine.mesh());
    let config = |op| {
        let rule = graph.rule(op);
        let mut found = factors(graph.node(op).phase).iter().filter_map(|name| rule.find(name));
        Config::new([found.next().map_or(AxisUse::Replicate, AxisUse::Split)])
    };
    let assignment = Assignment::new(graph.op_ids().map(config).collect());
    let program = lower(graph, &resharder, &assignment).unwrap();
    program.verify().unwrap();
    program
}

/// How often each step occurs, and how many tensors it moves.
fn steps(program: &ParallelGraph) -> Vec<(Action, usize)> {
    let step = |i: &shardwright_lower::Instruction| match &i.work {
        Work::Reshard(step) => Some((step.action, i.writes.len())),
        _ => None,
    };
    program.instructions.iter().filter_map(step).collect()
}

#[test]
fn data_parallelism_reduces_all_gradients_in_one_bucket() {
    let graph = perceptron(false);
    let program = program(&graph, |phase| if phase == Phase::Update { &[] } else { &["n", "d0"] });
    // The gradients, and nothing else: the loss stays a partial sum.
    assert_eq!(steps(&program), [(Action::AllReduce, 2)]);
    let loss = program.value(program.outputs[0].value);
    assert!(loss.partial().is_some());
}

#[test]
fn the_gradient_of_a_weight_that_is_used_twice_is_reduced_once() {
    let graph = perceptron(true);
    let factors = |phase| -> &'static [&'static str] { if phase == Phase::Update { &[] } else { &["n"] } };
    let text = program(&graph, factors).listing(&graph).to_string();
    assert_eq!(text.matches("all-reduce").count(), 1, "{text}");
    let sum = text.lines().find(|line| line.contains("= binary")).unwrap();
    assert!(sum.contains("P+"), "added up before it is reduced: {sum}");
}

#[test]
fn sharded_updates_gather_weights_in_every_pass_and_scatter_gradients() {
    let graph = perceptron(false);
    let program = program(&graph, |phase| if phase == Phase::Update { &["d0"] } else { &["n", "d0"] });
    let count = |action| steps(&program).iter().filter(|(a, _)| *a == action).count();
    // Both weights forwards; backwards only the second, since no gradient flows to the data.
    assert_eq!(count(Action::AllGather), 3);
    assert_eq!(count(Action::ReduceScatter), 2);
    assert_eq!(count(Action::AllReduce), 0);
    for carry in &program.carries {
        let weight = program.value(carry.old);
        assert_eq!(
            weight.local_type(&program.mesh, shardwright_machine::DeviceId(1)).unwrap().to_string(),
            "f32[2,4]"
        );
    }
}

#[test]
fn pinned_ops_send_to_each_other() {
    let graph = {
        let mut b = GraphBuilder::new("pipeline");
        let x = source(&mut b, "x", &[8, 4], Role::Input);
        let h = b.emit("first", Unary { f: UnaryFn::Relu }, &[x]).unwrap();
        let y = b.emit("second", Unary { f: UnaryFn::Tanh }, &[h]).unwrap();
        b.output(y);
        b.finish()
    };
    let machine = builtin("flat:2").unwrap();
    let resharder = Resharder::new(&machine, machine.mesh());
    let configs = [0, 1].map(|digit| Config::new([AxisUse::Pin(digit)]));
    let program = lower(&graph, &resharder, &Assignment::new(configs.to_vec())).unwrap();
    program.verify().unwrap();
    assert_eq!(
        program.listing(&graph).to_string(),
        "%0 x f32[8,4] @0\n\
         %1 first f32[8,4] @0 = unary first (%0)\n\
         %2 first f32[8,4] @1 = send gpu.0 (%1)\n\
         %3 second f32[8,4] @1 = unary second (%2)\n\
         output %3\n"
    );
    assert_eq!(program.traffic(resharder.comm()).total().0, 8 * 4 * 4);
}

#[test]
fn windows_fetch_their_neighbours_rows() {
    let mut b = GraphBuilder::new("conv");
    let x = source(&mut b, "x", &[1, 1, 8, 8], Role::Input);
    let w = source(&mut b, "w", &[1, 1, 3, 3], Role::Parameter);
    let geometry = ConvGeometry {
        stride: [1; 2].into_iter().collect(),
        pad: [(1, 1); 2].into_iter().collect(),
        dilation: [1; 2].into_iter().collect(),
        groups: 1,
    };
    let y = b.emit("conv", Conv { geometry }, &[x, w]).unwrap();
    b.output(y);
    let graph = b.finish();
    let program = program(&graph, |_| &["h"]);
    assert_eq!(
        program.listing(&graph).to_string(),
        "%0 x f32[1,1,8,8] S2\n\
         %2 w f32[1,1,3,3] R\n\
         %1 x f32[1,1,8,8] S2 2:[0..5 3..8] = window gpu.0 (%0)\n\
         %3 conv f32[1,1,8,8] S2 = conv conv (%1, %2)\n\
         output %3\n"
    );
}

#[test]
fn bad_configs_are_refused_with_a_reason() {
    let graph = perceptron(false);
    let machine = builtin("flat:2").unwrap();
    let resharder = Resharder::new(&machine, machine.mesh());
    let mut assignment = Assignment::replicated(&graph, machine.mesh());
    assignment.configs[1] = Config::new([AxisUse::Split(9)]);
    let error = lower(&graph, &resharder, &assignment).unwrap_err().to_string();
    assert!(error.starts_with("op `relu`: axis gpu.0 splits factor 9"), "{error}");
    let few = Assignment::new(assignment.configs[1..].to_vec());
    let count = AssignmentError::Count { configs: graph.ops.len() - 1, ops: graph.ops.len() };
    assert_eq!(lower(&graph, &resharder, &few).unwrap_err(), LowerError::Assignment(count));
}
