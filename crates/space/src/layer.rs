//! The configs of all ops of a layer, derived from the config of its forward op.
//!
//! Backward ops share their forward op's factor names, so an axis that splits `o` forwards splits `o` backwards. Ops
//! without the name (sums of gradients, updates) follow a tensor whose layout the layer has already fixed: the axis
//! splits the factor that leads the sharded dimension. If neither applies, or the factor does not divide, the axis
//! replicates the op. A pin holds for the whole layer.

use crate::{
    config::{AxisUse, Config},
    layout::{OpShapes, input_layout, output_layout},
};
use shardwright_cost::{Layout, Placement, Reduction};
use shardwright_graph::{FactorIndex, Graph, OpId, Phase, Rule, TensorId, TensorMap};
use shardwright_machine::{AxisId, Mesh};
use smallvec::SmallVec;

/// The ops of a layer, with the links between their factors.
#[derive(Clone, Debug)]
pub struct LayerSplit {
    /// The ops in topological order.
    pub ops: Vec<OpId>,
    /// Position of the forward op in `ops`.
    forward: usize,
    members: Vec<Member>,
}

#[derive(Clone, Debug)]
struct Member {
    /// Per factor of the forward op: this op's factor of the same name.
    by_name: SmallVec<[Option<FactorIndex>; 6]>,
    update: bool,
    inputs: SmallVec<[TensorId; 4]>,
    outputs: SmallVec<[TensorId; 2]>,
}

/// Layouts of the tensors that the layer's ops have touched so far.
#[derive(Default)]
struct KnownLayouts(Vec<(TensorId, Layout)>);

impl KnownLayouts {
    fn get(&self, tensor: TensorId) -> Option<&Layout> {
        self.0.iter().find(|(t, _)| *t == tensor).map(|(_, layout)| layout)
    }

    fn or_insert(&mut self, tensor: TensorId, layout: Layout) {
        if self.get(tensor).is_none() {
            self.0.push((tensor, layout));
        }
    }
}

/// Whether a factor's name only gives the position of a dimension: `d0`, `d1`, ...
fn positional(name: &str) -> bool {
    name.strip_prefix('d').is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

/// The factor of `rule` that corresponds to factor `f` of the forward op.
fn same_factor(forward: &Rule, f: usize, rule: &Rule) -> Option<FactorIndex> {
    let wanted = &forward.factors[f];
    let found = rule.find(wanted.name)?;
    // Positional names correspond only if the sizes are equal.
    let size = rule.factors[found as usize].size;
    (!positional(wanted.name) || size == wanted.size).then_some(found)
}

impl LayerSplit {
    /// The layer of these ops, in topological order. `forward` is one of them.
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
                // A view of a weight has the weight's layout: updates follow those who read it.
                let inputs = node.inputs.iter().map(|&t| graph.held_weight(t)).collect();
                Member { by_name, update, inputs, outputs: node.outputs.clone() }
            })
            .collect();
        let position = ops.iter().position(|&op| op == forward);
        debug_assert!(position.is_some(), "the forward op is one of the layer's ops");
        let forward = position.unwrap_or(0);
        Self { ops, forward, members }
    }

    /// The forward op.
    pub fn forward(&self) -> OpId {
        self.ops[self.forward]
    }

    /// The configs of all the layer's ops under a config of its forward op.
    pub fn configs(&self, shapes: &[OpShapes], mesh: &Mesh, forward: &Config) -> Vec<Config> {
        let mut configs: Vec<Option<Config>> = vec![None; self.ops.len()];
        let mut known = KnownLayouts::default();
        let mut settle = |at: usize, config: Config, known: &mut KnownLayouts| {
            let shapes = &shapes[self.ops[at].index()];
            for (o, &t) in self.members[at].outputs.iter().enumerate() {
                known.or_insert(t, output_layout(shapes, o, &config, mesh));
            }
            for (i, &t) in self.members[at].inputs.iter().enumerate() {
                known.or_insert(t, input_layout(shapes, i, &config, mesh));
            }
            configs[at] = Some(config);
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
        // The remaining ops follow tensors with known layouts, until no further op touches one.
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
        let replicated = Config::new(forward.uses().iter().map(|&used| match used {
            AxisUse::Split(_) => AxisUse::Replicate,
            other => other,
        }));
        // An op without any tensor of a known layout is replicated.
        configs.into_iter().map(|config| config.unwrap_or_else(|| replicated.clone())).collect()
    }

    /// The config of one op: by factor name, else by tensors with known layouts.
    fn follow(
        &self,
        at: usize,
        shapes: &[OpShapes],
        mesh: &Mesh,
        forward: &Config,
        known: &KnownLayouts,
    ) -> Config {
        let (member, rule) = (&self.members[at], &shapes[self.ops[at].index()].rule);
        let mut config = Config::replicated(mesh.len());
        let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
        for (a, axis) in mesh.axes().iter().enumerate() {
            let id = AxisId(a as u32);
            let AxisUse::Split(factor) = forward.get(id) else {
                config.set(id, forward.get(id));
                continue;
            };
            let fits = |f: &FactorIndex| rule.divides(*f, parts[*f as usize], axis.size);
            let by_name = member.by_name[factor as usize].filter(fits);
            let chosen = by_name.or_else(|| {
                operands(member, rule).find_map(|(map, t)| {
                    let layout = known.get(t)?;
                    // Partial sums are added up as they are, where the op can.
                    let partial =
                        map.partial.filter(|_| layout.get(id) == Placement::Partial(Reduction::Sum));
                    partial.or_else(|| led_factor(rule, map, layout, id)).filter(fits)
                })
            });
            if let Some(f) = chosen {
                parts[f as usize] *= u64::from(axis.size);
                config.set(id, AxisUse::Split(f));
            }
        }
        config
    }
}

/// The operands that an op may follow. An update only follows its weight, whatever the gradient's layout: the new
/// weight has the layout of the old one.
fn operands<'a>(member: &'a Member, rule: &'a Rule) -> impl Iterator<Item = (&'a TensorMap, TensorId)> {
    let inputs = rule.inputs.iter().zip(member.inputs.iter().copied());
    let outputs = rule.outputs.iter().zip(member.outputs.iter().copied());
    inputs.chain(outputs).take(if member.update { 1 } else { usize::MAX })
}

/// The factor that leads the dimension that an axis shards.
fn led_factor(rule: &Rule, map: &TensorMap, layout: &Layout, axis: AxisId) -> Option<FactorIndex> {
    let Placement::Shard(dim) = layout.get(axis) else { return None };
    rule.leading(map.dims.get(usize::from(dim))?)
}
