//! Models under random configs, every op its own or tied to its layer, with pins and without: the engine gives what the
//! reference executor gives, to the bit, though one device is slow and others take over its work. (That this is what the serial program gives is tested beside the executor.)

use shardwright_cost::Relayouts;
use shardwright_engine::{Guide, Options, run};
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::{Graph, OpId, Optimizer, Rule};
use shardwright_lower::{ParallelGraph, lower};
use shardwright_machine::{Mesh, builtin};
use shardwright_place::Planned;
use shardwright_runtime::{Reference, mix};
use shardwright_space::{AxisUse, Config, LayerSplit, OpShapes};

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 11, steps: 8, trace: false, finals: true, slow: &[], assist: None };

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 += 1;
        (mix(self.0) % limit as u64) as usize
    }
}

/// A random config that the rule allows.
fn random_config(random: &mut Random, rule: &Rule, mesh: &Mesh, pins: bool) -> Config {
    let mut config = Config::replicated(mesh.len());
    for axis in mesh.all().iter() {
        let legal = |&used: &AxisUse| {
            let mut with = config.clone();
            with.set(axis, used);
            with.check(rule, mesh).is_ok()
        };
        let splits = (0..rule.factors.len()).map(|f| AxisUse::Split(f as u8));
        let mut choices: Vec<AxisUse> = splits.filter(legal).chain([AxisUse::Replicate]).collect();
        if pins && random.below(4) == 0 {
            choices = (0..mesh.axis(axis).size).map(|digit| AxisUse::Pin(digit as u16)).collect();
        }
        config.set(axis, choices[random.below(choices.len())]);
    }
    config
}

fn configs(graph: &Graph, mesh: &Mesh, random: &mut Random, tied: bool, pins: bool) -> Vec<Config> {
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
    let mut configs: Vec<Config> =
        shapes.iter().map(|s| random_config(random, &s.rule, mesh, pins)).collect();
    for (at, layer) in graph.layers.iter().enumerate().filter(|_| tied) {
        let ops: Vec<OpId> = graph.op_ids().filter(|&op| graph.node(op).layer.index() == at).collect();
        let split = LayerSplit::new(graph, &shapes, ops, layer.forward);
        let forward = configs[layer.forward.index()].clone();
        for (op, config) in split.ops.iter().zip(split.configs(&shapes, mesh, &forward)) {
            configs[op.index()] = config;
        }
    }
    configs
}

/// A plan in which everything takes a microsecond.
fn guide(program: &ParallelGraph) -> Guide {
    let planned = |at: u64| Some(Planned { start: at * 1000, duration: 1000 });
    let of_device = |_| (0..program.instructions.len() as u64).map(planned).collect();
    Guide(program.devices().map(of_device).collect())
}

#[test]
fn random_configs_give_the_reference_executors_bits() {
    let models = [
        "mlp:batch=8,input=12,hidden=8,layers=2,classes=6",
        "lenet5:batch=4,image=12,width=0.5,classes=4",
        "gpt:batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4",
        "moe:batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4,experts=4",
        "rnnlm:batch=4,unroll=2,hidden=4,vocab=12",
    ];
    let (mut pinned, mut moved) = (0, 0);
    for (m, model) in models.iter().enumerate() {
        let options = BuildOptions { optimizer: Optimizer::adam(0.01), ..BuildOptions::default() };
        let graph = build(model, &options).unwrap();
        for (c, devices) in [2, 4, 6, 8].into_iter().enumerate() {
            let machine = builtin(&format!("flat:{devices}")).unwrap();
            let relayouts = Relayouts::new(&machine, machine.mesh());
            for case in 0..4 {
                let mut random = Random((m * 100 + c * 10 + case) as u64 * 1_000_003);
                let configs = configs(&graph, machine.mesh(), &mut random, case % 2 == 0, case / 2 == 0);
                pinned +=
                    configs.iter().filter(|c| c.uses().iter().any(|u| matches!(u, AxisUse::Pin(_)))).count();
                let program = lower(&graph, &relayouts, &configs).unwrap();
                let what = format!("{model} on {devices}, case {case}");
                let guide = guide(&program);
                let assisted = Options { slow: &[(1, 30.0)], assist: Some(&guide), ..OPTIONS };
                let outcomes = [OPTIONS, assisted]
                    .map(|options| run(&graph, &program, options).unwrap_or_else(|e| panic!("{what}: {e}")));
                moved += outcomes[1].devices.iter().map(|d| d.helped).sum::<u64>();
                let mut reference = Reference::new(&graph, &program, OPTIONS.seed);
                for step in 0..OPTIONS.steps {
                    reference.step().unwrap();
                    let losses = outcomes.each_ref().map(|outcome| Some(outcome.losses[step]));
                    assert_eq!(losses, [reference.loss(); 2], "{what}");
                }
                for (at, carry) in program.carries.iter().enumerate() {
                    let whole = reference.whole(carry.old);
                    for (tensor, value) in outcomes.iter().map(|outcome| &outcome.finals[at]) {
                        assert_eq!(whole.as_ref(), Some(value), "{what}: {}", graph.tensor(*tensor).name);
                    }
                }
            }
        }
    }
    assert!(pinned > 100, "{pinned} ops are pinned");
    assert!(moved > 100, "{moved} tasks were run by others");
}
