//! Builds the graph from the draft: drops unused ops, assigns roles and names to arguments, and lets the iterations of
//! loops share layers.

use super::{
    super::{
        ImportedProgram,
        error::{Result, TextError},
        syntax::{Attribute, Operation},
    },
    Importer, body_of,
    draft::{DraftGraph, DraftOp, Origin, Slot, Source},
    roles::{Roles, infer, pointwise},
    shown,
    sites::{AbsorbedTransposes, ReplacedSlots},
    value::{Stack, SymbolicValue},
};
use rustc_hash::FxHashMap;
use shardwright_graph::{
    DType, GraphBuilder, Init, LayerId, Op, Phase, Real, Role, Rule, Tensor, TensorId, fuse_attention,
};
use std::rc::Rc;

impl<'a> Importer<'a> {
    pub fn finish(mut self, main: &'a Operation<'a>, results: &[SymbolicValue]) -> Result<ImportedProgram> {
        self.draft.at = main.at;
        self.draft.name = "results".into();
        let results = results.iter().map(|value| value.slot(&mut self.draft)).collect::<Result<Vec<_>>>()?;
        let block = body_of(main)?;
        let arguments: Vec<Slot> = (0..block.arguments.len()).map(|i| Slot(i as u32)).collect();
        let donated = donates(main);
        let roles = infer(&self.draft, &arguments, &results, donated);
        if roles.next.iter().all(Option::is_none) && self.options.roles.is_empty() {
            self.note("no argument has its next value among the results: planned as a forward pass, all arguments as \
                 inputs; `--role NAME=parameter` tells weights".into());
        }
        let names = self.argument_names(main, &roles);
        let roles = self.told(roles, &names, main.at)?;
        let name = match self.program.module.attribute("sym_name") {
            Some(Attribute::Text(name)) => shown(name),
            _ => "stablehlo".into(),
        };
        let absorbed = absorb_transposes(&mut self.draft, &results);
        let live = live(&self.draft, &results);
        let mut build = Assembler {
            builder: GraphBuilder::new(name),
            tensors: vec![None; self.draft.slots()],
            leaders: FxHashMap::default(),
            at: main.at,
        };
        let bounds = id_bounds(&self.draft);
        for (i, &slot) in arguments.iter().enumerate() {
            let ty = self.draft.ty(slot).clone();
            let init = match (roles.roles[i], ty.dtype) {
                (Role::Parameter, dtype) if dtype.is_float() => Init::Normal(Real(0.02)),
                (Role::OptimizerState | Role::Parameter, _) => Init::Constant(Real(0.0)),
                (_, DType::Bool) => Init::Below(2),
                // Whole numbers that index nothing are mostly flags.
                (_, dtype) if dtype.is_int() => Init::Below(bounds[slot.0 as usize].unwrap_or(2)),
                _ => Init::Normal(Real(1.0)),
            };
            let fail = |e: shardwright_graph::BuildError| TextError::new(main.at, e.to_string());
            let tensor = build.builder.source(&names[i], ty, roles.roles[i], init).map_err(fail)?;
            build.tensors[slot.0 as usize] = Some(tensor);
        }
        for (op, _) in self.draft.ops.iter().zip(&live).filter(|(_, live)| **live) {
            build.add(&self.draft, op)?;
        }
        let (mut imported, mut tensors) =
            build.finish(&self.draft, &roles, &arguments, &results, self.notes)?;
        let mut replaced = ReplacedSlots::default();
        if self.options.fuse_attention {
            replaced = fuse(&mut imported, &mut tensors, main.at)?;
        }
        imported.stacks = stacks(&self.draft, &tensors);
        imported.sites = self.sites.finish(&self.draft, &absorbed, &tensors, &replaced, &imported.graph);
        Ok(imported)
    }

    /// Applies the roles that the user gave by name.
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
                return Err(TextError::new(
                    at,
                    format!("no argument is called `{pattern}`; there are {known}, ..."),
                ));
            }
        }
        Ok(roles)
    }

    /// An argument's name: from the text, else the path of the result that is its next value, else its position.
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
            shown(&own.filter(|name| !name.is_empty()).or_else(next).unwrap_or_else(|| format!("arg{i}")))
        };
        arguments.iter().enumerate().map(name).collect()
    }
}

/// Fuses the attention of a program. Returns the fused op in the place of each slot that is no tensor any more.
fn fuse(
    imported: &mut ImportedProgram,
    tensors: &mut [Option<TensorId>],
    at: usize,
) -> Result<ReplacedSlots> {
    let graph = std::mem::take(&mut imported.graph);
    let number = |tensor: &Tensor| match tensor.init {
        Some(Init::Constant(value)) if tensor.role == Role::Constant => Some(value.0),
        _ => None,
    };
    let numbers: FxHashMap<TensorId, f64> =
        graph.tensor_ids().filter_map(|t| Some((t, number(graph.tensor(t))?))).collect();
    let contents = |t: TensorId| Some(vec![*numbers.get(&t)?]);
    let kept = [&imported.arguments[..], &imported.results].concat();
    let fusion = fuse_attention(graph, &kept, &contents).map_err(|e| TextError::new(at, e.to_string()))?;
    imported.notes.extend(fusion.note());
    let mut replaced = ReplacedSlots::default();
    for (slot, tensor) in tensors.iter_mut().enumerate() {
        if let Some(old) = *tensor {
            *tensor = fusion.tensors[old.index()];
            replaced.extend(fusion.replaced.get(&old).map(|op| (Slot(slot as u32), *op)));
        }
    }
    for tensor in imported.arguments.iter_mut().chain(&mut imported.results) {
        let moved = fusion.tensors[tensor.index()];
        *tensor = moved.ok_or_else(|| TextError::new(at, "a result was lost; please report it"))?;
    }
    imported.graph = fusion.graph;
    Ok(replaced)
}

/// The tensors of the slices of every stack that is read again. A slice has one dimension of size one more than its tensor.
fn stacks(draft: &DraftGraph, tensors: &[Option<TensorId>]) -> Vec<Vec<TensorId>> {
    let tensor = |&slot: &Slot| {
        let mut from = slot;
        while let Some(DraftOp { op: Op::Reshape(_), inputs, .. }) = draft.producer(from) {
            from = inputs[0];
        }
        tensors[from.0 as usize]
    };
    let slices = |stack: &Rc<Stack>| stack.parts.iter().flatten().filter_map(tensor).collect();
    let mut stacks: Vec<Vec<TensorId>> = draft.stacks.iter().map(slices).collect();
    // Compilers keep one of two equal stacks.
    stacks.sort_unstable();
    stacks.dedup();
    stacks
}

/// Whether the caller donates the memory of an argument, as training steps do with their state.
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

/// Whether a name matches a pattern in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(head) else { return false };
    // The shortest match suffices for each star except the last.
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

/// Whether each op contributes to a result.
fn live(draft: &DraftGraph, results: &[Slot]) -> Vec<bool> {
    let mut needed = vec![false; draft.slots()];
    for slot in results {
        needed[slot.0 as usize] = true;
    }
    let mut live = vec![false; draft.ops.len()];
    for (i, op) in draft.ops.iter().enumerate().rev() {
        if op.outputs.iter().any(|o| needed[o.0 as usize]) {
            live[i] = true;
            for input in &op.inputs {
                needed[input.0 as usize] = true;
            }
        }
    }
    live
}

/// Merges a transpose that is the only reader of a product into the product. Returns the merged transposes.
fn absorb_transposes(draft: &mut DraftGraph, results: &[Slot]) -> AbsorbedTransposes {
    let mut absorbed = AbsorbedTransposes::default();
    let live = live(draft, results);
    let mut readers = vec![0u32; draft.slots()];
    for (op, _) in draft.ops.iter().zip(&live).filter(|(_, live)| **live) {
        for input in &op.inputs {
            readers[input.0 as usize] += 1;
        }
    }
    for slot in results {
        readers[slot.0 as usize] += 1;
    }
    for i in (0..draft.ops.len()).filter(|&i| live[i]) {
        let Op::Transpose(transpose) = &draft.ops[i].op else { continue };
        let from = draft.ops[i].inputs[0];
        let Source::Op(product) = draft.source(from) else { continue };
        if readers[from.0 as usize] != 1 || !std::matches!(draft.ops[product as usize].op, Op::Contract(_)) {
            continue;
        }
        let (perm, outputs) = (transpose.perm.clone(), draft.ops[i].outputs.clone());
        let producer = &mut draft.ops[product as usize];
        let Op::Contract(contract) = &mut producer.op else { continue };
        contract.result = perm.iter().map(|&p| contract.result[p]).collect();
        producer.outputs = outputs.clone();
        // The transpose now has no readers.
        let idle = &mut draft.ops[i];
        idle.outputs = smallvec::smallvec![from];
        draft.move_output(outputs[0], product);
        draft.move_output(from, i as u32);
        absorbed.insert(from, (outputs[0], perm));
    }
    absorbed
}

/// For arguments that are ids: the size of the smallest dimension that they index.
fn id_bounds(draft: &DraftGraph) -> Vec<Option<u64>> {
    let mut bounds: Vec<Option<u64>> = vec![None; draft.slots()];
    let lower = |bounds: &mut Vec<Option<u64>>, slot: Slot, bound: Option<u64>| {
        let known = &mut bounds[slot.0 as usize];
        *known = match (*known, bound) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    };
    for node in draft.ops.iter().rev() {
        match &node.op {
            Op::Gather(op) => lower(&mut bounds, node.inputs[1], Some(op.extent)),
            Op::TakeAlong(op) => lower(&mut bounds, node.inputs[1], Some(op.extent)),
            Op::ScatterAdd(op) => lower(&mut bounds, node.inputs[0], Some(op.extent)),
            Op::PutAlong(op) => lower(&mut bounds, node.inputs[0], Some(op.extent)),
            op if pointwise(op) => {
                let bound = bounds[node.outputs[0].0 as usize];
                for &input in node.inputs.iter().filter(|&&input| draft.ty(input).dtype.is_int()) {
                    lower(&mut bounds, input, bound);
                }
            }
            _ => {}
        }
    }
    bounds
}

/// The graph under construction.
struct Assembler {
    builder: GraphBuilder,
    tensors: Vec<Option<TensorId>>,
    /// The first op of each origin: its layer and its rule.
    leaders: FxHashMap<Origin, (LayerId, Rule)>,
    at: usize,
}

impl Assembler {
    fn tensor(&mut self, draft: &DraftGraph, slot: Slot) -> Result<TensorId> {
        if let Some(tensor) = self.tensors[slot.0 as usize] {
            return Ok(tensor);
        }
        let Source::Number(value) = draft.source(slot) else {
            return Err(TextError::new(self.at, "a value is used before it is computed"));
        };
        let ty = draft.ty(slot).clone();
        let made = self.builder.source(&format!("{value}"), ty, Role::Constant, Init::Constant(Real(value)));
        let tensor = made.map_err(|e| TextError::new(self.at, e.to_string()))?;
        self.tensors[slot.0 as usize] = Some(tensor);
        Ok(tensor)
    }

    fn add(&mut self, draft: &DraftGraph, op: &DraftOp) -> Result<()> {
        let inputs = op.inputs.iter().map(|&slot| self.tensor(draft, slot)).collect::<Result<Vec<_>>>()?;
        let types: Vec<_> = inputs.iter().map(|&t| self.builder.ty(t).clone()).collect();
        let made: Vec<_> = op.outputs.iter().map(|&slot| draft.ty(slot).clone()).collect();
        let rule = op.op.rule(&types, &made);
        let fail = |e: shardwright_graph::BuildError| TextError::new(op.origin.1, e.to_string());
        let tied = self.leaders.get(&op.origin).filter(|(_, first)| *first == rule).map(|(layer, _)| *layer);
        let outputs = match tied {
            Some(layer) => self
                .builder
                .in_layer(Phase::Forward, layer, |builder| builder.add(&op.name, op.op.clone(), &inputs))
                .map_err(fail)?,
            None => {
                let outputs = self.builder.add(&op.name, op.op.clone(), &inputs).map_err(fail)?;
                let layer = LayerId::new(self.builder.graph().layers.len() - 1);
                self.leaders.entry(op.origin).or_insert((layer, rule));
                outputs
            }
        };
        for (slot, tensor) in op.outputs.iter().zip(outputs) {
            self.tensors[slot.0 as usize] = Some(tensor);
        }
        Ok(())
    }

    fn finish(
        mut self,
        draft: &DraftGraph,
        roles: &Roles,
        arguments: &[Slot],
        results: &[Slot],
        notes: Vec<String>,
    ) -> Result<(ImportedProgram, Vec<Option<TensorId>>)> {
        let tensors = results.iter().map(|&slot| self.tensor(draft, slot)).collect::<Result<Vec<_>>>()?;
        let given = arguments.iter().map(|&slot| self.tensor(draft, slot)).collect::<Result<Vec<_>>>()?;
        let mut carried = vec![false; results.len()];
        let mut made = std::collections::HashSet::new();
        for (&old, next) in given.iter().zip(&roles.next) {
            let Some(r) = *next else { continue };
            // A tensor is the next value of one argument only, and a tensor without a producer never changes.
            if self.builder.graph().tensor(tensors[r]).producer.is_some() && made.insert(tensors[r]) {
                self.builder.record_carry(old, tensors[r]);
                carried[r] = true;
            }
        }
        let loss = (0..results.len()).find(|&r| {
            let ty = draft.ty(results[r]);
            !carried[r] && ty.rank() == 0 && ty.dtype.is_float()
        });
        let others = (0..results.len()).filter(|&r| !carried[r] && Some(r) != loss);
        for r in loss.into_iter().chain(others) {
            self.builder.output(tensors[r]);
        }
        let graph = self.builder.finish();
        shardwright_graph::verify::verify(&graph).map_err(|e| TextError::new(self.at, e.to_string()))?;
        let imported = ImportedProgram {
            graph,
            arguments: given,
            results: tensors,
            notes,
            stacks: Vec::new(),
            sites: Vec::new(),
        };
        Ok((imported, self.tensors))
    }
}
