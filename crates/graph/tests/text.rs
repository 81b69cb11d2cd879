//! The text form: what it looks like, that it holds everything, and that errors point to the place.

mod common;

use common::{any_graph, mlp};
use proptest::prelude::*;
use shardwright_graph::Graph;

const SMALL: &str = r#"graph small
%0 x: f32[4,6] input normal(1.0)
%1 w: f32[6,2] parameter uniform(0.5)
%2 fc: f32[4,2] = contract(%0, %1) {"spec":"mk,kn->mn"} @fc
%3 "odd \"name\"": f32[4,2] = unary(%2) {"f":"relu"} @"odd \"name\""
%4 loss: f32[] = reduce(%3) {"f":"sum","axes":[0,1],"scale":0.125} @loss
%5 loss.grad: f32[] = fill() {"value":1.0,"ty":"f32[]"} @loss backward
%6 zero: f32[6,2] constant constant(-inf)
%7 w.new: f32[6,2] = binary(%1, %6) {"f":"add"} as step @fc update
output %4
carry %1 %7
"#;

#[test]
fn the_text_form_is_read_and_printed_alike() {
    let graph: Graph = SMALL.parse().unwrap();
    assert_eq!(graph.to_string(), SMALL);
    assert_eq!((graph.ops.len(), graph.layers.len(), graph.carries.len()), (5, 3, 1));
    let spaced = SMALL.replace(' ', "\t ").replace('\n', "\r\n\n").replace("odd\t ", "odd ");
    assert_eq!(spaced.parse::<Graph>().as_ref(), Ok(&graph));
}

#[test]
fn a_training_step_survives() {
    let graph = mlp();
    assert_eq!(graph.to_string().parse::<Graph>(), Ok(graph));
}

/// Replaces part of the small graph and checks what the parser says.
#[track_caller]
fn check(from: &str, to: &str, expected: &str) {
    assert!(SMALL.contains(from), "{from}");
    let error = SMALL.replacen(from, to, 1).parse::<Graph>().expect_err("read without error").to_string();
    assert!(error.starts_with(expected), "`{error}` does not start with `{expected}`");
}

#[test]
fn errors_point_to_line_and_column() {
    check("graph small", "graf small", "line 1, column 1: expected `graph`");
    check("graph small", "graph", "line 1, column 6: expected a name");
    check("graph small", "graph small one", "line 1, column 13: expected the end of the line");
    check("%0 x:", "%x x:", "line 2, column 2: expected the number of a tensor");
    check("%0 x:", "%0 x", "line 2, column 6: expected `:`");
    check("f32[4,6]", "f32[4,six]", "line 2, column 7: `f32[4,six]` is not a tensor type");
    check(" input ", " imput ", "line 2, column 16: `imput` is not the role of a tensor");
    check("normal(1.0)", "normal(one)", "line 2, column 22: expected an initial value");
    check("normal(1.0)", "normal(1.0", "line 2, column 32: expected `)`");
    check(" input normal(1.0)", "", "line 2, column 15: expected a role");
    check("contract(", "conduct(", "line 4, column 19: unknown variant `conduct`");
    check("%0, %1", "%0 %1", "line 4, column 31: expected `,`");
    check("{\"spec\":", "{\"spek\":", "line 4, column 19: unknown field `spek`");
    check("kn->mn\"}", "kn->mn\"", "line 4, column 36: bad JSON here");
    check("odd \\\"", "odd \\x", "line 5, column 4: bad JSON here");
    check("@fc\n", "\n", "line 4, column 57: expected `@`");
    check("@fc\n", "@fd\n", "line 4, column 1: its layer does not exist");
    check("backward", "backwards", "line 7, column 63: `backwards` is not a phase");
    check("%6 zero", "%60 zero", "line 9, column 1: there is no %6");
    check("%6 zero", "%5 zero", "line 8, column 1: %5 appears twice");
    check("(%0, %1)", "(%0, %7)", "op #0 `fc` (contract): reads %7");
    check(" small", " \"small", "line 1, column 7: bad JSON here");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn reading_what_was_printed_gives_the_same_graph(graph in any_graph()) {
        let text = graph.to_string();
        prop_assert!(text.chars().all(|c| c == '\n' || c == ' ' || c.is_alphanumeric() || c.is_ascii_graphic()));
        prop_assert_eq!(text.parse::<Graph>(), Ok(graph), "{}", text);
    }

    #[test]
    fn arbitrary_text_does_no_harm(text in "\\PC*") {
        let _ = text.parse::<Graph>();
    }

    #[test]
    fn spliced_text_does_no_harm(
        parts in prop::collection::vec((any::<prop::sample::Index>(), 0..30usize), 1..60),
    ) {
        let mut text = String::new();
        for (at, length) in parts {
            let start = at.index(SMALL.len());
            text += SMALL.get(start..(start + length).min(SMALL.len())).unwrap_or("");
        }
        let _ = text.parse::<Graph>();
    }

    #[test]
    fn changed_characters_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<char>()), 1..4),
    ) {
        let mut text: Vec<char> = SMALL.chars().collect();
        for (at, c) in changes {
            let at = at.index(text.len());
            text[at] = c;
        }
        if let Ok(graph) = text.into_iter().collect::<String>().parse::<Graph>() {
            prop_assert_eq!(graph.to_string().parse::<Graph>(), Ok(graph));
        }
    }
}
