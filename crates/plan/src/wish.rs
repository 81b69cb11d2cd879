//! What people want fixed: `fc*=c4` gives every layer whose name matches `fc*` a config of those degrees. Where ops
//! choose for themselves, a layer's name means its forward op, and other ops can be named too (`fc6.w.update=d0=4`).

use crate::{error::PlanError, problem::Problem};
use shardwright_graph::OpId;
use shardwright_space::Config;

/// A pattern of layer names and the degrees that they shall have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    pattern: String,
    /// Sorted.
    degrees: Vec<String>,
    text: String,
}

/// How a config without splits is written.
const WHOLE: &str = "whole";

impl Wish {
    /// Reads `PATTERN=CONFIG`: `*` and `?` in the pattern stand for any letters and any one letter; the config
    /// is written as in plans, its parts joined by `·` or commas.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (pattern, config) =
            text.split_once('=').ok_or_else(|| format!("`{text}` is not of the form PATTERN=CONFIG"))?;
        if pattern.is_empty() || config.is_empty() {
            return Err(format!("`{text}`: pattern and config must not be empty"));
        }
        Ok(Self { pattern: pattern.to_string(), degrees: parts(config), text: text.to_string() })
    }

    /// The ops that are meant: forward ops of that name, or, where there are none, other ops.
    ///
    /// # Errors
    /// Where there is no such op, or it has no config of its own.
    pub fn ops(&self, problem: &Problem<'_>) -> Result<Vec<OpId>, PlanError> {
        let graph = problem.graph;
        let matches = |op: &OpId| glob(self.pattern.as_bytes(), graph.node(*op).name.as_bytes());
        let layers: Vec<OpId> = graph.layers.iter().map(|layer| layer.forward).filter(matches).collect();
        if !layers.is_empty() {
            return Ok(layers);
        }
        let ops: Vec<OpId> = graph.op_ids().filter(matches).collect();
        match (ops.is_empty(), problem.untied) {
            (true, _) => Err(self.error("no layer has such a name".into())),
            (false, false) => {
                let name = &graph.node(ops[0]).name;
                let reason =
                    format!("op `{name}` follows its layer; with --untied it has a config of its own");
                Err(self.error(reason))
            }
            (false, true) => Ok(ops),
        }
    }

    fn error(&self, reason: String) -> PlanError {
        PlanError::Wish { wish: self.text.clone(), reason }
    }

    /// Takes away the choices that the wish forbids.
    pub(crate) fn apply(&self, problem: &Problem<'_>, allowed: &mut [Vec<u32>]) -> Result<(), PlanError> {
        for op in self.ops(problem)? {
            let (variable, member) = problem.variables.place[op.index()];
            let allowed = &mut allowed[variable as usize];
            let rule = &problem.shapes[op.index()].rule;
            let shown = |c: u32| {
                let choice = &problem.choices[variable as usize][c as usize];
                choice.configs[member as usize].show(rule, problem.mesh())
            };
            let offered: Vec<String> = allowed.iter().map(|&c| shown(c)).collect();
            allowed.retain(|&c| parts(&shown(c)) == self.degrees);
            if allowed.is_empty() {
                let mut distinct = offered;
                distinct.sort_unstable();
                distinct.dedup();
                distinct.truncate(12);
                let (name, distinct) = (&problem.graph.node(op).name, distinct.join(", "));
                return Err(self.error(format!("`{name}` cannot be split so; it can be {distinct}")));
            }
        }
        Ok(())
    }

    /// Whether configs that are given keep the wish.
    pub fn check(&self, problem: &Problem<'_>, configs: &[Config]) -> Result<(), PlanError> {
        for op in self.ops(problem)? {
            let shown = configs[op.index()].show(&problem.shapes[op.index()].rule, problem.mesh());
            if parts(&shown) != self.degrees {
                let name = &problem.graph.node(op).name;
                return Err(self.error(format!("this strategy gives `{name}` {shown} and has no choice")));
            }
        }
        Ok(())
    }
}

/// The parts of a config, sorted.
fn parts(config: &str) -> Vec<String> {
    let split = config.split(['·', ',']).map(str::trim);
    let mut parts: Vec<String> = split.filter(|p| !p.is_empty() && *p != WHOLE).map(String::from).collect();
    parts.sort_unstable();
    parts
}

/// Whether a name matches a pattern of letters, `*` and `?`. Linear but for the last `*`, to which it returns.
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
        let wish = Wish::parse("fc*=c4·n2").unwrap();
        assert_eq!((wish.pattern.as_str(), wish.degrees), ("fc*", vec!["c4".to_string(), "n2".to_string()]));
        assert_eq!(Wish::parse("add=d0=4").unwrap().degrees, ["d0=4"]);
        assert!(Wish::parse("x=whole").unwrap().degrees.is_empty());
        assert!(Wish::parse("fc6").is_err() && Wish::parse("=n4").is_err());
    }
}
