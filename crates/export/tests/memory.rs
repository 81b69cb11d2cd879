//! What XLA is predicted to allocate, counted by hand for small programs, in 4-byte floats on two devices.

use shardwright_cost::Relayouts;
use shardwright_export::xla_memory;
use shardwright_frontend::stablehlo::{Imported, Options, import};
use shardwright_graph::OpId;
use shardwright_machine::builtin;
use shardwright_space::{AxisUse, Config};

fn program(body: &str) -> Imported {
    let types = "%arg0: tensor<8x16xf32>, %arg1: tensor<16x16xf32>";
    let text = format!("module {{\nfunc.func public @main({types}) -> tensor<8x16xf32> {{\n{body}\n}}\n}}\n");
    import(&text, "small", &Options::default()).unwrap()
}

/// With this factor of every op that has it split.
fn bytes(program: &Imported, factor: &str) -> u64 {
    let machine = builtin("flat:2").unwrap();
    let split = |op: OpId| {
        let found = program.graph.rule(op).find(factor);
        Config::new([found.map_or(AxisUse::Replicate, AxisUse::Split)])
    };
    let configs: Vec<Config> = program.graph.op_ids().map(split).collect();
    let relayouts = Relayouts::new(&machine, machine.mesh());
    xla_memory(&program.graph, &relayouts, &configs, &[]).unwrap()
}

const PRODUCT: &str = "%0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>";

#[test]
fn a_product_has_memory_of_its_own_and_loops_have_none() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let loops = "%1 = stablehlo.tanh %0 : tensor<8x16xf32>\n%2 = stablehlo.negate %1 : tensor<8x16xf32>\nreturn %2 : tensor<8x16xf32>";
    let program = program(&format!("{PRODUCT}\n{loops}"));
    // Arguments, the result, and the product that the loop reads.
    assert_eq!(bytes(&program, "nothing"), (x + w) + x + x);
}

#[test]
fn a_costly_function_with_two_readers_is_kept() {
    let (x, w) = (8 * 16 * 4, 16 * 16 * 4);
    let twice = |function: &str| {
        let text = format!(
            "%0 = stablehlo.{function} %arg0 : tensor<8x16xf32>\n%1 = stablehlo.negate %0 : tensor<8x16xf32>\n%2 = stablehlo.multiply %0, %1 : tensor<8x16xf32>\nreturn %2 : tensor<8x16xf32>"
        );
        bytes(&program(&text), "nothing")
    };
    // The weight is nobody's here, and still an argument.
    assert_eq!(twice("abs"), (x + w) + x);
    assert_eq!(twice("tanh"), (x + w) + x + x);
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
