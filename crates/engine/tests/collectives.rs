//! Collectives between threads equal their definitions: every kind, every element type, any blocks, many groups at
//! once, step after step.

use half::{bf16, f16};
use proptest::prelude::*;
use shardwright_cost::Reduction;
use shardwright_engine::{
    Edge, Exchange, ExchangeRole, Fabric, Member, Pool, ProcessMap, Progress, all_reduce,
};
use shardwright_graph::{Block, DType, TensorType, block::extents};
use shardwright_runtime::{Data, HostTensor, kernels::log_add_exp};
use std::sync::Arc;

/// A group of devices and its exchanges, one after the other.
struct Group {
    devices: Vec<u32>,
    stages: Vec<Exchange>,
}

/// Runs all groups at once, a thread per device, for some steps; `source` gives a member's tensor in a step.
/// Returns the result of each member of each group in each step.
fn run(
    devices: usize,
    groups: &[Group],
    steps: usize,
    source: impl Fn(usize, usize, usize) -> Option<HostTensor> + Sync,
) -> Vec<Vec<Vec<Option<HostTensor>>>> {
    let mut edges: Vec<Edge> = Vec::new();
    let process_map = ProcessMap { devices: devices as u32, processes: 1 };
    let mut roles_of = |group: &Group| -> Vec<Vec<ExchangeRole>> {
        group.stages.iter().map(|s| ExchangeRole::of(s, &group.devices, &process_map, &mut edges)).collect()
    };
    let roles: Vec<Vec<Vec<ExchangeRole>>> = groups.iter().map(&mut roles_of).collect();
    let fabric = Fabric::new(devices, edges);
    let (fabric, roles, source) = (&fabric, &roles, &source);
    let work = |device: u32| {
        fabric.notifier(device).claim();
        let mut pool = Pool::default();
        let mut found = Vec::new();
        for step in 0..steps {
            for (g, group) in groups.iter().enumerate() {
                let Some(member) = group.devices.iter().position(|&d| d == device) else { continue };
                let mut held = source(step, g, member).map(|value| {
                    let mut buffer = pool.take(value.ty().bytes() as usize);
                    Arc::get_mut(&mut buffer).unwrap().write(&value);
                    buffer
                });
                for stage in &roles[g] {
                    let (role, mut progress) = (&stage[member], Progress::default());
                    let result = progress.complete(role, fabric, device, held.as_ref(), &mut pool);
                    if let Some(old) = std::mem::replace(&mut held, result) {
                        pool.give(old);
                    }
                }
                let last = group.stages.last().unwrap();
                let wants = last.members[member].wants.as_ref();
                let ty = wants.map(|w| TensorType::new(last.dtype, extents(w)));
                found.push((step, g, member, ty.map(|ty| held.as_ref().unwrap().to_tensor(&ty))));
                held.into_iter().for_each(|held| pool.give(held));
            }
        }
        found
    };
    let work = &work;
    let mut all: Vec<Vec<Vec<Option<HostTensor>>>> =
        vec![groups.iter().map(|g| vec![None; g.devices.len()]).collect(); steps];
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..devices as u32).map(|d| scope.spawn(move || work(d))).collect();
        for (step, group, member, value) in threads.into_iter().flat_map(|t| t.join().unwrap()) {
            all[step][group][member] = value;
        }
    });
    all
}

/// Numbers that are exact in every type and differ from element to element, step to step and member to member.
fn content(dtype: DType, shape: &[u64], salt: usize) -> HostTensor {
    let count: u64 = shape.iter().product();
    let numbers = (0..count).map(|i| ((i * 7 + salt as u64 * 13) % 61) as f64 - 20.0);
    let data = match dtype {
        DType::F32 => Data::F32(numbers.map(|x| x as f32).collect()),
        DType::F64 => Data::F64(numbers.collect()),
        DType::Bf16 => Data::Bf16(numbers.map(bf16::from_f64).collect()),
        DType::F16 => Data::F16(numbers.map(f16::from_f64).collect()),
        DType::I32 => Data::I32(numbers.map(|x| x as i32).collect()),
        DType::I64 => Data::I64(numbers.map(|x| x as i64).collect()),
        DType::Bool => Data::Bool(numbers.map(|x| u8::from(x > 20.0)).collect()),
    };
    HostTensor::new(shape.into(), data)
}

fn whole(shape: &[u64]) -> Block {
    shape.iter().map(|&n| 0..n).collect()
}

/// Part `index` of `count` of one dimension.
fn part(shape: &[u64], dim: usize, index: usize, count: usize) -> Block {
    let mut block = whole(shape);
    let length = shape[dim] / count as u64;
    block[dim] = index as u64 * length..(index as u64 + 1) * length;
    block
}

/// The expected block of a result: copied from the only tensor, or reduced over all members that hold it.
fn expected(group: &Group, shape: &[u64], step: usize, g: usize, wants: &Block) -> Vec<f64> {
    let first = &group.stages[0];
    let of = |member: usize| content(first.dtype, shape, salt(step, g, member)).block(wants).to_f64_vec();
    let holders = (0..first.members.len()).filter(|&m| first.members[m].holds.is_some());
    match first.combine {
        None => of(0),
        Some(how) => holders
            .map(of)
            .reduce(|a, b| {
                let both = |(a, b): (f64, f64)| match (first.dtype, how) {
                    (DType::Bool, _) | (_, Reduction::Max) => a.max(b),
                    (_, Reduction::Sum) => a + b,
                    (_, Reduction::LogSumExp) => log_add_exp(a, b),
                };
                a.into_iter().zip(b).map(both).collect()
            })
            .unwrap(),
    }
}

fn salt(step: usize, group: usize, member: usize) -> usize {
    step * 31 + group * 5 + member
}

/// Runs groups that exchange tensors of these shapes and compares the results with the definition.
fn check(devices: usize, groups: &[Group], shapes: &[Vec<u64>]) {
    let found = run(devices, groups, 3, |step, g, member| {
        let exchange = &groups[g].stages[0];
        let holds = exchange.members[member].holds.as_ref()?;
        // Members that share one tensor hold blocks of the same; partial results are all different.
        let member = if exchange.combine.is_some() { member } else { 0 };
        let tensor = content(exchange.dtype, &shapes[g], salt(step, g, member));
        Some(tensor.block(holds))
    });
    for (step, results) in found.iter().enumerate() {
        for (g, group) in groups.iter().enumerate() {
            let last = group.stages.last().unwrap();
            for (member, result) in results[g].iter().enumerate() {
                let wants = last.members[member].wants.as_ref();
                let wanted = wants.map(|wants| expected(group, &shapes[g], step, g, wants));
                let result = result.as_ref().map(HostTensor::to_f64_vec);
                let place = format!("step {step}, group {g}, member {member}");
                match (last.combine.or(group.stages[0].combine), result, wanted) {
                    // Logarithms are rounded; everything else is exact.
                    (Some(Reduction::LogSumExp), Some(result), Some(wanted)) if last.dtype != DType::Bool => {
                        let rounding = if last.dtype == DType::Bf16 { 1e-2 } else { 1e-6 };
                        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= rounding * (1.0 + b.abs());
                        assert!(result.iter().zip(&wanted).all(near), "{place}: {result:?}, not {wanted:?}");
                    }
                    (_, result, wanted) => assert_eq!(result, wanted, "{place}"),
                }
            }
        }
    }
}

/// Every collective by its name, as blocks held and wanted by each of `n` members.
fn named(shape: &[u64], n: usize, root: usize) -> Vec<(&'static str, Option<Reduction>, Vec<Member>)> {
    let all = || Some(whole(shape));
    let of = |dim: usize, m: usize| Some(part(shape, dim, m, n));
    let at = |m: usize, block: Option<Block>| if m == root { block } else { None };
    let members = |holds: &dyn Fn(usize) -> Option<Block>, wants: &dyn Fn(usize) -> Option<Block>| {
        (0..n).map(|m| Member { holds: holds(m), wants: wants(m) }).collect::<Vec<_>>()
    };
    let sum = Some(Reduction::Sum);
    let rows = shape[1] / n as u64;
    let halo = |m: usize| {
        let mut block = part(shape, 1, m, n);
        let reach = rows.min(2);
        block[1] = block[1].start.saturating_sub(reach)..(block[1].end + reach).min(shape[1]);
        Some(block)
    };
    vec![
        ("all-gather", None, members(&|m| of(0, m), &|_| all())),
        ("all-gather of columns", None, members(&|m| of(1, m), &|_| all())),
        ("reduce-scatter", sum, members(&|_| all(), &|m| of(1, m))),
        ("reduce-scatter of maxima", Some(Reduction::Max), members(&|_| all(), &|m| of(0, m))),
        ("all-to-all", None, members(&|m| of(0, m), &|m| of(1, m))),
        ("broadcast", None, members(&|m| at(m, all()), &|_| all())),
        ("reduce", sum, members(&|_| all(), &|m| at(m, all()))),
        ("gather", None, members(&|m| of(1, m), &|m| at(m, all()))),
        ("scatter", None, members(&|m| at(m, all()), &|m| of(1, m))),
        ("send", None, members(&|m| at(m, all()), &|m| at((m + 1) % n, all()))),
        ("permute", None, members(&|m| of(0, m), &|m| of(0, (m + 1) % n))),
        ("halo", None, members(&|m| of(1, m), &halo)),
        ("slice", None, members(&|_| all(), &|m| of(1, m))),
    ]
}

#[test]
fn every_collective_equals_its_definition() {
    for n in [1, 2, 3, 4, 7] {
        let shape = vec![2 * n as u64, 3 * n as u64, 5];
        for root in [0, n - 1] {
            let named = named(&shape, n, root);
            for dtype in DType::ALL {
                let group = |(_, combine, members): &(_, _, Vec<Member>)| Group {
                    devices: (0..n as u32).rev().collect(),
                    stages: vec![Exchange::between(dtype, *combine, members.clone()).unwrap()],
                };
                let groups: Vec<Group> = named.iter().map(group).collect();
                check(n, &groups, &vec![shape.clone(); groups.len()]);
            }
        }
    }
}

#[test]
fn all_reduces_of_any_size_equal_the_sum() {
    for n in [1, 2, 5, 8] {
        for elements in [1, 3, 63, 4096, 20_001] {
            for dtype in [DType::F32, DType::Bf16, DType::Bool] {
                for how in Reduction::ALL {
                    let stages = all_reduce(dtype, how, elements, n).unwrap();
                    let group = Group { devices: (0..n as u32).collect(), stages };
                    check(n, &[group], &[vec![elements]]);
                }
            }
        }
    }
}

/// The sum of these floats depends on the order, which must be the group's in both algorithms and at any timing.
#[test]
fn sums_are_added_in_the_order_of_the_group() {
    let n = 5;
    for elements in [10, 40_000u64] {
        let values: Vec<Vec<f32>> = (0..n)
            .map(|m| (0..elements).map(|i| ((i * 37 + m * 101) % 97) as f32 * 0.1 + 1e4 * m as f32).collect())
            .collect();
        let wanted: Vec<f32> = (0..elements as usize)
            .map(|i| values.iter().map(|v| v[i]).reduce(|a, b| a + b).unwrap())
            .collect();
        let stages = all_reduce(DType::F32, Reduction::Sum, elements, n as usize).unwrap();
        let groups = [Group { devices: (0..n as u32).collect(), stages }];
        let found =
            run(n as usize, &groups, 4, |_, _, m| Some(HostTensor::from_vec([elements], values[m].clone())));
        for result in found.iter().flat_map(|step| &step[0]) {
            assert_eq!(result.as_ref().unwrap().as_slice::<f32>().unwrap(), wanted);
        }
    }
}

#[test]
fn what_nobody_holds_cannot_be_wanted() {
    let one = |holds, wants| Member { holds: Some(part(&[8, 3], 0, holds, 4)), wants };
    let all = Some(whole(&[8, 3]));
    let lacking = vec![one(0, all.clone()), one(1, None), one(3, None)];
    let error = Exchange::between(DType::F32, None, lacking).unwrap_err();
    assert_eq!(error.to_string(), "member 0 wants 24 elements, of which the group holds 18");
    // A sum without one member's part would be wrong.
    let halves = vec![one(0, Some(part(&[8, 3], 0, 0, 4))), one(1, None)];
    assert!(Exchange::between(DType::F32, Some(Reduction::Sum), halves).is_err());
}

/// A grid of blocks: the number of parts of each dimension.
fn grid(shape: &[u64], cuts: &[usize]) -> Vec<Block> {
    let mut blocks = vec![Block::new()];
    for (&size, &cut) in shape.iter().zip(cuts) {
        let ranges: Vec<_> =
            (0..cut as u64).map(|i| i * size / cut as u64..(i + 1) * size / cut as u64).collect();
        blocks = blocks
            .into_iter()
            .flat_map(|block| {
                ranges.iter().map(move |range| {
                    let mut longer = block.clone();
                    longer.push(range.clone());
                    longer
                })
            })
            .collect();
    }
    blocks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 60 }, ..ProptestConfig::default() })]

    /// Any blocks to any other blocks, uneven ones too, several groups that share devices.
    #[test]
    fn any_blocks_become_any_other_blocks(
        cases in prop::collection::vec(
            (prop::collection::vec(1u64..9, 1..4), [0usize..3, 0..3, 0..3], [0usize..3, 0..3, 0..3], 0usize..7, any::<u64>()),
            1..4,
        ),
    ) {
        let devices = 6;
        let mut groups = Vec::new();
        let mut shapes = Vec::new();
        for (shape, before, after, dtype, order) in cases {
            let cuts = |wanted: [usize; 3]| -> Vec<usize> {
                shape.iter().zip(wanted).map(|(&n, cut)| (cut + 1).min(n as usize)).collect()
            };
            let (holds, wants) = (grid(&shape, &cuts(before)), grid(&shape, &cuts(after)));
            let members = 6;
            // Blocks beyond the group's size are left out on the wanting side; the holders must hold all.
            if holds.len() > members {
                continue;
            }
            let rotate = order as usize % members;
            let member = |m: usize| Member {
                holds: Some(holds[m % holds.len()].clone()),
                wants: wants.get((m + rotate) % members).cloned(),
            };
            let exchange = Exchange::between(DType::ALL[dtype], None, (0..members).map(member).collect()).unwrap();
            let mut ids: Vec<u32> = (0..devices as u32).collect();
            ids.rotate_left(rotate);
            groups.push(Group { devices: ids, stages: vec![exchange] });
            shapes.push(shape);
        }
        if !groups.is_empty() {
            check(devices, &groups, &shapes);
        }
    }
}
