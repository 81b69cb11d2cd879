//! Constraints that a plan keeps, whatever the cost.
//!
//! A config constraint such as `fc*=c4` gives every layer whose name matches `fc*` a config of those degrees. In untied
//! problems a layer's name means its forward op. Other ops can then be named too (`fc6.w.update=d0=4`). `d0@gpu.0+gpu.1` names
//! the axes that split a factor in place of its degree.

use crate::{context::Context, error::PlanError, search_problem::SearchProblem};
use shardwright_graph::{OpId, Rule};
use shardwright_machine::{AxisSet, Bytes};
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_suggest::did_you_mean;
use std::collections::BTreeMap;

/// The constraints of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraints {
    /// The most bytes that one device may hold at once.
    pub memory: Option<Bytes>,
    /// Fixed configs of layers or ops.
    pub configs: Vec<ConfigConstraint>,
    /// For `place`: the share by which a device's work may exceed the average.
    pub balance: Option<f64>,
    /// Every device runs every op, without pins. Engines that run one program on all devices need this.
    pub spmd: bool,
}

/// A pattern of layer names, and the degrees of their configs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigConstraint {
    pattern: String,
    /// Sorted.
    degrees: Vec<String>,
    text: String,
}

/// The written form of a config without splits.
const WHOLE: &str = "whole";

impl ConfigConstraint {
    /// Reads `PATTERN=CONFIG`. In the pattern, `*` matches any letters and `?` any one letter. The config is written as
    /// in plans, its parts joined by `·` or commas.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (pattern, config) =
            text.split_once('=').ok_or_else(|| format!("`{text}` is not of the form PATTERN=CONFIG"))?;
        if pattern.is_empty() || config.is_empty() {
            return Err(format!("`{text}`: pattern and config must not be empty"));
        }
        Ok(Self { pattern: pattern.to_string(), degrees: parts(config), text: text.to_string() })
    }

    /// The ops that the pattern matches: forward ops, or, if none matches, other ops.
    ///
    /// # Errors
    /// Where no op matches, or a tied op cannot have its own config.
    pub fn ops(&self, context: &Context<'_>) -> Result<Vec<OpId>, PlanError> {
        let graph = context.graph;
        let matches = |op: &OpId| glob(self.pattern.as_bytes(), graph.node(*op).name.as_bytes());
        let layers: Vec<OpId> = graph.layers.iter().map(|layer| layer.forward).filter(matches).collect();
        if !layers.is_empty() {
            return Ok(layers);
        }
        let ops: Vec<OpId> = graph.op_ids().filter(matches).collect();
        match (ops.is_empty(), context.untied) {
            (true, _) => {
                let names = graph.layers.iter().map(|layer| &graph.node(layer.forward).name[..]);
                Err(self.error(format!("no layer has such a name{}", did_you_mean(&self.pattern, names))))
            }
            (false, false) => {
                let name = &graph.node(ops[0]).name;
                let reason =
                    format!("op `{name}` follows its layer; with --untied it has a config of its own");
                Err(self.error(reason))
            }
            (false, true) => Ok(ops),
        }
    }

    fn allows(&self, context: &Context<'_>, rule: &Rule, config: &Config) -> bool {
        parts(&self.shown(context, rule, config)) == self.degrees
    }

    /// A config as the constraint writes configs: with degrees, or with axes.
    fn shown(&self, context: &Context<'_>, rule: &Rule, config: &Config) -> String {
        let named = self.degrees.iter().any(|part| part.contains('@'));
        if named { by_axes(context, rule, config) } else { config.show(rule, context.mesh()) }
    }

    fn error(&self, reason: String) -> PlanError {
        PlanError::ConfigConstraint { constraint: self.text.clone(), reason }
    }

    /// Removes the choices that the constraint forbids.
    ///
    /// # Errors
    /// Where an op has no such config.
    pub fn apply(&self, problem: &SearchProblem<'_>, allowed: &mut [Vec<u32>]) -> Result<(), PlanError> {
        let context = &*problem.context;
        for op in self.ops(context)? {
            let (variable, member) = context.variables.index[op.index()];
            let allowed = &mut allowed[variable as usize];
            let rule = &context.shapes[op.index()].rule;
            let config = |c: u32| &problem.choices[variable as usize][c as usize].configs[member as usize];
            let offered: Vec<String> =
                allowed.iter().map(|&c| self.shown(context, rule, config(c))).collect();
            allowed.retain(|&c| self.allows(context, rule, config(c)));
            if allowed.is_empty() {
                let mut distinct = offered;
                distinct.sort_unstable();
                distinct.dedup();
                distinct.truncate(12);
                let (name, distinct) = (&context.graph.node(op).name, distinct.join(", "));
                return Err(self.error(format!("`{name}` cannot be split so; it can be {distinct}")));
            }
        }
        Ok(())
    }

    /// Checks that an assignment keeps the constraint.
    ///
    /// # Errors
    /// Where the assignment breaks it.
    pub fn check(&self, context: &Context<'_>, assignment: &Assignment) -> Result<(), PlanError> {
        for op in self.ops(context)? {
            let (config, rule) = (assignment.config(op), &context.shapes[op.index()].rule);
            if !self.allows(context, rule, config) {
                let shown = self.shown(context, rule, config);
                let name = &context.graph.node(op).name;
                return Err(self.error(format!("this strategy gives `{name}` {shown} and has no choice")));
            }
        }
        Ok(())
    }
}

/// A config as factors and the machine's axes that split them, `d0@gpu.0+gpu.1·d1@gpu.2`.
fn by_axes(context: &Context<'_>, rule: &Rule, config: &Config) -> String {
    let (mesh, primes) = (context.mesh(), context.machine.mesh());
    let mut split: BTreeMap<&str, AxisSet> = BTreeMap::new();
    for axis in mesh.all().iter() {
        match config.get(axis) {
            AxisUse::Replicate => {}
            AxisUse::Split(factor) => {
                let axes = split.entry(rule.factors[usize::from(factor)].name).or_default();
                *axes = axes.union(mesh.primes(AxisSet::of(axis)));
            }
            // A pinned op is on some devices only, which no text of this form says.
            AxisUse::Pin(_) => return config.show(rule, mesh),
        }
    }
    let names =
        |axes: AxisSet| axes.iter().map(|axis| primes.axis(axis).name.as_str()).collect::<Vec<_>>().join("+");
    let found: Vec<String> =
        split.iter().map(|(factor, &axes)| format!("{factor}@{}", names(axes))).collect();
    if found.is_empty() { WHOLE.into() } else { found.join("·") }
}

/// The parts of a config, sorted.
fn parts(config: &str) -> Vec<String> {
    let split = config.split(['·', ',']).map(str::trim);
    let mut parts: Vec<String> = split.filter(|p| !p.is_empty() && *p != WHOLE).map(String::from).collect();
    parts.sort_unstable();
    parts
}

/// Whether a name matches a pattern of letters, `*` and `?`. Backtracks to the last `*` only.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    (p, n) = (at + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name) in
            [("fc*", "fc6"), ("*", ""), ("a?c", "abc"), ("*.add*", "conv.add_bias"), ("a*b*c", "aXbYbZc")]
        {
            assert!(glob(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
        for (pattern, name) in [("fc", "fc6"), ("a?c", "ac"), ("*b", "abc"), ("", "x")] {
            assert!(!glob(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
    }

    #[test]
    fn wishes_are_read_as_plans_write_them() {
        let wish = ConfigConstraint::parse("fc*=c4·n2").unwrap();
        assert_eq!((wish.pattern.as_str(), wish.degrees), ("fc*", vec!["c4".to_string(), "n2".to_string()]));
        assert_eq!(ConfigConstraint::parse("add=d0=4").unwrap().degrees, ["d0=4"]);
        assert!(ConfigConstraint::parse("x=whole").unwrap().degrees.is_empty());
        assert!(ConfigConstraint::parse("fc6").is_err() && ConfigConstraint::parse("=n4").is_err());
    }
}
