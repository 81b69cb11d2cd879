//! Each invariant of the verifier, broken once: the error names the place.

mod common;

use common::{any_graph, mlp};
use proptest::prelude::*;
use shardwright_graph::{
    Carry, DType, Graph, Init, LayerId, OpId, Phase, Real, Role, Shape, TensorId, TensorType, WeightGradient,
    verify::{check_init, verify},
};

/// Breaks the MLP and checks what the verifier says.
#[track_caller]
fn check(break_it: impl FnOnce(&mut Graph), expected: &str) {
    let mut graph = mlp();
    break_it(&mut graph);
    let error = verify(&graph).expect_err("the broken graph passed").to_string();
    assert!(error.contains(expected), "`{error}` does not say `{expected}`");
}

fn find(graph: &Graph, name: &str) -> TensorId {
    graph.tensor_ids().find(|&t| graph.tensor(t).name == name).unwrap()
}

#[test]
fn a_built_graph_passes() {
    assert_eq!(verify(&mlp()), Ok(()));
    assert_eq!(verify(&Graph::default()), Ok(()));
}

#[test]
fn ids_must_point_somewhere() {
    check(|g| g.ops[1].inputs[0] = TensorId(999), "op #1 `fc0.add` (binary): there is no tensor %999");
    check(|g| g.ops[1].outputs[0] = TensorId(u32::MAX), "there is no tensor");
    check(|g| g.ops[1].layer = LayerId(999), "op #1 `fc0.add` (binary): there is no layer @999");
    check(|g| g.tensors[3].producer = Some(OpId(999)), "its producer #999 does not exist");
    check(|g| g.layers[2].forward = OpId(999), "there is no op #999");
    check(|g| g.outputs.push(TensorId(999)), "names tensor %999");
    check(|g| g.gradients[0].gradient = TensorId(999), "names tensor %999");
    check(|g| g.carries.push(Carry { old: TensorId(0), new: TensorId(999) }), "names tensor %999");
}

#[test]
fn ops_must_be_in_topological_order() {
    check(|g| g.ops[0].inputs[0] = g.ops[2].outputs[0], "has not made yet");
    check(|g| g.ops[0].inputs[0] = g.ops[0].outputs[0], "has not made yet");
    check(|g| g.ops.swap(0, 1), "op #0 `fc0.add`");
}

#[test]
fn a_tensor_is_made_once_by_its_producer() {
    check(|g| g.ops[1].outputs[0] = g.ops[0].outputs[0], "which another op makes, or none");
    check(|g| g.ops[1].outputs[0] = TensorId(0), "which another op makes, or none");
    let claim = |g: &mut Graph| {
        let w = find(g, "fc1.w").index();
        (g.tensors[w].producer, g.tensors[w].init) = (Some(OpId(0)), None);
    };
    check(claim, "op #3 `fc1.matmul` (contract): reads %6 `fc1.w`, which names #0 as its producer");
    check(
        |g| {
            // Read by nobody, so that only its own claim is wrong.
            let mut extra = g.tensors[find(g, "fc0.matmul").index()].clone();
            extra.name = "extra".into();
            g.tensors.push(extra);
        },
        "`extra`: names #0 as its producer, but that does not make it",
    );
}

#[test]
fn types_must_be_legal_and_as_inferred() {
    check(|g| g.tensors[0].ty.shape = Shape::new(&[0, 3]), "tensor %0 `x`: dimension 0 of [0,3] is empty");
    check(|g| g.tensors[0].ty.shape = Shape::new(&[1 << 40, 1 << 40]), "2^48 elements");
    check(|g| g.tensors[0].ty.shape = Shape::new(&[64, 101]), "op #0 `fc0.matmul` (contract)");
    check(|g| g.tensors[3].ty.dtype = DType::F64, "makes f32[64,300], but %3 `fc0.matmul` is f64[64,300]");
    check(|g| g.ops[0].outputs.clear(), "makes 1 tensors, but 0 are listed");
    check(
        |g| {
            for i in 0..300 {
                let mut big = g.tensors[0].clone();
                (big.name, big.ty.shape) = (format!("big{i}"), Shape::new(&[1 << 48]));
                g.tensors.push(big);
            }
        },
        "at most 2^56",
    );
}

#[test]
fn sources_and_only_they_have_initial_values() {
    check(|g| g.tensors[0].init = None, "no op makes it and it has no initial value");
    check(|g| g.tensors[3].init = Some(Init::Below(3)), "yet it has an initial value");
    check(|g| g.tensors[0].init = Some(Init::Constant(Real(f64::NAN))), "does not suit f32[64,100]");
}

#[test]
fn initial_values_suit_the_element_type() {
    let suits = |dtype, init| check_init(&TensorType::new(dtype, [2]), init).is_ok();
    for dtype in DType::ALL {
        assert!(suits(dtype, Init::Constant(Real(1.0))) && suits(dtype, Init::Below(2)), "{dtype}");
        assert!(!suits(dtype, Init::Below(0)), "{dtype}");
        assert!(!suits(dtype, Init::Constant(Real(f64::NAN))), "{dtype}");
        assert_eq!(suits(dtype, Init::Normal(Real(0.5))), dtype.is_float());
        assert_eq!(suits(dtype, Init::Constant(Real(f64::NEG_INFINITY))), dtype.is_float());
        assert_eq!(suits(dtype, Init::Constant(Real(0.5))), dtype.is_float());
        assert!(!suits(dtype, Init::Uniform(Real(-1.0))));
        assert!(!suits(dtype, Init::Normal(Real(f64::INFINITY))));
    }
    assert!(!suits(DType::I32, Init::Below(1 << 32)) && suits(DType::I64, Init::Below(1 << 32)));
}

#[test]
fn names_are_unique_and_layers_share_their_op_s() {
    check(|g| g.tensors[1].name = "x".into(), "tensor %1 `x`: another tensor has this name");
    check(|g| g.ops[1].name = "fc0.matmul".into(), "op #1 `fc0.matmul` (binary): another op has this name");
    check(|g| g.layers[1].name = "other".into(), "its forward op has another name");
}

#[test]
fn layers_belong_to_their_forward_ops() {
    check(|g| g.layers.swap(0, 1), "layer @0");
    check(|g| g.ops[1].layer = LayerId(0), "layer @1 `fc0.add`: its op #1 is not a forward op of it");
    check(|g| g.ops[0].phase = Phase::Backward, "op #1 `fc0.add`");
}

#[test]
fn phases_and_roles_agree() {
    let forward_reads_gradient = |g: &mut Graph| {
        let last = g.ops.len() - 1;
        g.ops[last].phase = Phase::Forward;
    };
    check(forward_reads_gradient, "a Forward op cannot read");
    check(|g| g.tensors[0].role = Role::Activation, "tensor %0 `x`: is Activation but no op makes it");
    check(|g| g.tensors[3].role = Role::Input, "is Input but made by #0, a Forward op");
    check(|g| g.tensors[3].role = Role::Gradient, "is Gradient but made by #0");
    check(|g| g.tensors[3].role = Role::Parameter, "is Parameter but made by #0");
}

#[test]
fn gradients_and_carries_join_what_belongs_together() {
    check(|g| g.gradients[0].gradient = TensorId(0), "gradient of `fc0.w` is f32[64,100], not f32[100,300]");
    check(|g| g.gradients[0].parameter = TensorId(0), "%0 `x` has a gradient but is not a weight");
    check(|g| g.gradients.push(g.gradients[0]), "`fc0.w` has two gradients");
    check(|g| g.carries.push(Carry { old: TensorId(0), new: TensorId(0) }), "only weights");
    let w = |g: &Graph| find(g, "fc0.w");
    check(
        |g| g.carries.push(Carry { old: w(g), new: find(g, "fc0.b") }),
        "`fc0.w` is f32[100,300] but is carried over as f32[300]",
    );
    check(|g| g.carries = vec![Carry { old: w(g), new: w(g) }; 2], "`fc0.w` is carried over twice");
}

#[test]
fn a_carried_result_may_come_from_any_phase() {
    let mut graph = mlp();
    let WeightGradient { parameter, gradient } = graph.gradients[0];
    graph.carries.push(Carry { old: parameter, new: gradient });
    graph.tensors[gradient.index()].role = Role::Parameter;
    assert_eq!(verify(&graph), Ok(()));
}

proptest! {
    #[test]
    fn whatever_the_builder_makes_passes(graph in any_graph()) {
        prop_assert_eq!(verify(&graph), Ok(()));
    }
}
