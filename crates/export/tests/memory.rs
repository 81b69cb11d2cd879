//! What XLA is predicted to allocate, counted by hand for small programs, in 4-byte floats on two devices.

use shardwright_cost::Resharder;
use shardwright_export::xla_memory;
use shardwright_graph::OpId;
use shardwright_machine::builtin;
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_stablehlo::{ImportOptions, ImportedProgram, import};

const ARGUMENTS: &str = "%arg0: tensor<8x16xf32>, %arg1: tensor<16x16xf32>";

fn program(body: &str) -> ImportedProgram {
    let text =
        format!("module {{\nfunc.func public @main({ARGUMENTS}) -> tensor<8x16xf32> {{\n{body}\n}}\n}}\n");
    import(&text, "small", &ImportOptions::default()).unwrap()
}

/// With this factor of every op that has it split.
fn bytes(program: &ImportedProgram, factor: &str) -> u64 {
    let machine = builtin("flat:2").unwrap();
    let split = |op: OpId| {
        let found = program.graph.rule(op).find(factor);
        Config::new([found.map_or(AxisUse::Replicate, AxisUse::Split)])
    };
    let assignment = Assignment::new(program.graph.op_ids().map(split).collect());
    let resharder = Resharder::new(&machine, machine.mesh());
    xla_memory(&program.graph, &resharder, &assignment, &[], &program.stacks).unwrap()
}

const PRODUCT: &str = "%0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>";

#[test]
fn a_product_has_memory_of_its_own_and_loops_have_none() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let loops = "%1 = stablehlo.tanh %0 : tensor<8x16xf32>\n%2 = stablehlo.negate %1 : tensor<8x16xf32>\nreturn %2 : tensor<8x16xf32>";
    let program = program(&format!("{PRODUCT}\n{loops}"));
    // Arguments and the result: the product that the loop reads lies there before.
    assert_eq!(bytes(&program, "nothing"), (x + w) + x);
}

#[test]
fn a_costly_function_with_two_readers_is_kept() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let sum =
        "applies stablehlo.add across dimensions = [0, 1] : (tensor<8x16xf32>, tensor<f32>) -> tensor<f32>";
    let twice = |function: &str| {
        let text = format!(
            "module {{ func.func public @main({ARGUMENTS}) -> tensor<f32> {{
            %zero = stablehlo.constant dense<0.0> : tensor<f32>
            %0 = stablehlo.{function} %arg0 : tensor<8x16xf32>
            %1 = stablehlo.reduce(%0 init: %zero) {sum}
            %2 = stablehlo.negate %0 : tensor<8x16xf32>
            %3 = stablehlo.multiply %2, %2 : tensor<8x16xf32>
            %4 = stablehlo.reduce(%3 init: %zero) {sum}
            %5 = stablehlo.multiply %1, %4 : tensor<f32>
            return %5 : tensor<f32> }} }}"
        );
        bytes(&import(&text, "small", &ImportOptions::default()).unwrap(), "nothing")
    };
    // The weight is nobody's here, and still an argument. Of two numbers one lies where the result will be.
    assert_eq!(twice("abs"), (x + w) + 4 + 4);
    assert_eq!(twice("tanh"), (x + w) + 4 + 4 + x);
}

#[test]
fn what_is_added_up_along_several_dimensions_is_turned_round() {
    let text = "module { func.func public @main(%x: tensor<4x4x8xf32>, %y: tensor<4x4x2xf32>) -> tensor<8x2xf32> {
        %0 = stablehlo.dot_general %x, %y, contracting_dims = [0, 1] x [0, 1] : (tensor<4x4x8xf32>, tensor<4x4x2xf32>) -> tensor<8x2xf32>
        return %0 : tensor<8x2xf32> } }";
    let product = import(text, "turned", &ImportOptions::default()).unwrap();
    let (x, y, result) = (128 * 4, 32 * 4, 16 * 4);
    assert_eq!(bytes(&product, "nothing"), (x + y) + result + x);
    // Not where these dimensions are the last ones already.
    let last = text
        .replace("x: tensor<4x4x8xf32>", "x: tensor<8x4x4xf32>")
        .replace("(tensor<4x4x8xf32>", "(tensor<8x4x4xf32>");
    let last = last.replace("contracting_dims = [0, 1] x [0, 1]", "contracting_dims = [1, 2] x [0, 1]");
    assert_eq!(
        bytes(&import(&last, "last", &ImportOptions::default()).unwrap(), "nothing"),
        (x + y) + result
    );
}

#[test]
fn the_derivative_of_pooling_looks_for_maxima_again() {
    let text = "module { func.func public @main(%x: tensor<2x4x4x1xf32>, %dy: tensor<2x2x2x1xf32>) -> tensor<2x4x4x1xf32> {
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = \"stablehlo.select_and_scatter\"(%x, %dy, %zero) <{window_dimensions = array<i64: 1, 2, 2, 1>, window_strides = array<i64: 1, 2, 2, 1>}> ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %c = stablehlo.compare GE, %a, %b, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        }, {
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %c = stablehlo.add %a, %b : tensor<f32>
          stablehlo.return %c : tensor<f32>
        }) : (tensor<2x4x4x1xf32>, tensor<2x2x2x1xf32>, tensor<f32>) -> tensor<2x4x4x1xf32>
        return %0 : tensor<2x4x4x1xf32> } }";
    let pooled = import(text, "pooled", &ImportOptions::default()).unwrap();
    let (image, windows) = (32, 8);
    // Four numbers say where an element is, and four more where a window's maximum is.
    let least = (image + windows) * 4 + image * 4 + (image + windows) * 4 * 5;
    let found = bytes(&pooled, "nothing");
    assert!((least..=least + image * 4 * 2).contains(&found), "{found}, at least {least}");
}

#[test]
fn partial_sums_are_summed_up_where_the_result_goes() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let rest = "%1 = stablehlo.negate %0 : tensor<8x16xf32>\nreturn %1 : tensor<8x16xf32>";
    let program = program(&format!("{PRODUCT}\n{rest}"));
    let summed = program.graph.op_ids().next().map(|op| program.graph.rule(op)).unwrap();
    let added =
        summed.factors.iter().enumerate().find(|(f, _)| summed.is_reduction(*f as u8)).unwrap().1.name;
    // Both operands are split along what is added up; the partial result and the result are whole.
    assert_eq!(bytes(&program, added), (x + w) / 2 + x + x);
}

#[test]
fn what_is_gathered_along_an_inner_dimension_is_turned_round() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let function = "%e = stablehlo.exponential %arg0 : tensor<8x16xf32>";
    let program =
        program(&format!("{function}\n{}\nreturn %0 : tensor<8x16xf32>", PRODUCT.replace("%arg0,", "%e,")));
    // Half of the argument and of the function, the whole of it for the product, and the product.
    assert_eq!(bytes(&program, "d0"), (x / 2 + w) + x / 2 + x + x);
    assert_eq!(bytes(&program, "d1"), (x / 2 + w) + x / 2 + x + x + x);
    // Of the function only the rows are computed that the product takes.
    assert_eq!(bytes(&program, "b"), (x + w) + x / 2 + x / 2);
}

#[test]
fn what_one_loop_stacks_for_another_is_written() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let product = "%y = stablehlo.dot_general %a, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
          %j = stablehlo.add %i, %one : tensor<i32>";
    let twice = "cond {
          %p = stablehlo.compare LT, %i, %two, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        } do {";
    let program = program(&format!(
        "%c = stablehlo.constant dense<0> : tensor<i32>
        %one = stablehlo.constant dense<1> : tensor<i32>
        %two = stablehlo.constant dense<2> : tensor<i32>
        %z = stablehlo.constant dense<0.0> : tensor<2x8x16xf32>
        %f:3 = stablehlo.while(%i = %c, %x = %arg0, %s = %z) : tensor<i32>, tensor<8x16xf32>, tensor<2x8x16xf32>
        {twice}
          %n = stablehlo.negate %x : tensor<8x16xf32>
          %part = stablehlo.reshape %n : (tensor<8x16xf32>) -> tensor<1x8x16xf32>
          %t = stablehlo.dynamic_update_slice %s, %part, %i, %c, %c : (tensor<2x8x16xf32>, tensor<1x8x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x8x16xf32>
          {}
          stablehlo.return %j, %y, %t : tensor<i32>, tensor<8x16xf32>, tensor<2x8x16xf32>
        }}
        %b:2 = stablehlo.while(%i = %c, %x = %f#1) : tensor<i32>, tensor<8x16xf32>
        {twice}
          %part = stablehlo.dynamic_slice %f#2, %i, %c, %c, sizes = [1, 8, 16] : (tensor<2x8x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x16xf32>
          %n = stablehlo.reshape %part : (tensor<1x8x16xf32>) -> tensor<8x16xf32>
          %m = stablehlo.multiply %x, %n : tensor<8x16xf32>
          {}
          stablehlo.return %j, %y : tensor<i32>, tensor<8x16xf32>
        }}
        return %b#1 : tensor<8x16xf32>",
        product.replace("%a,", "%x,"),
        product.replace("%a,", "%m,"),
    ));
    assert_eq!(program.stacks.iter().map(Vec::len).collect::<Vec<_>>(), [2]);
    // The stack, and operand and result of a product, one of which lies where the step's result will be.
    assert_eq!(bytes(&program, "nothing"), (x + w) + 2 * x + x + x);
    // A program in which nobody reads the stack has none: a negation has no buffer of its own.
    let fused = ImportedProgram { stacks: Vec::new(), ..program };
    assert!(bytes(&fused, "nothing") < (x + w) + 2 * x + x + x);
}
