//! Reshards: every step's result follows from the blocks before it, and costs obey their laws.

use proptest::prelude::*;
use shardwright_cost::{
    Action, Arrangement, Collective, Comm, Layout, LayoutError, Placement, Reduction, ReshardPath, Resharder,
    TensorShape,
};
use shardwright_machine::{AxisId, AxisSet, Bytes, DeviceId, LevelId, Mesh, Seconds, builtin};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use Placement::{Absent, Replicated as R, Shard};
const P: Placement = Placement::Partial(Reduction::Sum);
const S0: Placement = Shard(0);
const S1: Placement = Shard(1);

fn fresh(machine: &str) -> Resharder {
    let machine = builtin(machine).unwrap();
    Resharder::new(&machine, machine.mesh())
}

/// One per machine for all tests: building a mesh's arrangement graph takes longer than any test.
fn resharder(machine: &'static str) -> &'static Resharder {
    static ALL: Mutex<BTreeMap<&str, &Resharder>> = Mutex::new(BTreeMap::new());
    ALL.lock().unwrap().entry(machine).or_insert_with(|| Box::leak(Box::new(fresh(machine))))
}

fn find(machine: &'static str, dims: &[u64], from: &[Placement], to: &[Placement]) -> ReshardPath {
    let r = resharder(machine);
    let tensor = r.tensor(TensorShape::new(dims, 4).unwrap());
    r.find(&tensor, &Layout::new(from), &Layout::new(to)).unwrap()
}

fn actions(path: &ReshardPath) -> Vec<Action> {
    path.steps.iter().map(|step| step.action).collect()
}

const MIB: u64 = 1 << 20;

#[test]
fn gathering_one_dimension_is_one_all_gather() {
    let path = find("flat:4", &[1024, 1024], &[S0, S0], &[R, R]);
    assert_eq!(actions(&path), [Action::AllGather]);
    // 3/4 of 4 MiB at 16 GB/s; every device receives three blocks.
    assert!((path.seconds.0 - 0.75 * 4.0 * MIB as f64 / 16e9).abs() < 1e-12);
    assert_eq!(path.traffic.total(), Bytes(3 * 4 * MIB));
}

#[test]
fn slicing_is_free_where_the_new_axis_is_the_minor_one() {
    let free = find("flat:4", &[1024, 1024], &[S0, R], &[S0, S0]);
    assert_eq!((actions(&free), free.seconds), (vec![Action::Slice], Seconds::ZERO));
    // Adding the major axis changes the owners of blocks: devices 01 and 10 swap quarters.
    let paid = find("flat:4", &[1024, 1024], &[R, S0], &[S0, S0]);
    assert_eq!(actions(&paid), [Action::Slice, Action::Permute]);
    assert_eq!(paid.traffic.total(), Bytes(2 * MIB));
    assert!((paid.seconds.0 - MIB as f64 / 16e9).abs() < 1e-12);
}

#[test]
fn gathering_the_major_axis_permutes_the_blocks_first() {
    let path = find("flat:4", &[1024, 1024], &[S0, S0], &[R, S0]);
    assert_eq!(actions(&path), [Action::Permute, Action::AllGather]);
    // Two of four quarters move, then each half is gathered: 2 * 1 + 4 * 1 MiB. Gathering all would be 12.
    assert_eq!(path.traffic.total(), Bytes(6 * MIB));
}

#[test]
fn partial_sums_are_scattered_where_they_are_wanted_in_parts() {
    let path = find("flat:4", &[1024, 1024], &[P, P], &[S0, S0]);
    assert_eq!(actions(&path), [Action::ReduceScatter]);
    assert_eq!(path.traffic.total(), Bytes(3 * 4 * MIB));
    let whole = find("flat:4", &[1024, 1024], &[P, P], &[R, R]);
    assert_eq!(actions(&whole), [Action::AllReduce]);
    assert_eq!(whole.traffic.total(), Bytes(2 * 3 * 4 * MIB));
}

#[test]
fn another_dimension_is_an_all_to_all() {
    let path = find("flat:4", &[1024, 1024], &[S0, S0], &[S1, S1]);
    assert_eq!(actions(&path), [Action::AllToAll]);
    // Each of four devices sends three quarters of its MiB.
    assert_eq!(path.traffic.total(), Bytes(3 * MIB));
    assert!((path.seconds.0 - 0.75 * MIB as f64 / 16e9).abs() < 1e-12);
}

#[test]
fn idle_replicas_carry_a_share_across_the_slow_level() {
    // Gathered between nodes while four GPUs of a node are replicas: each fetches a quarter, and they share it.
    let path = find("p100x16", &[4096, 4096], &[S0, S0, R, R], &[R, R, R, R]);
    assert_eq!(path.steps.first().map(|step| step.action), Some(Action::Slice));
    let bytes = 4096 * 4096 * 4;
    // 3/4 of the tensor enters each node once. One ring through all 16 would carry 15/16 over every link.
    let machine = builtin("p100x16").unwrap();
    assert_eq!(path.traffic.level(machine.mesh(), LevelId(0)), Bytes(3 * bytes));
    let ring = Comm::new(&machine, machine.mesh()).seconds(
        Collective::AllGather,
        machine.mesh().all(),
        Bytes(bytes),
    );
    assert!(path.seconds.0 >= 0.75 * bytes as f64 / 12e9, "{}", path.seconds);
    assert!(path.seconds < ring, "{} {ring}", path.seconds);
}

#[test]
fn absent_tensors_are_sent_or_broadcast() {
    let send = find("flat:2", &[1024], &[Absent(0)], &[Absent(1)]);
    assert_eq!((actions(&send), send.traffic.total()), (vec![Action::Send], Bytes(4096)));
    let all = find("flat:4", &[1024], &[Absent(0), Absent(0)], &[R, R]);
    assert_eq!((actions(&all), all.traffic.total()), (vec![Action::Broadcast], Bytes(3 * 4096)));
    let parts = find("flat:4", &[1024], &[Absent(0), Absent(0)], &[S0, S0]);
    assert_eq!(actions(&parts), [Action::Scatter]);
    let one = find("flat:4", &[1024], &[S0, S0], &[Absent(1), Absent(0)]);
    assert_eq!(actions(&one), [Action::Gather]);
    let forget = find("flat:4", &[1024], &[R, R], &[Absent(1), R]);
    assert_eq!((actions(&forget), forget.seconds), (vec![Action::Drop], Seconds::ZERO));
    let sum = find("flat:4", &[1024], &[P, P], &[Absent(1), Absent(0)]);
    assert_eq!(actions(&sum), [Action::Reduce]);
}

/// From any device to any other: over exactly the axes on which they differ, in one step.
#[test]
fn one_device_sends_to_another_and_to_nobody_else() {
    for name in [&MACHINES[..], &["k80x64:64"]].concat() {
        let r = resharder(name);
        let mesh = r.comm().mesh();
        let only = |device: u32| {
            let digits = mesh.all().iter().map(|axis| Absent(mesh.digit(DeviceId(device), axis) as u16));
            Layout::new(&digits.collect::<Vec<_>>())
        };
        let differ = |a: u32, b: u32| -> AxisSet {
            let digit = |device, axis| mesh.digit(DeviceId(device), axis);
            mesh.all().iter().filter(|&axis| digit(a, axis) != digit(b, axis)).collect()
        };
        for elements in [16u64, 1 << 22] {
            let tensor = r.tensor(TensorShape::new(&[elements], 4).unwrap());
            for a in (0..mesh.devices()).step_by(5) {
                for b in (0..mesh.devices()).filter(|&b| b != a) {
                    let path = r.find(&tensor, &only(a), &only(b)).unwrap();
                    let sent =
                        r.comm().choose(Collective::Send, differ(a, b), mesh.all(), Bytes(4 * elements));
                    let steps: Vec<_> = path.steps.iter().map(|step| (step.action, step.axes)).collect();
                    assert_eq!(steps, [(Action::Send, differ(a, b))], "{name}: {a} to {b}");
                    assert_eq!((path.seconds, path.traffic.total()), (sent.1, Bytes(4 * elements)));
                }
            }
        }
    }
}

#[test]
fn impossible_reshards_are_refused() {
    let r = resharder("flat:4");
    let tensor = r.tensor(TensorShape::new(&[6, 8], 4).unwrap());
    let ask = |from: &[Placement], to: &[Placement]| r.seconds(&tensor, &Layout::new(from), &Layout::new(to));
    assert!(matches!(ask(&[S0, S0], &[R, R]), Err(LayoutError::Indivisible { dim: 0, size: 6, parts: 4 })));
    assert!(matches!(ask(&[R, R], &[S0, S0]), Err(LayoutError::Indivisible { dim: 0, size: 6, parts: 4 })));
    assert!(matches!(ask(&[R, R], &[Shard(2), R]), Err(LayoutError::NoSuchDim { dim: 2, rank: 2, .. })));
    assert!(matches!(ask(&[R, R], &[Shard(7), R]), Err(LayoutError::NoSuchDim { .. })));
    assert!(matches!(ask(&[R, R], &[Absent(2), R]), Err(LayoutError::NoSuchDigit { digit: 2, size: 2, .. })));
    assert!(matches!(ask(&[R, R], &[R]), Err(LayoutError::WrongMesh { layout: 1, mesh: 2 })));
    assert!(matches!(ask(&[R], &[R, R]), Err(LayoutError::WrongMesh { layout: 1, mesh: 2 })));
    assert!(matches!(ask(&[R, R], &[P, R]), Err(LayoutError::CannotBecomePartial { .. })));
    let most = Placement::Partial(Reduction::Max);
    assert!(matches!(ask(&[P, R], &[most, R]), Err(LayoutError::CannotBecomePartial { .. })));
    assert!(ask(&[most, P], &[R, R]).is_ok(), "a maximum of sums");
    assert!(TensorShape::new(&[1; 9], 4).is_err());
    assert!(TensorShape::new(&[u64::MAX, 2], 4).is_err());
}

#[test]
fn empty_and_scalar_tensors_are_no_trouble() {
    let r = resharder("p100x16");
    let from = Layout::new(&[P, P, P, P]);
    let to = Layout::replicated(4);
    for dims in [&[][..], &[0], &[0, 7], &[1, 1, 1, 1, 1, 1, 1, 1]] {
        let tensor = r.tensor(TensorShape::new(dims, 4).unwrap());
        let seconds = r.seconds(&tensor, &from, &to).unwrap();
        assert!(seconds.0 > 0.0 && seconds.0 < 1e-3, "latency remains");
    }
}

#[test]
fn a_mesh_of_many_axes_has_paths_too() {
    let r = resharder("flat:65536");
    let tensor = r.tensor(TensorShape::new(&[1 << 16, 1 << 16, 1 << 8], 4).unwrap());
    let from: Vec<_> = (0..16).map(|axis| [S0, S1, R, P][axis % 4]).collect();
    let to: Vec<_> = (0..16).map(|axis| [S1, R, S0, Shard(2)][axis % 4]).collect();
    let path = r.find(&tensor, &Layout::new(&from), &Layout::new(&to)).unwrap();
    assert!(path.seconds.0.is_finite() && !path.steps.is_empty());
    let scalar = r.tensor(TensorShape::new(&[], 4).unwrap());
    let (sum, whole) = (Layout::new(&[P; 16]), Layout::replicated(16));
    assert_eq!(actions(&r.find(&scalar, &sum, &whole).unwrap()), [Action::AllReduce]);
    assert!(r.find(&scalar, &whole, &whole).unwrap().steps.is_empty());
}

/// The part of a tensor on a device: the cells of a fine grid along one dimension.
fn cells(mesh: &Mesh, at: &Arrangement, device: DeviceId, dim: u8, fine: u64) -> BTreeSet<u64> {
    let parts = at.parts(mesh, dim);
    let block = at.block(mesh, device, dim);
    (block * (fine / parts)..(block + 1) * (fine / parts)).collect()
}

fn holds(at: &Arrangement, mesh: &Mesh, device: DeviceId) -> bool {
    at.layout().absent().iter().all(|axis| at.layout().get(axis) == Absent(mesh.digit(device, axis) as u16))
}

/// Checks that each step's result follows from the blocks that its groups held before, and from nothing else.
fn check_steps(r: &Resharder, rank: u8, from: &Layout, path: &ReshardPath) -> Result<(), TestCaseError> {
    let mesh = r.comm().mesh();
    let fine = u64::from(mesh.devices());
    let mut before = Arrangement::canonical(from);
    for step in &path.steps {
        let local = step.action.collective().is_none();
        for group in mesh.groups(if local { AxisSet::EMPTY } else { step.axes }) {
            let have: Vec<Vec<BTreeSet<u64>>> = group
                .iter()
                .filter(|&&device| holds(&before, mesh, device))
                .map(|&device| (0..rank).map(|dim| cells(mesh, &before, device, dim, fine)).collect())
                .collect();
            for &device in group.iter().filter(|&&device| holds(&step.after, mesh, device)) {
                // A device of the group holds every combination of cells that is needed.
                // Sizes are powers of two here, so one cell per block of the finer split is enough.
                let need: Vec<Vec<u64>> = (0..rank)
                    .map(|dim| {
                        let stride = fine / before.parts(mesh, dim).max(step.after.parts(mesh, dim));
                        let need = cells(mesh, &step.after, device, dim, fine).into_iter();
                        need.filter(|cell| cell.is_multiple_of(stride)).collect()
                    })
                    .collect();
                let mut points: Vec<Vec<u64>> = vec![vec![]];
                for cells in &need {
                    points = points
                        .iter()
                        .flat_map(|p| cells.iter().map(move |&c| [p.clone(), vec![c]].concat()))
                        .collect();
                }
                for point in points {
                    let held = have.iter().any(|h| h.iter().zip(&point).all(|(cells, c)| cells.contains(c)));
                    prop_assert!(held, "{:?} of {:?} leaves {:?} without {:?}", step, from, device, point);
                }
            }
        }
        // A partial axis is still partial, or this step reduced it over all of its devices.
        for axis in mesh.all().iter() {
            let was = matches!(before.layout().get(axis), Placement::Partial(_));
            let is = step.after.layout().get(axis);
            if was && !matches!(is, Placement::Partial(_)) {
                let reduces =
                    matches!(step.action, Action::AllReduce | Action::ReduceScatter | Action::Reduce);
                prop_assert!(reduces && step.axes.contains(axis), "{:?}", step);
            }
        }
        before = step.after;
    }
    Ok(())
}

fn placement(absent: bool) -> impl Strategy<Value = Placement> {
    let kinds = if absent { 7 } else { 5 };
    (0..kinds).prop_map(|kind| match kind {
        0 => R,
        1 => P,
        2 => S0,
        3 => S1,
        4 => Shard(2),
        5 => Absent(0),
        _ => Absent(1),
    })
}

fn layout(absent: bool) -> impl Strategy<Value = Vec<Placement>> {
    prop::collection::vec(placement(absent), 4)
}

/// A target that can be reached: partial only where the source is.
fn reachable(from: &[Placement], to: &[Placement]) -> Layout {
    let to: Vec<_> = from.iter().zip(to).map(|(&f, &t)| if t == P && f != P { R } else { t }).collect();
    Layout::new(&to)
}

/// Whether a reshard needs no message, as the module's documentation states it.
fn is_free(from: &Layout, to: &Layout) -> bool {
    (0..from.len() as u32).map(AxisId).all(|axis| match (from.get(axis), to.get(axis)) {
        (f, t) if f == t => true,
        (R, Absent(_)) => true,
        (R, Shard(dim)) => from.shards(dim).intersect(to.shards(dim)).iter().all(|stays| stays < axis),
        _ => false,
    })
}

const MACHINES: [&str; 4] = ["p100x16", "flat:16", "a100x64:16", "2080tix64:16"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn steps_only_use_what_their_groups_hold(
        which in 0usize..4, from in layout(true), to in layout(true), log in 0u32..20
    ) {
        let r = resharder(MACHINES[which]);
        let tensor = r.tensor(TensorShape::new(&[16 << (log / 2), 16, 16], 4).unwrap());
        let (to, from) = (reachable(&from, &to), Layout::new(&from));
        let path = r.find(&tensor, &from, &to).unwrap();
        let end = path.steps.last().map_or(Arrangement::canonical(&from), |step| step.after);
        prop_assert_eq!(end, Arrangement::canonical(&to));
        check_steps(r, 3, &from, &path)?;
        let seconds = r.seconds(&tensor, &from, &to).unwrap();
        prop_assert!((seconds.0 - path.seconds.0).abs() <= 1e-9 * path.seconds.0);
    }

    /// Too many axes for the arrangement graph: merged where neighbours agree, guided where not.
    #[test]
    fn steps_on_a_large_mesh_only_use_what_their_groups_hold(
        from in prop::collection::vec(placement(true), 6), to in prop::collection::vec(placement(true), 6), same in any::<bool>()
    ) {
        let (mut from, mut to) = (from, to);
        if same {
            // Equal neighbours, as in real plans.
            for l in [&mut from, &mut to] {
                (l[1], l[2], l[4], l[5]) = (l[0], l[0], l[3], l[3]);
            }
        }
        let flat = |l: Vec<Placement>| -> Vec<Placement> {
            l.into_iter().map(|p| if p == Shard(2) { S1 } else { p }).collect()
        };
        let (from, to) = (flat(from), flat(to));
        let r = resharder("k80x64:64");
        let tensor = r.tensor(TensorShape::new(&[64, 64], 4).unwrap());
        let (to, from) = (reachable(&from, &to), Layout::new(&from));
        let path = r.find(&tensor, &from, &to).unwrap();
        let end = path.steps.last().map_or(Arrangement::canonical(&from), |step| step.after);
        prop_assert_eq!(end, Arrangement::canonical(&to));
        let seconds = r.seconds(&tensor, &from, &to).unwrap();
        prop_assert!((seconds.0 - path.seconds.0).abs() <= 1e-9 * path.seconds.0);
        prop_assert_eq!(path.seconds == Seconds::ZERO, is_free(&from, &to), "{:?} -> {:?}: {:?}", from, to, path);
        check_steps(r, 2, &from, &path)?;
    }

    #[test]
    fn the_cost_is_zero_exactly_when_no_byte_moves(which in 0usize..4, from in layout(true), to in layout(true)) {
        let r = resharder(MACHINES[which]);
        let tensor = r.tensor(TensorShape::new(&[64, 16, 16], 4).unwrap());
        let (to, from) = (reachable(&from, &to), Layout::new(&from));
        let path = r.find(&tensor, &from, &to).unwrap();
        prop_assert_eq!(path.seconds == Seconds::ZERO, is_free(&from, &to), "{:?} -> {:?}: {:?}", from, to, path);
        prop_assert_eq!(path.traffic.total() == Bytes(0), is_free(&from, &to));
        prop_assert_eq!(r.seconds(&tensor, &from, &from).unwrap(), Seconds::ZERO);
    }

    #[test]
    fn going_through_a_third_layout_is_never_cheaper(
        which in 0usize..4, a in layout(false), b in layout(false), c in layout(false), log in 0u32..16
    ) {
        let r = resharder(MACHINES[which]);
        let tensor = r.tensor(TensorShape::new(&[16 << log, 16, 16], 4).unwrap());
        let b = reachable(&a, &b);
        let b_placements: Vec<_> = (0..4).map(|axis| b.get(AxisId(axis))).collect();
        let c = reachable(&b_placements, &c);
        let a = Layout::new(&a);
        let through = r.seconds(&tensor, &a, &b).unwrap() + r.seconds(&tensor, &b, &c).unwrap();
        let direct = r.seconds(&tensor, &a, &c).unwrap();
        prop_assert!(direct.0 <= through.0 * (1.0 + 1e-9), "{direct} > {through}: {a:?} {b:?} {c:?}");
    }

    #[test]
    fn larger_tensors_never_cost_less(which in 0usize..4, from in layout(true), to in layout(true), log in 0u32..16) {
        let r = resharder(MACHINES[which]);
        let (to, from) = (reachable(&from, &to), Layout::new(&from));
        let time = |rows: u64| {
            let tensor = r.tensor(TensorShape::new(&[rows, 16, 16], 4).unwrap());
            r.seconds(&tensor, &from, &to).unwrap().0
        };
        prop_assert!(time(16 << log) <= time(32 << log) * (1.0 + 1e-12));
    }

    /// A layout of merged axes is a prime layout too: merging axes never makes a reshard cheaper.
    #[test]
    fn coarse_axes_agree_with_the_prime_ones(from in prop::collection::vec(placement(false), 2), to in prop::collection::vec(placement(false), 2)) {
        let machine = builtin("p100x16").unwrap();
        let coarse = Resharder::new(&machine, &machine.mesh().per_level());
        let fine = resharder("p100x16");
        let shape = TensorShape::new(&[1024, 64, 16], 4).unwrap();
        let to_coarse = reachable(&from, &to);
        let double = |l: &[Placement]| Layout::new(&[l[0], l[0], l[1], l[1]]);
        let to_fine = double(&[to_coarse.get(AxisId(0)), to_coarse.get(AxisId(1))]);
        let merged = coarse.seconds(&coarse.tensor(shape), &Layout::new(&from), &to_coarse).unwrap().0;
        let prime = fine.seconds(&fine.tensor(shape), &double(&from), &to_fine).unwrap().0;
        prop_assert!(prime <= merged * (1.0 + 1e-9), "{prime} {merged}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn results_do_not_depend_on_earlier_queries(froms in prop::collection::vec(layout(true), 3), to in layout(true)) {
        let warm = fresh("flat:12");
        let shape = TensorShape::new(&[24, 36, 12], 4).unwrap();
        let ask = |r: &Resharder, from: &[Placement]| {
            r.seconds(&r.tensor(shape), &Layout::new(from), &reachable(from, &to[..3])).unwrap()
        };
        for from in froms.iter().chain(froms.iter().rev()) {
            prop_assert_eq!(ask(&warm, &from[..3]), ask(&fresh("flat:12"), &from[..3]));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tables come from sweeps over many layouts at once, paths from a queue: two searches, one result.
    #[test]
    fn tables_hold_the_times_of_the_paths(
        layouts in prop::collection::vec(layout(false), 1..12),
        dims in prop::sample::select(vec![[16, 16, 16, 16], [16, 48, 4, 4], [7, 32, 16, 2], [64, 1, 3, 16]]),
    ) {
        let r = resharder("p100x16");
        let shape = TensorShape::new(&dims, 4).unwrap();
        let tensor = r.tensor(shape);
        let all: Vec<Layout> = layouts.iter().map(|l| Layout::new(&l[..4])).collect();
        let from: Vec<Layout> =
            all.into_iter().filter(|l| shape.check(r.comm().mesh(), l).is_ok()).collect();
        let whole = |l: &Layout| l.axes_where(|p| p == P).is_empty();
        let to: Vec<Layout> = from.iter().copied().filter(whole).chain([Layout::replicated(4)]).collect();
        let table = r.table(&tensor, &from, &to).unwrap();
        for (row, from) in table.chunks(to.len()).zip(&from) {
            for (&seconds, to) in row.iter().zip(&to) {
                let path = r.find(&tensor, from, to).unwrap().seconds;
                prop_assert!((seconds.0 - path.0).abs() <= 1e-9 * path.0, "{from:?} to {to:?}: {seconds}, {path}");
                prop_assert_eq!(seconds, r.seconds(&tensor, from, to).unwrap());
            }
        }
    }
}

#[test]
fn collectives_and_reshards_agree_on_bytes() {
    let r = resharder("flat:16");
    let tensor = r.tensor(TensorShape::new(&[1 << 14, 1 << 10], 4).unwrap());
    let path = r.find(&tensor, &Layout::new(&[P; 4]), &Layout::replicated(4)).unwrap();
    let bytes = Bytes(tensor.shape().bytes());
    let all = r.comm().mesh().all();
    assert_eq!(path.traffic, r.comm().traffic(Collective::AllReduce, all, AxisSet::EMPTY, bytes));
}
