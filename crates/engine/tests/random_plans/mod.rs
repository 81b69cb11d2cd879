//! Random configs of a model's ops, for tests and for `examples/random_runs.rs`.

use shardwright_graph::{Graph, OpId, Rule};
use shardwright_machine::Mesh;
use shardwright_runtime::mix;
use shardwright_space::{AxisUse, Config, LayerSplit, OpShapes};

/// Random numbers from a seed.
pub struct Random(pub u64);

impl Random {
    /// A number below a limit.
    pub fn below(&mut self, limit: usize) -> usize {
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

/// A random config of every op: those of a layer follow from its forward op's, if they are tied.
pub fn configs(graph: &Graph, mesh: &Mesh, random: &mut Random, tied: bool, pins: bool) -> Vec<Config> {
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
