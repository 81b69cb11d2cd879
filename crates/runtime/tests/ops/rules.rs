//! Every sharding rule against the kernels. For random shapes and every factor that may be split, the op's kernel computes
//! the parts; recombined by the rule, they equal the whole.

use crate::case::{Case, Rng, assert_close, values};
use shardwright_graph::{FactorIndex, Op, Reduction, Region, Rule};
use shardwright_runtime::{Context, HostTensor as Value, kernels::evaluate};

const CASES_PER_KIND: u64 = 60;

/// Runs the parts of a split of several factors, `(factor, parts)` each, and recombines the results.
fn run_split(case: &Case, rule: &Rule, values: &[Value], splits: &[(FactorIndex, u64)]) -> Vec<Value> {
    let (inputs, outputs) = (case.input_types(), case.output_types());
    let mut whole: Vec<Value> = outputs.iter().map(Value::zeros).collect();
    let mut started: Vec<Vec<shardwright_graph::Block>> = vec![vec![]; outputs.len()];
    let parts: u64 = splits.iter().map(|s| s.1).product();
    for part in 0..parts {
        let mut region = Region::whole(rule, &inputs, &outputs);
        let mut rest = part;
        for &(factor, count) in splits {
            region = region.split(factor, rest % count, count);
            rest /= count;
        }
        let op = case.op.operator().localize(&region);
        let local: Vec<Value> =
            values.iter().enumerate().map(|(i, v)| v.block(&region.input_block(i))).collect();
        let results = evaluate(&op, &local.iter().collect::<Vec<_>>(), &mut Context::default())
            .unwrap_or_else(|e| panic!("{case:?} part {part} of {splits:?} as {op:?}: {e}"));
        for (o, result) in results.into_iter().enumerate() {
            let block = region.output_block(o);
            assert_eq!(
                *result.shape(),
                region.output_shape(o),
                "{case:?} part {part} of {splits:?} as {op:?}"
            );
            let joined = if started[o].contains(&block) {
                combine(rule.outputs[o].reduction, &whole[o].block(&block), &result)
            } else {
                started[o].push(block.clone());
                result
            };
            whole[o].set_block(&block.iter().map(|r| r.start).collect(), &joined);
        }
    }
    whole
}

fn combine(how: Reduction, a: &Value, b: &Value) -> Value {
    use shardwright_graph::ops::{Binary, BinaryFn};
    let f = match how {
        Reduction::Sum => BinaryFn::Add,
        Reduction::Max => BinaryFn::Max,
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
