//! What plans of the stored JAX programs say about the programs themselves.

use flate2::read::GzDecoder;
use shardwright_cost::Resharder;
use shardwright_export::{Shardings, Spec};
use shardwright_graph::OpId;
use shardwright_machine::{Mesh, builtin};
use shardwright_plan::Constraints;
use shardwright_search::Control;
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_stablehlo::{ImportOptions, ImportedProgram, import};
use shardwright_strategies::{PlanAnswer, Planner, find, plan};
use std::io::Read;

fn program(name: &str) -> ImportedProgram {
    let path = format!("{}/../stablehlo/tests/stablehlo/{name}.mlir.gz", env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    import(&text, name, &ImportOptions::default()).unwrap()
}

fn planned(program: &ImportedProgram, solver: &str) -> (Shardings, Mesh) {
    let machine = builtin("flat:4").unwrap();
    let planner = Planner::new(&program.graph, &machine, None, false);
    let PlanAnswer { plan, mesh, .. } =
        plan(&planner, find(solver).unwrap(), &Constraints::default(), &Control::new()).unwrap();
    assert_eq!(plan.mesh(&machine).unwrap().axes(), mesh.axes());
    let assignment = plan.assignment(&program.graph, &mesh).unwrap();
    let resharder = Resharder::new(&machine, &mesh);
    (Shardings::of(program, &program.graph, &resharder, &assignment).unwrap(), mesh)
}

fn divides(spec: &Spec, shape: &[u64], mesh: &Mesh) -> bool {
    let size =
        |name: &String| mesh.axes().iter().find(|axis| axis.name == *name).map_or(0, |a| u64::from(a.size));
    spec.0.len() == shape.len()
        && spec.0.iter().zip(shape).all(|(axes, n)| {
            let parts: u64 = axes.iter().flatten().map(size).product();
            parts > 0 && n % parts == 0
        })
}

#[test]
fn next_values_lie_as_what_they_replace() {
    for (name, solver) in
        [("mlp_sgd", "exact"), ("gpt_adam", "exact"), ("scan_transformer", "data"), ("moe", "fsdp")]
    {
        let program = program(name);
        let (shardings, mesh) = planned(&program, solver);
        for (&t, spec) in program.arguments.iter().zip(&shardings.arguments) {
            assert!(divides(spec, &program.graph.tensor(t).ty.shape, &mesh), "{name}: {spec}");
        }
        for carry in &program.graph.carries {
            let old = program.arguments.iter().position(|&t| t == carry.old).unwrap();
            let new = program.results.iter().position(|&t| t == carry.new).unwrap();
            assert_eq!(shardings.arguments[old], shardings.results[new], "{name}");
        }
        let split = |stops: &Option<Vec<Spec>>| stops.iter().flatten().any(|spec| !spec.is_whole());
        assert!(
            shardings.sites.iter().any(|site| site.results.iter().any(split)),
            "{name}: nothing is split"
        );
    }
}

#[test]
fn fully_sharded_steps_store_shards_of_weights() {
    let program = program("mlp_sgd");
    let (shardings, _) = planned(&program, "fsdp");
    let stored: Vec<String> = shardings.arguments.iter().map(Spec::to_string).collect();
    assert!(stored.iter().take(3).all(|spec| spec.contains("gpu.0")), "{stored:?}");
}

#[test]
fn every_product_says_how_its_operands_lie() {
    let program = program("named_mlp_sgd");
    let (shardings, _) = planned(&program, "exact");
    let product = |name: &Option<String>| name.as_ref().is_some_and(|name| name.ends_with("dot_general"));
    let products: Vec<_> = shardings.sites.iter().filter(|site| product(&site.name)).collect();
    assert!(products.len() >= 4, "{}", products.len());
    for site in products {
        assert!(site.operands.iter().all(Option::is_some), "{site:?}");
        assert!(site.results.iter().all(Option::is_some), "{site:?}");
    }
}

#[test]
fn partial_sums_are_summed_up_before_they_are_split() {
    let program = program("named_mlp_sgd");
    let (shardings, _) = planned(&program, "fsdp");
    let scattered = shardings.sites.iter().flat_map(|site| site.results.iter().flatten());
    let scattered: Vec<_> = scattered.filter(|stops| stops.len() > 1).collect();
    assert!(scattered.len() >= 2, "every gradient of a weight: {scattered:?}");
    for stops in scattered {
        assert!(stops.len() == 2 && stops[0].is_whole() && !stops[1].is_whole(), "{stops:?}");
    }
    let (shardings, _) = planned(&program, "data");
    assert!(shardings.sites.iter().flat_map(|site| &site.results).flatten().all(|stops| stops.len() == 1));
}

#[test]
fn partial_sums_in_functions_are_summed_up_where_they_are_made() {
    let text = "module {
  func.func public @main(%x: tensor<8x4xf32>, %y: tensor<8x4xf32>) -> tensor<4x4xf32> {
    %0 = func.call @product(%x, %y) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.negate %0 : tensor<4x4xf32>
    return %1 : tensor<4x4xf32>
  }
  func.func private @product(%x: tensor<8x4xf32>, %y: tensor<8x4xf32>) -> tensor<4x4xf32> {
    %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    return %0 : tensor<4x4xf32>
  }
}
";
    let program = import(text, "called", &ImportOptions::default()).unwrap();
    let graph = &program.graph;
    let configs = graph.op_ids().map(|op| {
        let rule = graph.rule(op);
        let summed = (0..rule.factors.len() as u8).find(|&f| rule.is_reduction(f));
        Config::new([AxisUse::Split(summed.unwrap_or(0))])
    });
    let machine = builtin("flat:2").unwrap();
    let resharder = Resharder::new(&machine, machine.mesh());
    let assignment = Assignment::new(configs.collect());
    let shardings = Shardings::of(&program, graph, &resharder, &assignment).unwrap();
    let product = shardings.sites.iter().rfind(|site| site.operands.len() == 2).unwrap();
    let stops: Vec<String> = product.results[0].iter().flatten().map(Spec::to_string).collect();
    assert_eq!(stops, ["[{}, {}]", "[{gpu.0}, {}]"]);
}

#[test]
fn what_a_convolution_turns_round_lies_as_the_convolution_wants_it() {
    let text = r#"module {
  func.func public @main(%arg0: tensor<8x6x6x8xf32>, %arg1: tensor<3x3x8x4xf32>, %arg2: tensor<8x6x6x4xf32>) -> (tensor<8x6x6x4xf32>, tensor<8x6x6x8xf32>) {
    %0 = stablehlo.convolution(%arg0, %arg1) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [1, 1], pad = [[1, 1], [1, 1]], lhs_dilate = [1, 1], rhs_dilate = [1, 1], reverse = [false, false]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<8x6x6x8xf32>, tensor<3x3x8x4xf32>) -> tensor<8x6x6x4xf32>
    %1 = stablehlo.reverse %arg1, dims = [0, 1] : tensor<3x3x8x4xf32>
    %2 = stablehlo.convolution(%arg2, %1) dim_numbers = [b, 0, 1, f]x[0, 1, o, i]->[b, 0, 1, f], window = {stride = [1, 1], pad = [[1, 1], [1, 1]], lhs_dilate = [1, 1], rhs_dilate = [1, 1], reverse = [false, false]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<8x6x6x4xf32>, tensor<3x3x8x4xf32>) -> tensor<8x6x6x8xf32>
    return %0, %2 : tensor<8x6x6x4xf32>, tensor<8x6x6x8xf32>
  }
}
"#;
    let program = import(text, "convolutions", &ImportOptions::default()).unwrap();
    let graph = &program.graph;
    let machine = builtin("flat:4").unwrap();
    // Only the convolutions are split, along samples and what they add up: the transpositions around them are whole.
    let config = |op: OpId, added: &str| {
        let use_of = |factor: &str| AxisUse::Split(graph.rule(op).find(factor).unwrap());
        Config::new([use_of("n"), use_of(added)])
    };
    let configs = graph.op_ids().map(|op| match graph.node(op).op.kind() {
        "conv" => config(op, "c"),
        "conv_grad_input" => config(op, "o"),
        _ => Config::replicated(2),
    });
    let resharder = Resharder::new(&machine, machine.mesh());
    let assignment = Assignment::new(configs.collect());
    let shardings = Shardings::of(&program, graph, &resharder, &assignment).unwrap();
    let last = |stops: &Option<Vec<Spec>>| stops.as_ref().unwrap().last().unwrap().to_string();
    let convolutions = shardings.sites.iter().filter(|site| site.operands.len() == 2);
    let operands: Vec<Vec<String>> =
        convolutions.map(|site| site.operands.iter().map(last).collect()).collect();
    assert_eq!(
        operands,
        [
            ["[{gpu.0}, {}, {}, {gpu.1}]", "[{}, {}, {gpu.1}, {}]"],
            ["[{gpu.0}, {}, {}, {gpu.1}]", "[{?}, {?}, {}, {gpu.1}]"]
        ]
    );
    // The kernel is brought where the derivative needs it before it is turned round, and nothing is said of it then.
    let reversed = shardings.sites.iter().find(|site| site.operands.len() == 1).unwrap();
    assert_eq!(
        (last(&reversed.operands[0]).as_str(), &reversed.results[..]),
        ("[{}, {}, {}, {gpu.1}]", &[None][..])
    );
    let made = shardings.sites.iter().filter(|site| site.operands.len() == 2).flat_map(|site| &site.results);
    let made: Vec<Vec<String>> =
        made.map(|stops| stops.as_ref().unwrap().iter().map(Spec::to_string).collect()).collect();
    // The sum over the parts comes first.
    assert!(made.iter().all(|stops| stops[0] == "[{gpu.0}, {}, {}, {}]"), "{made:?}");
}

#[test]
fn megatron_stores_weights_by_columns_and_rows_in_turn() {
    let program = program("named_mlp_sgd");
    let (shardings, _) = planned(&program, "megatron");
    let weights = program.arguments.iter().zip(&shardings.arguments);
    let weights = weights.filter(|(t, _)| program.graph.tensor(**t).ty.rank() == 2).map(|(_, spec)| spec);
    let weights: Vec<String> = weights.take(2).map(Spec::to_string).collect();
    assert_eq!(weights, ["[{}, {gpu.0, gpu.1}]", "[{gpu.0, gpu.1}, {}]"]);
}
