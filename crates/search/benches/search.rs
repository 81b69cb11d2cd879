//! Reading, writing and the solvers of the papers. `cargo bench -p shardwright-search`
//!
//! Generated problems are always used, published ones only if the shared data are found (`SHARDWRIGHT_SHARED`, or
//! `shared` beside the checkout).

#[path = "../examples/generate/step.rs"]
mod step;

use divan::{Bencher, counter::BytesCount};
use shardwright_search::format::{read_iopddl, write_cfn, write_iopddl};
use shardwright_search::{Control, Network, registry};
use std::io::Read;
use std::path::PathBuf;

fn main() {
    divan::main();
}

fn shared(path: &str) -> Option<Vec<u8>> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    std::fs::read(std::env::var_os("SHARDWRIGHT_SHARED").map_or(beside, PathBuf::from).join(path)).ok()
}

fn generated(layers: u32) -> Network {
    let settings = step::Settings { layers, mesh: [4, 8], followers: 2, memory_percent: Some(110) };
    step::network(&settings).expect("the generator makes valid networks")
}

fn text(network: &Network) -> Vec<u8> {
    let mut text = Vec::new();
    write_iopddl(network, "bench", &mut text).expect("memory does not fail");
    text
}

/// The contest's problem A: 93 MB of text.
#[divan::bench(args = ["plain", "gzip"], sample_count = 5)]
fn read_contest_a(bencher: Bencher<'_, '_>, form: &str) {
    let Some(packed) = shared("iopddl/asplos-2025-iopddl-A.json.gz") else { return };
    let mut plain = Vec::new();
    if flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut plain).is_err() {
        return;
    }
    let input = if form == "gzip" { &packed } else { &plain };
    bencher
        .counter(BytesCount::new(plain.len()))
        .bench(|| read_iopddl(&input[..]).map(|problem| problem.network));
}

#[divan::bench(sample_count = 5)]
fn read_generated(bencher: Bencher<'_, '_>) {
    let text = text(&generated(40));
    bencher
        .counter(BytesCount::new(text.len()))
        .bench(|| read_iopddl(&text[..]).map(|problem| problem.network));
}

#[divan::bench(args = ["iopddl", "cfn"], sample_count = 5)]
fn write_generated(bencher: Bencher<'_, '_>, format: &str) {
    let network = generated(4);
    bencher.bench(|| {
        let mut text = Vec::new();
        match format {
            "cfn" => write_cfn(&network, "bench", &mut text),
            _ => write_iopddl(&network, "bench", &mut text),
        }
        .map(|()| text.len())
    });
}

const NETWORKS: [&str; 6] =
    ["alexnet-p8", "rnnlm-p8", "inception3-p8", "resnet101-p8", "transformer-p4", "transformer-p8"];

fn solve(bencher: Bencher<'_, '_>, name: &str, solver: &str) {
    let Some(packed) = shared(&format!("pase/pase-{name}.json.gz")) else { return };
    let (Ok(problem), Some(entry)) = (read_iopddl(&packed[..]), registry::find(solver)) else { return };
    let solver = entry.solver();
    bencher.bench(|| solver.solve(&problem.network, &Control::new()).cost);
}

/// PaSE's networks, without reading them.
#[divan::bench(args = NETWORKS)]
fn pase(bencher: Bencher<'_, '_>, name: &str) {
    solve(bencher, name, "pase");
}

/// PaSE's networks, without reading them.
#[divan::bench(args = NETWORKS)]
fn optcnn(bencher: Bencher<'_, '_>, name: &str) {
    solve(bencher, name, "optcnn");
}
