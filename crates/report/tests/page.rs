//! What the page says is what the plan, the simulator and the cost model say.

use serde_json::Value;
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::Graph;
use shardwright_machine::{Machine, builtin};
use shardwright_plan::{Demands, Plan, Problem, evaluate, plan, strategy};
use shardwright_report::{Explainer, Page};
use shardwright_search::Control;
use shardwright_space::configs;

const MODELS: [(&str, &str); 3] = [
    ("lenet5:batch=32", "p100x16"),
    ("mlp:batch=64,hidden=1024,layers=3", "flat:4"),
    ("rnnlm:batch=64", "flat:2"),
];

fn open(model: &str, machine: &str) -> (Graph, Machine) {
    (build(model, &BuildOptions::default()).unwrap(), builtin(machine).unwrap())
}

fn planned(problem: &Problem<'_>, solver: &str) -> Plan {
    plan(problem, strategy::find(solver).unwrap(), &Demands::default(), &Control::new()).unwrap()
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
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let plan = planned(&problem, "auto");
        let page = Page::new(&problem, &plan, &[]).unwrap();
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
        let problem = Problem::new(&graph, &machine, None).unwrap();
        let plan = planned(&problem, "auto");
        let configs = plan.configs(&graph, problem.mesh()).unwrap();
        let mut explainer = Explainer::new(&problem, &configs).unwrap();
        let (mut own, mut shared) = (0, 0);
        for part in 0..explainer.parts() {
            let explanation = explainer.explain(part, 3).unwrap();
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
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let plan = planned(&problem, "data");
    let chosen = plan.configs(&graph, problem.mesh()).unwrap();
    let mut explainer = Explainer::new(&problem, &chosen).unwrap();
    for part in 0..explainer.parts() {
        let explanation = explainer.explain(part, usize::MAX - 1).unwrap();
        let split = &problem.layers.splits[part];
        let rule = &problem.shapes[split.forward().index()].rule;
        for option in &explanation.options[1..] {
            // The best config that reads so.
            let same =
                |config: &shardwright_space::Config| config.show(rule, problem.mesh()) == option.config;
            let with = |config| {
                let mut all = chosen.clone();
                let own = split.configs(&problem.shapes, problem.mesh(), &config);
                split.ops.iter().zip(own).for_each(|(op, config)| all[op.index()] = config);
                evaluate(&problem, &all).unwrap().objective()
            };
            let best = configs(rule, problem.mesh()).into_iter().filter(same).map(with).min();
            let change = option.total_ps() - explanation.options[0].total_ps();
            assert_eq!(best, Some(plan.objective + change), "{}", option.config);
        }
    }
}

#[test]
fn a_plan_of_another_model_is_refused() {
    let (graph, machine) = open("lenet5:batch=32", "flat:2");
    let (other, _) = open("mlp:batch=64", "flat:2");
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let others = Problem::new(&other, &machine, None).unwrap();
    assert!(Page::new(&others, &planned(&problem, "data"), &[]).is_err());
}
