//! Any text as a graph's text form: an error, or a graph that prints and reads alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shardwright_graph::Graph;

fuzz_target!(|text: &str| {
    if let Ok(graph) = text.parse::<Graph>() {
        assert_eq!(graph.to_string().parse().as_ref(), Ok(&graph));
        assert_eq!(Graph::from_json(graph.to_json().as_bytes()).as_ref(), Ok(&graph));
    }
});
