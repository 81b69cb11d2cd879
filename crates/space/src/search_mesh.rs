//! The search mesh: the finest mesh of the machine's axes on which every op has few enough configs.
//!
//! The machine's prime axes are the start. The axes of the level with the most axes are merged in pairs, until every op
//! has few enough configs and the mesh few enough axes. The plan records the search mesh.

use crate::config::count_configs;
use shardwright_graph::Rule;
use shardwright_machine::{AxisId, AxisSet, Machine, Mesh};

/// A mesh to search on, and its distance from the prime mesh.
#[derive(Clone, Debug)]
pub struct SearchMesh {
    /// The mesh.
    pub mesh: Mesh,
    /// Whether this is the machine's prime mesh.
    pub prime: bool,
    /// The largest number of configs that an op has on it.
    pub most_configs: usize,
}

impl SearchMesh {
    /// The finest mesh of at most `most_axes` axes on which no op has more than `most_configs` configs. Where no mesh
    /// is coarse enough, the coarsest one.
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
            match merge_pairs(&mesh).filter(|_| !fits) {
                Some(coarser) => mesh = coarser,
                None => {
                    let prime = mesh.len() == machine.mesh().len();
                    return Self { mesh, prime, most_configs: most };
                }
            }
        }
    }

    /// The axes and their sizes, for people.
    pub fn describe(&self) -> String {
        let axes: Vec<String> = self.mesh.axes().iter().map(|a| format!("{}:{}", a.name, a.size)).collect();
        let search_mesh = if self.prime { "prime axes" } else { "merged axes" };
        if axes.is_empty() { "one device".into() } else { format!("{search_mesh} {}", axes.join(" ")) }
    }
}

/// Merges in pairs the axes of the level with the most axes; none if every level has one axis.
fn merge_pairs(mesh: &Mesh) -> Option<Mesh> {
    let axes = mesh.axes();
    let count = |level| axes.iter().filter(|a| a.level == level).count();
    let (level, most) = axes.iter().map(|a| (a.level, count(a.level))).max_by_key(|&(level, n)| {
        // Ties go to the outermost level: people think of its axes as one.
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
    let merged = mesh.merge_axes(&groups);
    debug_assert!(merged.is_ok(), "the groups are neighbours of one level, in order");
    merged.ok()
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
        let search_mesh = SearchMesh::choose(&builtin("p100x16").unwrap(), [&rule], 4, 512);
        assert!(search_mesh.prime);
        assert_eq!(search_mesh.most_configs, 441);
        assert_eq!(search_mesh.describe(), "prime axes node.0:2 node.1:2 gpu.0:2 gpu.1:2");
    }

    #[test]
    fn large_machines_get_merged_axes_of_equal_sizes() {
        let rule = rule();
        let search_mesh = SearchMesh::choose(&builtin("flat:64").unwrap(), [&rule], 4, 512);
        let sizes: Vec<u32> = search_mesh.mesh.axes().iter().map(|a| a.size).collect();
        assert_eq!(sizes, [4, 4, 4]);
        assert!(!search_mesh.prime && search_mesh.describe().starts_with("merged axes"));
    }

    #[test]
    fn the_coarsest_mesh_is_the_last_resort() {
        let rule = rule();
        let search_mesh = SearchMesh::choose(&builtin("p100x16").unwrap(), [&rule], 1, 1);
        assert_eq!(search_mesh.mesh.len(), 2);
        assert_eq!(search_mesh.most_configs, 2, "counted to one more than allowed");
    }
}
