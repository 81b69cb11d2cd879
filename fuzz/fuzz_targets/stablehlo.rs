//! Any text as a StableHLO program: an error with its place, or a graph that every later stage can ask anything of.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shardwright_frontend::stablehlo::{Options, import, normalise};
use shardwright_graph::{Graph, factor_kinds};

fuzz_target!(|text: &str| {
    if let Ok(generic) = normalise(text, "fuzz") {
        assert_eq!(normalise(&generic, "again").as_ref(), Ok(&generic));
    }
    match import(text, "fuzz", &Options { opaque: vec!["*".into()], ..Options::default() }) {
        Ok(imported) => {
            let graph = imported.graph;
            for id in graph.op_ids() {
                graph.flops(id);
                graph.bytes(id);
            }
            factor_kinds(&graph);
            assert_eq!(Graph::from_json(graph.to_json().as_bytes()).as_ref(), Ok(&graph));
        }
        Err(error) => assert!(error.line >= 1 && error.column >= 1),
    }
});
