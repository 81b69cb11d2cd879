//! The check of runs accepts rounding, however amplified, and refuses mistakes.

use shardwright_cost::{Action, Resharder};
use shardwright_engine::{Check, Difference, Options, Outcome, run};
use shardwright_graph::{Graph, Op, Optimizer};
use shardwright_lower::{ParallelGraph, Work, lower};
use shardwright_machine::builtin;
use shardwright_plan::Constraints;
use shardwright_runtime::HostTensor;
use shardwright_search::Control;
use shardwright_strategies::{Planner, find};
use shardwright_zoo::{BuildOptions, build};

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 0, steps: 2, trace: false, finals: true, slow: &[], assist: None };

const GPT: &str = "gpt:batch=4,layers=2,hidden=64,heads=4,vocab=512,seq=32";

fn graph(model: &str, optimizer: Optimizer) -> Graph {
    build(model, &BuildOptions { optimizer, ..BuildOptions::default() }).unwrap()
}

fn program(graph: &Graph, devices: u32, solver: &str) -> ParallelGraph {
    let machine = builtin(&format!("flat:{devices}")).unwrap();
    let planner = Planner::new(graph, &machine, None, false);
    let control = Control { threads: 1, ..Control::new() };
    let solution = find(solver).unwrap().solve(&planner, &Constraints::default(), &control).unwrap();
    lower(graph, &Resharder::new(&machine, solution.context.mesh()), &solution.assignment).unwrap()
}

fn compare(graph: &Graph, outcome: &Outcome) -> Difference {
    Check::new(graph, OPTIONS).unwrap().compare(outcome).unwrap()
}

fn accepted(model: &str, optimizer: Optimizer, devices: u32, solver: &str) {
    let graph = graph(model, optimizer);
    let outcome = run(&graph, &program(&graph, devices, solver), OPTIONS).unwrap();
    let difference = compare(&graph, &outcome);
    println!("{model} by {solver} on {devices}: {difference:?}");
    assert!(difference.is_rounding(), "{model} by {solver} on {devices}: {difference:?}");
}

#[test]
fn adam_on_gradients_that_cancel_out_is_rounding() {
    for (devices, solver) in [(2, "data"), (2, "megatron"), (4, "data"), (2, "exact")] {
        accepted(GPT, Optimizer::adam(0.001), devices, solver);
    }
}

#[test]
fn batch_norms_in_single_precision_are_rounding() {
    for model in [
        "resnet101:batch=4,image=64,width=0.0625,classes=4,depth=50",
        "densenet121:batch=4,image=64,width=0.125,classes=4",
        "inception_v3:batch=4,image=107,width=0.0625,classes=4,dropout=0",
    ] {
        accepted(model, Optimizer::momentum(0.02, 0.9), 2, "data");
    }
}

/// Replaces a tensor of an outcome by a changed copy.
fn change(outcome: &mut Outcome, graph: &Graph, name: &str, change: impl Fn(&mut [f64])) {
    let found = outcome.finals.iter_mut().find(|(tensor, _)| graph.tensor(*tensor).name == name);
    let (_, value) = found.unwrap_or_else(|| panic!("no tensor {name}"));
    let mut numbers = value.to_f64_vec();
    change(&mut numbers);
    let dtype = value.ty().dtype;
    *value = HostTensor::new(value.shape().clone(), shardwright_runtime::Data::of_reals(dtype, numbers));
}

#[test]
fn one_wrong_element_is_found_in_every_weight_that_does_not_cancel_out() {
    for (optimizer, least) in [(Optimizer::sgd(0.01), 0.95), (Optimizer::adam(0.001), 0.3)] {
        let graph = graph(GPT, optimizer);
        let outcome = run(&graph, &program(&graph, 2, "data"), OPTIONS).unwrap();
        let check = Check::new(&graph, OPTIONS).unwrap();
        let (mut found, mut all) = (0, 0);
        for (tensor, _) in outcome.finals.clone() {
            let name = &graph.tensor(tensor).name;
            let mut wrong = outcome.clone();
            change(&mut wrong, &graph, name, |numbers| {
                let largest = numbers.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
                numbers[0] += 0.5 * largest;
            });
            let difference = check.compare(&wrong).unwrap();
            found += usize::from(!difference.is_rounding() && difference.worst == *name);
            all += 1;
        }
        println!("{found} of {all} wrong elements are found");
        assert!(found as f64 >= least * all as f64, "{found} of {all}");
    }
}

/// Lets every reader of an all-reduce read the partial sums instead.
fn without_all_reduce(program: &ParallelGraph, at: usize) -> ParallelGraph {
    let mut wrong = program.clone();
    let dropped = wrong.instructions[at].clone();
    for instruction in &mut wrong.instructions[at + 1..] {
        for read in &mut instruction.reads {
            if let Some(i) = dropped.writes.iter().position(|write| write == read) {
                *read = dropped.reads[i];
            }
        }
    }
    wrong
}

#[test]
fn a_dropped_all_reduce_is_found() {
    for (model, optimizer) in [
        (GPT, Optimizer::sgd(0.01)),
        (GPT, Optimizer::adam(0.001)),
        ("vgg16:batch=4,image=32,width=0.0625,classes=4,dropout=0", Optimizer::momentum(0.02, 0.9)),
    ] {
        let graph = graph(model, optimizer);
        let check = Check::new(&graph, OPTIONS).unwrap();
        let program = program(&graph, 2, "data");
        let is_sum = |work: &Work| matches!(work, Work::Reshard(step) if step.action == Action::AllReduce);
        let sums: Vec<usize> =
            (0..program.instructions.len()).filter(|&at| is_sum(&program.instructions[at].work)).collect();
        assert!(!sums.is_empty());
        for &at in sums.iter().step_by(sums.len().div_ceil(6)) {
            let outcome = run(&graph, &without_all_reduce(&program, at), OPTIONS).unwrap();
            let difference = check.compare(&outcome).unwrap();
            assert!(!difference.is_rounding(), "{model}: {at} of {sums:?}: {difference:?}");
        }
    }
}

#[test]
fn a_wrong_scale_is_found() {
    let graph = graph(GPT, Optimizer::sgd(0.01));
    let check = Check::new(&graph, OPTIONS).unwrap();
    let means: Vec<usize> = (0..graph.ops.len())
        .filter(|&at| matches!(&graph.ops[at].op, Op::Reduce(reduce) if reduce.scale.0 != 1.0))
        .collect();
    assert!(!means.is_empty());
    for at in means {
        let mut wrong = graph.clone();
        let Op::Reduce(reduce) = &mut wrong.ops[at].op else { unreachable!("chosen above") };
        // A device that divides by its own number of samples.
        reduce.scale.0 *= 2.0;
        let outcome = run(&wrong, &program(&wrong, 2, "data"), OPTIONS).unwrap();
        let difference = check.compare(&outcome).unwrap();
        assert!(!difference.is_rounding(), "{}: {difference:?}", graph.ops[at].name);
    }
}

#[test]
fn nan_is_a_mistake_unless_the_serial_program_has_it_too() {
    let graph = graph("mlp:batch=8,input=12,hidden=8,layers=2,classes=4", Optimizer::sgd(0.01));
    let program = program(&graph, 2, "data");
    let good = run(&graph, &program, OPTIONS).unwrap();
    assert!(compare(&graph, &good).is_rounding());
    let name = graph.tensor(good.finals[0].0).name.clone();
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut outcome = good.clone();
        change(&mut outcome, &graph, &name, |numbers| numbers[1] = bad);
        let difference = compare(&graph, &outcome);
        assert!(!difference.is_rounding() && difference.misplaced.as_ref() == Some(&name), "{difference:?}");
        let mut outcome = good.clone();
        outcome.losses[1] = bad;
        assert_eq!(compare(&graph, &outcome).misplaced.as_deref(), Some("loss"));
    }
    // A learning rate that diverges at once, in the serial program as well.
    let graph = self::graph("mlp:batch=8,input=12,hidden=8,layers=2,classes=4", Optimizer::sgd(1e38));
    let outcome = run(&graph, &self::program(&graph, 2, "data"), OPTIONS).unwrap();
    let difference = compare(&graph, &outcome);
    let infinite = outcome.finals.iter().any(|(_, value)| value.to_f64_vec().iter().any(|x| !x.is_finite()));
    assert!(infinite, "the run was meant to diverge");
    assert!(difference.is_rounding() || difference.misplaced.is_some(), "{difference:?}");
    if difference.misplaced.is_none() {
        assert!(difference.weaknesses.iter().any(|w| w.contains("NaN or infinity")), "{difference:?}");
    }
}

#[test]
fn a_loss_that_never_moves_is_told() {
    let still = graph("mlp:batch=8,input=12,hidden=8,layers=2,classes=4", Optimizer::sgd(0.0));
    let outcome = run(&still, &program(&still, 2, "data"), OPTIONS).unwrap();
    let difference = compare(&still, &outcome);
    assert!(difference.is_rounding(), "{difference:?}");
    assert!(difference.weaknesses.iter().any(|w| w.contains("checks little")), "{difference:?}");
    let moving = graph("mlp:batch=8,input=12,hidden=8,layers=2,classes=4", Optimizer::sgd(0.01));
    let outcome = run(&moving, &program(&moving, 2, "data"), OPTIONS).unwrap();
    assert_eq!(compare(&moving, &outcome).weaknesses, Vec::<String>::new());
}
