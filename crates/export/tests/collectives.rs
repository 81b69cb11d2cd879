//! What is exchanged for a plan, message by message.

use flate2::read::GzDecoder;
use shardwright_cost::Resharder;
use shardwright_export::{Collective, collectives};
use shardwright_graph::Role;
use shardwright_machine::builtin;
use shardwright_plan::Constraints;
use shardwright_search::Control;
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_stablehlo::{ImportOptions, ImportedProgram, import};
use shardwright_strategies::{Planner, find};
use std::io::Read;

fn exchanged(program: &ImportedProgram, configs: &[Config]) -> Vec<Collective> {
    let machine = builtin("flat:8").unwrap();
    collectives(&program.graph, &Resharder::new(&machine, machine.mesh()), &Assignment::new(configs.to_vec()))
        .unwrap()
}

fn shown(collectives: &[Collective]) -> Vec<(&str, String, u64)> {
    collectives.iter().map(|c| (c.kind, c.axes.join(" "), c.bytes)).collect()
}

#[test]
fn a_tensor_in_blocks_is_gathered_along_one_dimension_after_the_other() {
    let text = "module { func.func public @main(%x: tensor<16x32xf32>) -> tensor<32x16xf32> {
        %0 = stablehlo.exponential %x : tensor<16x32xf32>
        %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<16x32xf32>) -> tensor<32x16xf32>
        return %1 : tensor<32x16xf32>
    } }";
    let program = import(text, "blocks", &ImportOptions::default()).unwrap();
    let split = |factors: [u8; 3]| Config::new(factors.map(AxisUse::Split));
    // Rows on two devices, columns on four, and the other way round: rows or columns on two come first.
    let whole = Config::replicated(3);
    let found = exchanged(&program, &[split([0, 1, 1]), whole.clone()]);
    let all = 16 * 32 * 4;
    assert_eq!(
        shown(&found),
        [("all-gather", "gpu.0".into(), all / 4), ("all-gather", "gpu.1 gpu.2".into(), all)]
    );
    let found = exchanged(&program, &[split([0, 0, 1]), whole.clone()]);
    assert_eq!(
        shown(&found),
        [("all-gather", "gpu.2".into(), all / 4), ("all-gather", "gpu.0 gpu.1".into(), all)]
    );
    let found = exchanged(&program, &[split([0, 0, 0]), whole]);
    assert_eq!(shown(&found), [("all-gather", "gpu.0 gpu.1 gpu.2".into(), all)]);
}

#[test]
fn every_loop_that_is_split_is_summed_up_for_itself() {
    let text = "module { func.func public @main(%x: tensor<8x8x4xf32>, %y: tensor<8x8x4xf32>) -> tensor<4x4xf32> {
        %0 = stablehlo.dot_general %x, %y, contracting_dims = [0, 1] x [0, 1] : (tensor<8x8x4xf32>, tensor<8x8x4xf32>) -> tensor<4x4xf32>
        return %0 : tensor<4x4xf32>
    } }";
    let program = import(text, "sums", &ImportOptions::default()).unwrap();
    let rule = program.graph.rule(program.graph.op_ids().next().unwrap());
    let sums: Vec<u8> = (0..rule.factors.len() as u8).filter(|&f| rule.is_reduction(f)).collect();
    let [first, second] = sums[..] else { panic!("two loops are summed up: {sums:?}") };
    let config = |factors: [u8; 3]| [Config::new(factors.map(AxisUse::Split))];
    assert_eq!(
        shown(&exchanged(&program, &config([first, second, second]))),
        [("all-reduce", "gpu.0".into(), 64), ("all-reduce", "gpu.1 gpu.2".into(), 64)]
    );
    assert_eq!(
        shown(&exchanged(&program, &config([first, first, first]))),
        [("all-reduce", "gpu.0 gpu.1 gpu.2".into(), 64)]
    );
}

#[test]
fn fully_sharded_loops_gather_slices_of_stacked_weights() {
    let path =
        format!("{}/../stablehlo/tests/stablehlo/scan_transformer.mlir.gz", env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    let program = import(&text, "scan", &ImportOptions::default()).unwrap();
    let machine = builtin("flat:2").unwrap();
    let planner = Planner::new(&program.graph, &machine, None, false);
    let solution = find("fsdp").unwrap().solve(&planner, &Constraints::default(), &Control::new()).unwrap();
    let resharder = &solution.context.resharder;
    let found = collectives(&program.graph, resharder, &solution.assignment).unwrap();
    let weight =
        |name: &str| program.graph.sources(Role::Parameter).any(|t| program.graph.tensor(t).name == name);
    let gathered: Vec<&Collective> = found.iter().filter(|c| c.kind == "all-gather").collect();
    assert!(gathered.len() >= 8, "every weight, in every iteration: {gathered:?}");
    assert!(!gathered.iter().any(|c| weight(&c.tensor)), "{gathered:?}");
}
