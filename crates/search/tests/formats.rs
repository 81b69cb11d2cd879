//! Files: round trips are exact, and hostile input gives an error at worst.

mod common;

use common::{assert_same, recipes, written};
use proptest::prelude::*;
use shardwright_search::format::{ReadLimits, read_iopddl, read_iopddl_with, write_cfn};
use std::io::Write;

fn packed(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// Small enough that a hostile file cannot take long.
fn limits() -> ReadLimits {
    ReadLimits { text_bytes: 1 << 20, numbers: 1 << 16, ..ReadLimits::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn a_written_network_is_read_back(recipe in recipes(8, 5, true), gzip: bool) {
        let network = recipe.build();
        let text = written(&network);
        let text = if gzip { packed(&text) } else { text };
        assert_same(&network, &read_iopddl(&text[..]).unwrap().network);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), gzip: bool) {
        let bytes = if gzip { packed(&bytes) } else { bytes };
        let _ = read_iopddl_with(&bytes[..], &limits());
    }

    #[test]
    fn mutated_files_never_panic_and_read_networks_can_be_evaluated(
        recipe in recipes(4, 3, true),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), mutation()), 1..6),
    ) {
        let mut text = written(&recipe.build());
        for (place, change) in changes {
            change.apply(&mut text, place);
        }
        if let Ok(problem) = read_iopddl_with(&text[..], &limits()) {
            let choices = vec![0; problem.network.variables()];
            prop_assert!(problem.network.evaluate(&choices).is_ok());
            write_cfn(&problem.network, &problem.name, std::io::sink()).unwrap();
        }
        // The same through the decompressor, truncated.
        let packed = packed(&text);
        prop_assert!(read_iopddl_with(&packed[..packed.len() - 1], &limits()).is_err());
    }
}

/// One change to a file's bytes, as fuzzers make them, with a dictionary for this format.
#[derive(Clone, Debug)]
enum Mutation {
    Replace(u8),
    Remove(usize),
    Insert(&'static str),
    Repeat(usize),
    Truncate,
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let feared = prop::sample::select(vec![
        "-1",
        "NaN",
        "null",
        "1e999",
        "1e18",
        "9223372036854775807",
        "18446744073709551616",
        "0.5",
        "[",
        "]",
        "{",
        "}",
        ",",
        "\"",
        "[[[[",
        "\"problem\":",
        "\"nodes\":{},",
        "\\u",
        "true",
        " ",
        "\u{0}",
        "1000000000",
    ]);
    prop_oneof![
        any::<u8>().prop_map(Mutation::Replace),
        (1..40usize).prop_map(Mutation::Remove),
        feared.prop_map(Mutation::Insert),
        (1..60usize).prop_map(Mutation::Repeat),
        Just(Mutation::Truncate),
    ]
}

impl Mutation {
    fn apply(&self, text: &mut Vec<u8>, place: prop::sample::Index) {
        if text.is_empty() {
            return;
        }
        let at = place.index(text.len());
        match *self {
            Mutation::Replace(byte) => text[at] = byte,
            Mutation::Remove(count) => drop(text.drain(at..(at + count).min(text.len()))),
            Mutation::Insert(what) => drop(text.splice(at..at, what.bytes())),
            Mutation::Repeat(count) => {
                let again = text[at..(at + count).min(text.len())].to_vec();
                text.splice(at..at, again);
            }
            Mutation::Truncate => text.truncate(at),
        }
    }
}

#[test]
fn a_billion_choices_are_refused_without_a_billion_numbers() {
    // The text claims an edge between nodes whose tables would have 10^18 entries; nothing is allocated.
    let row = vec!["0"; 1_000_000].join(",");
    let text = format!(
        r#"{{"problem":{{"nodes":{{"costs":[[{row}],[{row}]]}},"edges":{{"nodes":[[0,1]],"costs":[[0,0]]}}}}}}"#
    );
    let error = read_iopddl(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(error, "edges.costs[0]: 2 entries, but nodes 0 and 1 have 1000000 and 1000000 choices");
    let row = vec!["0"; (1 << 20) + 1].join(",");
    let error =
        read_iopddl(format!(r#"{{"problem":{{"nodes":{{"costs":[[{row}]]}}}}}}"#).as_bytes()).unwrap_err();
    assert!(error.to_string().contains("at most 1048576"), "{error}");
}
