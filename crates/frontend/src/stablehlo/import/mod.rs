//! From the program to a graph: walks the main function, inlines calls, runs loops whose count is known, and turns
//! every operation into ops of ours. One file per family of operations; [`finish`] adds roles and builds the graph.

mod contract;
mod control;
mod conv;
mod elementwise;
mod finish;
mod fold;
mod index;
mod read;
mod reduce;
mod roles;
mod shape;
mod sites;
mod sort;
mod steps;
mod value;
mod window;

use self::{
    sites::{Seen, Sites},
    steps::Steps,
    value::{Typed, Value},
};
use super::{
    Imported, Options,
    error::{Fault, Result},
    syntax::{Attribute, Block, Operation, Program, Use},
};
use shardwright_graph::{Op, TensorType, ops::Opaque};
use std::collections::HashMap;

/// How deep calls and regions may nest.
const MOST_NESTED: usize = 64;
/// The most operations that are walked, calls and iterations counted each time: no text may take for ever.
const MOST_WALKED: usize = 1 << 20;

/// The most notes that anybody reads.
const MOST_NOTES: usize = 64;

/// What is known of a program while it is walked.
struct Importer<'a> {
    program: &'a Program<'a>,
    options: &'a Options,
    functions: HashMap<&'a str, &'a Operation<'a>>,
    steps: Steps,
    sites: Sites,
    notes: Vec<String>,
    /// Numbers of the places that calls and loops lead to, by where they come from.
    paths: HashMap<(u32, usize), u32>,
    /// What is called around the operation at hand, for names.
    scope: Vec<String>,
    nested: usize,
    walked: usize,
}

/// Values by name, of a function or a region in it.
struct Scope<'s, 'a> {
    outer: Option<&'s Scope<'s, 'a>>,
    values: HashMap<&'a str, Vec<Value>>,
}

impl<'a> Scope<'_, 'a> {
    fn find(&self, name: &str) -> Option<&Vec<Value>> {
        self.values.get(name).or_else(|| self.outer.and_then(|outer| outer.find(name)))
    }

    fn value(&self, value: &Use<'a>) -> Result<Value> {
        let found = self.find(value.name).and_then(|values| values.get(value.index as usize));
        found
            .cloned()
            .ok_or_else(|| Fault::new(value.at, format!("there is no value `%{}` here", value.name)))
    }
}

/// Imports a program.
pub(super) fn import(program: &Program<'_>, options: &Options) -> Result<Imported> {
    let mut functions = HashMap::new();
    let body = program.module.regions.first().map_or(&[][..], |block| &block.operations[..]);
    for operation in body.iter().filter(|op| op.name == "func.func") {
        if let Some(Attribute::Text(name)) = operation.attribute("sym_name")
            && functions.insert(*name, operation).is_some()
        {
            return Err(Fault::new(operation.at, format!("there are two functions @{name}")));
        }
    }
    let main = functions.get("main").copied();
    let main = main.ok_or_else(|| Fault::new(program.module.at, "there is no function @main to plan"))?;
    let mut importer = Importer {
        program,
        options,
        functions,
        steps: Steps::default(),
        sites: Sites::default(),
        notes: Vec::new(),
        paths: HashMap::new(),
        scope: Vec::new(),
        nested: 0,
        walked: 0,
    };
    let block = body_of(main)?;
    let mut arguments = Vec::new();
    for (i, argument) in block.arguments.iter().enumerate() {
        let typed = Typed::of(&argument.ty, main.at)?;
        arguments.push(Value::Tensor(importer.steps.argument(typed.ty, i)));
    }
    let results = importer.block(block, arguments, None)?;
    importer.finish(main, &results)
}

fn body_of<'a>(function: &'a Operation<'a>) -> Result<&'a Block<'a>> {
    function.regions.first().ok_or_else(|| Fault::new(function.at, "this function has no body"))
}

impl<'a> Importer<'a> {
    /// Runs the operations of a block; gives what it returns.
    fn block(
        &mut self,
        block: &'a Block<'a>,
        arguments: Vec<Value>,
        outer: Option<&Scope<'_, 'a>>,
    ) -> Result<Vec<Value>> {
        let at = self.steps.at;
        if self.nested >= MOST_NESTED {
            let reason =
                format!("calls and regions nest more than {MOST_NESTED} deep; does a function call itself?");
            return Err(Fault::new(at, reason));
        }
        if arguments.len() != block.arguments.len() {
            let reason = format!("{} values for {} arguments", arguments.len(), block.arguments.len());
            return Err(Fault::new(at, reason));
        }
        self.nested += 1;
        let mut scope = Scope { outer, values: HashMap::with_capacity(block.operations.len()) };
        for (argument, value) in block.arguments.iter().zip(arguments) {
            self.check_type(&value, &Typed::of(&argument.ty, at)?, at)?;
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
        Err(Fault::new(at, "this block does not return"))
    }

    fn check_type(&self, value: &Value, expected: &Typed, at: usize) -> Result<()> {
        let found = value.ty(&self.steps);
        if found != expected.ty {
            let reason = format!("the value is {found}, but the text says {} here", expected.ty);
            return Err(Fault::new(at, reason));
        }
        Ok(())
    }

    /// One operation: checks its types before and after.
    fn operation(&mut self, operation: &'a Operation<'a>, scope: &Scope<'_, 'a>) -> Result<Vec<Value>> {
        self.walk(operation.at)?;
        let mut operands = Vec::with_capacity(operation.operands.len());
        let mut types = Vec::with_capacity(operation.operands.len());
        for (value, ty) in operation.operands.iter().zip(&operation.operand_types) {
            let found = scope.value(value)?;
            let typed = Typed::of(ty, value.at)?;
            self.check_type(&found, &typed, value.at)?;
            operands.push(found);
            types.push(typed);
        }
        let results = operation
            .result_types
            .iter()
            .map(|ty| Typed::of(ty, operation.at))
            .collect::<Result<Vec<_>>>()?;
        self.steps.at = operation.at;
        self.steps.ordinal = 0;
        self.steps.name = self.name_of(operation);
        let what = Reading { operation, operands: &operands, types: &types, results: &results };
        let (first, path) = (self.steps.steps.len() as u32, self.steps.path);
        let values = self.dispatch(&what, scope)?;
        if values.len() != results.len() {
            return Err(what.fault(format!(
                "it makes {} values, but has {} results",
                values.len(),
                results.len()
            )));
        }
        for (value, result) in values.iter().zip(&results) {
            let found = value.ty(&self.steps);
            if found != result.ty {
                return Err(what.fault(format!("it makes {found}, but the text says {}", result.ty)));
            }
        }
        // What is done inside calls and loops is said of the operations in there.
        if matches!(operation.name, "func.call" | "stablehlo.while") {
            return Ok(values);
        }
        let last = if operation.regions.len() > 1 { first } else { self.steps.steps.len() as u32 };
        let name = operation.location.and_then(|text| self.location_name(text));
        let results = values.clone();
        self.sites
            .see(operation.at, Seen { name, path, operands, results, steps: first..last, shared: false });
        Ok(values)
    }

    /// Counts an operation or an iteration.
    fn walk(&mut self, at: usize) -> Result<()> {
        self.walked += 1;
        if self.walked > MOST_WALKED {
            let reason = format!(
                "the program takes more than {MOST_WALKED} operations; plan a step with fewer iterations"
            );
            return Err(Fault::new(at, reason));
        }
        Ok(())
    }

    fn dispatch(&mut self, op: &Reading<'_, 'a>, scope: &Scope<'_, 'a>) -> Result<Vec<Value>> {
        let name = op.operation.name;
        let Some(short) = name.strip_prefix("stablehlo.").or_else(|| name.strip_prefix("chlo.")) else {
            return match name {
                "func.call" => self.call(op),
                "sdy.sharding_constraint" => Ok(op.operands.to_vec()),
                _ => {
                    Err(op.fault("this operation is not StableHLO; lower with plain `jax.jit(f).lower(...)`"))
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
                Err(op.fault("the program is parallel already; lower it without `shard_map` and meshes"))
            }
            _ => Err(
                op.fault("this operation is not supported; please report it with the function that makes it")
            ),
        }
    }

    /// The name of an operation's ops: where JAX says that it comes from, or what and where it is in the text.
    fn name_of(&self, operation: &Operation<'_>) -> String {
        if let Some(name) = operation.location.and_then(|text| self.location_name(text)) {
            return name;
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
        name
    }

    /// The name in a `loc(...)`: `"a/b"(#loc1)`, or what an alias stands for.
    fn location_name(&self, text: &str) -> Option<String> {
        let mut text = text;
        // An alias may stand for another; no more than a few times.
        for _ in 0..8 {
            if let Some(quoted) = text.strip_prefix('"') {
                let (name, rest) = quoted.split_once('"')?;
                // A file's name has a line behind it and says nothing about the op.
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

    /// The number of the place that a call or loop leads to.
    fn path_to(&mut self, at: usize) -> u32 {
        let next = self.paths.len() as u32 + 1;
        *self.paths.entry((self.steps.path, at)).or_insert(next)
    }

    /// An op of which only the types are known, and a note that says so.
    fn opaque(&mut self, op: &Reading<'_, 'a>, call: &str, why: &str) -> Result<Vec<Value>> {
        let inputs = op.slots(&mut self.steps)?;
        let makes: Vec<TensorType> = op.results.iter().map(|typed| typed.ty.clone()).collect();
        if makes.is_empty() {
            return Ok(Vec::new());
        }
        self.note(format!("{} is opaque, replicated: {why}", self.steps.name));
        let made = self.steps.add(Op::from(Opaque { call: call.to_string(), makes }), &inputs)?;
        Ok(made.into_iter().map(Value::Tensor).collect())
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < MOST_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn custom_call(&mut self, op: &Reading<'_, 'a>) -> Result<Vec<Value>> {
        let name = match op.operation.attribute("call_target_name") {
            Some(Attribute::Text(name) | Attribute::Symbol(name)) => *name,
            _ => return Err(op.fault("what is called is not said")),
        };
        if matches!(name, "Sharding" | "SPMDFullToShardShape" | "SPMDShardToFullShape")
            && op.operands.len() == 1
        {
            return if name == "Sharding" {
                Ok(op.operands.to_vec())
            } else {
                Err(op.fault("the program is parallel already; lower it without `shard_map` and meshes"))
            };
        }
        if !self.options.opaque.iter().any(|known| known == name || known == "*") {
            return Err(op.fault(format!(
                "a call to `{name}`, of which only the types are known; if it is a pure function, `--opaque {name}` \
                 plans it replicated"
            )));
        }
        self.opaque(op, name, "told so")
    }
}

/// An operation with its operands found.
struct Reading<'r, 'a> {
    operation: &'a Operation<'a>,
    operands: &'r [Value],
    types: &'r [Typed],
    results: &'r [Typed],
}
