//! Converts a program to a graph: walks the main function, inlines calls, runs loops of known count, and converts every
//! operation to ops. One file per family of operations; [`finish`] assigns roles and builds the graph.

mod attention;
mod contract;
mod control;
mod conv;
mod draft;
mod elementwise;
mod finish;
mod fold;
mod index;
mod pallas;
mod read;
mod reduce;
mod roles;
mod rule;
mod shape;
mod sites;
mod sort;
mod value;
mod window;

use self::{
    draft::DraftGraph,
    sites::{SiteRecord, SiteRecorder},
    value::{HloType, SymbolicValue},
};
use super::{
    ImportOptions, ImportedProgram,
    error::{Result, TextError},
    syntax::{Attribute, Block, Operation, Program, Use},
};
use shardwright_graph::{
    Op, TensorType,
    ops::{AttentionKernel, Opaque},
};
use std::collections::{HashMap, HashSet};

/// The most levels of calls and regions.
const MOST_NESTED: usize = 256;
/// The most operations that are walked, counting calls and iterations each time. This bounds the time of an import, and
/// grows with the text.
const MOST_WALKED: usize = 1 << 20;
/// Elements of a constant that count as one operation.
const ELEMENTS_WALKED: usize = 16;
/// The longest name of an op or an argument.
const LONGEST_NAME: usize = 500;

/// The most notes that are kept.
const MOST_NOTES: usize = 64;

/// The state of an import.
struct Importer<'a> {
    program: &'a Program<'a>,
    options: &'a ImportOptions,
    functions: HashMap<&'a str, &'a Operation<'a>>,
    draft: DraftGraph,
    sites: SiteRecorder,
    notes: Vec<String>,
    /// Ids of call and loop paths, by the outer path and the position of the call or loop.
    paths: HashMap<(u32, usize), u32>,
    /// The names of the enclosing calls and loops.
    scope: Vec<String>,
    /// The functions of the enclosing calls.
    open_functions: HashSet<&'a str>,
    nested: usize,
    /// Operations that may still be walked.
    walks_left: usize,
}

/// A name from the text, for messages and for the graph.
fn shown(name: &str) -> String {
    shardwright_graph::printable(name, LONGEST_NAME)
}

/// The values of a function or a region, by name.
struct Scope<'s, 'a> {
    outer: Option<&'s Scope<'s, 'a>>,
    values: HashMap<&'a str, Vec<SymbolicValue>>,
}

impl<'a> Scope<'_, 'a> {
    fn find(&self, name: &str) -> Option<&Vec<SymbolicValue>> {
        self.values.get(name).or_else(|| self.outer.and_then(|outer| outer.find(name)))
    }

    fn value(&self, value: &Use<'a>) -> Result<SymbolicValue> {
        let found = self.find(value.name).and_then(|values| values.get(value.index as usize));
        found
            .cloned()
            .ok_or_else(|| TextError::new(value.at, format!("there is no value `%{}` here", value.name)))
    }
}

/// Imports a program whose text has this many bytes.
pub(super) fn import(
    program: &Program<'_>,
    text_bytes: usize,
    options: &ImportOptions,
) -> Result<ImportedProgram> {
    let mut functions = HashMap::new();
    let body = program.module.regions.first().map_or(&[][..], |block| &block.operations[..]);
    for operation in body.iter().filter(|op| op.name == "func.func") {
        if let Some(Attribute::Text(name)) = operation.attribute("sym_name")
            && functions.insert(*name, operation).is_some()
        {
            return Err(TextError::new(operation.at, format!("function @{name} is defined twice")));
        }
    }
    let main = functions.get("main").copied();
    let main = main.ok_or_else(|| TextError::new(program.module.at, "there is no function @main to plan"))?;
    let mut importer = Importer {
        program,
        options,
        functions,
        draft: DraftGraph::default(),
        sites: SiteRecorder::default(),
        notes: Vec::new(),
        paths: HashMap::new(),
        scope: Vec::new(),
        open_functions: HashSet::new(),
        nested: 0,
        walks_left: MOST_WALKED.saturating_add(text_bytes),
    };
    let block = body_of(main)?;
    let mut arguments = Vec::new();
    for (i, argument) in block.arguments.iter().enumerate() {
        let typed = HloType::of(&argument.ty, main.at)?;
        arguments.push(SymbolicValue::Tensor(importer.draft.argument(typed.ty, i)));
    }
    let results = importer.block(block, arguments, None)?;
    importer.finish(main, &results)
}

fn body_of<'a>(function: &'a Operation<'a>) -> Result<&'a Block<'a>> {
    function.regions.first().ok_or_else(|| TextError::new(function.at, "this function has no body"))
}

impl<'a> Importer<'a> {
    /// Imports the operations of a block and returns the values that it returns.
    fn block(
        &mut self,
        block: &'a Block<'a>,
        arguments: Vec<SymbolicValue>,
        outer: Option<&Scope<'_, 'a>>,
    ) -> Result<Vec<SymbolicValue>> {
        let at = self.draft.at;
        if self.nested >= MOST_NESTED {
            let reason = format!("calls and regions are nested more than {MOST_NESTED} levels deep");
            return Err(TextError::new(at, reason));
        }
        if arguments.len() != block.arguments.len() {
            let reason =
                format!("{} values do not match {} arguments", arguments.len(), block.arguments.len());
            return Err(TextError::new(at, reason));
        }
        self.nested += 1;
        let mut scope = Scope { outer, values: HashMap::with_capacity(block.operations.len()) };
        for (argument, value) in block.arguments.iter().zip(arguments) {
            self.check_type(&value, &HloType::of(&argument.ty, at)?, at)?;
            scope.values.insert(argument.name, vec![value]);
        }
        for operation in &block.operations {
            if matches!(operation.name, "func.return" | "stablehlo.return") {
                let values = operation.operands.iter().map(|value| scope.value(value)).collect();
                self.nested -= 1;
                return values;
            }
            let values = self.operation(operation, &scope)?;
            let mut values = values.into_iter();
            for (name, count) in &operation.results {
                scope.values.insert(name, values.by_ref().take(*count as usize).collect());
            }
        }
        Err(TextError::new(at, "this block does not return"))
    }

    fn check_type(&self, value: &SymbolicValue, expected: &HloType, at: usize) -> Result<()> {
        let found = value.ty(&self.draft);
        if found != expected.ty {
            let reason = format!("the value has type {found}, but the text says {} here", expected.ty);
            return Err(TextError::new(at, reason));
        }
        Ok(())
    }

    /// Imports one operation and checks the types of its operands and results.
    fn operation(
        &mut self,
        operation: &'a Operation<'a>,
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<SymbolicValue>> {
        self.walk(operation.at, 1)?;
        if !operation.result_types.is_empty() && operation.result_types.iter().all(attention::is_empty) {
            return Ok(vec![SymbolicValue::empty(); operation.result_types.len()]);
        }
        let mut operands = Vec::with_capacity(operation.operands.len());
        let mut types = Vec::with_capacity(operation.operands.len());
        for (value, ty) in operation.operands.iter().zip(&operation.operand_types) {
            let found = scope.value(value)?;
            let typed = HloType::of(ty, value.at)?;
            self.check_type(&found, &typed, value.at)?;
            operands.push(found);
            types.push(typed);
        }
        // A kernel's workspace has no elements here; nobody reads it.
        let workspaces = operation.result_types.iter().rev().take_while(|ty| attention::is_empty(ty)).count();
        let results = operation.result_types[..operation.result_types.len() - workspaces]
            .iter()
            .map(|ty| HloType::of(ty, operation.at))
            .collect::<Result<Vec<_>>>()?;
        if let Some(wider) = types.iter().chain(&results).find(|typed| typed.narrow) {
            self.note(format!(
                "narrow numbers (8 bits, 16-bit integers) are planned as {}: their bytes are overestimated, and `run` does \
                 not wrap or round them",
                wider.ty.dtype
            ));
        }
        self.draft.at = operation.at;
        self.draft.ordinal = 0;
        self.draft.name = self.name_of(operation);
        let what = ResolvedOperation { operation, operands: &operands, types: &types, results: &results };
        let (first, path) = (self.draft.ops.len() as u32, self.draft.path);
        let mut values = self.dispatch(&what, scope)?;
        if values.len() != results.len() {
            return Err(what.error(format!(
                "the operation computes {} values, but has {} results",
                values.len(),
                results.len()
            )));
        }
        for (value, result) in values.iter().zip(&results) {
            let found = value.ty(&self.draft);
            if found != result.ty {
                return Err(
                    what.error(format!("the result has type {found}, but the text says {}", result.ty))
                );
            }
        }
        values.extend((0..workspaces).map(|_| SymbolicValue::empty()));
        // Operations inside calls and loops are recorded themselves.
        if matches!(operation.name, "func.call" | "stablehlo.while") {
            return Ok(values);
        }
        let last = if operation.regions.len() > 1 { first } else { self.draft.ops.len() as u32 };
        let name = operation.location.and_then(|text| self.location_name(text));
        let results = values.clone();
        self.sites.record(
            operation.at,
            SiteRecord { name, path, operands, results, ops: first..last, shared: false },
        );
        Ok(values)
    }

    /// Counts operations or iterations.
    fn walk(&mut self, at: usize, operations: usize) -> Result<()> {
        let left = self.walks_left.checked_sub(operations);
        self.walks_left = left.ok_or_else(|| {
            let reason = format!(
                "the program walks more than {MOST_WALKED} operations; plan a step with fewer iterations"
            );
            TextError::new(at, reason)
        })?;
        Ok(())
    }

    fn dispatch(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<SymbolicValue>> {
        let name = op.operation.name;
        let Some(short) = name.strip_prefix("stablehlo.").or_else(|| name.strip_prefix("chlo.")) else {
            return match name {
                "func.call" => self.call(op),
                "sdy.sharding_constraint" => Ok(op.operands.to_vec()),
                _ => {
                    Err(op.error("this operation is not StableHLO; lower with plain `jax.jit(f).lower(...)`"))
                }
            };
        };
        if let Some(values) = self.elementwise(short, op)? {
            return Ok(values);
        }
        match short {
            "broadcast_in_dim" => self.broadcast_in_dim(op),
            "reshape" => self.reshape(op),
            "transpose" => self.transpose(op),
            "slice" => self.slice(op),
            "concatenate" => self.concatenate(op),
            "pad" => self.pad(op),
            "reverse" => self.reverse(op),
            "iota" => self.iota(op),
            "dynamic_slice" => self.dynamic_slice(op),
            "dynamic_update_slice" => self.dynamic_update_slice(op),
            "dot_general" => self.dot_general(op),
            "convolution" => self.convolution(op),
            "reduce" => self.reduce(op),
            "reduce_window" => self.reduce_window(op),
            "select_and_scatter" => self.select_and_scatter(op),
            "gather" => self.gather(op),
            "scatter" => self.scatter(op),
            "sort" => self.sort(op),
            "top_k" => self.top_k(op),
            "while" => self.while_loop(op, scope),
            "case" | "if" => self.case(op, scope),
            "optimization_barrier" => Ok(op.operands.to_vec()),
            "rng" | "rng_bit_generator" => self.opaque(op, short, "random numbers are planned replicated"),
            "custom_call" => self.custom_call(op),
            "all_reduce"
            | "all_gather"
            | "reduce_scatter"
            | "all_to_all"
            | "collective_permute"
            | "collective_broadcast"
            | "partition_id"
            | "replica_id" => {
                Err(op.error("the program is parallel already; lower it without `shard_map` and meshes"))
            }
            _ => Err(op.error(
                "this operation is not supported; please report it with the JAX function that it comes from",
            )),
        }
    }

    /// The name of an operation's ops: its location in the JAX program, or its name and position in the text.
    fn name_of(&self, operation: &Operation<'_>) -> String {
        if let Some(name) = operation.location.and_then(|text| self.location_name(text)) {
            return shown(&name);
        }
        let short = operation.name.rsplit('.').next().unwrap_or(operation.name);
        let mut name = String::new();
        for scope in &self.scope {
            name += scope;
            name.push('/');
        }
        name += short;
        if let Some((result, _)) = operation.results.first() {
            name.push('.');
            name += result;
        }
        shown(&name)
    }

    /// The name in a `loc(...)`: `"a/b"(#loc1)`, or the name of an alias.
    fn location_name(&self, text: &str) -> Option<String> {
        let mut text = text;
        // An alias may refer to another; the depth is limited.
        for _ in 0..8 {
            if let Some(quoted) = text.strip_prefix('"') {
                let (name, rest) = quoted.split_once('"')?;
                // A file name is followed by a line number and does not name the op.
                let name = name
                    .split_once('/')
                    .map_or(name, |(first, rest)| if first.starts_with("jit(") { rest } else { name });
                return (!rest.starts_with(':') && !name.is_empty()).then(|| name.to_string());
            }
            let alias = text.strip_prefix('#')?;
            let found = self.program.aliases.binary_search_by_key(&alias, |known| known.name).ok()?;
            text = self.program.aliases[found].meaning;
        }
        None
    }

    /// The id of the path into a call or loop.
    fn path_to(&mut self, at: usize) -> u32 {
        let next = self.paths.len() as u32 + 1;
        *self.paths.entry((self.draft.path, at)).or_insert(next)
    }

    /// Adds an op of which only the types are known, and a note about it.
    fn opaque(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        call: &str,
        why: &str,
    ) -> Result<Vec<SymbolicValue>> {
        self.opaque_call(op, call, why, Vec::new(), None)
    }

    /// Adds an op of which only the types, the shared dimensions and perhaps the work are known, and a note about it.
    fn opaque_call(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        call: &str,
        why: &str,
        shared: Vec<Vec<Option<u8>>>,
        attention: Option<AttentionKernel>,
    ) -> Result<Vec<SymbolicValue>> {
        let inputs = op.slots(&mut self.draft)?;
        let makes: Vec<TensorType> = op.results.iter().map(|typed| typed.ty.clone()).collect();
        if makes.is_empty() {
            return Ok(Vec::new());
        }
        let split =
            if shared.iter().flatten().any(Option::is_some) { "split by its rule" } else { "replicated" };
        let priced =
            if attention.is_some() { "; priced as attention without a mask, which is not known" } else { "" };
        self.note(format!("{} is opaque, {split}: {why}{priced}", self.draft.name));
        let made =
            self.draft.add(Op::from(Opaque { shared, attention, ..Opaque::new(call, makes) }), &inputs)?;
        Ok(made.into_iter().map(SymbolicValue::Tensor).collect())
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < MOST_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn custom_call(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let name = pallas::call_name(op.operation);
        let name = name.ok_or_else(|| op.error("`call_target_name` is missing"))?;
        if let Some(values) = self.compiled_kernel(name, op)? {
            return Ok(values);
        }
        if let Some(values) = self.cudnn_call(name, op)? {
            return Ok(values);
        }
        if matches!(name, "Sharding" | "SPMDFullToShardShape" | "SPMDShardToFullShape")
            && op.operands.len() == 1
        {
            return if name == "Sharding" {
                Ok(op.operands.to_vec())
            } else {
                Err(op.error("the program is parallel already; lower it without `shard_map` and meshes"))
            };
        }
        if name == "shardwright.pin"
            && let [value] = op.operands
        {
            let slot = value.slot(&mut self.draft)?;
            return Ok(vec![SymbolicValue::Tensor(self.draft.constrained(slot)?)]);
        }
        let given =
            self.options.rules.iter().find(|(target, _)| target == name).map(|(_, rule)| rule.as_str());
        if let Some(text) = given.or_else(|| stated_rule(op.operation)) {
            let shared =
                rule::parse(text).map_err(|reason| op.error(format!("the rule `{text}` {reason}")))?;
            let work = pallas::stated_work(op);
            return self.opaque_call(op, name, "a call of which only the types are known", shared, work);
        }
        if !self.options.opaque.iter().any(|known| known == name || known == "*") {
            return Err(op.error(format!(
                "a call to `{name}`, of which only the types are known; if it is a pure function, `--opaque {name}` \
                 plans it replicated, and `--rule '{name}=b d, b d -> b d'` splits it by the dimensions that it shares"
            )));
        }
        self.opaque(op, name, "by `--opaque`")
    }
}

/// The rule that a call states in its configuration, `mhlo.backend_config = {rule = "..."}`.
fn stated_rule<'a>(operation: &Operation<'a>) -> Option<&'a str> {
    config_text(operation, "rule")
}

/// A text in the configuration of a call.
fn config_text<'a>(operation: &Operation<'a>, name: &str) -> Option<&'a str> {
    let Some(Attribute::Dict(entries)) = operation.attribute("mhlo.backend_config") else { return None };
    entries.iter().find_map(|(key, value)| match value {
        Attribute::Text(text) if *key == name => Some(*text),
        _ => None,
    })
}

/// An operation with the values and types of its operands.
struct ResolvedOperation<'r, 'a> {
    operation: &'a Operation<'a>,
    operands: &'r [SymbolicValue],
    types: &'r [HloType],
    results: &'r [HloType],
}
