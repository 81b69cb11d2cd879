//! Every model of the zoo, small, trained for three steps under the plan of every strategy, gives the serial losses and weights
//! and sends the predicted bytes.

use shardwright_engine::{Check, Options, run};
use shardwright_graph::Optimizer;
use shardwright_lower::lower;
use shardwright_machine::{Machine, parse};
use shardwright_plan::Constraints;
use shardwright_search::Control;
use shardwright_space::Assignment;
use shardwright_strategies::{Planner, STRATEGIES, Solution};
use shardwright_zoo::{BuildOptions, FAMILIES, build};

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 7, steps: 3, trace: false, finals: true, slow: &[], assist: None };

/// Most ops of a problem that tests search with untied layers.
const FEW_OPS: usize = 200;

/// Two nodes of two devices, so slow that even tiny models are worth splitting.
fn machine() -> Machine {
    let mut text = String::from("name = \"test\"\n");
    for (name, rate, latency) in [("node", 10, 50), ("gpu", 100, 10)] {
        text += &format!(
            "[[level]]\nname = \"{name}\"\ncount = 2\nbandwidth = \"{rate} GB/s\"\nlatency = \"{latency} ns\"\n\
             topology = \"switch\"\n"
        );
    }
    text += "[device]\nname = \"x\"\nmemory = \"1 GiB\"\nmemory_bandwidth = \"1 GB/s\"\n\
             launch_overhead = \"0 s\"\npeak.f32 = \"1 GFLOP/s\"\npeak.f64 = \"1 GFLOP/s\"\n";
    parse("test.toml", text.as_bytes(), &mut |_| Err("none".into())).unwrap()
}

/// Plans a model by every strategy, layers tied and untied, and runs each plan that differs from those before.
fn train(name: &str, options: &str) {
    let options_given = BuildOptions { optimizer: Optimizer::momentum(0.02, 0.9), ..BuildOptions::default() };
    let spec = format!("{name}:{options},dtype=f64");
    let graph = build(&spec, &options_given).unwrap_or_else(|e| panic!("{spec}: {e}"));
    let (machine, serial) = (machine(), Check::new(&graph, OPTIONS).unwrap());
    let mut seen: Vec<Assignment> = Vec::new();
    // Only untied plans can express these.
    const SHARDED: [&str; 6] = ["zero1", "zero2", "fsdp", "hsdp", "ep", "megatron-sp"];
    for untied in [false, true] {
        if untied && graph.ops.len() > FEW_OPS {
            continue;
        }
        let planner = Planner::new(&graph, &machine, None, untied);
        // `auto` takes the best of the others. Chains (`mcmc`) and placements (`place`) are planned without a network, and
        // may answer that one device does it all.
        let others = ["auto", "mcmc", "place"];
        for strategy in STRATEGIES.iter().filter(|s| !others.contains(&s.name())) {
            let name = strategy.name();
            let wanted = if untied { ["fsdp", "exact"].contains(&name) } else { !SHARDED.contains(&name) };
            if wanted {
                let what = format!("{spec} by {name}");
                let solution = strategy.solve(&planner, &Constraints::default(), &Control::new());
                let solution = solution.unwrap_or_else(|e| panic!("{what}: {e}"));
                if !seen.contains(&solution.assignment) {
                    check(&solution, &serial, &what);
                    seen.push(solution.assignment);
                }
            }
        }
    }
}

fn check(solution: &Solution<'_>, serial: &Check<'_>, what: &str) {
    let (graph, resharder) = (solution.context.graph, &solution.context.resharder);
    let program = lower(graph, resharder, &solution.assignment).unwrap();
    let traffic = &solution.costs.traffic;
    // A plan that sends no bytes would test nothing.
    assert!(traffic.total().0 > 0, "{what} sends nothing");
    assert_eq!(program.traffic(resharder.comm()), *traffic, "{what}");
    let outcome = run(graph, &program, OPTIONS).unwrap_or_else(|e| panic!("{what}: {e}"));
    let difference = serial.compare(&outcome).unwrap();
    println!("{what}: {difference:?}");
    assert!(difference.is_rounding(), "{what}: {difference:?}");
}

macro_rules! models {
    ($($test:ident: $name:literal $options:literal),* $(,)?) => {
        $(#[test]
        fn $test() {
            train($name, $options);
        })*

        #[test]
        fn every_model_of_the_zoo_is_trained() {
            let mut tested = vec![$($name),*];
            let mut all: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            tested.sort_unstable();
            all.sort_unstable();
            assert_eq!(tested, all);
        }
    };
}

// Sizes that two nodes of two devices can split, where the tiny ones of the zoo are odd.
models! {
    alexnet: "alexnet" "batch=4,image=63,width=0.0625,classes=4",
    bert: "bert" "batch=4,layers=1,hidden=8,heads=4,ffn=12,vocab=12,seq=4",
    densenet121: "densenet121" "batch=4,image=64,width=0.125,classes=4",
    dlrm: "dlrm" "batch=4,tables=2,rows=8,dim=4,dense=6,bottom=8,top=8,lookups=2",
    gpt: "gpt" "batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4",
    inception_v3: "inception_v3" "batch=4,image=107,width=0.0625,classes=4,dropout=0",
    lenet5: "lenet5" "batch=4,image=12,width=0.5,classes=4",
    llama: "llama" "batch=4,layers=1,hidden=8,heads=4,kv_heads=2,ffn=12,vocab=12,seq=4",
    mlp: "mlp" "batch=8,input=12,hidden=8,layers=2,classes=4",
    moe: "moe" "batch=4,layers=1,hidden=8,heads=4,kv_heads=2,ffn=12,vocab=12,seq=4,experts=4",
    nmt: "nmt" "batch=4,seq=4,hidden=8,vocab=12",
    resnet101: "resnet101" "batch=4,image=64,width=0.0625,classes=4,depth=50",
    rnnlm: "rnnlm" "batch=4,seq=4,hidden=8,vocab=12",
    rnntc: "rnntc" "batch=4,seq=4,hidden=8,vocab=12",
    transformer: "transformer" "batch=4,layers=1,hidden=8,heads=4,ffn=12,vocab=12,seq=4",
    vgg16: "vgg16" "batch=4,image=32,width=0.0625,classes=4,dropout=0",
}
