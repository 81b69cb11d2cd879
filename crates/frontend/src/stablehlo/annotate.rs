//! Writes a program again with shardings in Shardy's dialect: a mesh, shardings of arguments and results, and a
//! `sdy.sharding_constraint` on every value of which something is known.

use super::{
    error::{Fault, Result},
    parser,
    syntax::{Attribute, Block, Operation, Type, Use},
};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// What is known of a program's values. Shardings are in Shardy's words, without the mesh: `[{"x"}, {?}]`.
#[derive(Clone, Debug, Default)]
pub struct Annotations {
    /// The mesh: `["x"=2, "y"=4]`.
    pub mesh: String,
    /// How many devices it has.
    pub devices: u32,
    /// Shardings of the arguments.
    pub arguments: Vec<String>,
    /// Shardings of the results.
    pub results: Vec<String>,
    /// Operations, by where they begin in the text.
    pub sites: BTreeMap<usize, SiteAnnotation>,
}

/// What is known of an operation's values.
#[derive(Clone, Debug, Default)]
pub struct SiteAnnotation {
    /// Shardings that its operands are brought into.
    pub operands: Vec<Option<String>>,
    /// Shardings of its results.
    pub results: Vec<Option<String>>,
}

pub(super) fn annotate(text: &str, known: &Annotations) -> Result<String> {
    let mut program = parser::parse(text)?;
    // Names of values that the text does not have; at most one per sharding.
    let most = known.sites.values().map(|site| site.operands.len() + site.results.len()).sum();
    let prefix = free_prefix(text);
    let names: Vec<String> = (0..most).map(|i| format!("{prefix}{i}")).collect();
    let mut writer = Writer { known, names: names.iter() };
    let devices = known.devices.to_string();
    let body = program.module.regions.first_mut();
    let body = body.ok_or_else(|| Fault::new(0, "there is no program to annotate"))?;
    for operation in &mut body.operations {
        if operation.attribute("sym_name") == Some(&Attribute::Text("main")) {
            shard_signature(operation, "arg_attrs", &known.arguments);
            shard_signature(operation, "res_attrs", &known.results);
        }
        operation.regions.iter_mut().for_each(|block| writer.block(block));
    }
    body.operations.insert(0, mesh(&known.mesh));
    for (name, value) in &mut program.module.attributes {
        if *name == "mhlo.num_partitions" {
            *value = Attribute::Number(&devices, Some("i32"));
        }
    }
    Ok(program.to_string())
}

/// Letters that no name in the text begins with.
fn free_prefix(text: &str) -> String {
    let mut prefix = "sharded".to_string();
    while text.contains(&prefix) {
        prefix.push('_');
    }
    prefix
}

fn mesh(axes: &str) -> Operation<'_> {
    Operation {
        at: 0,
        name: "sdy.mesh",
        results: Vec::new(),
        operands: Vec::new(),
        attributes: vec![
            ("sym_name", Attribute::Text("mesh")),
            ("mesh", Attribute::Dialect("sdy.mesh", Cow::Borrowed(axes))),
        ],
        regions: Vec::new(),
        operand_types: Vec::new(),
        result_types: Vec::new(),
        location: None,
    }
}

fn sharding<'a>(dims: &str) -> Attribute<'a> {
    Attribute::Dialect("sdy.sharding", Cow::Owned(format!("@mesh, {dims}")))
}

/// Adds shardings to a function's arguments or results.
fn shard_signature<'a>(function: &mut Operation<'a>, key: &'a str, shardings: &[String]) {
    if shardings.is_empty() {
        return;
    }
    let at = function.attributes.iter().position(|(name, _)| *name == key).unwrap_or_else(|| {
        let none = shardings.iter().map(|_| Attribute::Dict(Vec::new())).collect();
        function.attributes.push((key, Attribute::List(none)));
        function.attributes.len() - 1
    });
    let Attribute::List(entries) = &mut function.attributes[at].1 else { return };
    for (entry, dims) in entries.iter_mut().zip(shardings) {
        let Attribute::Dict(items) = entry else { continue };
        items.retain(|(name, _)| !matches!(*name, "sdy.sharding" | "mhlo.sharding"));
        items.push(("sdy.sharding", sharding(dims)));
    }
}

struct Writer<'k, 'a> {
    known: &'k Annotations,
    names: std::slice::Iter<'a, String>,
}

impl<'a> Writer<'_, 'a> {
    fn block(&mut self, block: &mut Block<'a>) {
        for mut operation in std::mem::take(&mut block.operations) {
            operation.regions.iter_mut().for_each(|inner| self.block(inner));
            let Some(SiteAnnotation { operands, results }) = self.known.sites.get(&operation.at) else {
                block.operations.push(operation);
                continue;
            };
            for ((operand, ty), dims) in
                operation.operands.iter_mut().zip(&operation.operand_types).zip(operands)
            {
                if let (Some(dims), Some(name)) = (dims, self.names.next()) {
                    block.operations.push(constraint(name, *operand, ty, dims));
                    *operand = Use { at: operand.at, name, index: 0 };
                }
            }
            let mut after = Vec::new();
            // Several results under one name keep it: nobody could be told apart.
            if operation.results.iter().all(|(_, count)| *count == 1) {
                for (((name, _), ty), dims) in
                    operation.results.iter_mut().zip(&operation.result_types).zip(results)
                {
                    if let (Some(dims), Some(raw)) = (dims, self.names.next()) {
                        let made = Use { at: operation.at, name: raw, index: 0 };
                        after.push(constraint(std::mem::replace(name, raw), made, ty, dims));
                    }
                }
            }
            block.operations.push(operation);
            block.operations.append(&mut after);
        }
    }
}

fn constraint<'a>(name: &'a str, value: Use<'a>, ty: &Type<'a>, dims: &str) -> Operation<'a> {
    Operation {
        at: value.at,
        name: "sdy.sharding_constraint",
        results: vec![(name, 1)],
        operands: vec![value],
        attributes: vec![("sharding", sharding(dims))],
        regions: Vec::new(),
        operand_types: vec![ty.clone()],
        result_types: vec![ty.clone()],
        location: None,
    }
}
