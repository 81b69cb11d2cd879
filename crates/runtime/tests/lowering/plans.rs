//! Every model of the zoo, tiny, trained for three steps under the plan of every strategy: the serial losses.

use crate::check::{check, machine};
use shardwright_frontend::zoo::{BuildOptions, FAMILIES, build};
use shardwright_graph::Optimizer;
use shardwright_plan::{
    Demands, Problem, evaluate, search,
    strategy::{self, Strategy},
};
use shardwright_search::Control;
use shardwright_space::Config;

/// Ops up to which a problem in which every op chooses for itself is searched in a test.
const FEW_OPS: usize = 200;

/// Plans a model by every strategy for two nodes of two devices, layers tied and untied, and checks three steps of
/// each plan.
fn train(name: &str, options: &str) {
    let options_given = BuildOptions { optimizer: Optimizer::momentum(0.02, 0.9), ..BuildOptions::default() };
    let spec = format!("{name}:{options},dtype=f64");
    let graph = build(&spec, &options_given).unwrap_or_else(|e| panic!("{spec}: {e}"));
    let machine = machine(&[2, 2]);
    let untied = |strategy: &Strategy| strategy.name == "fsdp";
    let tied = Problem::new(&graph, &machine, None).unwrap_or_else(|e| panic!("{spec}: {e}"));
    let mut seen: Vec<Vec<Config>> = Vec::new();
    // `auto` takes the best of the others.
    for strategy in strategy::STRATEGIES.iter().filter(|s| !untied(s) && s.name != "auto") {
        run(&tied, strategy, &mut seen);
    }
    drop(tied);
    if graph.ops.len() <= FEW_OPS {
        let problem = Problem::untied(&graph, &machine, None).unwrap_or_else(|e| panic!("{spec}: {e}"));
        for strategy in strategy::STRATEGIES.iter().filter(|s| untied(s) || s.name == "exact") {
            run(&problem, strategy, &mut seen);
        }
    }
}

fn run(problem: &Problem<'_>, strategy: &Strategy, seen: &mut Vec<Vec<Config>>) {
    let what = format!("{} by {}", problem.graph.name, strategy.name);
    let found = search(problem, strategy, &Demands::default(), &Control::new());
    let configs = found.unwrap_or_else(|e| panic!("{what}: {e}")).configs;
    if seen.contains(&configs) {
        return;
    }
    let checked = check(problem.graph, &problem.relayouts, &configs, 3);
    // A plan that sends nothing would show nothing.
    let traffic = evaluate(problem, &configs).unwrap().traffic;
    assert!(checked.is_ok() && traffic.total().0 > 0, "{what}: {checked:?}");
    seen.push(configs);
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
