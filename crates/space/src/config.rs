//! Configs: what each mesh axis does to one op. Listed here, never priced.
//!
//! Axes of one level that have the same size and lie in the same dimension of its grid are interchangeable,
//! so only assignments that are sorted by factor along them are listed. Every degree of parallelism that the
//! mesh offers is still there; what is given up is that two layers with *several different* splits inside one
//! level choose their order freely.

use shardwright_graph::{FactorIndex, Rule};
use shardwright_machine::{Axis, AxisId, AxisSet, Mesh};
use smallvec::SmallVec;

/// What one mesh axis does to an op. Splits order before repetition, and by factor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AxisUse {
    /// Every digit computes its part of this factor.
    Split(FactorIndex),
    /// Every digit computes the same.
    Replicate,
}

/// What every mesh axis does to an op, outermost first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Config(SmallVec<[AxisUse; 8]>);

impl Config {
    /// Every device computes everything.
    pub fn replicated(axes: usize) -> Self {
        Self(SmallVec::from_elem(AxisUse::Replicate, axes))
    }

    /// From one use per axis.
    pub fn new(uses: impl IntoIterator<Item = AxisUse>) -> Self {
        Self(uses.into_iter().collect())
    }

    /// One use per axis, outermost first.
    pub fn uses(&self) -> &[AxisUse] {
        &self.0
    }

    /// What an axis does.
    pub fn get(&self, axis: AxisId) -> AxisUse {
        self.0[axis.index()]
    }

    /// Sets what an axis does.
    pub fn set(&mut self, axis: AxisId, to: AxisUse) {
        self.0[axis.index()] = to;
    }

    /// The axes that split a factor.
    pub fn axes_of(&self, factor: FactorIndex) -> AxisSet {
        let splits =
            |(at, used): (usize, &AxisUse)| (*used == AxisUse::Split(factor)).then_some(AxisId(at as u32));
        self.0.iter().enumerate().filter_map(splits).collect()
    }

    /// Into how many parts each factor of a rule is split.
    pub fn parts(&self, rule: &Rule, mesh: &Mesh) -> SmallVec<[u64; 6]> {
        let mut parts = SmallVec::from_elem(1, rule.factors.len());
        for (used, axis) in self.0.iter().zip(mesh.axes()) {
            if let AxisUse::Split(f) = used {
                parts[*f as usize] *= u64::from(axis.size);
            }
        }
        parts
    }

    /// The degree of every split factor, by the outermost axis that splits it.
    pub fn degrees(&self, rule: &Rule, mesh: &Mesh) -> Vec<(&'static str, u64)> {
        let parts = self.parts(rule, mesh);
        let mut seen: SmallVec<[FactorIndex; 8]> = SmallVec::new();
        for used in &self.0 {
            if let AxisUse::Split(f) = used
                && !seen.contains(f)
            {
                seen.push(*f);
            }
        }
        seen.into_iter().map(|f| (rule.factors[f as usize].name, parts[f as usize])).collect()
    }

    /// Whether an op of this rule can be run so on the mesh: one use per axis, factors that exist and divide. The
    /// reason, where it cannot.
    pub fn check(&self, rule: &Rule, mesh: &Mesh) -> Result<(), String> {
        if self.0.len() != mesh.len() {
            return Err(format!("the config speaks of {} axes, the mesh has {}", self.0.len(), mesh.len()));
        }
        let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
        for (used, axis) in self.0.iter().zip(mesh.axes()) {
            let AxisUse::Split(f) = *used else { continue };
            let Some(factor) = rule.factors.get(f as usize) else {
                return Err(format!("axis {} splits factor {f}, which the op lacks", axis.name));
            };
            if !divides(rule, f, parts[f as usize], axis.size) {
                let (name, size) = (factor.name, factor.size);
                return Err(format!("axis {} cannot split factor {name} of size {size}", axis.name));
            }
            parts[f as usize] *= u64::from(axis.size);
        }
        Ok(())
    }

    /// For people: `n4·c4`, `d0=4` where the factor's name ends in a digit; `whole` where nothing is split.
    pub fn show(&self, rule: &Rule, mesh: &Mesh) -> String {
        let degrees = self.degrees(rule, mesh);
        if degrees.is_empty() {
            return "whole".into();
        }
        let text = |(name, degree): &(&'static str, u64)| {
            // A name that ends in a digit (`d1`) needs something between itself and the degree.
            let equals = if name.ends_with(|c: char| c.is_ascii_digit()) { "=" } else { "" };
            format!("{name}{equals}{degree}")
        };
        degrees.iter().map(text).collect::<Vec<_>>().join("·")
    }
}

/// Whether a factor of so many iterations, already in `parts`, can be split by `size` more.
pub(crate) fn divides(rule: &Rule, factor: FactorIndex, parts: u64, size: u32) -> bool {
    let f = &rule.factors[factor as usize];
    !f.whole && f.size > 1 && f.size.is_multiple_of(parts.saturating_mul(u64::from(size)))
}

/// Whether exchanging two axes changes nothing about the machine.
fn interchangeable(a: &Axis, b: &Axis) -> bool {
    (a.level, a.size, a.dim) == (b.level, b.size, b.dim)
}

/// Walks all configs in order; `visit` returns whether to go on.
fn walk(rule: &Rule, mesh: &Mesh, visit: &mut impl FnMut(&Config) -> bool) {
    let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
    let mut config = Config(SmallVec::new());
    step(rule, mesh, &mut parts, &mut config, visit);
}

fn step(
    rule: &Rule,
    mesh: &Mesh,
    parts: &mut SmallVec<[u64; 6]>,
    config: &mut Config,
    visit: &mut impl FnMut(&Config) -> bool,
) -> bool {
    let at = config.0.len();
    let Some(axis) = mesh.axes().get(at) else { return visit(config) };
    let least = match at.checked_sub(1) {
        Some(before) if interchangeable(&mesh.axes()[before], axis) => config.0[before],
        _ => AxisUse::Split(0),
    };
    for factor in 0..rule.factors.len() as FactorIndex {
        let used = AxisUse::Split(factor);
        if used < least || !divides(rule, factor, parts[factor as usize], axis.size) {
            continue;
        }
        parts[factor as usize] *= u64::from(axis.size);
        config.0.push(used);
        let go_on = step(rule, mesh, parts, config, visit);
        config.0.pop();
        parts[factor as usize] /= u64::from(axis.size);
        if !go_on {
            return false;
        }
    }
    config.0.push(AxisUse::Replicate);
    let go_on = step(rule, mesh, parts, config, visit);
    config.0.pop();
    go_on
}

/// All configs of an op, splits first.
pub fn configs(rule: &Rule, mesh: &Mesh) -> Vec<Config> {
    let mut all = Vec::new();
    walk(rule, mesh, &mut |config| {
        all.push(config.clone());
        true
    });
    all
}

/// How many configs an op has, counted up to `most` and one more.
pub fn count_configs(rule: &Rule, mesh: &Mesh, most: usize) -> usize {
    let mut count = 0;
    walk(rule, mesh, &mut |_| {
        count += 1;
        count <= most
    });
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;

    fn rule(sizes: &[(&'static str, u64)]) -> Rule {
        let mut rule = Rule::default();
        for &(name, size) in sizes {
            rule.factor(name, size);
        }
        rule
    }

    #[test]
    fn configs_are_multisets_per_level() {
        let machine = builtin("p100x16").unwrap();
        let rule = rule(&[("n", 64), ("o", 64), ("c", 64), ("h", 64), ("w", 64)]);
        // Two levels of two binary axes; each level takes two of six uses, in order.
        let all = configs(&rule, machine.mesh());
        assert_eq!(all.len(), 21 * 21);
        assert_eq!(count_configs(&rule, machine.mesh(), 1000), 441);
        assert_eq!(count_configs(&rule, machine.mesh(), 100), 101, "counting stops");
        assert_eq!(all[0].show(&rule, machine.mesh()), "n16");
        assert_eq!(all[440].show(&rule, machine.mesh()), "whole");
    }

    #[test]
    fn a_factor_is_split_no_further_than_it_divides() {
        let machine = builtin("flat:8").unwrap();
        let rule = rule(&[("a", 12), ("b", 5), ("c", 1)]);
        let shown: Vec<_> =
            configs(&rule, machine.mesh()).iter().map(|c| c.show(&rule, machine.mesh())).collect();
        assert_eq!(shown, ["a4", "a2", "whole"]);
    }

    #[test]
    fn factors_that_must_stay_whole_are_never_split() {
        let machine = builtin("flat:2").unwrap();
        let mut rule = Rule::default();
        rule.whole_factor("s", 8);
        assert_eq!(configs(&rule, machine.mesh()), [Config::replicated(1)]);
    }

    #[test]
    fn degrees_come_outermost_first() {
        let machine = builtin("p100x16").unwrap();
        let rule = rule(&[("n", 64), ("c", 64)]);
        let (n, c) = (AxisUse::Split(0), AxisUse::Split(1));
        assert_eq!(Config::new([c, c, n, n]).show(&rule, machine.mesh()), "c4·n4");
        assert_eq!(
            Config::new([n, c, n, AxisUse::Replicate]).degrees(&rule, machine.mesh()),
            [("n", 4), ("c", 2)]
        );
    }
}
