//! The kinds of configs that every op kind is tested with: counted while cases run, and listed in docs/testing.md.

use shardwright_graph::{FactorIndex, Rule};
use shardwright_machine::Mesh;
use shardwright_space::{AxisUse, Config, configs_with_pins};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The kinds of configs; one can be of several.
pub const CONFIG_KINDS: [&str; 7] = [
    "repeated",
    "split result",
    "partial results",
    "split windows",
    "several factors",
    "pinned",
    "pinned and split",
];

/// Least number of cases of each kind.
const OFTEN: u32 = 3;

/// The kinds of a config.
fn kinds_of(config: &Config, rule: &Rule) -> [bool; CONFIG_KINDS.len()] {
    let mut split: Vec<FactorIndex> = Vec::new();
    let mut pinned = false;
    for used in config.uses() {
        match used {
            AxisUse::Split(factor) => split.push(*factor),
            AxisUse::Pin(_) => pinned = true,
            AxisUse::Replicate => {}
        }
    }
    split.sort_unstable();
    split.dedup();
    let everywhere = |f: FactorIndex| rule.outputs.iter().all(|output| output.has(f));
    let windowed = |f: FactorIndex| {
        rule.inputs.iter().flat_map(|i| &i.dims).any(|d| d.window.is_some() && d.factors.contains(&f))
    };
    [
        split.is_empty() && !pinned,
        split.iter().any(|&f| everywhere(f)),
        split.iter().any(|&f| !everywhere(f)),
        split.iter().any(|&f| windowed(f)),
        split.len() > 1,
        pinned,
        pinned && !split.is_empty(),
    ]
}

/// Number of cases by op kind and config kind; none where no case is possible.
#[derive(Default)]
pub struct Coverage(BTreeMap<&'static str, [Option<u32>; CONFIG_KINDS.len()]>);

impl Coverage {
    /// Records a case: its kinds, and the kinds that it could have had.
    pub fn note(&mut self, op: &'static str, rule: &Rule, mesh: &Mesh, config: &Config) {
        let row = self.0.entry(op).or_default();
        for possible in configs_with_pins(rule, mesh) {
            let kinds = kinds_of(&possible, rule);
            row.iter_mut().zip(kinds).filter(|(_, is)| *is).for_each(|(cell, _)| {
                cell.get_or_insert(0);
            });
        }
        let kinds = kinds_of(config, rule);
        row.iter_mut().zip(kinds).filter(|(_, is)| *is).for_each(|(cell, _)| {
            *cell.get_or_insert(0) += 1;
        });
    }

    /// The first possible kind of config that an op has had too few cases of.
    pub fn lacking(&self, op: &str) -> Option<&'static str> {
        let row = self.0.get(op)?;
        (0..row.len()).find(|&at| row[at].is_some_and(|met| met < OFTEN)).map(|at| CONFIG_KINDS[at])
    }

    /// As Markdown.
    pub fn table(&self) -> String {
        let mut text = format!(
            "| op kind | {} |\n|---|{}\n",
            CONFIG_KINDS.join(" | "),
            "---:|".repeat(CONFIG_KINDS.len())
        );
        for (op, row) in &self.0 {
            let cells = row.map(|cell| cell.map_or("–".to_owned(), |count| count.to_string()));
            let _ = writeln!(text, "| `{op}` | {} |", cells.join(" | "));
        }
        text
    }
}
