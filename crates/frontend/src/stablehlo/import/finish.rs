//! From steps to a graph: leaves out what no result needs, gives arguments their roles and names, ties the
//! iterations of loops, and builds.

use super::{
    super::{
        Imported,
        error::{Fault, Result},
        syntax::{Attribute, Operation},
    },
    Importer, body_of,
    roles::{Roles, infer, pointwise},
    sites::Absorbed,
    steps::{Origin, Slot, Source, Step, Steps},
    value::Value,
};
use rustc_hash::FxHashMap;
use shardwright_graph::{DType, GraphBuilder, Init, LayerId, Op, Phase, Real, Role, Rule, TensorId};

impl<'a> Importer<'a> {
    pub fn finish(mut self, main: &'a Operation<'a>, results: &[Value]) -> Result<Imported> {
        self.steps.at = main.at;
        self.steps.name = "results".into();
        let results = results.iter().map(|value| value.slot(&mut self.steps)).collect::<Result<Vec<_>>>()?;
        let block = body_of(main)?;
        let arguments: Vec<Slot> = (0..block.arguments.len()).map(|i| Slot(i as u32)).collect();
        let donated = donates(main);
        let roles = infer(&self.steps, &arguments, &results, donated);
        if roles.next.iter().all(Option::is_none) && self.options.roles.is_empty() {
            self.note("no argument has its next value among the results: planned as a forward pass, all arguments as \
                 inputs; `--role NAME=parameter` tells weights".into());
        }
        let names = self.argument_names(main, &roles);
        let roles = self.told(roles, &names, main.at)?;
        let name = match self.program.module.attribute("sym_name") {
            Some(Attribute::Text(name)) => (*name).to_string(),
            _ => "stablehlo".into(),
        };
        let absorbed = absorb_transpositions(&mut self.steps, &results);
        let live = live(&self.steps, &results);
        let mut build = Build {
            builder: GraphBuilder::new(name),
            tensors: vec![None; self.steps.slots()],
            leaders: FxHashMap::default(),
            at: main.at,
        };
        let bounds = id_bounds(&self.steps);
        for (i, &slot) in arguments.iter().enumerate() {
            let ty = self.steps.ty(slot).clone();
            let init = match (roles.roles[i], ty.dtype) {
                (Role::Parameter, dtype) if dtype.is_float() => Init::Normal(Real(0.02)),
                (Role::OptimizerState | Role::Parameter, _) => Init::Constant(Real(0.0)),
                (_, DType::Bool) => Init::Below(2),
                (_, dtype) if dtype.is_int() => Init::Below(bounds[slot.0 as usize].unwrap_or(2)),
                _ => Init::Normal(Real(1.0)),
            };
            let fail = |e: shardwright_graph::BuildError| Fault::new(main.at, e.to_string());
            let tensor = build.builder.source(&names[i], ty, roles.roles[i], init).map_err(fail)?;
            build.tensors[slot.0 as usize] = Some(tensor);
        }
        for (step, _) in self.steps.steps.iter().zip(&live).filter(|(_, live)| **live) {
            build.add(&self.steps, step)?;
        }
        let sites = self.sites.finish(&self.steps, &absorbed, &build.tensors, build.builder.graph());
        let imported = build.finish(&self.steps, &roles, &arguments, &results, self.notes)?;
        Ok(Imported { sites, ..imported })
    }

    /// Roles that people told by name.
    fn told(&self, mut roles: Roles, names: &[String], at: usize) -> Result<Roles> {
        for (pattern, role) in &self.options.roles {
            let mut met = false;
            for (i, name) in names.iter().enumerate() {
                if matches(pattern, name) || matches(pattern, &format!("arg{i}")) {
                    met = true;
                    roles.roles[i] = *role;
                    if !std::matches!(role, Role::Parameter | Role::OptimizerState) {
                        roles.next[i] = None;
                    }
                }
            }
            if !met {
                let known = names.iter().take(12).cloned().collect::<Vec<_>>().join(", ");
                return Err(Fault::new(
                    at,
                    format!("no argument is called `{pattern}`; there are {known}, ..."),
                ));
            }
        }
        Ok(roles)
    }

    /// An argument's name: what the text calls it, else the path of the result that is its next value, else its
    /// position.
    fn argument_names(&self, main: &'a Operation<'a>, roles: &Roles) -> Vec<String> {
        let infos = match main.attribute("res_attrs") {
            Some(Attribute::List(items)) => &items[..],
            _ => &[],
        };
        let result_path = |r: usize| match infos.get(r) {
            Some(Attribute::Dict(entries)) => entries.iter().find_map(|(key, value)| match value {
                Attribute::Text(text) if *key == "jax.result_info" => {
                    Some(path(text.strip_prefix("result").unwrap_or(text)))
                }
                _ => None,
            }),
            _ => None,
        };
        let arguments = main.regions.first().map_or(&[][..], |block| &block.arguments[..]);
        let name = |(i, argument): (usize, &super::super::syntax::Argument<'_>)| {
            let own = argument.location.and_then(|text| self.location_name(text)).map(|name| path(&name));
            let next = || roles.next[i].and_then(result_path).filter(|path| !path.is_empty());
            own.filter(|name| !name.is_empty()).or_else(next).unwrap_or_else(|| format!("arg{i}"))
        };
        arguments.iter().enumerate().map(name).collect()
    }
}

/// Whether the caller gives some argument's memory away, which training steps do with their state.
fn donates(main: &Operation<'_>) -> bool {
    let Some(Attribute::List(arguments)) = main.attribute("arg_attrs") else { return false };
    arguments.iter().any(|argument| match argument {
        Attribute::Dict(entries) => {
            entries.iter().any(|(key, _)| std::matches!(*key, "tf.aliasing_output" | "jax.buffer_donor"))
        }
        _ => false,
    })
}

/// `params['blocks'][0]['w']` as `params.blocks.0.w`.
fn path(text: &str) -> String {
    let words = text.split(['[', ']', '\'', '"', '.', '\\']).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(".")
}

/// Whether a name fits a pattern in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(head) else { return false };
    // The shortest piece for each star but the last suffices.
    let mut rest = rest;
    let mut pieces = tail.split('*').peekable();
    while let Some(piece) = pieces.next() {
        if pieces.peek().is_none() {
            return rest.ends_with(piece);
        }
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    true
}

/// Which steps some result needs.
fn live(steps: &Steps, results: &[Slot]) -> Vec<bool> {
    let mut needed = vec![false; steps.slots()];
    for slot in results {
        needed[slot.0 as usize] = true;
    }
    let mut live = vec![false; steps.steps.len()];
    for (i, step) in steps.steps.iter().enumerate().rev() {
        if step.outputs.iter().any(|o| needed[o.0 as usize]) {
            live[i] = true;
            for input in &step.inputs {
                needed[input.0 as usize] = true;
            }
        }
    }
    live
}

/// A product that is read by one transposition only makes its result in that order at once; says which ones do.
fn absorb_transpositions(steps: &mut Steps, results: &[Slot]) -> Absorbed {
    let mut absorbed = Absorbed::default();
    let live = live(steps, results);
    let mut readers = vec![0u32; steps.slots()];
    for (step, _) in steps.steps.iter().zip(&live).filter(|(_, live)| **live) {
        for input in &step.inputs {
            readers[input.0 as usize] += 1;
        }
    }
    for slot in results {
        readers[slot.0 as usize] += 1;
    }
    for i in (0..steps.steps.len()).filter(|&i| live[i]) {
        let Op::Transpose(transpose) = &steps.steps[i].op else { continue };
        let from = steps.steps[i].inputs[0];
        let Source::Step(maker) = steps.source(from) else { continue };
        if readers[from.0 as usize] != 1 || !std::matches!(steps.steps[maker as usize].op, Op::Contract(_)) {
            continue;
        }
        let (perm, outputs) = (transpose.perm.clone(), steps.steps[i].outputs.clone());
        let producer = &mut steps.steps[maker as usize];
        let Op::Contract(contract) = &mut producer.op else { continue };
        contract.result = perm.iter().map(|&p| contract.result[p]).collect();
        producer.outputs = outputs.clone();
        // The transposition is left without anything to do, and so without readers.
        let idle = &mut steps.steps[i];
        idle.outputs = smallvec::smallvec![from];
        steps.move_output(outputs[0], maker);
        steps.move_output(from, i as u32);
        absorbed.insert(from, (outputs[0], perm));
    }
    absorbed
}

/// For arguments that are ids: the least table that they count in.
fn id_bounds(steps: &Steps) -> Vec<Option<u64>> {
    let mut bounds: Vec<Option<u64>> = vec![None; steps.slots()];
    let lower = |bounds: &mut Vec<Option<u64>>, slot: Slot, bound: Option<u64>| {
        let known = &mut bounds[slot.0 as usize];
        *known = match (*known, bound) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    };
    for step in steps.steps.iter().rev() {
        match &step.op {
            Op::Gather(op) => lower(&mut bounds, step.inputs[1], Some(op.extent)),
            Op::TakeAlong(op) => lower(&mut bounds, step.inputs[1], Some(op.extent)),
            Op::ScatterAdd(op) => lower(&mut bounds, step.inputs[0], Some(op.extent)),
            Op::PutAlong(op) => lower(&mut bounds, step.inputs[0], Some(op.extent)),
            op if pointwise(op) => {
                let bound = bounds[step.outputs[0].0 as usize];
                for &input in step.inputs.iter().filter(|&&input| steps.ty(input).dtype.is_int()) {
                    lower(&mut bounds, input, bound);
                }
            }
            _ => {}
        }
    }
    bounds
}

/// The graph while it is built.
struct Build {
    builder: GraphBuilder,
    tensors: Vec<Option<TensorId>>,
    /// The first op of each origin: its layer and its rule.
    leaders: FxHashMap<Origin, (LayerId, Rule)>,
    at: usize,
}

impl Build {
    fn tensor(&mut self, steps: &Steps, slot: Slot) -> Result<TensorId> {
        if let Some(tensor) = self.tensors[slot.0 as usize] {
            return Ok(tensor);
        }
        let Source::Number(value) = steps.source(slot) else {
            return Err(Fault::new(self.at, "a value is used before it is made"));
        };
        let ty = steps.ty(slot).clone();
        let made = self.builder.source(&format!("{value}"), ty, Role::Constant, Init::Constant(Real(value)));
        let tensor = made.map_err(|e| Fault::new(self.at, e.to_string()))?;
        self.tensors[slot.0 as usize] = Some(tensor);
        Ok(tensor)
    }

    fn add(&mut self, steps: &Steps, step: &Step) -> Result<()> {
        let inputs = step.inputs.iter().map(|&slot| self.tensor(steps, slot)).collect::<Result<Vec<_>>>()?;
        let types: Vec<_> = inputs.iter().map(|&t| self.builder.ty(t).clone()).collect();
        let made: Vec<_> = step.outputs.iter().map(|&slot| steps.ty(slot).clone()).collect();
        let rule = step.op.rule(&types, &made);
        let fail = |e: shardwright_graph::BuildError| Fault::new(step.origin.1, e.to_string());
        let tied =
            self.leaders.get(&step.origin).filter(|(_, first)| *first == rule).map(|(layer, _)| *layer);
        let outputs = match tied {
            Some(layer) => self
                .builder
                .in_layer(Phase::Forward, layer, |builder| builder.add(&step.name, step.op.clone(), &inputs))
                .map_err(fail)?,
            None => {
                let outputs = self.builder.add(&step.name, step.op.clone(), &inputs).map_err(fail)?;
                let layer = LayerId::new(self.builder.graph().layers.len() - 1);
                self.leaders.entry(step.origin).or_insert((layer, rule));
                outputs
            }
        };
        for (slot, tensor) in step.outputs.iter().zip(outputs) {
            self.tensors[slot.0 as usize] = Some(tensor);
        }
        Ok(())
    }

    fn finish(
        mut self,
        steps: &Steps,
        roles: &Roles,
        arguments: &[Slot],
        results: &[Slot],
        notes: Vec<String>,
    ) -> Result<Imported> {
        let tensors = results.iter().map(|&slot| self.tensor(steps, slot)).collect::<Result<Vec<_>>>()?;
        let given = arguments.iter().map(|&slot| self.tensor(steps, slot)).collect::<Result<Vec<_>>>()?;
        let mut carried = vec![false; results.len()];
        let mut made = std::collections::HashSet::new();
        for (&old, next) in given.iter().zip(&roles.next) {
            let Some(r) = *next else { continue };
            // A tensor becomes one thing only, and what no op makes does not change.
            if self.builder.graph().tensor(tensors[r]).producer.is_some() && made.insert(tensors[r]) {
                self.builder.record_carry(old, tensors[r]);
                carried[r] = true;
            }
        }
        let loss = (0..results.len()).find(|&r| {
            let ty = steps.ty(results[r]);
            !carried[r] && ty.rank() == 0 && ty.dtype.is_float()
        });
        let others = (0..results.len()).filter(|&r| !carried[r] && Some(r) != loss);
        for r in loss.into_iter().chain(others) {
            self.builder.output(tensors[r]);
        }
        let graph = self.builder.finish();
        shardwright_graph::verify::verify(&graph).map_err(|e| Fault::new(self.at, e.to_string()))?;
        Ok(Imported { graph, arguments: given, results: tensors, notes, sites: Vec::new() })
    }
}
