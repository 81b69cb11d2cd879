//! Golden values: MLPs of square layers in several sizes, computed by an independent implementation of the authors'
//! formulas.

use shardwright_cost::Comm;
use shardwright_graph::Graph;
use shardwright_machine::builtin;
use shardwright_search::Control;
use shardwright_soybean::{Cuts, Objective, SoyBeanError, Tiling, count, solve};
use shardwright_space::{AxisUse, Config, OpShapes};
use shardwright_zoo::{BuildOptions, build};

fn mlp(batch: u64, hidden: u64, layers: u64) -> Graph {
    let model = format!("mlp:batch={batch},hidden={hidden},layers={layers},loss=elementwise");
    build(&model, &BuildOptions::default()).unwrap()
}

fn shapes(graph: &Graph) -> Vec<OpShapes> {
    graph.op_ids().map(|op| OpShapes::of(graph, op)).collect()
}

fn cuts(graph: &Graph, devices: u32) -> Result<Cuts, SoyBeanError> {
    let machine = builtin(&format!("flat:{devices}")).unwrap();
    solve(graph, &shapes(graph), &Comm::new(&machine, machine.mesh()), Objective::Elements, &Control::new())
}

/// Every op split along its first loop, the samples; weights replicated.
fn data_parallel(graph: &Graph, devices: u32) -> Cuts {
    let machine = builtin(&format!("flat:{devices}")).unwrap();
    let mesh = machine.mesh();
    let shapes = shapes(graph);
    let samples = |s: &OpShapes| s.rule.find("n").or_else(|| s.rule.find("d0"));
    let config = |s: &OpShapes| match samples(s) {
        Some(f) => Config::new((0..mesh.len()).map(|_| AxisUse::Split(f))),
        None => Config::replicated(mesh.len()),
    };
    let configs: Vec<Config> = shapes.iter().map(config).collect();
    count(graph, &shapes, &Comm::new(&machine, mesh), &configs, &Control::new()).unwrap()
}

#[test]
fn the_golden_values_are_exact() {
    for (batch, hidden, layers, expected) in [
        (400, 300, 5, &[780_000, 480_000][..]),
        (512, 8192, 4, &[25_165_824, 18_874_368, 12_582_912]),
        (2048, 1024, 5, &[10_485_760, 8_912_896, 4_456_448]),
    ] {
        let graph = mlp(batch, hidden, layers);
        for k in 1..=expected.len() {
            let found = cuts(&graph, 1 << k).unwrap();
            assert_eq!(found.cuts, expected[..k], "b{batch} h{hidden} L{layers}, {k} cuts");
            let total = expected[..k].iter().enumerate().map(|(i, c)| c << i).sum::<u64>();
            assert_eq!(found.total_elements(), total);
            assert!(found.proved);
        }
    }
}

#[test]
fn forced_data_parallelism_is_the_closed_form() {
    for (batch, hidden, layers) in [(400, 300, 5), (512, 8192, 4), (2048, 1024, 5), (64, 64, 2)] {
        let graph = mlp(batch, hidden, layers);
        for devices in [2u32, 4, 8, 16].into_iter().filter(|&n| batch % u64::from(n) == 0) {
            let found = data_parallel(&graph, devices);
            let closed = 2 * (u64::from(devices) - 1) * layers * hidden * hidden;
            assert_eq!(found.total_elements(), closed, "b{batch} h{hidden} L{layers} n{devices}");
        }
    }
}

#[test]
fn no_size_moves_more_than_data_parallelism() {
    for layers in [2, 3, 5] {
        for batch in [64, 400, 1024, 4096] {
            for hidden in [64, 300, 1024, 8192] {
                let graph = mlp(batch, hidden, layers);
                for devices in [2, 4, 8] {
                    let (own, data) = (cuts(&graph, devices).unwrap(), data_parallel(&graph, devices));
                    assert!(
                        own.total_elements() <= data.total_elements(),
                        "b{batch} h{hidden} L{layers} n{devices}: {:?} against {:?}",
                        own.cuts,
                        data.cuts
                    );
                }
            }
        }
    }
}

#[test]
fn devices_that_are_not_a_power_of_two_are_refused() {
    let graph = mlp(48, 48, 2);
    for devices in [3, 6, 12] {
        let error = cuts(&graph, devices).unwrap_err().to_string();
        assert!(error.contains(&format!("{devices} is not a power of two")), "{error}");
    }
    assert!(cuts(&graph, 1).unwrap().cuts.is_empty());
}

#[test]
fn a_weight_its_gradient_and_its_next_value_lie_alike() {
    let graph = mlp(512, 8192, 4);
    let found = cuts(&graph, 8).unwrap();
    for pair in &graph.gradients {
        assert_eq!(found.tilings[pair.parameter.index()], found.tilings[pair.gradient.index()]);
    }
    for carry in &graph.carries {
        assert_eq!(found.tilings[carry.old.index()], found.tilings[carry.new.index()]);
    }
    assert!(found.tilings[graph.carries[0].new.index()].iter().any(|t| *t != Tiling::Replicated));
}

#[test]
fn weighing_by_time_changes_the_tilings_and_never_the_first_cuts_least_count() {
    let graph = mlp(64, 16, 5);
    let machine = builtin("k80x8").unwrap();
    let comm = Comm::new(&machine, machine.mesh());
    let by = |objective| solve(&graph, &shapes(&graph), &comm, objective, &Control::new()).unwrap();
    let (elements, time) = (by(Objective::Elements), by(Objective::Time));
    // Layers this small are dominated by latency: fewer, larger transfers win, and more elements move.
    assert!(elements.cuts[0] <= time.cuts[0]);
    assert_ne!(elements.configs, time.configs);
}
