//! Random small problems, solved and compared with an exhaustive search that shares no code with the crate.

use proptest::prelude::*;
use shardwright_stages::format::{Overrides, Problem, read, write};
use shardwright_stages::{
    Control, Edge, Layer, LayerOption, LayerProblem, Objective, Outcome, RangeOption, Shape, StopReason,
    TableOption, TableProblem, TableStage,
};
use std::collections::BTreeMap;

/// A stage of the exhaustive search: time if it fits, by layers (bits), degree, replicas and micro-batches in flight.
type StageTime<'a> = dyn Fn(u32, u32, u32, u32) -> Option<f64> + 'a;

/// All pipelines from the last stage to the first; `rest` has the layers that are not placed yet.
struct Exhaustive<'a> {
    successors: Vec<u32>,
    micro_batches: u32,
    objective: Objective,
    time: &'a StageTime<'a>,
}

impl Exhaustive<'_> {
    fn best(&self, rest: u32, devices: u32, behind: u32, seconds: &mut Vec<f64>) -> f64 {
        if rest == 0 {
            return self.objective.value(seconds);
        }
        let mut best = f64::INFINITY;
        let mut stage = rest;
        while stage != 0 {
            let is_last = (0..self.successors.len())
                .all(|layer| stage >> layer & 1 == 0 || self.successors[layer] & rest & !stage == 0);
            if is_last {
                for t in 1..=devices {
                    for d in (1..=devices / t).filter(|&d| self.micro_batches.is_multiple_of(d)) {
                        if behind + d > self.micro_batches {
                            continue;
                        }
                        if let Some(time) = (self.time)(stage, t, d, (behind + d).div_ceil(d)) {
                            seconds.push(time);
                            best = best.min(self.best(rest & !stage, devices - t * d, behind + d, seconds));
                            seconds.pop();
                        }
                    }
                }
            }
            stage = (stage - 1) & rest;
        }
        best
    }
}

/// The least time of a stage over every combination of options.
fn stage_time(problem: &LayerProblem, stage: u32, t: u32, d: u32, y: u32) -> Option<f64> {
    let inside = |layer: u32| stage >> layer & 1 == 1;
    let replicas = f64::from(d);
    let mut totals = vec![(0.0, 0.0)];
    for (v, layer) in problem.layers.iter().enumerate().filter(|(v, _)| inside(*v as u32)) {
        let mut next = Vec::new();
        for option in layer.options.get(&t)? {
            let mut traffic = 0.0;
            for edge in &problem.edges {
                if edge.to == v as u32 && !inside(edge.from) {
                    traffic += 2.0 * (edge.bytes + option.receive_bytes.get(&edge.from).unwrap_or(&0.0));
                }
                if edge.from == v as u32 && !inside(edge.to) {
                    traffic += 2.0 * (edge.bytes + option.send_bytes.get(&edge.to).unwrap_or(&0.0));
                }
            }
            let sync =
                4.0 * (replicas - 1.0) / replicas * option.parameter_bytes / problem.micro_batches as f64;
            let time = option.seconds / replicas + (traffic / replicas + sync) / problem.bandwidth;
            let memory = option.bytes_per_micro_batch * f64::from(y) + option.fixed_bytes;
            next.extend(totals.iter().map(|(seconds, bytes)| (seconds + time, bytes + memory)));
        }
        totals = next;
    }
    let fitting = totals.into_iter().filter(|&(_, bytes)| bytes <= problem.memory_bytes);
    fitting.map(|(seconds, _)| seconds).min_by(f64::total_cmp)
}

fn exhaustive(problem: &LayerProblem) -> f64 {
    let mut successors = vec![0; problem.layers.len()];
    for edge in &problem.edges {
        successors[edge.from as usize] |= 1 << edge.to;
    }
    let time = |stage, t, d, y| stage_time(problem, stage, t, d, y);
    let search = Exhaustive {
        successors,
        micro_batches: problem.micro_batches as u32,
        objective: problem.objective,
        time: &time,
    };
    search.best((1 << problem.layers.len()) - 1, problem.devices, 0, &mut Vec::new())
}

/// The objective of the answer, computed from its stages alone; every rule of the problem is asserted.
fn judged(problem: &LayerProblem, outcome: &Outcome) -> f64 {
    let stages = outcome.stages.as_ref().unwrap();
    let mut placed = 0u32;
    let mut seconds = Vec::new();
    let (mut devices, mut behind) = (0, 0);
    for stage in stages.iter().rev() {
        let bits = stage.option.layers.iter().fold(0u32, |bits, layer| bits | 1 << layer);
        assert_eq!(placed & bits, 0, "a layer is placed twice");
        placed |= bits;
        for edge in &problem.edges {
            assert!(placed >> edge.from & 1 == 0 || placed >> edge.to & 1 == 1, "an edge runs backwards");
        }
        let Shape { tensor, replicas } = stage.shape;
        devices += tensor * replicas;
        behind += replicas;
        assert_eq!(stage.in_flight, behind.div_ceil(replicas));
        let (mut time, mut memory) = (0.0, 0.0);
        for (&layer, &index) in stage.option.layers.iter().zip(&stage.option.options) {
            let option = &problem.layers[layer as usize].options[&tensor][index as usize];
            let single = LayerProblem {
                layers: problem
                    .layers
                    .iter()
                    .enumerate()
                    .map(|(v, known)| {
                        let only = BTreeMap::from([(tensor, vec![option.clone()])]);
                        if v as u32 == layer {
                            Layer { options: only, ..known.clone() }
                        } else {
                            known.clone()
                        }
                    })
                    .collect(),
                memory_bytes: f64::INFINITY,
                ..problem.clone()
            };
            // One layer alone, with the edges that cross the whole stage's border.
            let edges = problem.edges.iter().filter(|edge| {
                let other = if edge.from == layer { edge.to } else { edge.from };
                (edge.from == layer || edge.to == layer) && bits >> other & 1 == 0
            });
            let single = LayerProblem { edges: edges.copied().collect(), ..single };
            time += stage_time(&single, 1 << layer, tensor, replicas, stage.in_flight).unwrap();
            memory += option.bytes_per_micro_batch * f64::from(stage.in_flight) + option.fixed_bytes;
        }
        assert!(memory <= problem.memory_bytes);
        assert!((memory - stage.option.memory_bytes).abs() <= 1e-9 * memory);
        seconds.push(time);
    }
    assert_eq!(placed, (1 << problem.layers.len()) - 1, "a layer has no stage");
    assert!(devices <= problem.devices && u64::from(behind) <= problem.micro_batches);
    problem.objective.value(&seconds)
}

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-8 * a.abs().max(b.abs())
}

/// Numbers with many ties and zeros, as profiles have.
fn amount() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), (1u32..6).prop_map(f64::from), (0u32..1000).prop_map(|x| f64::from(x) / 32.0)]
}

type OptionNumbers = ((f64, f64, f64, f64), Vec<f64>);

fn option_numbers() -> impl Strategy<Value = OptionNumbers> {
    ((amount(), amount(), amount(), amount()), prop::collection::vec(amount(), 12))
}

prop_compose! {
    fn layer_problem(most_layers: usize)(
        layers in prop::collection::vec(
            prop::collection::btree_map(prop_oneof![Just(1u32), Just(2), Just(3)], prop::collection::vec(option_numbers(), 1..3), 1..3),
            1..=most_layers,
        ),
        density in 0u32..4,
        mask in prop::collection::vec((0u32..4, amount()), 16),
        equal in any::<bool>(),
        plain in any::<bool>(),
        numbers in (1u32..7, 2u32..80, prop_oneof![Just(1u64), Just(2), Just(4), Just(6), Just(12)], 1u32..5),
        step in any::<bool>(),
    ) -> LayerProblem {
        let (devices, memory, micro_batches, bandwidth) = numbers;
        let mut edges = Vec::new();
        for to in 1..layers.len() as u32 {
            for from in 0..to {
                let (draw, bytes) = mask[(to * 3 + from) as usize % 16];
                if draw < density || (density == 0 && from + 1 == to) {
                    edges.push(Edge { from, to, bytes: if equal { 0.0 } else { bytes } });
                }
            }
        }
        let layers = (0..layers.len()).map(|v| {
            // Equal layers make exchangeable branches.
            let options = if equal { &layers[v % 2 % layers.len()] } else { &layers[v] };
            let options = options.iter().map(|(&degree, options)| {
                let options = options.iter().enumerate().map(|(index, (numbers, ends))| {
                    let ends = |other: u32, at: usize| (other, if plain { 0.0 } else { ends[(other as usize + at) % 12] });
                    let incoming = edges.iter().filter(|edge| edge.to == v as u32).map(|edge| ends(edge.from, 0));
                    let outgoing = edges.iter().filter(|edge| edge.from == v as u32).map(|edge| ends(edge.to, 6));
                    LayerOption {
                        id: format!("o{index}"),
                        seconds: numbers.0,
                        parameter_bytes: numbers.1,
                        bytes_per_micro_batch: numbers.2,
                        fixed_bytes: numbers.3,
                        receive_bytes: incoming.collect(),
                        send_bytes: outgoing.collect(),
                    }
                });
                (degree, options.collect())
            });
            Layer { name: format!("{v}"), options: options.collect() }
        }).collect();
        LayerProblem {
            devices,
            memory_bytes: f64::from(memory),
            micro_batches,
            bandwidth: f64::from(bandwidth),
            objective: if step { Objective::Step { micro_batches } } else { Objective::Bottleneck },
            layers,
            edges,
        }
    }
}

/// The problem in Piper's format, with ids that are not positions.
fn piper(problem: &LayerProblem) -> String {
    use serde_json::{Map, Value, json};
    let id = |layer: u32| 7 * layer + 3;
    let ends = |bytes: &BTreeMap<u32, f64>| -> Map<String, Value> {
        bytes.iter().map(|(&layer, &bytes)| (id(layer).to_string(), json!(bytes))).collect()
    };
    let nodes: Vec<Value> = (0..)
        .zip(&problem.layers)
        .map(|(v, layer)| {
            let options: Map<String, Value> = layer
                .options
                .iter()
                .map(|(degree, options)| {
                    let options = options.iter().map(|o| {
                        json!({"id": o.id, "timePerSample": o.seconds, "parameterSize": o.parameter_bytes,
                            "memoryUsageA": o.bytes_per_micro_batch, "memoryUsageB": o.fixed_bytes,
                            "syncTimeFw": ends(&o.receive_bytes), "syncTimeBw": ends(&o.send_bytes)})
                    });
                    (degree.to_string(), options.collect())
                })
                .collect();
            json!({"id": id(v), "name": "layer", "TMPCs": options})
        })
        .collect();
    let edges: Vec<Value> = problem
        .edges
        .iter()
        .map(|e| json!({"sourceId": id(e.from), "destId": id(e.to), "communicationCost": e.bytes}))
        .collect();
    json!({"maxDevices": problem.devices, "maxMemoryPerDevice": problem.memory_bytes, "bandwidth": problem.bandwidth,
        "mbsInBatch": problem.micro_batches, "nodes": nodes, "edges": edges})
    .to_string()
}

fn check(problem: &LayerProblem) -> Result<(), TestCaseError> {
    let outcome = Problem::Layers(problem.clone()).solve(&Control::default());
    let best = exhaustive(problem);
    if best.is_infinite() {
        prop_assert_eq!(outcome.stop_reason, StopReason::Infeasible);
        prop_assert!(outcome.stages.is_none() && outcome.lower_bound_seconds.is_infinite());
        return Ok(());
    }
    prop_assert_eq!(outcome.stop_reason, StopReason::Optimal);
    prop_assert!(close(outcome.objective_seconds, best), "{} instead of {}", outcome.objective_seconds, best);
    prop_assert!(close(judged(problem, &outcome), best));
    Ok(())
}

proptest! {

    #[test]
    fn layered_problems_equal_an_exhaustive_search(problem in layer_problem(5)) {
        check(&problem)?;
    }

    #[test]
    fn both_formats_read_back_the_same_problem(problem in layer_problem(6)) {
        let own = Problem::Layers(problem.clone());
        prop_assert_eq!(&read(write(&own).as_bytes(), &Overrides::default()).unwrap(), &own);
        let Problem::Layers(mut other) = read(piper(&problem).as_bytes(), &Overrides::default()).unwrap() else {
            panic!("Piper's problems have layers")
        };
        for (v, layer) in other.layers.iter_mut().enumerate() {
            prop_assert_eq!(&layer.name, &format!("{}", 7 * v + 3));
            layer.name = format!("{v}");
        }
        other.objective = problem.objective;
        prop_assert_eq!(other, problem);
    }
}

prop_compose! {
    /// A chain of two kinds of layers, with a table of options that misses some stages. `inexact` bounds are below the times.
    fn table_problem(inexact: bool)(
        kinds in prop::collection::vec(0u32..2, 1..6),
        numbers in (1u32..7, 2u32..60, prop_oneof![Just(1u64), Just(2), Just(6)]),
        step in any::<bool>(),
        draws in prop::collection::vec((0u32..10, amount(), amount(), amount(), amount()), 40),
    ) -> TableProblem {
        let (devices, memory, micro_batches) = numbers;
        let mut draws = draws.into_iter().cycle();
        let mut stages: BTreeMap<(Vec<u32>, Shape), TableStage> = BTreeMap::new();
        for first in 0..kinds.len() {
            for last in first + 1..=kinds.len() {
                for (tensor, replicas) in [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)] {
                    let (draw, seconds, gap, per_micro_batch, fixed) = draws.next().unwrap();
                    let shape = Shape { tensor, replicas };
                    let options = (0..draw % 3).map(|index| TableOption {
                        id: format!("o{index}"),
                        costs: RangeOption {
                            seconds: seconds + f64::from(index) + gap,
                            lower_bound_seconds: seconds + f64::from(index) + if inexact { 0.0 } else { gap },
                            bytes_per_micro_batch: per_micro_batch / f64::from(index + 1),
                            fixed_bytes: fixed,
                        },
                    });
                    let kinds = kinds[first..last].to_vec();
                    stages.entry((kinds.clone(), shape)).or_insert(TableStage { kinds, shape, options: options.collect() });
                }
            }
        }
        let mut names = Vec::new();
        let mut layer_kinds = Vec::new();
        for kind in &kinds {
            let at = names.iter().position(|known| known == kind).unwrap_or_else(|| { names.push(*kind); names.len() - 1 });
            layer_kinds.push(at as u32);
        }
        let renamed = |stage: TableStage| TableStage {
            kinds: stage.kinds.iter().map(|kind| names.iter().position(|known| known == kind).unwrap() as u32).collect(),
            ..stage
        };
        TableProblem {
            devices,
            memory_bytes: f64::from(memory),
            micro_batches,
            objective: if step { Objective::Step { micro_batches } } else { Objective::Bottleneck },
            layers: (0..kinds.len()).map(|layer| format!("layer {layer}")).collect(),
            layer_kinds,
            kinds: names.iter().map(|kind| format!("kind {kind}")).collect(),
            stages: stages.into_values().map(renamed).collect(),
        }
    }
}

fn exhaustive_table(problem: &TableProblem, of: &dyn Fn(&RangeOption) -> f64) -> f64 {
    let layers = problem.layers.len() as u32;
    let time = |stage: u32, t: u32, d: u32, y: u32| {
        let first = stage.trailing_zeros();
        let length = stage.count_ones();
        if stage != ((1 << length) - 1) << first {
            return None;
        }
        let kinds = &problem.layer_kinds[first as usize..(first + length) as usize];
        let found = problem
            .stages
            .iter()
            .find(|row| row.kinds == kinds && row.shape == Shape { tensor: t, replicas: d })?;
        let options = found.options.iter().map(|option| option.costs);
        let fitting = options
            .filter(|o| o.bytes_per_micro_batch * f64::from(y) + o.fixed_bytes <= problem.memory_bytes);
        fitting.map(|option| of(&option)).min_by(f64::total_cmp)
    };
    let search = Exhaustive {
        successors: (0..layers).map(|layer| (1 << (layer + 1)) & ((1 << layers) - 1)).collect(),
        micro_batches: problem.micro_batches as u32,
        objective: problem.objective,
        time: &time,
    };
    search.best((1 << layers) - 1, problem.devices, 0, &mut Vec::new())
}

proptest! {

    #[test]
    fn tables_of_stages_equal_an_exhaustive_search(problem in table_problem(false)) {
        problem.check().unwrap();
        let outcome = problem.solve(&Control::default());
        let best = exhaustive_table(&problem, &|option| option.seconds);
        prop_assert!(close(outcome.objective_seconds, best), "{} instead of {}", outcome.objective_seconds, best);
        let expected = if best.is_finite() { StopReason::Optimal } else { StopReason::Infeasible };
        prop_assert_eq!(outcome.stop_reason, expected);
        let own = Problem::Table(problem);
        prop_assert_eq!(read(write(&own).as_bytes(), &Overrides::default()).unwrap(), own);
    }

    #[test]
    fn bounds_of_an_inexact_oracle_bound_the_answer(problem in table_problem(true)) {
        let outcome = problem.solve(&Control::default());
        let best = exhaustive_table(&problem, &|option| option.seconds);
        let bound = exhaustive_table(&problem, &|option| option.lower_bound_seconds);
        prop_assert!(close(outcome.objective_seconds, best), "{} instead of {}", outcome.objective_seconds, best);
        prop_assert!(outcome.lower_bound_seconds <= best * (1.0 + 1e-9));
        prop_assert!(outcome.lower_bound_seconds >= bound * (1.0 - 1e-8), "{} < {}", outcome.lower_bound_seconds, bound);
    }
}
