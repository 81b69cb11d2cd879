use super::*;
use crate::reshard::Resharder;
use proptest::prelude::*;
use shardwright_graph::Reduction;
use shardwright_machine::{AxisId, builtin};

/// A random layout of a tensor: placements are tried in order until one divides.
fn layout(mesh: &shardwright_machine::Mesh, dims: &[u64], picks: &[u8], partial: bool) -> Layout {
    let mut layout = Layout::replicated(mesh.len());
    let mut blocks = vec![1u64; dims.len()];
    for (at, axis) in mesh.axes().iter().enumerate() {
        let pick = usize::from(picks[at]) % (dims.len() + 2);
        let placement = match pick.checked_sub(2) {
            Some(dim) if dims[dim].is_multiple_of(blocks[dim] * u64::from(axis.size)) => {
                blocks[dim] *= u64::from(axis.size);
                Placement::Shard(dim as u8)
            }
            None if pick == 1 && partial => Placement::Partial(Reduction::Sum),
            _ => Placement::Replicated,
        };
        layout = layout.with(AxisId(at as u32), placement);
    }
    layout
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No reshard between two layouts is faster than the path between their patterns.
    #[test]
    fn patterns_bound_every_reshard(
        machine in prop::sample::select(vec!["h100x64:32", "flat:16", "p100x16", "v5e-256:16", "k80x8", "a100x64:24"]),
        dims in prop::collection::vec(prop::sample::select(vec![3u64, 8, 24, 96, 1024]), 1..3),
        from in prop::collection::vec(0u8..8, 12),
        to in prop::collection::vec(0u8..8, 12),
        bytes in prop::sample::select(vec![1u32, 4, 8]),
    ) {
        let machine = builtin(machine).unwrap();
        let shape = TensorShape::new(&dims, bytes).unwrap();
        let (from, to) =
            (layout(machine.mesh(), &dims, &from, true), layout(machine.mesh(), &dims, &to, false));
        let resharder = Resharder::new(&machine, machine.mesh());
        let real = resharder.seconds(&resharder.tensor(shape), &from, &to).unwrap();
        let resharder = PatternResharder::new(&machine);
        let patterns = resharder.tensor(&shape, true).unwrap();
        let (source, target) = (patterns.pattern(&from).unwrap(), patterns.pattern(&to).unwrap());
        let bound = patterns.times(&[&[source]])[0][target as usize];
        prop_assert!(bound <= real.0 * (1.0 + 1e-9), "{bound} above {real:?}: {from:?} to {to:?}");
        // Where dimensions count as one, the bound is lower, if at all.
        let resharder = resharder.with_patterns(patterns.patterns() - 1);
        if let Some(fewer) = resharder.tensor(&shape, true) {
            let (source, target) = (fewer.pattern(&from).unwrap(), fewer.pattern(&to).unwrap());
            let less = fewer.times(&[&[source]])[0][target as usize];
            prop_assert!(less <= bound * (1.0 + 1e-9), "{less} above {bound}: {from:?} to {to:?}");
            prop_assert!(fewer.patterns() < patterns.patterns());
        }
        // A set is as near as its nearest member.
        let all: Vec<u32> = (0..patterns.patterns() as u32).collect();
        prop_assert_eq!(patterns.times(&[&all])[0][target as usize], 0.0);
    }
}

#[test]
fn the_bound_is_near_the_time_where_nothing_is_ordered() {
    let machine = builtin("h100x64").unwrap();
    let shape = TensorShape::new(&[4096, 4096], 4).unwrap();
    let resharder = Resharder::new(&machine, machine.mesh());
    let patterns = PatternResharder::new(&machine).tensor(&shape, true).unwrap();
    let (mut bounds, mut times) = (0.0, 0.0);
    let uses =
        [Placement::Replicated, Placement::Shard(0), Placement::Shard(1), Placement::Partial(Reduction::Sum)];
    let pure = |node: Placement, gpu: Placement| Layout::new(&[node, node, node, gpu, gpu, gpu]);
    for from in uses.iter().flat_map(|&node| uses.iter().map(move |&gpu| pure(node, gpu))) {
        for to in uses[..3].iter().flat_map(|&node| uses[..3].iter().map(move |&gpu| pure(node, gpu))) {
            let real = resharder.seconds(&resharder.tensor(shape), &from, &to).unwrap().0;
            let source = patterns.pattern(&from).unwrap();
            let bound = patterns.times(&[&[source]])[0][patterns.pattern(&to).unwrap() as usize];
            assert!(bound <= real * (1.0 + 1e-9), "{bound} above {real}: {from:?} to {to:?}");
            bounds += bound;
            times += real;
        }
    }
    assert!(times > 0.0 && bounds >= 0.85 * times, "{bounds} of {times}");
}

#[test]
fn collectives_that_are_left_out_shorten_no_path() {
    for (machine, dims) in
        [("h100x64:32", &[1024u64, 512][..]), ("v5e-256:16", &[96, 64]), ("a100x64:24", &[24, 96])]
    {
        let machine = builtin(machine).unwrap();
        let shape = TensorShape::new(dims, 4).unwrap();
        let few = PatternResharder::new(&machine);
        // Nothing is left out.
        let mut every = PatternResharder::new(&machine);
        every.divisible.clear();
        let (few, every) = (few.tensor(&shape, true).unwrap(), every.tensor(&shape, true).unwrap());
        assert!(few.graph.steps.len() < every.graph.steps.len(), "{:?} of {:?}", few.graph, every.graph);
        for source in 0..few.patterns() as u32 {
            let (few, every) = (few.times(&[&[source]]), every.times(&[&[source]]));
            for (few, every) in few[0].iter().zip(every[0].iter()) {
                let equal = few == every || (few - every).abs() <= 1e-11 * every;
                assert!(equal, "{few} and {every} from {source} of {dims:?} on {}", machine.name());
            }
        }
    }
}
