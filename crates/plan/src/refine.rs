//! Coarse to fine: a plan found on glued axes, improved on finer ones.
//!
//! On large machines the problem is solved on a mesh whose neighbouring axes are glued ([`shardwright_space::Grain`]).
//! Here one glued axis at a time is taken apart (all of them at once, where few axes come of it), and the problem is
//! solved again on the finer mesh. Ops with few configs there have all of them; others those near the plan at hand,
//! which differ from it on two new axes in any way, on one other axis, or split one factor as far as it goes. What
//! gains is kept, axes on which all ops agree are glued again, and so on until nothing gains, the time is up or somebody
//! interrupts: the best so far is there at any time. The result
//! is never worse than the plan at the start; nothing is proved about the finer space, so the bound of the coarse one is
//! reported beside it. Finer problems are therefore not solved to the end: a mesh on which nothing can gain enough is
//! left as soon as its bound says so, and one that gains as soon as what more it could gain is too little.

use crate::{
    error::PlanError,
    planner::{Demands, Found, attempt},
    problem::{Near, Problem},
    strategy::{Space, Strategy},
};
use shardwright_graph::{FactorIndex, Rule};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_search::{Control, StopReason};
use shardwright_space::{AxisUse, Config, count_configs};
use std::collections::BTreeSet;

/// The most axes of a finer mesh: one more than a coarse one has, which keeps most re-layouts exact.
const MOST_FINER_AXES: usize = crate::problem::MOST_AXES + 1;
/// Ops with at most so many configs on a finer mesh have them all.
const FEW_CONFIGS: usize = crate::problem::MOST_CONFIGS / 2;
/// A finer mesh that gains less than this part of the step ends the refinement.
const LEAST_GAIN: f64 = 1e-4;

/// A plan on a finer mesh, and the problem that it solves.
pub struct Refined<'a> {
    /// Configs near the coarse plan on the finer mesh.
    pub problem: Problem<'a>,
    /// The plan; its bound is nobody's.
    pub found: Found,
}

/// What came of looking at finer meshes.
#[derive(Default)]
pub struct Refinement<'a> {
    /// The best plan that is better than the coarse one.
    pub best: Option<Refined<'a>>,
    /// How many meshes were searched.
    pub meshes: usize,
    /// Why it ended before nothing gained any more: the time was up, or the caller cancelled.
    pub cut_short: Option<StopReason>,
}

/// Improves a plan on finer meshes, unless its mesh is the finest already. May be stopped at any time by `control`, and
/// has then the best that was found so far.
pub fn refine<'a>(
    problem: &Problem<'a>,
    strategy: &Strategy,
    demands: &Demands,
    coarse: &Found,
    control: &Control<'_>,
) -> Refinement<'a> {
    let pinned = |config: &Config| config.uses().iter().any(|used| matches!(used, AxisUse::Pin(_)));
    let free = demands.wishes.is_empty() && !coarse.configs.iter().any(pinned);
    let mut refinement = Refinement::default();
    if problem.grain.prime || strategy.space != Space::All || !free {
        return refinement;
    }
    while let Some(better) = step(problem, strategy, demands, coarse, control, &mut refinement) {
        refinement.best = Some(better);
    }
    refinement
}

/// A plan on a mesh finer than that of the best so far, if one of them gains.
fn step<'a>(
    problem: &Problem<'a>,
    strategy: &Strategy,
    demands: &Demands,
    coarse: &Found,
    control: &Control<'_>,
    refinement: &mut Refinement<'a>,
) -> Option<Refined<'a>> {
    let (mesh, found) = match &refinement.best {
        Some(refined) => (refined.problem.mesh(), &refined.found),
        None => (problem.mesh(), coarse),
    };
    let least = (found.objective as f64 * LEAST_GAIN) as i64;
    let target = found.objective - least;
    // A mesh is done with when nothing on it can gain, or what it gains is known well enough.
    let enough = move |cost: Option<i64>, bound: i64| {
        bound >= target || cost.is_some_and(|cost| cost < target && cost - bound <= least)
    };
    let control = Control { enough: Some(&enough), ..control.clone() };
    for finer in finer_meshes(problem.machine.mesh(), &agreed(mesh, &found.configs)) {
        if let Some(reason) = control.stop(0) {
            refinement.cut_short = Some(reason);
            return None;
        }
        refinement.meshes += 1;
        let candidates = near(problem, mesh, &found.configs, &finer);
        let near = match problem.near(Near { mesh: finer, candidates }, &control) {
            Ok(near) => near,
            Err(PlanError::Stopped(reason)) => {
                refinement.cut_short = Some(reason);
                return None;
            }
            Err(_) => continue,
        };
        // The coarse plan is no worse than any baseline: no need to look at those again.
        let Ok(better) = attempt(&near, strategy, demands, &control) else { continue };
        if better.objective < target {
            return Some(Refined { problem: near, found: Found { bound: 0, ..better } });
        }
    }
    None
}

/// The prime axes under each axis, with neighbours of a level glued on which every op does the same.
fn agreed(mesh: &Mesh, configs: &[Config]) -> Vec<AxisSet> {
    let mut groups: Vec<AxisSet> = Vec::new();
    for (at, axis) in mesh.axes().iter().enumerate() {
        let alike = at > 0
            && mesh.axes()[at - 1].level == axis.level
            && configs.iter().all(|config| config.uses()[at - 1] == config.uses()[at]);
        match groups.last_mut() {
            Some(group) if alike => *group = group.union(axis.primes),
            _ => groups.push(axis.primes),
        }
    }
    groups
}

/// The prime mesh if it has few axes; else all meshes with one of the groups taken apart after its first or before
/// its last prime axis.
fn finer_meshes(prime: &Mesh, groups: &[AxisSet]) -> Vec<Mesh> {
    let mut meshes = Vec::new();
    if groups.len() >= MOST_FINER_AXES.min(prime.len()) {
        return meshes;
    }
    if prime.len() <= MOST_FINER_AXES {
        return vec![prime.clone()];
    }
    for (at, group) in groups.iter().enumerate().filter(|(_, group)| group.len() > 1) {
        let axes: Vec<AxisId> = group.iter().collect();
        for cut in BTreeSet::from([1, axes.len() - 1]) {
            let mut finer = groups.to_vec();
            let halves = [&axes[..cut], &axes[cut..]].map(|half| half.iter().copied().collect::<AxisSet>());
            finer.splice(at..=at, halves);
            meshes.extend(prime.glue(&finer));
        }
    }
    meshes
}

/// Per variable: configs of its leading op on a finer mesh near those of a plan.
fn near(problem: &Problem<'_>, coarse: &Mesh, configs: &[Config], finer: &Mesh) -> Vec<Vec<Config>> {
    let axes: Vec<AxisId> = finer.all().iter().collect();
    // The coarse axis that each finer one was part of; new axes are those that share one.
    let parent = |axis: AxisId| {
        let part = |of: &AxisId| !coarse.axis(*of).primes.intersect(finer.axis(axis).primes).is_empty();
        coarse.all().iter().find(part)
    };
    let parents: Vec<Option<AxisId>> = axes.iter().map(|&axis| parent(axis)).collect();
    let new: Vec<AxisId> = axes
        .iter()
        .zip(&parents)
        .filter(|(_, parent)| parents.iter().filter(|other| other == parent).count() > 1)
        .map(|(&axis, _)| axis)
        .collect();
    let variable = |variable: usize| {
        let lead = problem.variables.splits[variable].forward().index();
        let rule = &problem.shapes[lead].rule;
        let used = |parent: &Option<AxisId>| parent.map_or(AxisUse::Replicate, |p| configs[lead].get(p));
        let same = Config::new(parents.iter().map(used));
        let factors = 0..rule.factors.len() as FactorIndex;
        let uses: Vec<AxisUse> = factors.clone().map(AxisUse::Split).chain([AxisUse::Replicate]).collect();
        let mut found = BTreeSet::from([same.clone()]);
        for &a in &axes {
            for &first in &uses {
                let mut one = same.clone();
                one.set(a, first);
                for &b in new.iter().filter(|&&b| new.contains(&a) && b > a) {
                    for &second in &uses {
                        let mut two = one.clone();
                        two.set(b, second);
                        found.insert(two);
                    }
                }
                found.insert(one);
            }
        }
        found.extend(factors.map(|factor| as_far_as_it_goes(rule, finer, factor)));
        if count_configs(rule, finer, FEW_CONFIGS) <= FEW_CONFIGS {
            found.extend(shardwright_space::configs(rule, finer));
        }
        found.retain(|config| divides(rule, finer, config));
        found.into_iter().collect()
    };
    (0..problem.variables.splits.len()).map(variable).collect()
}

fn divides(rule: &Rule, mesh: &Mesh, config: &Config) -> bool {
    config.parts(rule, mesh).iter().zip(&rule.factors).all(|(&parts, factor)| {
        parts == 1 || (!factor.whole && factor.size > 1 && factor.size.is_multiple_of(parts))
    })
}

/// One factor on every axis that still divides it.
fn as_far_as_it_goes(rule: &Rule, mesh: &Mesh, factor: FactorIndex) -> Config {
    let mut config = Config::replicated(mesh.len());
    for axis in mesh.all().iter() {
        config.set(axis, AxisUse::Split(factor));
        if !divides(rule, mesh, &config) {
            config.set(axis, AxisUse::Replicate);
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{planner::search, strategy};
    use shardwright_frontend::zoo::{BuildOptions, build};
    use shardwright_machine::builtin;

    /// The exact answer on the prime mesh with every use of every axis: few enough where little divides.
    fn exact_on_primes(problem: &Problem<'_>) -> Found {
        let mesh = problem.machine.mesh().clone();
        let all = |v: usize| {
            let rule = &problem.shapes[problem.variables.splits[v].forward().index()].rule;
            let mut found = vec![Config::replicated(mesh.len())];
            for axis in mesh.all().iter() {
                let splits = found.iter().flat_map(|config| {
                    (0..rule.factors.len() as FactorIndex).map(move |factor| {
                        let mut config = config.clone();
                        config.set(axis, AxisUse::Split(factor));
                        config
                    })
                });
                let more: Vec<Config> = splits.filter(|config| divides(rule, &mesh, config)).collect();
                found.extend(more);
            }
            found
        };
        let candidates = (0..problem.variables.splits.len()).map(all).collect();
        let fine = problem.near(Near { mesh: mesh.clone(), candidates }, &Control::new()).unwrap();
        search(&fine, strategy::find("exact").unwrap(), &Demands::default(), &Control::new()).unwrap()
    }

    #[test]
    fn refined_plans_lie_between_the_coarse_one_and_the_best() {
        let control = Control::new();
        let exact = strategy::find("exact").unwrap();
        let (mut gained, mut optimal) = (0, 0);
        let cases = [
            ("mlp:batch=500,input=1500,hidden=1000,layers=2,classes=100", "flat:32"),
            ("mlp:batch=50,input=4500,hidden=4100,layers=2,classes=100", "flat:32"),
            ("mlp:batch=100,input=6000,hidden=6100,layers=2,classes=100", "a100x64:32"),
        ];
        for (model, machine) in cases {
            let graph = build(model, &BuildOptions::default()).unwrap();
            let machine = builtin(machine).unwrap();
            let problem = Problem::new(&graph, &machine, None).unwrap();
            assert!(!problem.grain.prime, "{model} is searched on glued axes");
            let coarse = search(&problem, exact, &Demands::default(), &control).unwrap();
            let best = exact_on_primes(&problem);
            let refined = refine(&problem, exact, &Demands::default(), &coarse, &control).best;
            let objective = refined.as_ref().map_or(coarse.objective, |r| r.found.objective);
            assert!(objective <= coarse.objective, "{model}: {objective}");
            assert!(best.bound <= objective, "{model}: {objective} below {}", best.bound);
            println!("{model}: {} refined to {objective}, best {}", coarse.objective, best.objective);
            gained += usize::from(refined.is_some());
            optimal += usize::from(objective <= best.objective);
        }
        assert!(gained > 0, "no case has anything to refine");
        assert!(optimal > 0, "refinement never finds the best");
    }

    #[test]
    fn refined_plans_are_no_slower_cost_what_they_say_and_keep_the_limit() {
        let control = Control::new().iteration_limit(50);
        let exact = strategy::find("exact").unwrap();
        let mut gained = 0;
        for (model, machine, limited) in [
            ("mlp:hidden=768,layers=2", "k80x64", true),
            ("mlp:hidden=480,input=720,layers=3", "flat:48", false),
            ("lenet5", "flat:32", false),
        ] {
            let graph = build(model, &BuildOptions { batch: Some(96), ..BuildOptions::default() }).unwrap();
            let machine = builtin(machine).unwrap();
            let problem = Problem::new(&graph, &machine, None).unwrap();
            let free = search(&problem, exact, &Demands::default(), &control).unwrap();
            let peak = crate::evaluate(&problem, &free.configs).unwrap().peak_memory;
            for memory in [None, limited.then_some(peak)] {
                let demands = Demands { memory, ..Demands::default() };
                let Some(refined) = refine(&problem, exact, &demands, &free, &control).best else { continue };
                gained += 1;
                assert!(refined.found.objective < free.objective, "{model}");
                let costs = crate::evaluate(&refined.problem, &refined.found.configs).unwrap();
                assert_eq!(costs.objective(), refined.found.objective, "{model}");
                assert!(memory.is_none_or(|limit| costs.peak_memory <= limit), "{model}");
            }
        }
        assert!(gained > 0, "no case has anything to refine");
    }

    #[test]
    fn a_refinement_that_is_cut_short_says_so() {
        let graph =
            build("mlp:batch=500,input=1500,hidden=1000,layers=2,classes=100", &BuildOptions::default());
        let (graph, machine) = (graph.unwrap(), builtin("flat:32").unwrap());
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let exact = strategy::find("exact").unwrap();
        let coarse = search(&problem, exact, &Demands::default(), &Control::new()).unwrap();
        let flag = std::sync::atomic::AtomicBool::new(true);
        let cancelled = Control { cancel: Some(&flag), ..Control::new() };
        let late = Control::new().time_limit(std::time::Duration::ZERO);
        for (control, reason) in [(cancelled, StopReason::Cancelled), (late, StopReason::Deadline)] {
            let mesh = machine.mesh().clone();
            let candidates = near(&problem, problem.mesh(), &coarse.configs, &mesh);
            let stopped = problem.near(Near { mesh, candidates }, &control).err();
            assert_eq!(stopped, Some(PlanError::Stopped(reason.clone())));
            let refinement = refine(&problem, exact, &Demands::default(), &coarse, &control);
            assert!(refinement.best.is_none() && refinement.meshes == 0);
            assert_eq!(refinement.cut_short, Some(reason));
        }
    }

    #[test]
    fn finer_meshes_take_one_axis_apart() {
        let machine = builtin("a100x64").unwrap();
        let groups = agreed(&machine.mesh().per_level(), &[]);
        let shapes: Vec<Vec<u32>> = finer_meshes(machine.mesh(), &groups)
            .iter()
            .map(|mesh| mesh.axes().iter().map(|axis| axis.size).collect())
            .collect();
        assert_eq!(shapes, [[2, 4, 8], [4, 2, 8], [8, 2, 4], [8, 4, 2]]);
    }
}
