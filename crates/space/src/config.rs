//! Configs: the use of each mesh axis by one op. This module lists configs and never prices them.
//!
//! Axes of one level that have the same size and lie in the same dimension of its grid are interchangeable. So only
//! configs that are sorted by factor along such axes are listed. Every degree of parallelism of the mesh is still
//! listed. The restriction: two layers with *several different* splits inside one level cannot choose the order of
//! their axes. Pins are listed only on request, for searches that place whole ops: they multiply the choices.

use shardwright_graph::{FactorIndex, Rule};
use shardwright_machine::{Axis, AxisId, AxisSet, Mesh};
use smallvec::SmallVec;

/// The use of one mesh axis by an op. Splits order before replication, and by factor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AxisUse {
    /// Every digit computes its part of this factor.
    Split(FactorIndex),
    /// Every digit computes the same values.
    Replicate,
    /// Only this digit computes; the op's tensors are absent from the others.
    Pin(u16),
}

/// The use of every mesh axis by an op, outermost first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Config(SmallVec<[AxisUse; 8]>);

impl Config {
    /// Every device computes the whole op.
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

    /// The use of an axis.
    pub fn get(&self, axis: AxisId) -> AxisUse {
        self.0[axis.index()]
    }

    /// Sets the use of an axis.
    pub fn set(&mut self, axis: AxisId, to: AxisUse) {
        self.0[axis.index()] = to;
    }

    /// The axes that split a factor.
    pub fn axes_of(&self, factor: FactorIndex) -> AxisSet {
        let splits =
            |(at, used): (usize, &AxisUse)| (*used == AxisUse::Split(factor)).then_some(AxisId(at as u32));
        self.0.iter().enumerate().filter_map(splits).collect()
    }

    /// The number of parts of each factor of a rule.
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

    /// Checks that an op of this rule can run under the config: one use per axis, factors that exist and divide, digits
    /// that exist.
    pub fn check(&self, rule: &Rule, mesh: &Mesh) -> Result<(), String> {
        if self.0.len() != mesh.len() {
            return Err(format!("the config speaks of {} axes, the mesh has {}", self.0.len(), mesh.len()));
        }
        let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
        for (used, axis) in self.0.iter().zip(mesh.axes()) {
            match *used {
                AxisUse::Split(f) => {
                    let Some(factor) = rule.factors.get(f as usize) else {
                        return Err(format!("axis {} splits factor {f}, which the op lacks", axis.name));
                    };
                    if !rule.divides(f, parts[f as usize], axis.size) {
                        let (name, size) = (factor.name, factor.size);
                        return Err(format!("axis {} cannot split factor {name} of size {size}", axis.name));
                    }
                    parts[f as usize] *= u64::from(axis.size);
                }
                AxisUse::Replicate => {}
                AxisUse::Pin(digit) if u32::from(digit) < axis.size => {}
                AxisUse::Pin(digit) => return Err(format!("axis {} has no digit {digit}", axis.name)),
            }
        }
        Ok(())
    }

    /// The same config, which has no pins, on the machine's prime axes; `mesh` merges some of them.
    #[must_use]
    pub fn on_primes(&self, mesh: &Mesh) -> Self {
        let primes = mesh.axes().iter().map(|axis| axis.primes.len()).sum();
        let mut fine = Self::replicated(primes);
        for (axis, &used) in mesh.axes().iter().zip(&self.0) {
            for prime in axis.primes.iter() {
                fine.set(prime, used);
            }
        }
        fine
    }

    /// For people: `n4·c4`, `d0=4` where the factor's name ends in a digit, `@node.0=1` for a pin; `whole` where
    /// nothing is split or pinned.
    pub fn show(&self, rule: &Rule, mesh: &Mesh) -> String {
        let text = |(name, degree): &(&'static str, u64)| {
            // A name that ends in a digit (`d1`) is separated from the degree.
            let equals = if name.ends_with(|c: char| c.is_ascii_digit()) { "=" } else { "" };
            format!("{name}{equals}{degree}")
        };
        let mut shown: Vec<String> = self.degrees(rule, mesh).iter().map(text).collect();
        for (used, axis) in self.0.iter().zip(mesh.axes()) {
            if let AxisUse::Pin(digit) = used {
                shown.push(format!("@{}={digit}", axis.name));
            }
        }
        if shown.is_empty() { "whole".into() } else { shown.join("·") }
    }
}

/// Whether exchanging two axes leaves the machine unchanged.
fn interchangeable(a: &Axis, b: &Axis) -> bool {
    (a.level, a.size, a.dim) == (b.level, b.size, b.dim)
}

/// Visits all configs in order; `visit` returns whether to continue.
fn walk(rule: &Rule, mesh: &Mesh, pins: bool, visit: &mut impl FnMut(&Config) -> bool) {
    let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
    let mut config = Config(SmallVec::new());
    step(rule, mesh, pins, &mut parts, &mut config, visit);
}

fn step(
    rule: &Rule,
    mesh: &Mesh,
    pins: bool,
    parts: &mut SmallVec<[u64; 6]>,
    config: &mut Config,
    visit: &mut impl FnMut(&Config) -> bool,
) -> bool {
    let at = config.0.len();
    let Some(axis) = mesh.axes().get(at) else { return visit(config) };
    let least = match at.checked_sub(1) {
        // Pins on two axes name different devices in either order.
        Some(before) if matches!(config.0[before], AxisUse::Pin(_)) => AxisUse::Split(0),
        Some(before) if interchangeable(&mesh.axes()[before], axis) => config.0[before],
        _ => AxisUse::Split(0),
    };
    for factor in 0..rule.factors.len() as FactorIndex {
        let used = AxisUse::Split(factor);
        if used < least || !rule.divides(factor, parts[factor as usize], axis.size) {
            continue;
        }
        parts[factor as usize] *= u64::from(axis.size);
        config.0.push(used);
        let go_on = step(rule, mesh, pins, parts, config, visit);
        config.0.pop();
        parts[factor as usize] /= u64::from(axis.size);
        if !go_on {
            return false;
        }
    }
    let pinned = (0..if pins { axis.size } else { 0 }).map(|digit| AxisUse::Pin(digit as u16));
    for used in std::iter::once(AxisUse::Replicate).chain(pinned) {
        config.0.push(used);
        let go_on = step(rule, mesh, pins, parts, config, visit);
        config.0.pop();
        if !go_on {
            return false;
        }
    }
    true
}

impl Config {
    /// Whether [`configs`] lists this config: it is valid, pins nothing, and of interchangeable neighbours the first axis has
    /// the first use.
    pub fn is_listed(&self, rule: &Rule, mesh: &Mesh) -> bool {
        let ordered = |at: usize| {
            at == 0
                || !interchangeable(&mesh.axes()[at - 1], &mesh.axes()[at])
                || self.0[at - 1] <= self.0[at]
        };
        self.check(rule, mesh).is_ok()
            && !self.0.iter().any(|used| matches!(used, AxisUse::Pin(_)))
            && (0..mesh.len()).all(ordered)
    }
}

/// All configs of an op without pins, also those that [`configs`] leaves out because axes are interchangeable.
pub fn configs_in_any_order(rule: &Rule, mesh: &Mesh) -> Vec<Config> {
    let mut found: Vec<SmallVec<[AxisUse; 8]>> = vec![SmallVec::new()];
    for _ in mesh.axes() {
        let uses = |config: SmallVec<[AxisUse; 8]>| {
            let splits = (0..rule.factors.len() as FactorIndex).map(AxisUse::Split);
            splits.chain([AxisUse::Replicate]).map(move |used| {
                let mut longer = config.clone();
                longer.push(used);
                longer
            })
        };
        found = found.into_iter().flat_map(uses).collect();
    }
    found.into_iter().map(Config::new).filter(|config| config.check(rule, mesh).is_ok()).collect()
}

/// All configs of an op without pins, splits first.
pub fn configs(rule: &Rule, mesh: &Mesh) -> Vec<Config> {
    list(rule, mesh, false)
}

/// All configs of an op, including those that pin it along some axes.
pub fn configs_with_pins(rule: &Rule, mesh: &Mesh) -> Vec<Config> {
    list(rule, mesh, true)
}

fn list(rule: &Rule, mesh: &Mesh, pins: bool) -> Vec<Config> {
    let mut all = Vec::new();
    walk(rule, mesh, pins, &mut |config| {
        all.push(config.clone());
        true
    });
    all
}

/// The number of an op's configs without pins, counted up to `most + 1`.
pub fn count_configs(rule: &Rule, mesh: &Mesh, most: usize) -> usize {
    let mut count = 0;
    walk(rule, mesh, false, &mut |_| {
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
    fn a_config_is_listed_if_and_only_if_it_is_among_the_configs() {
        let rule = rule(&[("n", 6), ("o", 4), ("c", 1)]);
        for machine in ["flat:8", "p100x16", "flat:6"] {
            let machine = builtin(machine).unwrap();
            let (mesh, all) = (machine.mesh(), configs(&rule, machine.mesh()));
            let uses = (0..3).map(AxisUse::Split).chain([AxisUse::Replicate, AxisUse::Pin(0)]);
            let uses: Vec<AxisUse> = uses.collect();
            for number in 0..uses.len().pow(mesh.len() as u32) {
                let used = |at: usize| uses[number / uses.len().pow(at as u32) % uses.len()];
                let config = Config::new((0..mesh.len()).map(used));
                assert_eq!(config.is_listed(&rule, mesh), all.contains(&config), "{config:?}");
            }
        }
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
    fn pins_reach_every_device_and_are_shown_by_axis() {
        let machine = builtin("flat:4").unwrap();
        let rule = rule(&[("n", 2)]);
        let all = configs_with_pins(&rule, machine.mesh());
        let shown: Vec<_> = all.iter().map(|c| c.show(&rule, machine.mesh())).collect();
        assert_eq!(shown.iter().filter(|s| s.matches('@').count() == 2).count(), 4, "{shown:?}");
        assert!(shown.contains(&"n2·@gpu.0=1".to_string()), "{shown:?}");
        assert!(shown.contains(&"@gpu.0=1·@gpu.1=0".to_string()), "{shown:?}");
        for config in &all {
            assert_eq!(config.check(&rule, machine.mesh()), Ok(()));
        }
    }

    #[test]
    fn configs_that_cannot_be_are_refused() {
        let machine = builtin("flat:4").unwrap();
        let mut rule = rule(&[("n", 6)]);
        rule.whole_factor("s", 4);
        let (n, r) = (AxisUse::Split(0), AxisUse::Replicate);
        for (uses, why) in [
            (vec![n], "speaks of 1 axes"),
            (vec![n, n], "cannot split factor n of size 6"),
            (vec![AxisUse::Split(1), r], "cannot split factor s"),
            (vec![AxisUse::Split(2), r], "which the op lacks"),
            (vec![r, AxisUse::Pin(2)], "has no digit 2"),
        ] {
            let error = Config::new(uses).check(&rule, machine.mesh()).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
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
