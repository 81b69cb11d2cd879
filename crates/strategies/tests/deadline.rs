//! Searches end with their time: every stage looks at the clock, and a first plan needs none.

use shardwright_graph::{Graph, Optimizer};
use shardwright_machine::{Bytes, Machine, builtin};
use shardwright_plan::{Constraints, PlanError};
use shardwright_search::{Clock, Control, FrozenClock};
use shardwright_strategies::{Planner, PricedRecipe, StrategyError, find, plan};
use shardwright_zoo::{BuildOptions, build};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A clock that goes on by a second whenever somebody looks.
#[derive(Default)]
struct CountingClock(AtomicU64);

impl Clock for CountingClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

fn step(model: &str) -> Graph {
    let options = BuildOptions { optimizer: Optimizer::adam(1e-3), ..BuildOptions::default() };
    build(model, &options).unwrap()
}

/// Deep enough that the time matters to its recipes too.
const DEEP: &str = "gpt:batch=64,layers=48,hidden=256,heads=4,seq=32,vocab=1024";
const SHALLOW: &str = "gpt:batch=16,layers=2,hidden=64,heads=4,seq=16,vocab=256";

/// The recipes' peaks, in ascending order.
fn peaks(graph: &Graph, machine: &Machine) -> Vec<u64> {
    let planner = Planner::new(graph, machine, None, false);
    let recipes = planner.recipes(&Constraints::default(), &Control::new()).unwrap();
    let mut peaks: Vec<u64> = recipes.iter().map(|own: &PricedRecipe<'_>| own.costs.peak_memory.0).collect();
    peaks.sort_unstable();
    peaks
}

fn holding(bytes: u64) -> Constraints {
    Constraints { memory: Some(Bytes(bytes)), ..Constraints::default() }
}

#[test]
fn without_any_time_a_recipe_that_fits_is_the_plan() {
    let over = Control::new().time_limit(&FrozenClock, Duration::ZERO);
    for (model, machine) in [(DEEP, "h100x64:32"), (SHALLOW, "flat:8")] {
        let (graph, machine) = (step(model), builtin(machine).unwrap());
        let peaks = peaks(&graph, &machine);
        let (least, most) = (peaks[0], peaks[peaks.len() - 1]);
        assert!(least < most, "some recipes hold less than others");
        // More than the least of all meshes: a recipe is only priced on one of them, where buffers may be larger.
        for limit in [Some(least + least / 4), Some((least + most) / 2), None] {
            let constraints = Constraints { memory: limit.map(Bytes), ..Constraints::default() };
            for name in ["auto", "exact"] {
                let planner = Planner::new(&graph, &machine, None, true);
                let found = plan(&planner, find(name).unwrap(), &constraints, &over).unwrap().plan;
                assert!(limit.is_none_or(|limit| found.peak_memory_bytes <= limit), "{name} {limit:?}");
                assert!(found.simulated.step_seconds > 0.0 && !found.proved_optimal, "{name}");
            }
        }
        // A recipe that is asked for is not replaced by another one.
        for name in ["data", "fsdp"].into_iter().filter(|_| model == DEEP) {
            let planner = Planner::new(&graph, &machine, None, false);
            let found = plan(&planner, find(name).unwrap(), &Constraints::default(), &over).unwrap().plan;
            let control = Control::new();
            let timed = Planner::new(&graph, &machine, None, false);
            let timed = plan(&timed, find(name).unwrap(), &Constraints::default(), &control).unwrap().plan;
            // On other axes, reshards have other steps, and buffers differ.
            let [found, timed] = [found, timed].map(|plan| plan.peak_memory_bytes);
            assert!(found.abs_diff(timed) <= timed / 4, "{name}: {found} {timed}");
        }
        // What fits nowhere is not found, and nothing is claimed.
        let planner = Planner::new(&graph, &machine, None, true);
        let error = plan(&planner, find("auto").unwrap(), &holding(least / 100), &over).err();
        assert!(matches!(error, Some(StrategyError::Plan(PlanError::NotFound { .. }))), "{error:?}");
    }
}

#[test]
fn at_a_deadline_all_stages_end_and_the_plan_fits() {
    let (graph, machine) =
        (step("mlp:batch=64,input=64,hidden=64,layers=3,classes=16"), builtin("p100x16").unwrap());
    let peaks = peaks(&graph, &machine);
    let constraints = holding((peaks[0] + peaks[peaks.len() - 1]) / 2);
    for name in ["auto", "exact", "mcmc", "place", "soybean", "fsdp"] {
        let strategy = find(name).unwrap();
        // How often the clock is read before and after a deadline, with one thread: readings then repeat.
        let readings = |limit: u64| {
            let clock = CountingClock::default();
            let control = Control::new().time_limit(&clock, Duration::from_secs(limit));
            let planner = Planner::new(&graph, &machine, None, true);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            match pool.install(|| plan(&planner, strategy, &constraints, &control)) {
                Ok(found) => assert!(found.plan.peak_memory_bytes <= constraints.memory.unwrap().0, "{name}"),
                Err(StrategyError::Plan(error)) => assert!(error.is_without_answer(), "{name}: {error}"),
                Err(error) => println!("{name} at {limit}: {error}"),
            }
            clock.0.load(Ordering::Relaxed)
        };
        let all = readings(3_000);
        for limit in [0, 1, 10, 100, 1_000].into_iter().filter(|limit| *limit < all) {
            let late = readings(limit).saturating_sub(limit);
            println!("{name}: {late} of {all} readings after a deadline of {limit}");
            assert!(late <= 200, "{name}: {late} readings after a deadline of {limit}");
        }
    }
}
