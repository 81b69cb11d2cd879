//! Real exports, where they are present beside the checkout, compared with the zoo's models.

use bytes::Bytes;
use shardwright_graph::{Graph, verify::verify};
use shardwright_onnx::{ImportOptions, ImportedModel, NoExternalData, import};
use shardwright_zoo::{self as zoo, BuildOptions};
use std::collections::BTreeSet;
use std::path::Path;

fn bytes(name: &str) -> Option<Bytes> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name);
    let bytes = std::fs::read(&path).ok();
    if bytes.is_none() {
        println!("skipped: {} is missing", path.display());
    }
    bytes.map(Bytes::from)
}

fn read(name: &str, options: &ImportOptions) -> Option<ImportedModel> {
    let imported = import(&bytes(name)?, options, &NoExternalData);
    let imported = imported.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(verify(&imported.graph), Ok(()), "{name}");
    Some(imported)
}

fn kinds(graph: &Graph) -> BTreeSet<&'static str> {
    graph.ops.iter().map(|n| n.op.kind()).collect()
}

#[test]
fn alexnet_is_the_zoos() {
    let Some(file) = read("alexnet.onnx", &ImportOptions::default()) else { return };
    let zoo = zoo::build("alexnet:dropout=0,batch=16", &BuildOptions::default()).unwrap();
    assert_eq!(file.graph.parameter_count(), zoo.parameter_count());
    assert_eq!(file.graph.total_flops(), zoo.total_flops());
    assert_eq!(kinds(&file.graph).difference(&kinds(&zoo)).count(), 0);
    // The same at another batch than the file's.
    let options = ImportOptions { batch: Some(64), ..ImportOptions::default() };
    let Some(file) = read("alexnet.onnx", &options) else { return };
    let zoo = zoo::build("alexnet:dropout=0,batch=64", &BuildOptions::default()).unwrap();
    assert_eq!(file.graph.total_flops(), zoo.total_flops());
}

#[test]
fn vgg_16_is_the_zoos_without_biases() {
    let Some(file) = read("vgg16.onnx", &ImportOptions::default()) else { return };
    let zoo = zoo::build("vgg16:dropout=0,batch=16", &BuildOptions::default()).unwrap();
    let biases: u64 = zoo
        .parameters()
        .filter(|&t| zoo.tensor(t).name.ends_with(".bias"))
        .map(|t| zoo.tensor(t).ty.shape.elements())
        .sum();
    assert_eq!(file.graph.parameter_count(), zoo.parameter_count() - biases);
    assert_eq!(kinds(&file.graph).difference(&kinds(&zoo)).count(), 0);
}

#[test]
fn transformers_do_the_zoos_work() {
    for (name, spec) in
        [("bert_base.onnx", "bert:dropout=0,batch=8,seq=128"), ("gpt2.onnx", "gpt:batch=8,seq=128")]
    {
        let Some(file) = read(name, &ImportOptions::default()) else { return };
        // Heads, dropped biases and positions change the work only a little.
        let zoo = zoo::build(spec, &BuildOptions::default()).unwrap();
        let ratio = file.graph.total_flops() as f64 / zoo.total_flops() as f64;
        assert!((0.9..1.1).contains(&ratio), "{name}: {ratio}");
    }
}

#[test]
fn every_file_keeps_its_nodes_names_and_survives_damage() {
    for name in ["alexnet.onnx", "vgg16.onnx", "inception_v3.onnx", "bert_base.onnx", "gpt2.onnx"] {
        let Some(file) = read(name, &ImportOptions::default()) else { return };
        let named = file.graph.layers.iter().filter(|l| l.name.starts_with("node_")).count();
        assert!(named * 10 > file.graph.layers.len() * 7, "{name}: {named} of {}", file.graph.layers.len());
        let Some(bytes) = bytes(name) else { return };
        for part in 1..8 {
            let _ =
                import(&bytes.slice(..bytes.len() * part / 8), &ImportOptions::default(), &NoExternalData);
        }
    }
}
