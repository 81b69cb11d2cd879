use super::*;
use crate::compute_lower_bound;
use crate::limited::limited;
use crate::memory::{memory_lower_bound, peak};
use crate::search_problem::{Candidates, SearchProblem};
use proptest::prelude::*;
use shardwright_graph::{FactorIndex, Optimizer, Rule};
use shardwright_machine::builtin;
use shardwright_search::{Solver, exact::Exact};
use shardwright_space::AxisUse;
use shardwright_zoo::{BuildOptions, build};

/// All configs of a rule on a mesh, in every order of axes.
fn every_config(rule: &Rule, mesh: &Mesh) -> Vec<Config> {
    let mut found = vec![Config::replicated(mesh.len())];
    for axis in mesh.all().iter() {
        let more: Vec<Config> = found
            .iter()
            .flat_map(|config| (0..rule.factors.len() as FactorIndex).map(move |f| (config.clone(), f)))
            .map(|(mut config, factor)| {
                config.set(axis, AxisUse::Split(factor));
                config
            })
            .filter(|config| config.check(rule, mesh).is_ok())
            .collect();
        found.extend(more);
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The bound is at most the best of all assignments on the prime axes, in every order of axes, and at most each of
    /// them.
    #[test]
    fn no_assignment_on_prime_axes_costs_less(
        model in prop::sample::select(vec![
            "mlp:batch=8,input=6,hidden=12,layers=2,classes=4",
            "mlp:batch=6,input=512,hidden=2048,layers=1,classes=10",
            "gpt:layers=1,hidden=16,heads=2,seq=6,vocab=10",
            "lenet5",
        ]),
        machine in prop::sample::select(vec!["flat:4", "p100x16:4", "h100x64:16", "flat:6", "v5e-256:8", "p100x16"]),
        batch in prop::sample::select(vec![2u64, 6, 8, 100]),
        untied in any::<bool>(),
        most_configs in prop::sample::select(vec![60_000usize, 40, 12]),
        most_patterns in prop::sample::select(vec![9_000usize, 60, 12]),
        gap in prop::sample::select(vec![0.0, 0.01, 0.3]),
        tightness in 0usize..12,
        picks in prop::collection::vec(any::<u16>(), 64),
    ) {
        let graph = build(model, &BuildOptions { batch: Some(batch), ..BuildOptions::default() }).unwrap();
        let machine = builtin(machine).unwrap();
        let mesh = machine.mesh().clone();
        let context = Context::new(&graph, &machine, None, mesh.clone(), untied).unwrap();
        // Small limits make dimensions count as one, and leave classes out.
        let limits = Limits { most_configs, most_configs_in_all: 50 * most_configs, most_patterns };
        let control = Control { gap, ..Control::new() };
        let bound_of = |target: i64, limit: Option<Bytes>| {
            bound_within(&context, target, limit, &limits, &control).unwrap().bound
        };
        let bound = bound_of(i64::MAX, None);
        prop_assert!(bound > 0);
        let rule = |v: usize| &context.shapes[context.variables.members[v].forward().index()].rule;
        let all: Vec<Vec<Config>> =
            (0..context.variables.members.len()).map(|v| every_config(rule(v), &mesh)).collect();
        let mut priced: Vec<(u64, i64)> = Vec::new();
        for pick in 0..picks.len() {
            let mut chosen = vec![Config::replicated(mesh.len()); graph.ops.len()];
            for (v, split) in context.variables.members.iter().enumerate() {
                let own = usize::from(picks[(pick + v) % picks.len()]) % all[v].len();
                let configs = split.configs(&context.shapes, &mesh, &all[v][own]);
                split.ops.iter().zip(configs).for_each(|(&op, config)| chosen[op.index()] = config);
            }
            let assignment = Assignment::of(&graph, chosen);
            prop_assert!(is_on_prime_axes(&context, &mesh, &assignment));
            let cost = context.layer_costs(&assignment, &Control::new()).unwrap().objective();
            prop_assert!(bound <= cost, "{bound} above {cost}");
            priced.push((peak(&context, &assignment).0, cost));
        }
        // Within a memory limit that some of the assignments keep, with the cheapest of these as the target, or none.
        priced.sort_unstable();
        let limit = Bytes(priced[tightness].0);
        let fitting = priced.iter().filter(|(peak, _)| *peak <= limit.0);
        let cheapest = fitting.map(|(_, cost)| *cost).min().unwrap();
        let target = if tightness % 2 == 0 { cheapest } else { i64::MAX };
        let within = bound_of(target, Some(limit));
        prop_assert!(within <= cheapest, "{within} above {cheapest} within {limit:?}");
        // Groups beyond a target are removed, also where the target is below all assignments.
        let cheapest = priced.iter().map(|(_, cost)| *cost).min().unwrap();
        let removed = [cheapest, cheapest / 10 * 9, bound, bound / 2].map(|target| bound_of(target, None));
        prop_assert!(removed.iter().all(|bound| *bound <= cheapest), "{removed:?} above {cheapest}");
        if all.iter().all(|own| own.len() <= 64) {
            let candidates = Candidates { mesh, configs: all };
            let problem = SearchProblem::among(&context, candidates, &Control::new()).unwrap();
            let best = Exact.solve(&problem.network, &Control::new().iteration_limit(50));
            prop_assert!(bound <= best.cost.unwrap(), "{bound} above {:?}", best.cost);
            prop_assert!(removed.iter().all(|bound| *bound <= best.cost.unwrap()), "{removed:?} above {:?}", best.cost);
            // At no gap, a bound whose target is the optimum is the optimum, unless something counts less.
            let near = bound_of(best.cost.unwrap(), None);
            prop_assert!(near <= best.cost.unwrap(), "{near} above {:?}", best.cost);
            let network = limited(&problem, limit, &Control::new()).unwrap();
            let best = Exact.solve(&network, &Control::new().iteration_limit(50));
            prop_assert!(best.cost.is_none_or(|best| within <= best), "{within} above {:?}", best.cost);
        }
    }
}

#[test]
fn a_tight_memory_limit_raises_the_bound() {
    let options =
        BuildOptions { batch: Some(8), optimizer: Optimizer::adam(1e-3), ..BuildOptions::default() };
    let graph = build("mlp:batch=8,input=512,hidden=1024,layers=3", &options).unwrap();
    let machine = builtin("h100x64:16").unwrap();
    let context = Context::new(&graph, &machine, None, machine.mesh().clone(), true).unwrap();
    let free = pattern_bound(&context, i64::MAX, None, &Control::new()).unwrap().bound;
    let limit = Bytes(memory_lower_bound(&context).0 * 3 / 2);
    let within = pattern_bound(&context, 2 * free, Some(limit), &Control::new()).unwrap().bound;
    println!("{free} without a limit, {within} within {limit:?}");
    assert!(within as f64 > 1.05 * free as f64, "{within} within {limit:?}, {free} without a limit");
}

#[test]
fn on_512_devices_the_bound_has_communication() {
    let graph = build(
        "gpt:layers=2,hidden=2048,heads=16",
        &BuildOptions { batch: Some(1024), ..BuildOptions::default() },
    );
    let (graph, machine) = (graph.unwrap(), builtin("h100x4096:512").unwrap());
    let problem = SearchProblem::new(&graph, &machine, None).unwrap();
    // Near enough to be above computing; coming nearer takes a minute.
    let control = Control { gap: 0.15, ..Control::new() };
    let best = Exact.solve(&problem.network, &control).cost.unwrap();
    let bound = pattern_bound(&problem.context, best, None, &control).unwrap().bound;
    let computing = compute_lower_bound(&problem.context).unwrap();
    println!("{computing} of computing, {bound} of {best}");
    assert!(computing < bound && bound <= best, "{computing} of computing, {bound} of {best}");
}

#[test]
fn the_bound_is_near_the_optimum() {
    for (model, machine) in [("vgg16", "h100x64:16"), ("gpt:layers=2,hidden=256,heads=4", "a100x64:16")] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let machine = builtin(machine).unwrap();
        let problem = SearchProblem::new(&graph, &machine, None).unwrap();
        assert!(problem.context.search_mesh.prime);
        let best = Exact.solve(&problem.network, &Control::new()).cost.unwrap();
        let bound = pattern_bound(&problem.context, best, None, &Control::new()).unwrap().bound;
        println!("{model}: {bound} of {best}");
        assert!(bound <= best && bound as f64 >= 0.97 * best as f64, "{model}: {bound} of {best}");
    }
}
