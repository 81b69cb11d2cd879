//! Coarse to fine: an assignment found on merged axes, improved on finer ones.
//!
//! On large machines the problem is solved on a mesh whose neighbouring axes are merged ([`shardwright_space::SearchMesh`]).
//! Refinement splits one merged axis at a time (all of them at once, where that makes few axes) and solves the problem
//! again on the finer mesh. Ops with few configs keep all of them. Other ops keep configs near the current assignment: any
//! change on the two new axes, one change on any other axis, or one factor split as finely as possible. A gain is kept, axes
//! on which all ops agree are merged again, and so on until nothing gains or the control stops. The best so far is known at
//! any time, and never worse than the start. Nothing is proved about the finer space. So finer problems are not solved to the
//! end: a mesh is left as soon as its bound rules out a gain, or once further gains are too small.

use crate::{
    network_search::{NetworkAnswer, NetworkSearch, Space},
    prime_search::among,
};
use shardwright_graph::{FactorIndex, Rule};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_plan::{Candidates, Constraints, Context, MOST_AXES, MOST_CONFIGS, PlanError, SearchProblem};
use shardwright_search::{Control, StopReason, gap};
use shardwright_space::{AxisUse, Config, count_configs};
use std::collections::BTreeSet;

/// The most axes of a finer mesh: one more than a coarse one has, which keeps most reshard paths exact.
const MOST_FINER_AXES: usize = MOST_AXES + 1;
/// Ops with at most so many configs on a finer mesh have them all.
const FEW_CONFIGS: usize = MOST_CONFIGS / 2;
/// The search among candidates of the bound may take one in so many parts of the time.
const AMONG_SHARE: u32 = 3;
/// A finer mesh that gains less than this part of the step ends the refinement.
const LEAST_GAIN: f64 = 1e-4;

/// The result of a refinement.
#[derive(Default)]
pub struct Refinement<'a> {
    /// The best answer cheaper than the coarse one, and the problem that it solves. Its bound is zero: the finer space is
    /// not searched exhaustively.
    pub best: Option<(SearchProblem<'a>, NetworkAnswer)>,
    /// How many meshes were searched.
    pub meshes: usize,
    /// Why it ended while something might still gain: the time was up, or the caller cancelled.
    pub cut_short: Option<StopReason>,
}

/// Improves an answer on finer meshes, unless its mesh is the finest already. It ends at the gap asked for to `bound`, which
/// holds on the prime axes. `candidates` are configs on the prime axes, per variable, that are tried first.
pub fn refine<'a>(
    problem: &SearchProblem<'a>,
    search: &NetworkSearch<'_>,
    constraints: &Constraints,
    coarse: &NetworkAnswer,
    bound: i64,
    candidates: &[Vec<Config>],
    control: &Control<'_>,
) -> Refinement<'a> {
    let free = constraints.configs.is_empty() && !coarse.assignment.has_pins();
    let mut refinement = Refinement::default();
    if problem.context.search_mesh.prime || search.space != Space::All || !free {
        return refinement;
    }
    let (context, mut objective) = (&*problem.context, coarse.objective);
    if !candidates.is_empty() && !control.is_near(objective, bound) {
        let known = [(context.mesh(), &coarse.assignment)];
        let found = among(context, search, constraints, candidates, &known, &control.share(AMONG_SHARE));
        refinement.best = found.filter(|(_, found)| found.objective < coarse.objective);
        objective = refinement.best.as_ref().map_or(objective, |(_, found)| found.objective);
    }
    while !control.is_near(objective, bound)
        && let Some(better) = improve(problem, search, constraints, coarse, control, &mut refinement)
    {
        objective = better.1.objective;
        refinement.best = Some(better);
    }
    refinement
}

/// An answer on a mesh finer than that of the best so far, if one of them gains.
fn improve<'a>(
    problem: &SearchProblem<'a>,
    search: &NetworkSearch<'_>,
    constraints: &Constraints,
    coarse: &NetworkAnswer,
    control: &Control<'_>,
    refinement: &mut Refinement<'a>,
) -> Option<(SearchProblem<'a>, NetworkAnswer)> {
    let context = &*problem.context;
    let (mesh, found) = match &refinement.best {
        Some((finer, found)) => (finer.context.mesh(), found),
        None => (context.mesh(), coarse),
    };
    let configs = &found.assignment.configs;
    let least = (found.objective as f64 * LEAST_GAIN) as i64;
    let target = found.objective - least;
    // A mesh is done with when nothing on it can gain, when its gain is known well enough, or when the gap asked for is
    // reached, by what it offers or by what is known already.
    let (objective, asked) = (found.objective, control.gap);
    let enough = move |cost: Option<i64>, bound: i64| {
        let best = cost.map_or(objective, |cost| cost.min(objective));
        bound >= target
            || gap(best, bound).is_some_and(|gap| gap <= asked)
            || cost.is_some_and(|cost| cost < target && cost - bound <= least)
    };
    let control = Control { enough: Some(&enough), ..control.clone() };
    for finer in finer_meshes(context.machine.mesh(), &agreed(mesh, configs)) {
        if let Some(reason) = control.stop(0) {
            refinement.cut_short = Some(reason);
            return None;
        }
        refinement.meshes += 1;
        let candidates = Candidates { configs: near(context, mesh, configs, &finer), mesh: finer };
        let near = match SearchProblem::among(context, candidates, &control) {
            Ok(near) => near,
            Err(PlanError::Stopped(reason)) => {
                refinement.cut_short = Some(reason);
                return None;
            }
            Err(_) => continue,
        };
        let Ok(better) = search.run(&near, constraints, &control) else { continue };
        if better.objective < target {
            return Some((near, NetworkAnswer { bound: 0, ..better }));
        }
    }
    None
}

/// The prime axes under each axis. Neighbouring axes of a level are merged where every op uses both in the same way.
pub(crate) fn agreed(mesh: &Mesh, configs: &[Config]) -> Vec<AxisSet> {
    let mut groups: Vec<AxisSet> = Vec::new();
    for (at, axis) in mesh.axes().iter().enumerate() {
        let equal = at > 0
            && mesh.axes()[at - 1].level == axis.level
            && configs.iter().all(|config| config.uses()[at - 1] == config.uses()[at]);
        match groups.last_mut() {
            Some(group) if equal => *group = group.union(axis.primes),
            _ => groups.push(axis.primes),
        }
    }
    groups
}

/// The prime mesh if it has few axes; else all meshes with one group split after its first or before its last prime axis.
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
            meshes.extend(prime.merge_axes(&finer));
        }
    }
    meshes
}

/// Per variable: configs of its leading op on a finer mesh near those of an assignment.
fn near(context: &Context<'_>, coarse: &Mesh, configs: &[Config], finer: &Mesh) -> Vec<Vec<Config>> {
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
        let lead = context.variables.members[variable].forward().index();
        let rule = &context.shapes[lead].rule;
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
        found.extend(factors.map(|factor| split_finest(rule, finer, factor)));
        if count_configs(rule, finer, FEW_CONFIGS) <= FEW_CONFIGS {
            found.extend(shardwright_space::configs(rule, finer));
        }
        found.retain(|config| divides(rule, finer, config));
        found.into_iter().collect()
    };
    (0..context.variables.members.len()).map(variable).collect()
}

fn divides(rule: &Rule, mesh: &Mesh, config: &Config) -> bool {
    config
        .parts(rule, mesh)
        .iter()
        .zip(&rule.factors)
        .all(|(&parts, factor)| parts == 1 || factor.divides_into(parts))
}

/// One factor on every axis that still divides it.
fn split_finest(rule: &Rule, mesh: &Mesh, factor: FactorIndex) -> Config {
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
    use shardwright_machine::builtin;
    use shardwright_search::exact::Exact;
    use shardwright_zoo::{BuildOptions, build};

    const EXACT: NetworkSearch<'_> =
        NetworkSearch { name: "exact", space: Space::All, solver: &Exact, keeps_limits: true };

    /// The exact answer on the prime mesh with every use of every axis: few enough where little divides.
    fn exact_on_primes(context: &Context<'_>) -> NetworkAnswer {
        let mesh = context.machine.mesh().clone();
        let all = |v: usize| {
            let rule = &context.shapes[context.variables.members[v].forward().index()].rule;
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
        let configs = (0..context.variables.members.len()).map(all).collect();
        let candidates = Candidates { mesh: mesh.clone(), configs };
        let fine = SearchProblem::among(context, candidates, &Control::new()).unwrap();
        EXACT.run(&fine, &Constraints::default(), &Control::new()).unwrap()
    }

    #[test]
    fn refined_plans_lie_between_the_coarse_one_and_the_best() {
        let control = Control::new();
        let (mut gained, mut optimal) = (0, 0);
        let cases = [
            ("mlp:batch=500,input=1500,hidden=1000,layers=2,classes=100", "flat:32"),
            ("mlp:batch=50,input=4500,hidden=4100,layers=2,classes=100", "flat:32"),
            ("mlp:batch=100,input=6000,hidden=6100,layers=2,classes=100", "a100x64:32"),
        ];
        for (model, machine) in cases {
            let graph = build(model, &BuildOptions::default()).unwrap();
            let machine = builtin(machine).unwrap();
            let problem = SearchProblem::new(&graph, &machine, None).unwrap();
            assert!(!problem.context.search_mesh.prime, "{model} is searched on merged axes");
            let coarse = EXACT.run(&problem, &Constraints::default(), &control).unwrap();
            let best = exact_on_primes(&problem.context);
            let refined = refine(&problem, &EXACT, &Constraints::default(), &coarse, 0, &[], &control).best;
            let objective = refined.as_ref().map_or(coarse.objective, |(_, found)| found.objective);
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
        let mut gained = 0;
        for (model, machine, limited) in [
            ("mlp:hidden=768,layers=2", "k80x64", true),
            ("mlp:hidden=480,input=720,layers=3", "flat:48", false),
            ("lenet5", "flat:32", false),
        ] {
            let graph = build(model, &BuildOptions { batch: Some(96), ..BuildOptions::default() }).unwrap();
            let machine = builtin(machine).unwrap();
            let problem = SearchProblem::new(&graph, &machine, None).unwrap();
            let free = EXACT.run(&problem, &Constraints::default(), &control).unwrap();
            let peak = problem.context.price(&free.assignment).unwrap().peak_memory;
            for memory in [None, limited.then_some(peak)] {
                let constraints = Constraints { memory, ..Constraints::default() };
                let Some((finer, refined)) =
                    refine(&problem, &EXACT, &constraints, &free, 0, &[], &control).best
                else {
                    continue;
                };
                gained += 1;
                assert!(refined.objective < free.objective, "{model}");
                let costs = finer.context.price(&refined.assignment).unwrap();
                assert_eq!(costs.objective(), refined.objective, "{model}");
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
        let problem = SearchProblem::new(&graph, &machine, None).unwrap();
        let coarse = EXACT.run(&problem, &Constraints::default(), &Control::new()).unwrap();
        let flag = std::sync::atomic::AtomicBool::new(true);
        let cancelled = Control { cancel: Some(&flag), ..Control::new() };
        let late = Control::new().time_limit(&shardwright_search::FrozenClock, std::time::Duration::ZERO);
        for (control, reason) in [(cancelled, StopReason::Cancelled), (late, StopReason::Deadline)] {
            let mesh = machine.mesh().clone();
            let context = &*problem.context;
            let configs = near(context, context.mesh(), &coarse.assignment.configs, &mesh);
            let stopped = SearchProblem::among(context, Candidates { mesh, configs }, &control).err();
            assert_eq!(stopped, Some(PlanError::Stopped(reason.clone())));
            let refinement = refine(&problem, &EXACT, &Constraints::default(), &coarse, 0, &[], &control);
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
