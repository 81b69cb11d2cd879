//! Uniform plans: segments add up to the ordinary step, closed forms hold, and the search finds the best.

use shardwright_graph::{BlockChain, Graph, RecomputePolicy, microbatch};
use shardwright_machine::{Bytes, EngineName, Machine, builtin};
use shardwright_plan::{Constraints, Context, step_lower_bound};
use shardwright_search::{Clock, Control};
use shardwright_sim::simulate_step;
use shardwright_stages::schedule::Schedule;
use shardwright_strategies::pipeline::{
    UniformPlan, UniformPricer, UniformRequest, UniformScope, ZeroLevel, search, write_down,
};
use shardwright_strategies::{EXPERT, Expert, Variant, VariantInputs, find, plan_variants};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn gpt(layers: u32, batch: u32) -> Graph {
    let name = format!("gpt:layers={layers},hidden=512,heads=8,seq=256,vocab=1024,batch={batch},dtype=mixed");
    build(&name, &BuildOptions::default()).unwrap()
}

/// Kind, phase and types of every op.
fn ops(graph: &Graph) -> Vec<String> {
    let mut all: Vec<String> = graph
        .op_ids()
        .map(|op| {
            let node = graph.node(op);
            format!(
                "{} {:?} {:?} {:?}",
                node.op.kind(),
                node.phase,
                graph.input_types(op),
                graph.output_types(op)
            )
        })
        .collect();
    all.sort();
    all
}

#[test]
fn a_shortened_model_is_the_model_with_three_blocks() {
    for name in ["gpt", "moe"] {
        let of = |layers: u32| {
            let name = format!("{name}:layers={layers},hidden=64,heads=4,seq=16,vocab=128,batch=4");
            build(&name, &BuildOptions::default()).unwrap()
        };
        let chain = BlockChain::of(&of(7)).unwrap();
        assert_eq!(ops(&chain.short), ops(&of(3)), "{name}");
        assert_eq!((chain.blocks(), chain.segments.len()), (7, 9), "{name}");
        let like: Vec<u32> = chain.segments.iter().map(|segment| segment.like).collect();
        assert_eq!(like, [0, 1, 2, 2, 2, 2, 2, 3, 4], "{name}");
    }
}

fn plan(request: &str, pricer: &UniformPricer<'_>) -> UniformPlan {
    pricer.plans(&UniformRequest::parse(request).unwrap()).unwrap()[0]
}

/// The composed step, and the ordinary simulation of the same assignment.
fn composed_and_ordinary(layers: u32, request: &str) -> (f64, f64) {
    let machine = builtin("8xa100").unwrap();
    let graph = gpt(layers, 16);
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    let priced = pricer.price(&plan(request, &pricer)).unwrap();
    let written = write_down(&pricer, &priced, ("as", "test"), None, &Control::new()).unwrap();
    let answer = &written.answer;
    let context = shardwright_plan::Context::new(&written.graph, &machine, None, answer.mesh.clone(), true);
    let context = context.unwrap();
    let peak = shardwright_plan::peak(&context, &answer.assignment).0 as f64;
    let counted = priced.price.peak_memory as f64;
    assert!((0.5..2.5).contains(&(counted / peak)), "{request}: {counted} against {peak} bytes");
    // The plan has the step and the memory of the ordinary simulation.
    let written_step = answer.plan.simulated.step_seconds;
    assert_eq!(written_step, simulate_step(&context, &answer.assignment).unwrap().times.step_seconds);
    assert_eq!(answer.plan.peak_memory_bytes, peak as u64);
    (priced.price.step_seconds, simulate_step(&context, &answer.assignment).unwrap().times.step_seconds)
}

#[test]
fn one_stage_and_one_micro_batch_are_the_ordinary_step() {
    for request in [
        "tp=2,mbs=4",
        "tp=8,mbs=16",
        "tp=4,mbs=8,sp,zero=1",
        "tp=1,mbs=2,zero=1,recompute=full",
        "tp=2,mbs=4,sp,zero=3",
    ] {
        // Three blocks are not shortened: equal up to rounding.
        let (composed, ordinary) = composed_and_ordinary(3, request);
        assert!((composed / ordinary - 1.0).abs() < 1e-6, "{request}: {composed} against {ordinary}");
        // Composed ones guide the search only: sums of gradients and gathers of weights overlap with other blocks than in the
        // short step.
        let (composed, ordinary) = composed_and_ordinary(8, request);
        assert!((composed / ordinary - 1.0).abs() < 0.33, "{request}: {composed} against {ordinary}");
    }
}

#[test]
fn micro_batches_compose_to_the_ordinary_step() {
    for request in ["tp=2,mbs=1", "tp=8,mbs=2,sp", "tp=4,mbs=1,sp,zero=1", "tp=1,mbs=1,zero=1,recompute=full"]
    {
        // Three blocks are not shortened: equal but for weights that are gathered before the first micro-batch.
        let (composed, ordinary) = composed_and_ordinary(3, request);
        assert!((composed / ordinary - 1.0).abs() < 0.01, "{request}: {composed} against {ordinary}");
        let (composed, ordinary) = composed_and_ordinary(8, request);
        assert!((composed / ordinary - 1.0).abs() < 0.05, "{request}: {composed} against {ordinary}");
    }
}

/// The simulated step of a plan on eight H100s whose steps an engine runs.
fn step_under(engine: EngineName, request: &str) -> shardwright_plan::StepTimes {
    let mut spec = builtin("8xh100").unwrap().spec().clone();
    spec.device.engine = Some(engine);
    let machine = Machine::new(spec).unwrap();
    let name = "gpt:layers=3,hidden=4096,heads=32,seq=2048,vocab=32768,batch=8,dtype=mixed";
    let graph = build(name, &BuildOptions::default()).unwrap();
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    let priced = pricer.price(&plan(request, &pricer)).unwrap();
    let written = write_down(&pricer, &priced, ("as", "test"), None, &Control::new()).unwrap();
    written.answer.plan.simulated
}

#[test]
fn collectives_of_tensor_parallelism_run_beside_their_products() {
    // Both engines have the same kernels.
    let [usual, beside] = [EngineName::TorchCompile, EngineName::MegatronBridge];
    let exposed = |engine, request| step_under(engine, request).exposed_comm_seconds;
    let (before, after) = (exposed(usual, "tp=8,mbs=8,sp"), exposed(beside, "tp=8,mbs=8,sp"));
    assert!(after < 0.5 * before, "{after} of {before} s");
    // One of eight parts of every collective is left, and those of embedding and logits.
    assert!(after > 0.1 * before, "{after} of {before} s");
    let sums = |engine| step_under(engine, "tp=8,mbs=8").step_seconds;
    assert_eq!(sums(usual), sums(beside), "sums of whole activations are not divided");
    let replicas = |engine| step_under(engine, "dp=8,mbs=1,zero=3,tp=1").step_seconds;
    assert_eq!(replicas(usual), replicas(beside), "weights are gathered as before");
}

#[test]
fn equal_stages_take_the_closed_form() {
    let machine = builtin("8xa100").unwrap();
    let graph = gpt(8, 64);
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    let one = pricer.price(&plan("pp=4,dp=2,mbs=1", &pricer)).unwrap();
    let slowest = one.price.stages.iter().map(|stage| stage.seconds).fold(0.0, f64::max);
    let all: f64 = one.price.stages.iter().map(|stage| stage.seconds).sum();
    // Alpa's form: all stages once, and the slowest for every further micro-batch.
    let closed = all + 31.0 * slowest;
    let once = one.price.stages.iter().map(|stage| stage.once).fold(0.0, f64::max);
    let step = one.price.step_seconds;
    assert!(step >= 0.9 * closed && step <= 1.1 * closed + once, "{step} against {closed}");
    // More chunks, more passes in flight.
    let two = pricer.price(&plan("pp=4,dp=2,mbs=1,vp=2", &pricer)).unwrap();
    assert_eq!(one.price.stages[0].in_flight, 4);
    assert!(two.price.stages[0].in_flight > 8);
    // Recomputation: a longer step in less memory.
    let full = pricer.price(&plan("pp=4,dp=2,mbs=1,recompute=full", &pricer)).unwrap();
    assert!(full.price.step_seconds > step && full.price.peak_memory < one.price.peak_memory);
}

#[test]
fn a_written_plan_has_one_peak() {
    let machine = builtin("8xa100").unwrap();
    let graph = gpt(8, 16);
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    for degrees in ["pp=4,dp=2,mbs=1", "tp=2,pp=2,vp=2,dp=2,mbs=1,zero=1,sp,recompute=selective"] {
        let priced = pricer.price(&plan(degrees, &pricer)).unwrap();
        let written = write_down(&pricer, &priced, ("as", "test"), None, &Control::new()).unwrap();
        let plan = &written.answer.plan;
        let stages = &plan.pipeline.as_ref().unwrap().stages;
        let most = stages.iter().map(|stage| stage.peak_memory_bytes).max();
        assert_eq!(most, Some(plan.peak_memory_bytes), "{degrees}");
        // A group's devices hold all of its chunks at once.
        let of = |group: u32| stages.iter().filter(move |stage| stage.group == group);
        assert!(of(0).all(|stage| stage.peak_memory_bytes == stages[0].peak_memory_bytes), "{degrees}");
    }
}

#[test]
fn degrees_that_do_not_suit_are_named_one_by_one() {
    let machine = builtin("8xa100").unwrap();
    let graph = gpt(8, 64);
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    let refused = |request: &str| {
        let request = UniformRequest::parse(request).unwrap();
        match pricer.plans(&request) {
            Err(error) => error.reasons.join("; "),
            Ok(plans) => pricer.price(&plans[0]).unwrap_err().to_string(),
        }
    };
    let several = refused("tp=3,pp=3,dp=5,mbs=7");
    assert!(several.contains("tp=3 × pp=3 × dp=5 = 45 is not"), "{several}");
    assert!(several.contains("dp=5 does not divide the batch, 64"), "{several}");
    assert!(several.contains("pp=3 does not divide the 8 blocks"), "{several}");
    assert!(several.contains("mbs=7 does not divide"), "{several}");
    assert!(several.contains("tp=3 does not divide `blocks.0.attn.q` (h=8"), "{several}");
    let experts = refused("tp=2,pp=3,ep=2,cp=3");
    assert!(experts.contains("ep=2: the model has no experts"), "{experts}");
    assert!(experts.contains("cp=3 does not divide the sequence"), "{experts}");
    assert!(refused("tp=2,pp=4,ep=3").contains("ep=3 does not divide"));
    assert!(refused("pp=8,vp=2").contains("does not divide the 8 blocks"));
    assert!(refused("pp=4,dp=2,mbs=16,vp=2").contains("interleaved needs a multiple of 4"));
    assert!(refused("schedule=1f1b").contains("needs pipeline stages"));
    let heads = gpt_with_heads(3);
    let pricer = UniformPricer::new(&heads, &machine, None).unwrap();
    let wanted = plan("tp=4,mbs=1", &pricer);
    let error = pricer.price(&wanted).unwrap_err().to_string();
    assert!(error.contains("tp=4 does not divide `blocks.0.attn.q`") && error.contains("h=3"), "{error}");
}

fn gpt_with_heads(heads: u32) -> Graph {
    let name = format!("gpt:layers=4,hidden=192,heads={heads},seq=64,vocab=1024,batch=64,dtype=mixed");
    build(&name, &BuildOptions::default()).unwrap()
}

#[test]
fn no_plan_of_the_space_beats_the_searched_one() {
    let machine = builtin("8xa100").unwrap();
    let graph = gpt(4, 32);
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    let found = search(&pricer, None, UniformScope::default(), &Control::new()).unwrap();
    let best = found.best.unwrap();
    assert!(found.complete && found.priced <= found.plans);
    for tensor in [1, 2, 4] {
        for pipeline in [1, 2, 4] {
            for recompute in RecomputePolicy::ALL {
                let plan = UniformPlan {
                    tensor,
                    pipeline,
                    context: 1,
                    expert: 1,
                    data: 8 / tensor / pipeline.min(8 / tensor),
                    micro_batch: 1,
                    micro_batches: 32 / (8 / tensor / pipeline.min(8 / tensor)),
                    zero: ZeroLevel::State,
                    sequence: tensor > 1,
                    recompute,
                    schedule: if pipeline > 1 {
                        Schedule::OneForwardOneBackward
                    } else {
                        Schedule::Accumulate
                    },
                };
                if tensor * pipeline > 8 {
                    continue;
                }
                let other = pricer.price(&plan).unwrap().price.step_seconds;
                assert!(best.price.step_seconds <= other * (1.0 + 1e-9), "{plan}: {other}");
            }
        }
    }
    // A limit below every plan's memory leaves none.
    let none = search(&pricer, Some(Bytes(1)), UniformScope::default(), &Control::new()).unwrap();
    assert!(none.best.is_none());
}

#[test]
fn the_bound_of_the_short_step_is_that_of_the_whole() {
    let (graph, machine) = (gpt(9, 8), builtin("8xa100").unwrap());
    let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
    let whole = [1, 2, 4, 8].map(|count| {
        let step = microbatch(&graph, NonZeroU32::new(count).unwrap()).unwrap();
        let context = Context::new(&step.graph, &machine, None, machine.mesh().clone(), true).unwrap();
        step_lower_bound(&context, false).unwrap()
    });
    let (short, whole) = (pricer.step_lower_bound().unwrap(), *whole.iter().min().unwrap());
    // Both leave out up to a thousandth.
    assert!((short as f64 / whole as f64 - 1.0).abs() < 0.002, "{short} and {whole}");
}

/// A clock that advances one second per reading.
struct CountingClock(AtomicU64);

impl Clock for CountingClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

#[test]
fn auto_is_no_slower_than_the_best_uniform_plan_and_is_held_against_it() {
    let machine = builtin("8xa100").unwrap();
    let inputs = VariantInputs { machine: &machine, costs: None, untied: false, recompute_ops: false };
    for (graph, limit) in [(gpt(5, 16), None), (gpt(5, 16), Some(Bytes(100_000_000)))] {
        let constraints = Constraints { memory: limit, ..Constraints::default() };
        let counts = [1, 2].into_iter().filter_map(NonZeroU32::new);
        let of = |micro_batches| {
            RecomputePolicy::ALL.map(|recompute| Variant { micro_batches, recompute, engine: None })
        };
        let variants: Vec<Variant> = counts.flat_map(of).collect();
        let best = Expert::find(&graph, &variants, inputs, &constraints, &Control::new()).unwrap().unwrap();
        // No stated uniform plan without stages is faster than the best one.
        let pricer = UniformPricer::new(&graph, &machine, None).unwrap();
        for text in ["tp=1,mbs=1,zero=1", "tp=2,mbs=2,zero=3,sp", "tp=1,mbs=2,zero=3,recompute=full"] {
            for stated in pricer.plans(&UniformRequest::parse(text).unwrap()).unwrap() {
                let priced = pricer.price(&stated).unwrap();
                let written = write_down(&pricer, &priced, ("as", ""), limit, &Control::new()).unwrap();
                let step = written.answer.plan.simulated.step_seconds;
                let allowed = stated.micro_batches <= 2 && written.answer.plan.fits;
                assert!(!allowed || best.cost.step_seconds <= step, "{text}");
            }
        }
        let (auto, clock) = (find("auto").unwrap(), CountingClock(AtomicU64::new(0)));
        let control = Control::new().time_limit(&clock, Duration::from_secs(300));
        let planned = plan_variants(&graph, &variants, inputs, auto, &constraints, &control);
        let plan = planned.ok().unwrap().answer.plan;
        let (expert, step) = (&plan.baselines[EXPERT], plan.simulated.step_seconds);
        assert!(expert.fits && step <= expert.step_seconds, "{step} and {}", expert.step_seconds);
        assert!(plan.overlap.unwrap().lower_bound_seconds <= step);
    }
}
