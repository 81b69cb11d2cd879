//! The paper's check of optimality (arXiv 1807.05358, section 8.4): the search finds what looking at every plan finds.
//!
//! All plans of all layers are far too many to simulate, so a plan is left out as soon as a bound says that its step cannot
//! be shorter than what is known. The bounds hold for every schedule: a step takes at least as long as any chain of ops that
//! wait for each other, the reshards between them included, up to some op, and then all the computing that waits for that op, which
//! one device does one after the other, or all that is moved after it, which has to go through one port. Each bound is a sum over
//! layers and neighbours in an order, so the least that the layers still to be chosen can add is known exactly.

use shardwright_cost::TensorShape;
use shardwright_graph::{Graph, OpId, Phase, TensorId};
use shardwright_machine::builtin;
use shardwright_plan::{Candidates, Context, SearchProblem, picoseconds};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_sim::Delta;
use shardwright_space::{Assignment, Config, configs, input_layout, output_layout};
use shardwright_strategies::{
    Moves,
    chain::{Limits, run_chains},
    recipes,
};
use shardwright_zoo::{BuildOptions, build};
use std::cmp::Ordering;

/// A sum over variables in an order and over neighbours in it, never above the simulated step.
struct Bound {
    /// Per position: what each choice adds.
    own: Vec<Vec<u64>>,
    /// Per position and choice: what each choice of the next position adds.
    next: Vec<Vec<Vec<u64>>>,
    /// Per position and choice: the least that all later positions add.
    least: Vec<Vec<u64>>,
}

impl Bound {
    fn new(own: Vec<Vec<u64>>, next: Vec<Vec<Vec<u64>>>) -> Self {
        let mut least: Vec<Vec<u64>> = own.iter().map(|own| vec![0; own.len()]).collect();
        for at in (0..own.len() - 1).rev() {
            for choice in 0..own[at].len() {
                let then = |c: usize| next[at][choice][c] + own[at + 1][c] + least[at + 1][c];
                least[at][choice] = (0..own[at + 1].len()).map(then).min().unwrap_or(0);
            }
        }
        Self { own, next, least }
    }
}

/// By these durations, the ops of the longest chain that ends in each of some ops, or anywhere; first to last.
fn longest_chains(graph: &Graph, durations: &[i64], ends: &[OpId]) -> Vec<Vec<OpId>> {
    let mut best: Vec<(i64, Option<OpId>)> = Vec::new();
    for op in graph.op_ids() {
        let makers = graph.node(op).inputs.iter().filter_map(|&t| graph.tensor(t).producer);
        let before = makers.map(|maker| (best[maker.index()].0, Some(maker))).max().unwrap_or((0, None));
        // Ops without any work count a little, so that the chain has all ops on its way.
        best.push((before.0 + durations[op.index()].max(1), before.1));
    }
    let chain = |end: OpId| {
        let mut chain: Vec<OpId> = std::iter::successors(Some(end), |op| best[op.index()].1).collect();
        chain.reverse();
        chain
    };
    let longest = graph.op_ids().max_by_key(|op| best[op.index()].0);
    longest.iter().chain(ends).map(|&end| chain(end)).collect()
}

/// What a bound counts behind its chain.
#[derive(Clone, Copy, PartialEq)]
enum Behind {
    Computing,
    Moving,
}

struct Exhaustive<'p> {
    problem: &'p SearchProblem<'p>,
    /// Variables in the order in which they are chosen.
    order: Vec<usize>,
    bounds: Vec<Bound>,
    delta: Delta<'p>,
    numbers: Vec<Vec<Vec<(u32, u32)>>>,
    chosen: Vec<usize>,
    applied: Vec<usize>,
    least: u64,
    simulated: u64,
    looked_at: u64,
}

impl<'p> Exhaustive<'p> {
    fn new(problem: &'p SearchProblem<'p>, start: &Assignment, known: u64) -> Self {
        let graph = problem.context.graph;
        let times = problem.context.times().unwrap();
        let durations: Vec<i64> = graph.op_ids().map(|op| times.compute(op, start.config(op))).collect();
        let updates: Vec<OpId> = graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Update).collect();
        let chains = longest_chains(graph, &durations, &updates);
        let chain = &chains[0];
        let mut order: Vec<usize> = Vec::new();
        for op in chain.iter().copied().chain(graph.op_ids()) {
            let variable = problem.context.variables.index[op.index()].0 as usize;
            if !order.contains(&variable) {
                order.push(variable);
            }
        }
        // Some ops of the chain, after which all that waits for them has to be computed; the last one has little to wait for it.
        let marks = 8.min(chain.len());
        let after: Vec<usize> = (1..=marks).map(|n| n * chain.len() / marks - 1).collect();
        let longest = after.iter().map(|&last| &chain[..=last]);
        // Gradients of every weight, added up over devices just before its update.
        let bounds = longest.chain(chains[1..].iter().map(Vec::as_slice));
        let bounds = bounds.flat_map(|chain| [(chain, Behind::Computing), (chain, Behind::Moving)]);
        let bounds = bounds.chain([(&[][..], Behind::Moving)]);
        let bounds = bounds.map(|(chain, behind)| Self::bound(problem, &order, chain, behind)).collect();
        let mut delta = Delta::new(&problem.context, start).unwrap();
        let numbers = order.iter().map(|&v| {
            let ops = &problem.context.variables.members[v].ops;
            let numbers = |configs: &[Config], delta: &mut Delta<'_>| {
                let pairs = ops.iter().zip(configs);
                pairs.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect::<Vec<_>>()
            };
            problem.choices[v].iter().map(|choice| numbers(&choice.configs, &mut delta)).collect()
        });
        let numbers: Vec<Vec<Vec<(u32, u32)>>> = numbers.collect();
        let chosen = vec![0; order.len()];
        let applied = vec![usize::MAX; order.len()];
        Self {
            problem,
            order,
            bounds,
            delta,
            numbers,
            chosen,
            applied,
            least: known,
            simulated: 0,
            looked_at: 0,
        }
    }

    /// A chain of ops, and all computing that waits for its last one, or all that is moved from there on.
    fn bound(problem: &SearchProblem<'_>, order: &[usize], chain: &[OpId], behind: Behind) -> Bound {
        assert_eq!(problem.context.machine.levels().len(), 1, "transfers have one port");
        let last = chain.last().copied();
        let (graph, mesh) = (problem.context.graph, problem.context.mesh());
        let times = problem.context.times().unwrap();
        let mut waits = vec![last.is_none(); graph.ops.len()];
        for op in graph.op_ids() {
            let makers = graph.node(op).inputs.iter().filter_map(|&t| graph.tensor(t).producer);
            waits[op.index()] |= makers.into_iter().any(|maker| Some(maker) == last || waits[maker.index()]);
        }
        // Sums of partial results are run otherwise than planned.
        let sum = |op: OpId| graph.node(op).op.operator().is_sum();
        let computes = |op: OpId| behind == Behind::Computing && waits[op.index()];
        let counts = |op: OpId| !sum(op) && (computes(op) || chain.contains(&op));
        let choices = |at: usize| &problem.choices[order[at]];
        let own = (0..order.len()).map(|at| {
            let ops = &problem.context.variables.members[order[at]].ops;
            let of = |configs: &[Config]| {
                let counted = ops.iter().zip(configs).filter(|(op, _)| counts(**op));
                counted.map(|(&op, config)| times.compute(op, config) as u64).sum::<u64>()
            };
            choices(at).iter().map(|choice| of(&choice.configs)).collect::<Vec<u64>>()
        });
        let mut own: Vec<Vec<u64>> = own.collect();
        let mut next: Vec<Vec<Vec<u64>>> =
            (0..order.len() - 1).map(|at| vec![vec![0; choices(at + 1).len()]; choices(at).len()]).collect();
        let position = |op: OpId| {
            let (variable, member) = problem.context.variables.index[op.index()];
            (order.iter().position(|&v| v == variable as usize).unwrap(), member as usize)
        };
        let mut pairs: Vec<[OpId; 2]> = chain.windows(2).map(|pair| [pair[0], pair[1]]).collect();
        if behind == Behind::Moving {
            // Of everybody who reads a tensor one is enough for a bound.
            let consumers = graph.consumers();
            for tensor in graph.tensor_ids() {
                let maker = graph.tensor(tensor).producer;
                let Some(maker) = maker.filter(|&op| Some(op) == last || waits[op.index()]) else { continue };
                let distance = |reader: &OpId| position(maker).0.abs_diff(position(*reader).0);
                pairs
                    .extend(consumers.of(tensor).iter().min_by_key(|op| distance(op)).map(|&op| [maker, op]));
            }
        }
        pairs.sort_unstable();
        pairs.dedup();
        for pair in pairs.into_iter().filter(|pair| !sum(pair[0]) && !sum(pair[1])) {
            let (maker, reader) = (graph.node(pair[0]), graph.node(pair[1]));
            let between = |t: &&TensorId| maker.outputs.contains(t);
            let Some(&tensor) = reader.inputs.iter().find(between) else { continue };
            let (o, i) = (
                maker.outputs.iter().position(|&t| t == tensor).unwrap(),
                reader.inputs.iter().position(|&t| t == tensor).unwrap(),
            );
            let ((a, maker_member), (b, reader_member)) = (position(pair[0]), position(pair[1]));
            if a.abs_diff(b) > 1 {
                continue;
            }
            let ty = &graph.tensor(tensor).ty;
            let tensor = problem
                .context
                .resharder
                .tensor(TensorShape::new(&ty.shape, ty.dtype.bytes() as u32).unwrap());
            for (ca, from) in choices(a).iter().enumerate() {
                let from = output_layout(
                    &problem.context.shapes[pair[0].index()],
                    o,
                    &from.configs[maker_member],
                    mesh,
                );
                for (cb, to) in choices(b).iter().enumerate().filter(|&(cb, _)| a != b || ca == cb) {
                    let to = input_layout(
                        &problem.context.shapes[pair[1].index()],
                        i,
                        &to.configs[reader_member],
                        mesh,
                    );
                    let way = problem.context.resharder.find(&tensor, &from, &to).unwrap();
                    let steps = way.steps.iter().map(|step| picoseconds(step.seconds) as u64);
                    // Other ways of the same length may round otherwise.
                    let time = steps.map(|time| time.saturating_sub(2)).sum::<u64>();
                    match a.cmp(&b) {
                        Ordering::Less => next[a][ca][cb] += time,
                        Ordering::Equal => own[a][ca] += time,
                        Ordering::Greater => next[b][cb][ca] += time,
                    }
                }
            }
        }
        Bound::new(own, next)
    }

    /// Chooses from a position on in every way that may be better than what is known.
    fn descend(&mut self, at: usize, sums: &[u64], most: u64) -> bool {
        if at == self.order.len() {
            self.simulate();
            return self.simulated < most;
        }
        for choice in 0..self.problem.choices[self.order[at]].len() {
            self.looked_at += 1;
            let sum = |(bound, sum): (&Bound, &u64)| {
                let before = if at == 0 { 0 } else { bound.next[at - 1][self.chosen[at - 1]][choice] };
                sum + before + bound.own[at][choice]
            };
            let sums: Vec<u64> = self.bounds.iter().zip(sums).map(sum).collect();
            let hopeless =
                self.bounds.iter().zip(&sums).any(|(b, sum)| sum + b.least[at][choice] >= self.least);
            self.chosen[at] = choice;
            if !hopeless && !self.descend(at + 1, &sums, most) {
                return false;
            }
        }
        true
    }

    fn simulate(&mut self) {
        let mut changes = Vec::new();
        for (at, &choice) in self.chosen.iter().enumerate() {
            if self.applied[at] != choice {
                self.applied[at] = choice;
                changes.extend_from_slice(&self.numbers[at][choice]);
            }
        }
        self.simulated += 1;
        self.least = self.least.min(self.delta.propose(&changes).unwrap());
        self.delta.accept();
    }
}

/// The axes that every layer chooses on.
enum Axes {
    Prime,
    /// One for all devices: a layer is split along one of its factors, or repeated.
    PerLevel,
}

/// Whether the search finds the best of all plans; how many were simulated.
fn finds_the_optimum(spec: &str, machine: &str, axes: Axes, most: u64) -> u64 {
    let graph = build(spec, &BuildOptions::default()).unwrap();
    let machine = builtin(machine).unwrap();
    let problem = match axes {
        Axes::Prime => SearchProblem::new(&graph, &machine, None).unwrap(),
        Axes::PerLevel => {
            let mesh = machine.mesh().per_level();
            let context = Context::new(&graph, &machine, None, mesh.clone(), false).unwrap();
            let leads = context.variables.members.iter().map(|split| split.forward().index());
            let configs = leads.map(|lead| configs(&context.shapes[lead].rule, &mesh)).collect();
            SearchProblem::among(&context, Candidates { mesh, configs }, &Control::new()).unwrap()
        }
    };
    let context = &*problem.context;
    let exact = Exact.solve(&problem.network, &Control::new()).choice.unwrap();
    let starts = [
        problem.assignment(&exact),
        recipes::OWT.assignment(context),
        recipes::DATA.assignment(context),
        recipes::MODEL.assignment(context),
    ];
    let moves = Moves::new(context, &problem.choices, &starts[0]);
    let limits = Limits { proposals: 50_000, ..Limits::default() };
    let found = run_chains(context, &moves, &starts, &limits, &Control::new()).unwrap();
    let best = &found[0];
    let plans: f64 = problem.choices.iter().map(|c| (c.len() as f64).log10()).sum();
    // One more than the best: the best itself must be met.
    let mut all = Exhaustive::new(&problem, &best.assignment, best.makespan + 1);
    let sums = vec![0; all.bounds.len()];
    let whole = all.descend(0, &sums, most);
    println!(
        "{spec}: {} layers, 10^{plans:.1} plans, {} simulated, {} looked at; search {} ps, all plans {} ps",
        problem.choices.len(),
        all.simulated,
        all.looked_at,
        best.makespan,
        all.least
    );
    assert!(whole, "{spec}: more than {most} plans are left to simulate");
    assert_eq!(all.least, best.makespan, "{spec}");
    all.simulated
}

#[test]
fn the_search_finds_the_best_plan_of_all_of_small_perceptrons() {
    assert!(finds_the_optimum("mlp:batch=16,hidden=64,layers=2", "flat:4", Axes::PerLevel, 3_000_000) > 0);
    assert!(finds_the_optimum("mlp:batch=16,hidden=64,layers=1", "flat:2", Axes::Prime, 3_000_000) > 0);
}

#[test]
#[ignore = "half a minute: cargo test --release -p shardwright-strategies --test optimum -- --ignored --nocapture"]
fn the_search_finds_the_best_plan_of_all_of_a_perceptron_on_two_axes() {
    assert!(finds_the_optimum("mlp:batch=16,hidden=64,layers=1", "flat:4", Axes::Prime, 3_000_000) > 0);
}

#[test]
#[ignore = "half a minute: cargo test --release -p shardwright-strategies --test optimum -- --ignored --nocapture"]
fn the_search_finds_the_best_plan_of_all_of_lenet() {
    assert!(finds_the_optimum("lenet5:batch=8", "flat:4", Axes::PerLevel, 20_000_000) > 0);
}

#[test]
#[ignore = "half a minute: cargo test --release -p shardwright-strategies --test optimum -- --ignored --nocapture"]
fn the_search_finds_the_best_plan_of_all_of_a_short_recurrent_net() {
    assert!(
        finds_the_optimum(
            "rnnlm:batch=64,layers=1,seq=1,hidden=2048,vocab=8192,unroll=1",
            "flat:4",
            Axes::PerLevel,
            20_000_000
        ) > 0
    );
}
