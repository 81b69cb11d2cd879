//! Writes shardings into a program's text, in Shardy's dialect: a mesh, shardings of arguments, and a
//! `sdy.sharding_constraint` on every value with a known sharding. The rest of the text is unchanged.

use super::{
    error::{Result, TextError},
    parser,
    syntax::{Block, Operation, Type},
};
use std::collections::BTreeMap;

/// The shardings of a program's values, in Shardy's notation without the mesh: `[{"x"}, {?}]`.
#[derive(Clone, Debug, Default)]
pub struct Annotations {
    /// The mesh: `["x"=2, "y"=4]`.
    pub mesh: String,
    /// The number of devices of the mesh.
    pub devices: u32,
    /// Shardings of the arguments.
    pub arguments: Vec<String>,
    /// Shardings of the results.
    pub results: Vec<String>,
    /// Shardings of operations, by the byte at which they begin.
    pub sites: BTreeMap<usize, SiteAnnotation>,
}

/// The shardings of an operation's values.
#[derive(Clone, Debug, Default)]
pub struct SiteAnnotation {
    /// Per operand: the shardings that it is resharded to, in order.
    pub operands: Vec<Vec<String>>,
    /// Per result: the shardings that it is resharded to, in order.
    pub results: Vec<Vec<String>>,
}

pub(super) fn annotate(text: &str, known: &Annotations) -> Result<String> {
    let program = parser::parse(text)?;
    let mut prefix = "sharded".to_string();
    while text.contains(&prefix) {
        prefix.push('_');
    }
    let mut writer = Writer { text, known, prefix, named: 0, edits: Vec::new() };
    let functions = program.module.regions.first().map_or(&[][..], |block| &block.operations[..]);
    let first = functions.first().ok_or_else(|| TextError::new(0, "there is no function to annotate"))?;
    writer.insert(first.at, format!("sdy.mesh @mesh = <{}>\n  ", known.mesh));
    writer.count_devices(first.at);
    for function in functions {
        let main = function.attribute("sym_name") == Some(&super::syntax::Attribute::Text("main"));
        for block in &function.regions {
            if main {
                writer.arguments(function, block);
            }
            writer.block(block, main);
        }
    }
    Ok(writer.finish())
}

/// A replacement: position, number of bytes, new text.
type Edit = (usize, usize, String);

struct Writer<'k> {
    text: &'k str,
    known: &'k Annotations,
    /// A prefix that no name of the text has.
    prefix: String,
    named: usize,
    edits: Vec<Edit>,
}

impl Writer<'_> {
    fn insert(&mut self, at: usize, what: String) {
        self.edits.push((at, 0, what));
    }

    fn name(&mut self) -> String {
        self.named += 1;
        format!("%{}{}", self.prefix, self.named)
    }

    fn finish(mut self) -> String {
        // A stable sort keeps insertions at one position in order.
        self.edits.sort_by_key(|(at, ..)| *at);
        let (mut written, mut done) = (String::with_capacity(self.text.len() * 2), 0);
        for (at, length, what) in &self.edits {
            if *at < done {
                continue;
            }
            written += &self.text[done..*at];
            written += what;
            done = at + length;
        }
        written += &self.text[done..];
        written
    }

    /// Sets the number of partitions of the module.
    fn count_devices(&mut self, before: usize) {
        const KEY: &str = "mhlo.num_partitions = 1 :";
        if let Some(at) = self.text[..before].find(KEY) {
            self.edits.push((at, KEY.len(), format!("mhlo.num_partitions = {} :", self.known.devices)));
        }
    }

    /// Adds shardings to the arguments of a function.
    fn arguments(&mut self, function: &Operation<'_>, block: &Block<'_>) {
        let end = block.operations.first().map_or(function.at, |first| first.at);
        let mut at = function.at;
        for (argument, dims) in block.arguments.iter().zip(&self.known.arguments) {
            let written = format!("%{}: {}", argument.name, show(&argument.ty));
            let Some(found) = self.text[at..end].find(&written) else { continue };
            at += found + written.len();
            let sharding = format!("sdy.sharding = #sdy.sharding<@mesh, {dims}>");
            match self.text[at..].strip_prefix(" {") {
                Some(_) => self.edits.push((at + 2, 0, format!("{sharding}, "))),
                None => self.edits.push((at, 0, format!(" {{{sharding}}}"))),
            }
        }
    }

    fn block(&mut self, block: &Block<'_>, main: bool) {
        // Constraints on results are inserted before the next operation.
        let mut pending = String::new();
        for operation in &block.operations {
            let start = self.text[..operation.at].rfind('\n').map_or(0, |at| at + 1);
            let head = &self.text[start..operation.at];
            let indent = &head[..head.len() - head.trim_start().len()];
            if !pending.is_empty() {
                self.insert(start, std::mem::take(&mut pending));
            }
            // The body of a reduction works on elements, which have no sharding.
            if matches!(operation.name, "stablehlo.while" | "stablehlo.case" | "stablehlo.if") {
                operation.regions.iter().for_each(|inner| self.block(inner, false));
            }
            let returned: Vec<Vec<String>>;
            let site = self.known.sites.get(&operation.at);
            let stops = match site {
                _ if main && operation.name == "func.return" => {
                    returned = self.known.results.iter().map(|dims| vec![dims.clone()]).collect();
                    &returned[..]
                }
                Some(site) => &site.operands[..],
                None => continue,
            };
            let operands = operation.operands.iter().zip(&operation.operand_types).zip(stops);
            for ((operand, ty), stops) in operands.filter(|(_, stops)| !stops.is_empty()) {
                let written = self.text[operand.at..].len()
                    - self.text[operand.at..]
                        .trim_start_matches(|c: char| "%#_$.-".contains(c) || c.is_alphanumeric())
                        .len();
                let mut value = self.text[operand.at..operand.at + written].to_string();
                for dims in stops {
                    let name = self.name();
                    self.insert(start, format!("{indent}{}", constraint(&name, &value, dims, ty)));
                    value = name;
                }
                self.edits.push((operand.at, written, value));
            }
            let (Some(site), [(name, 1)]) = (site, &operation.results[..]) else { continue };
            let defined = format!("%{name}");
            if let ([stops], [ty], Some(at)) =
                (&site.results[..], &operation.result_types[..], head.find(&defined))
                && let Some((last, before)) = stops.split_last()
                && head.trim() == format!("{defined} =")
            {
                let mut value = self.name();
                self.edits.push((start + at, defined.len(), value.clone()));
                for dims in before {
                    let name = self.name();
                    pending += &format!("{indent}{}", constraint(&name, &value, dims, ty));
                    value = name;
                }
                pending += &format!("{indent}{}", constraint(&defined, &value, last, ty));
            }
        }
    }
}

fn constraint(name: &str, value: &str, dims: &str, ty: &Type<'_>) -> String {
    format!("{name} = sdy.sharding_constraint {value} <@mesh, {dims}> : {}\n", show(ty))
}

fn show(ty: &Type<'_>) -> String {
    match ty {
        Type::Tensor(ty) => format!("tensor<{}{}>", ty.sizes, ty.element),
        Type::Other(text) => (*text).to_string(),
    }
}
