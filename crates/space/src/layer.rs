//! From the config of a layer's forward op to the configs of all its ops.
//!
//! Backward ops share their forward op's factor names, so an axis that splits `o` forwards splits `o`
//! backwards. Ops without the name (sums of gradients, updates) take what an axis does to a tensor that
//! the layer has already laid out: the factor that leads the sharded dimension. Where neither says anything, or the
//! factor does not divide, the axis repeats the op. A pin holds for the whole layer.

use crate::{
    config::{AxisUse, Config, divides},
    layout::{OpShapes, input_layout, output_layout},
};
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{FactorIndex, Graph, OpId, Phase, Rule, TensorId, TensorMap};
use shardwright_machine::{AxisId, Mesh};
use smallvec::SmallVec;

/// A layer's ops, ready to be given configs.
#[derive(Clone, Debug)]
pub struct LayerSplit {
    /// The ops in topological order.
    pub ops: Vec<OpId>,
    /// Where the forward op is among them.
    forward: usize,
    members: Vec<Member>,
}

#[derive(Clone, Debug)]
struct Member {
    /// The factor that carries the forward op's factor of the same position, by name.
    by_name: SmallVec<[Option<FactorIndex>; 6]>,
    update: bool,
    inputs: SmallVec<[TensorId; 4]>,
    outputs: SmallVec<[TensorId; 2]>,
}

/// Layouts of the tensors that the layer has touched so far.
#[derive(Default)]
struct Known(Vec<(TensorId, Layout)>);

impl Known {
    fn get(&self, tensor: TensorId) -> Option<&Layout> {
        self.0.iter().find(|(t, _)| *t == tensor).map(|(_, layout)| layout)
    }

    fn or_insert(&mut self, tensor: TensorId, layout: Layout) {
        if self.get(tensor).is_none() {
            self.0.push((tensor, layout));
        }
    }
}

/// Whether a name says where a dimension is and not what it is: `d0`, `d1`, ...
fn positional(name: &str) -> bool {
    name.strip_prefix('d').is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

/// The factor of `rule` that means the same as factor `f` of the forward op.
fn same_factor(forward: &Rule, f: usize, rule: &Rule) -> Option<FactorIndex> {
    let wanted = &forward.factors[f];
    let found = rule.find(wanted.name)?;
    // Dimensions that are only counted mean the same only if they have the same size.
    let size = rule.factors[found as usize].size;
    (!positional(wanted.name) || size == wanted.size).then_some(found)
}

impl LayerSplit {
    /// The layer of these ops (in topological order), one of which is `forward`.
    pub fn new(graph: &Graph, shapes: &[OpShapes], ops: Vec<OpId>, forward: OpId) -> Self {
        let rule = &shapes[forward.index()].rule;
        let members = ops
            .iter()
            .map(|&op| {
                let node = graph.node(op);
                let update = node.phase == Phase::Update;
                let by_name = (0..rule.factors.len())
                    .map(|f| if update { None } else { same_factor(rule, f, &shapes[op.index()].rule) })
                    .collect();
                Member { by_name, update, inputs: node.inputs.clone(), outputs: node.outputs.clone() }
            })
            .collect();
        let forward = ops.iter().position(|&op| op == forward).unwrap_or(0);
        Self { ops, forward, members }
    }

    /// The forward op.
    pub fn forward(&self) -> OpId {
        self.ops[self.forward]
    }

    /// The configs of all the layer's ops under a config of its forward op.
    pub fn configs(&self, shapes: &[OpShapes], mesh: &Mesh, forward: &Config) -> Vec<Config> {
        let mut found: Vec<Option<Config>> = vec![None; self.ops.len()];
        let mut known = Known::default();
        let mut settle = |at: usize, config: Config, known: &mut Known| {
            let shapes = &shapes[self.ops[at].index()];
            for (o, &t) in self.members[at].outputs.iter().enumerate() {
                known.or_insert(t, output_layout(shapes, o, &config, mesh));
            }
            for (i, &t) in self.members[at].inputs.iter().enumerate() {
                known.or_insert(t, input_layout(shapes, i, &config, mesh));
            }
            found[at] = Some(config);
        };
        settle(self.forward, forward.clone(), &mut known);
        let named = |at: usize| self.members[at].by_name.iter().any(Option::is_some);
        let mut open: Vec<usize> = Vec::new();
        for at in (0..self.ops.len()).filter(|&at| at != self.forward) {
            if named(at) {
                let config = self.follow(at, shapes, mesh, forward, &known);
                settle(at, config, &mut known);
            } else {
                open.push(at);
            }
        }
        // What is left follows tensors that lie somewhere already, until nothing new is learnt.
        loop {
            let before = open.len();
            open.retain(|&at| {
                let member = &self.members[at];
                let touched = member.inputs.iter().chain(&member.outputs).any(|&t| known.get(t).is_some());
                if touched {
                    let config = self.follow(at, shapes, mesh, forward, &known);
                    settle(at, config, &mut known);
                }
                !touched
            });
            if open.len() == before {
                break;
            }
        }
        let alone = Config::new(forward.uses().iter().map(|&used| match used {
            AxisUse::Split(_) => AxisUse::Replicate,
            other => other,
        }));
        found.into_iter().map(|config| config.unwrap_or_else(|| alone.clone())).collect()
    }

    /// The config of one op: by name, else by the tensors that are known.
    fn follow(&self, at: usize, shapes: &[OpShapes], mesh: &Mesh, forward: &Config, known: &Known) -> Config {
        let (member, rule) = (&self.members[at], &shapes[self.ops[at].index()].rule);
        let mut config = Config::replicated(mesh.len());
        let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
        for (a, axis) in mesh.axes().iter().enumerate() {
            let id = AxisId(a as u32);
            let AxisUse::Split(factor) = forward.get(id) else {
                config.set(id, forward.get(id));
                continue;
            };
            let fits = |f: &FactorIndex| divides(rule, *f, parts[*f as usize], axis.size);
            let by_name = member.by_name[factor as usize].filter(fits);
            let chosen = by_name.or_else(|| {
                operands(member, rule)
                    .find_map(|(map, t)| led_factor(rule, map, known.get(t)?, id).filter(fits))
            });
            if let Some(f) = chosen {
                parts[f as usize] *= u64::from(axis.size);
                config.set(id, AxisUse::Split(f));
            }
        }
        config
    }
}

/// The operands that an op may follow. An update follows its weight, whatever the gradient's layout: the
/// weight has to end up where it was.
fn operands<'a>(member: &'a Member, rule: &'a Rule) -> impl Iterator<Item = (&'a TensorMap, TensorId)> {
    let inputs = rule.inputs.iter().zip(member.inputs.iter().copied());
    let outputs = rule.outputs.iter().zip(member.outputs.iter().copied());
    inputs.chain(outputs).take(if member.update { 1 } else { usize::MAX })
}

/// The factor that leads the dimension which an axis shards.
fn led_factor(rule: &Rule, map: &TensorMap, layout: &Layout, axis: AxisId) -> Option<FactorIndex> {
    let Placement::Shard(dim) = layout.get(axis) else { return None };
    rule.leading(map.dims.get(usize::from(dim))?)
}
