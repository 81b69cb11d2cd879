//! How finely the machine's axes are cut for a search: the finest mesh on which every op has few enough configs.
//!
//! Starting from prime axes, the axes of the level that has most of them are glued in pairs until the
//! configs of every op, and the axes themselves, are few enough. What was used is part of the plan.

use crate::config::count_configs;
use shardwright_graph::Rule;
use shardwright_machine::{AxisId, AxisSet, Machine, Mesh};

/// A mesh to search on, and why it is not a finer one.
#[derive(Clone, Debug)]
pub struct Grain {
    /// The mesh.
    pub mesh: Mesh,
    /// Whether it is the machine's prime mesh.
    pub prime: bool,
    /// The most configs that any op has on it.
    pub most_configs: usize,
}

impl Grain {
    /// The finest mesh of at most `most_axes` axes on which no op has more than `most_configs` configs; the
    /// coarsest mesh there is where none is that coarse.
    pub fn choose<'r>(
        machine: &Machine,
        rules: impl IntoIterator<Item = &'r Rule> + Clone,
        most_axes: usize,
        most_configs: usize,
    ) -> Self {
        let mut mesh = machine.mesh().clone();
        loop {
            let counts = rules.clone().into_iter().map(|rule| count_configs(rule, &mesh, most_configs));
            let most = counts.max().unwrap_or(1);
            let fits = mesh.len() <= most_axes && most <= most_configs;
            match glue_pairs(&mesh).filter(|_| !fits) {
                Some(coarser) => mesh = coarser,
                None => {
                    let prime = mesh.len() == machine.mesh().len();
                    return Self { mesh, prime, most_configs: most };
                }
            }
        }
    }

    /// For people: the axes and their sizes.
    pub fn describe(&self) -> String {
        let axes: Vec<String> = self.mesh.axes().iter().map(|a| format!("{}:{}", a.name, a.size)).collect();
        let grain = if self.prime { "prime axes" } else { "glued axes" };
        if axes.is_empty() { "one device".into() } else { format!("{grain} {}", axes.join(" ")) }
    }
}

/// The axes of the level that has most of them glued in pairs; none if every level has one.
fn glue_pairs(mesh: &Mesh) -> Option<Mesh> {
    let axes = mesh.axes();
    let count = |level| axes.iter().filter(|a| a.level == level).count();
    let (level, most) = axes.iter().map(|a| (a.level, count(a.level))).max_by_key(|&(level, n)| {
        // The outermost of equals: its axes are the ones that people think of as one.
        (n, std::cmp::Reverse(level))
    })?;
    if most < 2 {
        return None;
    }
    let mut groups: Vec<AxisSet> = Vec::new();
    let mut open = false;
    for (at, axis) in axes.iter().enumerate() {
        let id = AxisId(at as u32);
        match groups.last_mut() {
            Some(group) if open && axis.level == level => {
                *group = group.with(id);
                open = false;
            }
            _ => {
                groups.push(AxisSet::of(id));
                open = axis.level == level;
            }
        }
    }
    mesh.glue(&groups).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;

    fn rule() -> Rule {
        let mut rule = Rule::default();
        for name in ["n", "o", "c", "h", "w"] {
            rule.factor(name, 4096);
        }
        rule
    }

    #[test]
    fn small_machines_keep_their_prime_axes() {
        let rule = rule();
        let grain = Grain::choose(&builtin("p100x16").unwrap(), [&rule], 4, 512);
        assert!(grain.prime);
        assert_eq!(grain.most_configs, 441);
        assert_eq!(grain.describe(), "prime axes node.0:2 node.1:2 gpu.0:2 gpu.1:2");
    }

    #[test]
    fn large_machines_get_glued_axes_of_equal_sizes() {
        let rule = rule();
        let grain = Grain::choose(&builtin("flat:64").unwrap(), [&rule], 4, 512);
        let sizes: Vec<u32> = grain.mesh.axes().iter().map(|a| a.size).collect();
        assert_eq!(sizes, [4, 4, 4]);
        assert!(!grain.prime && grain.describe().starts_with("glued axes"));
    }

    #[test]
    fn the_coarsest_mesh_is_the_last_resort() {
        let rule = rule();
        let grain = Grain::choose(&builtin("p100x16").unwrap(), [&rule], 1, 1);
        assert_eq!(grain.mesh.len(), 2);
        assert_eq!(grain.most_configs, 2, "counted to one more than allowed");
    }
}
