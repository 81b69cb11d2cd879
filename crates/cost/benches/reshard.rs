//! Times of cost queries, from which cost tables are built.

use divan::{Bencher, black_box};
use shardwright_cost::{Collective, Comm, Layout, Placement, Reduction, Resharder, TensorShape};
use shardwright_machine::{AxisId, AxisSet, Bytes, builtin};

fn main() {
    divan::main();
}

/// A random sample of layouts of a four-dimensional tensor.
fn layouts(axes: usize, partial: bool, absent: bool) -> Vec<Layout> {
    let mut seed = 12345u64;
    let mut draw = |n: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) % n
    };
    let mut place = || match draw(7) {
        0..4 => Placement::Shard(draw(4) as u8),
        4 if partial => Placement::Partial(Reduction::Sum),
        5 if absent => Placement::Absent(0),
        _ => Placement::Replicated,
    };
    (0..64).map(|_| Layout::new(&(0..axes).map(|_| place()).collect::<Vec<_>>())).collect()
}

#[divan::bench]
fn collective(bencher: Bencher) {
    let machine = builtin("p100x16").expect("built in");
    let comm = Comm::new(&machine, machine.mesh());
    bencher.bench(|| {
        comm.seconds(black_box(Collective::AllReduce), black_box(AxisSet(0b1011)), black_box(Bytes(1 << 24)))
    });
}

/// A lookup in a cached row.
#[divan::bench(args = ["p100x16", "a100x64:32"])]
fn known_row(bencher: Bencher, name: &str) {
    let machine = builtin(name).expect("built in");
    let resharder = Resharder::new(&machine, machine.mesh());
    let tensor = resharder.tensor(TensorShape::new(&[512, 256, 64, 64], 4).expect("fits"));
    let all = layouts(machine.mesh().len(), false, false);
    let times = resharder.times(&tensor, &all[0]).expect("legal");
    let mut at = 0;
    bencher.bench_local(|| {
        at = (at + 1) % all.len();
        times.to(black_box(&all[at]))
    });
}

/// The same through the cache of rows.
#[divan::bench]
fn known_pair(bencher: Bencher) {
    let machine = builtin("p100x16").expect("built in");
    let resharder = Resharder::new(&machine, machine.mesh());
    let tensor = resharder.tensor(TensorShape::new(&[512, 256, 64, 64], 4).expect("fits"));
    let all = layouts(4, false, false);
    let mut at = 0;
    bencher.bench_local(|| {
        at = (at + 1) % all.len();
        resharder.seconds(&tensor, black_box(&all[at / 8]), black_box(&all[at]))
    });
}

/// All times from a layout that is not cached.
#[divan::bench(args = ["p100x16", "a100x64:8"])]
fn new_row(bencher: Bencher, name: &str) {
    let machine = builtin(name).expect("built in");
    let resharder = Resharder::new(&machine, machine.mesh());
    let all = layouts(machine.mesh().len(), true, false);
    let mut size = 64;
    bencher.bench_local(|| {
        size += 64;
        let tensor = resharder.tensor(TensorShape::new(&[size, 256, 64, 64], 4).expect("fits"));
        resharder.times(&tensor, black_box(&all[size as usize / 64 % all.len()])).map(|_| ())
    });
}

/// One new pair on a mesh with too many arrangements for rows, with a different placement on every axis: the hard case.
#[divan::bench(args = ["a100x64", "v5e-256"])]
fn new_pair_of_different_axes(bencher: Bencher, name: &str) {
    let all = layouts(builtin(name).expect("built in").mesh().len(), false, false);
    new_pairs(bencher, name, &all);
}

/// The same with the axes in at most four runs of equal placements, as in plans.
#[divan::bench(args = ["a100x64", "v5e-256"])]
fn new_pair_of_equal_axes(bencher: Bencher, name: &str) {
    let machine = builtin(name).expect("built in");
    let mesh = machine.mesh();
    let runs = layouts(4, false, false);
    let of = |run: &Layout| {
        let place = |at: usize| run.get(AxisId((at * 4 / mesh.len()) as u32));
        Layout::new(&(0..mesh.len()).map(place).collect::<Vec<_>>())
    };
    new_pairs(bencher, name, &runs.iter().map(of).collect::<Vec<_>>());
}

fn new_pairs(bencher: Bencher, name: &str, all: &[Layout]) {
    let machine = builtin(name).expect("built in");
    let resharder = Resharder::new(&machine, machine.mesh());
    let mut size = 256;
    bencher.bench_local(|| {
        size += 256;
        let tensor = resharder.tensor(TensorShape::new(&[size, 256, 256, 256], 4).expect("fits"));
        let at = size as usize / 256 % all.len();
        resharder.seconds(&tensor, &all[at], &all[(at + 1) % all.len()])
    });
}

/// Building the arrangement graph of a mesh, once per rank.
#[divan::bench(sample_count = 3)]
fn first_query(bencher: Bencher) {
    let machine = builtin("p100x16").expect("built in");
    bencher.bench_local(|| {
        let resharder = Resharder::new(&machine, machine.mesh());
        let tensor = resharder.tensor(TensorShape::new(&[512, 256, 64, 64], 4).expect("fits"));
        resharder.times(&tensor, &Layout::replicated(4)).map(|_| ())
    });
}
