//! Every sharding rule against the kernels. For random shapes and every factor that may be split, the op's kernel computes
//! the parts; recombined by the rule, they equal the whole. Where the op reduces a result itself, each part is completed with
//! the reduced result first.

use crate::case::{Case, Rng, assert_close, values};
use shardwright_graph::{FactorIndex, Op, Reduction, Region, Rule};
use shardwright_runtime::{
    Context, HostTensor as Value,
    kernels::{evaluate, log_add_exp},
};

const CASES_PER_KIND: u64 = 60;

/// Runs the parts of a split of several factors, `(factor, parts)` each, and recombines the results.
fn run_split(case: &Case, rule: &Rule, values: &[Value], splits: &[(FactorIndex, u64)]) -> Vec<Value> {
    let (inputs, outputs) = (case.input_types(), case.output_types());
    let parts: u64 = splits.iter().map(|s| s.1).product();
    let region_of = |part: u64| {
        let mut region = Region::whole(rule, &inputs, &outputs);
        let mut rest = part;
        for &(factor, count) in splits {
            region = region.split(factor, rest % count, count);
            rest /= count;
        }
        region
    };
    let mut results: Vec<Vec<Value>> = Vec::new();
    for part in 0..parts {
        let region = region_of(part);
        let op = case.op.operator().localize(&region);
        let local: Vec<Value> =
            values.iter().enumerate().map(|(i, v)| v.block(&region.input_block(i))).collect();
        let made = evaluate(&op, &local.iter().collect::<Vec<_>>(), &mut Context::default())
            .unwrap_or_else(|e| panic!("{case:?} part {part} of {splits:?} as {op:?}: {e}"));
        for (o, result) in made.iter().enumerate() {
            assert_eq!(
                *result.shape(),
                region.output_shape(o),
                "{case:?} part {part} of {splits:?} as {op:?}"
            );
        }
        results.push(made);
    }
    let mut whole: Vec<Value> = outputs.iter().map(Value::zeros).collect();
    let mut join = |o: usize, results: &[Vec<Value>]| {
        let mut started: Vec<shardwright_graph::Block> = Vec::new();
        for (part, results) in results.iter().enumerate() {
            let (block, result) = (region_of(part as u64).output_block(o), results[o].clone());
            let joined = if started.contains(&block) {
                combine(rule.outputs[o].reduction, &whole[o].block(&block), &result)
            } else {
                started.push(block.clone());
                result
            };
            whole[o].set_block(&block.iter().map(|r| r.start).collect(), &joined);
        }
        whole[o].clone()
    };
    let own = rule.outputs.iter().position(|map| map.reduction == Reduction::LogSumExp);
    if let Some(own) = own {
        let reduced = join(own, &results);
        let completion = case.op.operator().completion().expect("it reduces a result itself");
        for (part, results) in results.iter_mut().enumerate() {
            let all = reduced.block(&region_of(part as u64).output_block(own));
            let operands = [&results[0], &results[own], &all];
            results[0] = evaluate(&completion, &operands, &mut Context::default()).unwrap().remove(0);
        }
    }
    (0..outputs.len()).map(|o| join(o, &results)).collect()
}

fn combine(how: Reduction, a: &Value, b: &Value) -> Value {
    use shardwright_graph::ops::{Binary, BinaryFn};
    let f = match how {
        Reduction::Sum => BinaryFn::Add,
        Reduction::Max => BinaryFn::Max,
        Reduction::LogSumExp => {
            let pairs = a.to_f64_vec().into_iter().zip(b.to_f64_vec());
            return Value::from_vec(a.shape().clone(), pairs.map(|(a, b)| log_add_exp(a, b)).collect());
        }
    };
    evaluate(&Binary { f }.into(), &[a, b], &mut Context::default()).unwrap().remove(0)
}

#[test]
fn splitting_any_factor_gives_what_the_whole_op_gives() {
    for examples in Op::EXAMPLES.iter().filter(|examples| examples.runs) {
        let kind = examples.kind;
        let mut splits_tried = 0;
        for seed in 0..CASES_PER_KIND {
            let case = (examples.case)(&mut Rng::new(seed));
            let (inputs, outputs) = (case.input_types(), case.output_types());
            let rule = case.op.rule(&inputs, &outputs);
            rule.check(&inputs, &outputs).unwrap_or_else(|e| panic!("{case:?}: {rule}: {e}"));
            let values = values(&case, seed);
            let expected = evaluate(&case.op, &values.iter().collect::<Vec<_>>(), &mut Context::default())
                .unwrap_or_else(|e| panic!("{case:?}: {e}"));
            let splittable: Vec<(FactorIndex, u64)> = rule
                .factors
                .iter()
                .enumerate()
                .filter(|(_, f)| !f.whole)
                .flat_map(|(i, f)| [2, 3].map(|parts| (i as FactorIndex, parts, f.size)))
                .filter(|(_, parts, size)| size % parts == 0)
                .map(|(i, parts, _)| (i, parts))
                .collect();
            let pairs = splittable.iter().zip(splittable.iter().skip(1)).filter(|(a, b)| a.0 != b.0);
            let tries = splittable.iter().map(|&s| vec![s]).chain(pairs.map(|(&a, &b)| vec![a, b]));
            for splits in tries {
                let actual = run_split(&case, &rule, &values, &splits);
                splits_tried += 1;
                for (e, a) in expected.iter().zip(&actual) {
                    assert_close(e, a, 1e-10, &format!("{kind} {case:?} {rule} split {splits:?}"));
                }
            }
        }
        assert!(splits_tried >= 10, "{kind}: only {splits_tried} splits were possible");
    }
}
