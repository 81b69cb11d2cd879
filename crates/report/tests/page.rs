//! What the page says is what the plan, the simulator and the cost model say.

use serde_json::Value;
use shardwright_graph::{Graph, Optimizer, Role};
use shardwright_machine::{Bytes, Machine, builtin};
use shardwright_plan::{ConfigConstraint, Constraints, Context};
use shardwright_report::{Alternatives, Certainty, Difference, Explainer, KINDS, Page, Reoptimisation};
use shardwright_search::Control;
use shardwright_space::{Assignment, common_axes, configs, on_finer_axes};
use shardwright_strategies::{PlanAnswer, Planner, find, plan};
use shardwright_zoo::{BuildOptions, build};
use std::sync::Arc;

const MODELS: [(&str, &str); 3] = [
    ("lenet5:batch=32", "p100x16"),
    ("mlp:batch=64,hidden=1024,layers=3", "flat:4"),
    ("rnnlm:batch=64", "flat:2"),
];

fn open(model: &str, machine: &str) -> (Graph, Machine) {
    (build(model, &BuildOptions::default()).unwrap(), builtin(machine).unwrap())
}

/// A strategy's plan, its assignment, and the context of its mesh.
fn planned<'a>(planner: &Planner<'a>, solver: &str) -> (PlanAnswer, Arc<Context<'a>>) {
    let answer = plan(planner, find(solver).unwrap(), &Constraints::default(), &Control::new()).unwrap();
    let context = planner.context(answer.mesh.clone(), answer.plan.space.untied).unwrap();
    (answer, context)
}

/// The data inside of a page.
fn data(page: &Page<'_>) -> Value {
    let mut html = Vec::new();
    page.write(&mut html).unwrap();
    let html = String::from_utf8(html).unwrap();
    let (_, rest) = html.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_page_holds_the_plan_and_every_byte_that_is_sent() {
    for (model, machine) in MODELS {
        let (graph, machine) = open(model, machine);
        let planner = Planner::new(&graph, &machine, None, false);
        let (PlanAnswer { plan, assignment, .. }, context) = planned(&planner, "auto");
        let page = Page::new(&context, &plan, &assignment, &[], &Control::new()).unwrap();
        let data = data(&page);
        assert_eq!(data["plan"], serde_json::to_value(&plan).unwrap());
        let step = &page.steps[0];
        assert_eq!(step.moves.iter().map(|m| m.bytes).sum::<u64>(), plan.traffic_bytes, "{model}");
        let computing: u64 = step.compute_ps.iter().sum();
        assert_eq!(computing, step.classes[0].busy_ps, "{model}: all devices do the same");
        assert!(step.moves.iter().all(|m| (m.to as usize) < graph.ops.len()));
        // Bars of a track do not overlap and fill its time.
        let bars = &step.bars;
        for at in 1..bars.what.len() {
            let before = bars.start[at - 1] + bars.duration[at - 1];
            assert!(bars.track[at - 1] < bars.track[at] || before <= bars.start[at]);
        }
        let ends = bars.start.iter().zip(&bars.duration).map(|(start, duration)| start + duration);
        assert_eq!(ends.max(), Some(step.step_ps));
    }
}

#[test]
fn explanations_add_up_to_the_objective() {
    for (model, machine) in MODELS {
        let (graph, machine) = open(model, machine);
        let planner = Planner::new(&graph, &machine, None, false);
        let (PlanAnswer { plan, assignment, .. }, context) = planned(&planner, "auto");
        let mut explainer = Explainer::new(&context, &assignment).unwrap();
        let (mut own, mut shared) = (0, 0);
        for part in 0..explainer.parts() {
            let explanation = explainer.explain(part, 3, None).unwrap();
            let chosen = &explanation.options[0];
            own += chosen.compute_ps + chosen.inside_ps;
            shared += chosen.neighbours_ps;
            // A plan that is proved cannot be improved by changing one layer.
            let best = explanation.options.iter().map(|option| option.total_ps()).min();
            assert!(!plan.proved_optimal || best == Some(chosen.total_ps()), "{model}: {explanation:?}");
        }
        assert_eq!(own + shared / 2, plan.objective, "{model}");
        assert_eq!(shared % 2, 0, "every transfer between layers has two ends");
    }
}

#[test]
fn an_option_costs_what_the_plan_with_it_costs() {
    let (graph, machine) = open("lenet5:batch=32", "p100x16");
    let planner = Planner::new(&graph, &machine, None, false);
    let (PlanAnswer { plan, assignment, .. }, context) = planned(&planner, "data");
    let mut explainer = Explainer::new(&context, &assignment).unwrap();
    for part in 0..explainer.parts() {
        let explanation = explainer.explain(part, usize::MAX - 1, None).unwrap();
        let split = &context.layers.members[part];
        let rule = &context.shapes[split.forward().index()].rule;
        for option in &explanation.options[1..] {
            // The best config that reads so.
            let same =
                |config: &shardwright_space::Config| config.show(rule, context.mesh()) == option.config;
            let with = |config| {
                let mut all = assignment.clone();
                let own = split.configs(&context.shapes, context.mesh(), &config);
                split.ops.iter().zip(own).for_each(|(op, config)| all.configs[op.index()] = config);
                context.price(&all).unwrap().objective()
            };
            let best = configs(rule, context.mesh()).into_iter().filter(same).map(with).min();
            let change = option.total_ps() - explanation.options[0].total_ps();
            assert_eq!(best, Some(plan.objective + change), "{}", option.config);
        }
    }
}

#[test]
fn a_plan_of_another_model_is_refused() {
    let (graph, machine) = open("lenet5:batch=32", "flat:2");
    let (other, _) = open("mlp:batch=64", "flat:2");
    let planner = Planner::new(&graph, &machine, None, false);
    let (PlanAnswer { plan, assignment, mesh }, _) = planned(&planner, "data");
    let others = Planner::new(&other, &machine, None, false).context(mesh, false).unwrap();
    assert!(Page::new(&others, &plan, &assignment, &[], &Control::new()).is_err());
}

#[test]
fn what_holds_the_memory_at_the_peak_is_all_of_it() {
    for (model, machine) in MODELS {
        let (graph, machine) = open(model, machine);
        let planner = Planner::new(&graph, &machine, None, false);
        let (PlanAnswer { plan, assignment, .. }, context) = planned(&planner, "auto");
        let page = Page::new(&context, &plan, &assignment, &[], &Control::new()).unwrap();
        for class in page.steps.iter().flat_map(|step| &step.classes) {
            let peak = &class.peak;
            assert_eq!(
                peak.kinds.iter().map(|own| own.bytes).sum::<u64>(),
                class.peak_memory_bytes,
                "{model}"
            );
            let at = class.memory_ps.iter().position(|&time| time == peak.at_ps).unwrap();
            assert_eq!(class.memory_bytes[at], class.peak_memory_bytes);
            assert!(peak.largest.is_sorted_by_key(|held| std::cmp::Reverse(held.bytes)));
            let named: u64 = peak.largest.iter().map(|held| held.bytes).sum();
            assert!(if peak.others == 0 {
                named == class.peak_memory_bytes
            } else {
                named < class.peak_memory_bytes
            });
        }
        // The op that is computed then is the one whose bar lies there.
        let (step, peak) = (&page.steps[0], &page.steps[0].classes[0].peak);
        let bars = &step.bars;
        let lies = |at: &usize| {
            bars.track[*at] == 0
                && bars.start[*at] <= peak.at_ps
                && peak.at_ps < bars.start[*at] + bars.duration[*at]
        };
        let running = (0..bars.what.len()).find(lies).map(|at| bars.what[at]);
        assert_eq!(peak.op.map(i64::from), running, "{model}");
    }
}

#[test]
fn memory_is_told_by_what_it_is_for() {
    let options = BuildOptions { optimizer: Optimizer::adam(0.001), ..BuildOptions::default() };
    let graph = build("mlp:batch=64,hidden=1024,layers=3", &options).unwrap();
    let machine = builtin("flat:4").unwrap();
    let planner = Planner::new(&graph, &machine, None, false);
    let (PlanAnswer { plan, assignment, .. }, context) = planned(&planner, "data");
    let page = Page::new(&context, &plan, &assignment, &[], &Control::new()).unwrap();
    let total = |wanted: &dyn Fn(Role) -> bool| {
        let own = graph.tensors.iter().filter(|t| t.producer.is_none() && wanted(t.role));
        // Buffers are whole cache lines.
        own.map(|t| t.ty.bytes().next_multiple_of(64)).sum::<u64>()
    };
    let held = |kind: &str| {
        let kinds = &page.steps[0].classes[0].peak.kinds;
        kinds.iter().find(|own| own.kind == kind).map_or(0, |own| own.bytes)
    };
    // Data parallelism keeps all weights and states on every device, and a quarter of the data.
    assert_eq!(held("weights"), total(&|role| role == Role::Parameter));
    assert_eq!(held("optimizer state"), total(&|role| role == Role::OptimizerState));
    assert!(
        held("data") >= total(&|role| role == Role::Input) / 4
            && held("data") < total(&|role| role == Role::Input)
    );
    // At the end of the backward pass gradients are there, as they were made and as they were added up.
    assert!(held("gradients") > 0 && held("copies") > 0);
    assert!(KINDS.iter().map(|kind| held(kind)).sum::<u64>() == page.steps[0].classes[0].peak_memory_bytes);
}

/// The least sum with an op's config given; configs of the same degrees are equally good.
fn constrained(planner: &Planner<'_>, name: &str, config: &str) -> Option<i64> {
    let configs = vec![ConfigConstraint::parse(&format!("{name}={config}")).unwrap()];
    let constraints = Constraints { configs, ..Constraints::default() };
    find("exact").unwrap().solve(planner, &constraints, &Control::new()).ok().map(|solution| {
        assert!(solution.proved_optimal());
        solution.objective()
    })
}

/// A config's degrees in any order.
fn degrees(config: &str) -> Vec<&str> {
    let mut parts: Vec<&str> = config.split('\u{b7}').collect();
    parts.sort_unstable();
    parts
}

#[test]
fn everything_else_chosen_anew_costs_what_a_search_with_the_config_given_finds() {
    for (model, machine) in MODELS {
        let (graph, machine) = open(model, machine);
        let planner = Planner::new(&graph, &machine, None, false);
        let (PlanAnswer { plan, assignment, .. }, context) = planned(&planner, "exact");
        let known = Reoptimisation::of(&context, &plan, &assignment, &Control::new()).unwrap();
        assert_eq!(known.certainty, Certainty::Exact);
        let mut explainer = Explainer::new(&context, &assignment).unwrap();
        for part in 0..explainer.parts() {
            let all = explainer.explain(part, usize::MAX - 1, Some(&known)).unwrap();
            assert_eq!(all.options[0].reoptimised_ps, Some(0), "{model}: nothing is better than the optimum");
            let alone = |at: usize| all.options[at].total_ps() - all.options[0].total_ps();
            for at in 1..all.options.len() {
                assert!(
                    all.options[at].reoptimised_ps.unwrap() <= alone(at),
                    "{model}: {:?}",
                    all.options[at]
                );
            }
            let name = &graph.node(shardwright_graph::OpId(all.op)).name;
            for option in all.options.iter().skip(1).step_by(7) {
                let same =
                    |other: &&shardwright_report::Choice| degrees(&other.config) == degrees(&option.config);
                let least =
                    all.options.iter().filter(same).filter_map(|own| own.reoptimised_ps).min().unwrap();
                let found = constrained(&planner, name, &option.config);
                assert_eq!(found, Some(plan.objective + least), "{model}: {name}={}", option.config);
            }
        }
    }
}

#[test]
fn under_a_limit_of_memory_alternatives_are_searched_one_by_one() {
    let (graph, machine) = open("mlp:batch=64,hidden=256,layers=1", "flat:4");
    let planner = Planner::new(&graph, &machine, None, true);
    let free = planned(&planner, "exact").0.plan;
    let constraints =
        Constraints { memory: Some(Bytes(free.peak_memory_bytes * 9 / 10)), ..Constraints::default() };
    let control = Control::new().iteration_limit(400);
    let PlanAnswer { plan, assignment, mesh } =
        plan(&planner, find("exact").unwrap(), &constraints, &control).unwrap();
    let context = planner.context(mesh, true).unwrap();
    assert!(plan.objective > free.objective, "the limit costs something");
    let alternatives = Alternatives::new(&context, &plan, &assignment, &Control::new()).unwrap();
    let all = alternatives.all(&Control::new()).unwrap();
    assert_eq!(all.certainty, Certainty::AtLeast, "elimination does not know of memory");
    let mut explainer = Explainer::new(&context, &assignment).unwrap();
    let part = explainer.part(graph.layers[0].forward);
    let leads = explainer.leads(part).unwrap();
    let leads = &leads[..leads.len().min(6)];
    let one = alternatives.one(part, leads, &Control::new()).unwrap().unwrap();
    assert_eq!(one.certainty, Certainty::AtLeast, "the network counts less memory than plans need");
    assert!(one.own_change(part) <= Some(0));
    for lead in leads {
        let (Some(with), Some(without)) = (one.change(part, lead), all.change(part, lead)) else { continue };
        assert!(with >= without, "a limit saves nothing");
    }
    let free = (0..explainer.parts()).filter_map(|part| all.own_change(part)).min();
    assert!(free < Some(0), "without the limit the plan could be better");
}

#[test]
fn a_change_is_worth_what_the_plan_with_it_costs_more() {
    for (model, machine) in MODELS {
        let (graph, machine) = open(model, machine);
        let planner = Planner::new(&graph, &machine, None, false);
        let (PlanAnswer { plan: before, assignment: old, mesh: from }, _) = planned(&planner, "data");
        let (PlanAnswer { plan: after, assignment: new, mesh: to }, _) = planned(&planner, "exact");
        let common = common_axes(&machine, &from, &to).unwrap();
        let (old, new) = (on_finer_axes(&old, &from, &common), on_finer_axes(&new, &to, &common));
        let context = planner.context(common, false).unwrap();
        let sum = |all: &Assignment| context.price(all).unwrap().objective();
        let difference = Difference::of(&context, (&before, &old), (&after, &new)).unwrap();
        let mut changed = 0;
        for change in &difference.changes {
            let part = context.variables.variable_of(shardwright_graph::OpId(change.index));
            let ops = &context.variables.members[part].ops;
            let with = |from: &Assignment, to: &Assignment| {
                let mut all = from.clone();
                ops.iter().for_each(|op| all.configs[op.index()] = to.config(*op).clone());
                sum(&all)
            };
            let picoseconds = |seconds: f64| (seconds * 1e12).round() as i64;
            assert_eq!(
                picoseconds(change.alone_seconds.unwrap()),
                with(&old, &new) - sum(&old),
                "{model}: {change:?}"
            );
            assert_eq!(
                picoseconds(change.undone_seconds.unwrap()),
                with(&new, &old) - sum(&new),
                "{model}: {change:?}"
            );
            assert!(change.undone_seconds >= Some(0.0), "nothing improves the optimum");
            changed += change.ops;
        }
        assert_eq!(
            changed,
            old.configs.iter().zip(&new.configs).filter(|(old, new)| old != new).count(),
            "{model}"
        );
    }
}
