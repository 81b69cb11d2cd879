//! Any bytes as graph JSON: an error, or a graph that every later stage can ask anything of.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shardwright_graph::{Graph, factor_kinds};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(graph) = Graph::from_json(bytes) {
        for id in graph.op_ids() {
            graph.flops(id);
            graph.bytes(id);
        }
        factor_kinds(&graph);
        assert_eq!(Graph::from_json(graph.to_json().as_bytes()).as_ref(), Ok(&graph));
        assert_eq!(graph.to_string().parse().as_ref(), Ok(&graph));
    }
});
