//! Small texts that ask for much, or lie about ranks and shapes. Each is refused at its place, or takes little.

use shardwright_stablehlo::{ImportOptions, import};

fn refused(text: &str) -> String {
    import(text, "hostile.mlir", &ImportOptions::default()).err().map(|e| e.to_string()).unwrap_or_default()
}

fn main_of(arguments: &str, result: &str, body: &str) -> String {
    format!("module @m {{ func.func public @main({arguments}) -> {result} {{\n{body}\n}} }}")
}

#[test]
fn a_scatter_whose_source_has_another_rank_is_refused() {
    let scatter = |source: &str, init: &str| {
        let body = format!(
            r#"  %zero = stablehlo.constant dense<0.0> : {init}
  %0 = "stablehlo.select_and_scatter"(%x, %dy, %zero) <{{padding = dense<0> : tensor<4x2xi64>, window_dimensions = array<i64: 1, 1, 2, 2>, window_strides = array<i64: 1, 1, 2, 2>}}> ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }}, {{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  }}) : (tensor<2x3x8x8xf32>, {source}, {init}) -> tensor<2x3x8x8xf32>
  return %0 : tensor<2x3x8x8xf32>"#
        );
        refused(&main_of(&format!("%x: tensor<2x3x8x8xf32>, %dy: {source}"), "tensor<2x3x8x8xf32>", &body))
    };
    assert_eq!(scatter("tensor<2x3x4x4xf32>", "tensor<f32>"), "");
    for source in ["tensor<f32>", "tensor<96xf32>", "tensor<2x3x4xf32>", "tensor<2x3x4x4x1xf32>"] {
        let text = scatter(source, "tensor<f32>");
        assert!(
            text.contains("hostile.mlir:3:") && text.contains("select_and_scatter: source"),
            "{source}: {text}"
        );
    }
    assert!(scatter("tensor<2x3x5x4xf32>", "tensor<f32>").contains("select_and_scatter"));
    assert!(scatter("tensor<2x3x4x4xf32>", "tensor<1xf32>").contains("initial value"));
}

#[test]
fn slices_of_constants_have_the_shape_that_the_slice_has() {
    let slice = |constant: &str, to: &str, stride: u32| {
        let body = format!(
            "  %c = stablehlo.constant dense<{constant}> : tensor<4xf32>
  %0 = stablehlo.slice %c [0:4:{stride}] : (tensor<4xf32>) -> {to}
  %1 = stablehlo.add %0, %0 : {to}
  return %1 : {to}"
        );
        refused(&main_of("%x: tensor<4xf32>", to, &body))
    };
    for constant in ["[1.0, 2.0, 3.0, 4.0]", "1.0"] {
        assert_eq!(slice(constant, "tensor<2xf32>", 2), "");
        assert!(slice(constant, "tensor<3xf32>", 2).contains("slice"));
        // A stride of zero would read the first element for ever.
        assert!(slice(constant, "tensor<281474976710656xf32>", 0).contains("stride 0"));
    }
}

/// Functions that call each other in a row; the last one computes.
fn chain(length: usize, last: &str) -> String {
    let mut text = "module @m {\n".to_string();
    for i in 0..length {
        let name = if i == 0 { "public @main".into() } else { format!("private @f{i}") };
        let body = if i + 1 == length {
            last.into()
        } else {
            format!("func.call @f{}(%x) : (tensor<4xf32>) -> tensor<4xf32>", i + 1)
        };
        text += &format!(
            "func.func {name}(%x: tensor<4xf32>) -> tensor<4xf32> {{\n  %0 = {body}\n  return %0 : tensor<4xf32>\n}}\n"
        );
    }
    text + "}"
}

#[test]
fn functions_may_nest_and_only_recursion_is_called_recursion() {
    for length in [60, 200] {
        assert_eq!(refused(&chain(length, "stablehlo.add %x, %x : tensor<4xf32>")), "");
    }
    let text = refused(&chain(300, "stablehlo.add %x, %x : tensor<4xf32>"));
    assert!(text.contains("nested more than") && !text.contains("itself"), "{text}");
    let text = refused(&chain(3, "func.call @f1(%x) : (tensor<4xf32>) -> tensor<4xf32>"));
    assert!(text.contains("function @f1 calls itself"), "{text}");
}

#[test]
fn constants_in_loops_count_each_time() {
    let numbers = vec!["1.0"; 40_000].join(", ");
    let body = format!(
        "  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<40000xf32>
   cond {{
    %n = stablehlo.constant dense<900000> : tensor<i32>
    %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %k = stablehlo.constant dense<[{numbers}]> : tensor<40000xf32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %v : tensor<i32>, tensor<40000xf32>
  }}
  return %0#1 : tensor<40000xf32>"
    );
    let text = refused(&main_of("%x: tensor<40000xf32>", "tensor<40000xf32>", &body));
    assert!(text.contains("walks more than"), "{text}");
}

#[test]
fn text_is_escaped_and_cut_in_messages_and_names() {
    let hostile = format!("\u{1b}[2J\u{202e}{}", "x".repeat(100_000));
    let call = format!(
        "  %0 = stablehlo.custom_call @\"{hostile}\"(%x) : (tensor<4xf32>) -> tensor<4xf32>\n  return %0 : tensor<4xf32>"
    );
    let text = refused(&main_of("%x: tensor<4xf32>", "tensor<4xf32>", &call));
    assert!(
        !text.is_empty() && text.len() < 3000 && !text.contains(['\u{1b}', '\u{202e}']),
        "{} bytes",
        text.len()
    );
    let named = format!(
        "  %0 = stablehlo.add %x, %x : tensor<4xf32> loc(\"{}\")\n  return %0 : tensor<4xf32>",
        hostile.replace('\u{1b}', "")
    );
    let text = main_of("%x: tensor<4xf32>", "tensor<4xf32>", &named);
    let graph = import(&text, "named.mlir", &ImportOptions::default()).unwrap().graph;
    assert!(graph.ops.iter().all(|op| op.name.len() < 3000 && !op.name.contains('\u{202e}')));
}
