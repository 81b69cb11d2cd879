//! Every model of the zoo, small, trained for three steps under the plan of every strategy: the serial losses and weights,
//! and the bytes that were predicted.

use shardwright_engine::{Check, Options, run};
use shardwright_frontend::zoo::{BuildOptions, FAMILIES, build};
use shardwright_graph::Optimizer;
use shardwright_lower::lower;
use shardwright_machine::{Machine, parse};
use shardwright_plan::{Demands, Problem, evaluate, search, strategy};
use shardwright_search::Control;
use shardwright_space::Config;

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 7, steps: 3, trace: false, finals: true, slow: &[], assist: None };

/// Ops up to which a problem in which every op chooses for itself is searched in a test.
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
    let mut seen: Vec<Vec<Config>> = Vec::new();
    for untied in [false, true] {
        if untied && graph.ops.len() > FEW_OPS {
            continue;
        }
        let problem = if untied { Problem::untied } else { Problem::new };
        let problem = problem(&graph, &machine, None).unwrap_or_else(|e| panic!("{spec}: {e}"));
        // `auto` takes the best of the others.
        for strategy in strategy::STRATEGIES.iter().filter(|s| s.name != "auto") {
            let wanted =
                if untied { ["fsdp", "exact"].contains(&strategy.name) } else { strategy.name != "fsdp" };
            if wanted {
                let what = format!("{spec} by {}", strategy.name);
                let found = search(&problem, strategy, &Demands::default(), &Control::new());
                let configs = found.unwrap_or_else(|e| panic!("{what}: {e}")).configs;
                if !seen.contains(&configs) {
                    check(&problem, &configs, &serial, &what);
                    seen.push(configs);
                }
            }
        }
    }
}

fn check(problem: &Problem<'_>, configs: &[Config], serial: &Check<'_>, what: &str) {
    let program = lower(problem.graph, &problem.relayouts, configs).unwrap();
    let traffic = evaluate(problem, configs).unwrap().traffic;
    // A plan that sends nothing would show nothing.
    assert!(traffic.total().0 > 0, "{what} sends nothing");
    assert_eq!(program.traffic(problem.relayouts.comm()), traffic, "{what}");
    let outcome = run(problem.graph, &program, OPTIONS).unwrap_or_else(|e| panic!("{what}: {e}"));
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
