//! Peak memory of random plans: the plan's account bounds the simulated peak, which bounds the peak of the run, on every
//! device; and the plan's is close to the run's.

mod random_plans;

use random_plans::{Random, configs};
use shardwright_engine::{Options, run};
use shardwright_graph::Optimizer;
use shardwright_lower::{DeviceAccount, lower};
use shardwright_machine::builtin;
use shardwright_plan::{Context, network_peak, peak};
use shardwright_sim::{Classes, Links, Memory, schedule};
use shardwright_space::{Assignment, Sharing};
use shardwright_zoo::{BuildOptions, build};

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 3, steps: 2, trace: false, finals: false, slow: &[], assist: None };

/// Models whose buffers are larger than cache lines and chunks.
const MODELS: [&str; 6] = [
    "mlp:batch=64,input=48,hidden=64,layers=3,classes=32",
    "lenet5:batch=16,image=20,classes=8",
    "gpt:batch=8,layers=2,hidden=32,heads=4,vocab=64,seq=16",
    "moe:batch=4,layers=1,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=48,seq=16,experts=4",
    "rnnlm:batch=8,seq=8,hidden=32,vocab=64",
    "dlrm:batch=32,tables=2,rows=64,dim=16,dense=16,bottom=32,top=32,lookups=2",
];

#[test]
fn plan_bounds_simulation_and_simulation_bounds_the_run() {
    let mut ratios = Vec::new();
    let mut above = Vec::new();
    for (m, model) in MODELS.iter().enumerate() {
        for (o, optimizer) in [Optimizer::sgd(0.01), Optimizer::adam(0.01)].into_iter().enumerate() {
            let graph = build(model, &BuildOptions { optimizer, ..BuildOptions::default() }).unwrap();
            for devices in [2, 4, 6] {
                let machine = builtin(&format!("flat:{devices}")).unwrap();
                let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
                for case in 0..7 {
                    let mut random = Random(1 + ((m * 10 + o) * 10 + devices) as u64 * 1_000_003 + case);
                    let (tied, pins) = (case % 2 == 0, case % 3 == 2);
                    let configs = configs(&graph, machine.mesh(), &mut random, tied, pins);
                    let assignment = Assignment::new(configs);
                    let what = format!("{model} on {devices}, case {case}");
                    let (plan, fullest) = check(&context, &assignment, &what);
                    above.push(network_peak(&context, &assignment).0 as f64 / fullest as f64);
                    ratios.push(plan as f64 / fullest as f64);
                }
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    above.sort_by(f64::total_cmp);
    let (median, most) = (ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
    let few = ratios[ratios.len() * 95 / 100];
    println!("{} plans: plan over run: median {median:.4}, 95% below {few:.4}, most {most:.4}", ratios.len());
    println!("network over run: {:.3} {:.3} {:.3}", above[0], above[above.len() / 2], above[above.len() - 1]);
    assert!(ratios.len() >= 252);
    assert!(median <= 1.02 && most <= 1.1, "median {median}, most {most}");
}

/// The plan's peak and the run's, after checking all devices.
fn check(context: &Context<'_>, assignment: &Assignment, what: &str) -> (u64, u64) {
    let program = lower(context.graph, &context.resharder, assignment).unwrap();
    let plan = peak(context, assignment).0;
    let classes = Classes::of(&program);
    let links = Links::of(context.machine);
    let schedule = schedule(context, assignment, &program, classes, links, Sharing::AcrossLayers).unwrap();
    let line = schedule.simulate();
    let outcome = run(context.graph, &program, OPTIONS).unwrap_or_else(|e| panic!("{what}: {e}"));
    for (device, outcome) in program.devices().zip(&outcome.devices) {
        let class = schedule.classes.class(&program.mesh, device);
        let simulated = Memory::of(&program, &schedule, &line, class).peak().0;
        let account = DeviceAccount::of(&program, device).account.peak();
        assert!(plan >= simulated, "{what}: plan {plan}, simulated {simulated}");
        assert!(simulated >= account, "{what}: simulated {simulated}, account {account}");
        assert!(account >= outcome.memory, "{what}: account {account}, run {}", outcome.memory);
    }
    (plan, outcome.devices.iter().map(|device| device.memory).max().unwrap())
}
