//! Transposed convolutions with given output shapes, pads and output padding.
//!
//! The expected numbers are those of ONNX's reference implementation. Where it refuses a variant that the specification
//! defines, they are onnxruntime's.

use super::*;
use shardwright_graph::DType;
use shardwright_runtime::{Data, HostTensor, Serial};

enum Value<'a> {
    Int(i64),
    Text(&'a str),
}

/// `x = [1, 2, 3, 4]` convolved with `[1, 10, 100]`, transposed. Without a stride among the attributes it is 1.
fn transposed(attributes: &[(&str, &[Value<'_>])]) -> Result<Vec<f64>, String> {
    let mut conv = node("ConvTranspose", &["x", "w"], &["y"]);
    for (name, values) in attributes {
        let mut attribute = Attribute { name: (*name).into(), kind: 7, ..Attribute::default() };
        for value in *values {
            match value {
                Value::Int(i) => attribute.ints.push(*i),
                Value::Text(text) => (attribute.kind, attribute.s) = (3, text.as_bytes().to_vec().into()),
            }
        }
        conv.attribute.push(attribute);
    }
    let w = Tensor { float_data: vec![1.0, 10.0, 100.0], ..weight("w", &[1, 1, 3]) };
    let mut model = model(vec![conv], vec![w], "y");
    model.graph.as_mut().unwrap().input = vec![info("x", 1, &[1, 1, 4])];
    let options = ImportOptions { training: false, ..ImportOptions::default() };
    let bytes = model.encode_to_vec().into();
    let imported = import(&bytes, &options, &NoExternalData).map_err(|e| e.to_string())?;
    let graph = &imported.graph;
    let mut serial = Serial::new(graph, 0, &[]);
    let reals = |values: &[f64]| Data::of_reals(DType::F32, values.to_vec());
    let x = HostTensor::new([1, 1, 4].into_iter().collect(), reals(&[1.0, 2.0, 3.0, 4.0]));
    serial.set(imported.inputs[0].1, x).unwrap();
    let source = &imported.sources[0];
    let w = HostTensor::new(graph.tensor(source.tensor).ty.shape.clone(), reals(&[1.0, 10.0, 100.0]));
    serial.set(source.tensor, w).unwrap();
    serial.evaluate().map_err(|e| e.to_string())?;
    Ok(serial.value(imported.outputs[0].1).unwrap().to_f64_vec())
}

/// The full result at stride 2; results at that stride are parts of it.
const FULL: [f64; 9] = [1.0, 10.0, 102.0, 20.0, 203.0, 30.0, 304.0, 40.0, 400.0];

/// The full result without `start` and `end` positions; negative numbers add zeros.
fn part(full: &[f64], start: i64, end: i64) -> Vec<f64> {
    (start..full.len() as i64 - end)
        .map(|i| usize::try_from(i).ok().and_then(|i| full.get(i)).copied().unwrap_or(0.0))
        .collect()
}

macro_rules! check {
    ($full:expr, $start:literal, $end:literal, $(($name:literal, $($value:expr),+)),+) => {
        let result = transposed(&[$(($name, &[$($value),+])),+]);
        assert_eq!(result.as_deref(), Ok(&part(&$full, $start, $end)[..]), "{}", stringify!($(($name, $($value),+)),+));
    };
}

#[test]
fn outputs_are_those_of_the_reference() {
    use Value::{Int, Text};
    check!(FULL, 0, 0, ("strides", Int(2)));
    check!(FULL, 1, 0, ("strides", Int(2)), ("pads", Int(1), Int(1)), ("output_padding", Int(1)));
    // An output shape without pads: left out at both ends, the odd one at the start; added at the end.
    check!(FULL, 2, 1, ("strides", Int(2)), ("output_shape", Int(6)));
    check!(FULL, 1, 1, ("strides", Int(2)), ("output_shape", Int(7)));
    check!(FULL, 1, 0, ("strides", Int(2)), ("output_shape", Int(8)));
    check!(FULL, 0, -1, ("strides", Int(2)), ("output_shape", Int(10)));
    check!(FULL, 1, 0, ("strides", Int(2)), ("output_shape", Int(8)), ("output_padding", Int(1)));
    check!(FULL, 1, 0, ("strides", Int(2)), ("output_shape", Int(8)), ("auto_pad", Text("VALID")));
    // An output shape with pads: the pads at the start are kept.
    check!(FULL, 1, 1, ("strides", Int(2)), ("output_shape", Int(7)), ("pads", Int(1), Int(1)));
    check!(FULL, 0, 2, ("strides", Int(2)), ("output_shape", Int(7)), ("pads", Int(0), Int(2)));
    check!(FULL, 1, 0, ("strides", Int(2)), ("output_shape", Int(8)), ("pads", Int(1), Int(1)));
    // Padding that keeps the size, with and without an output shape.
    check!(FULL, 0, 1, ("strides", Int(2)), ("auto_pad", Text("SAME_UPPER")));
    check!(FULL, 1, 0, ("strides", Int(2)), ("auto_pad", Text("SAME_LOWER")));
    check!(FULL, 1, 1, ("strides", Int(2)), ("auto_pad", Text("SAME_UPPER")), ("output_shape", Int(7)));
    check!(FULL, -1, 0, ("strides", Int(2)), ("auto_pad", Text("SAME_UPPER")), ("output_shape", Int(10)));
    check!(FULL, 0, -1, ("strides", Int(2)), ("auto_pad", Text("SAME_LOWER")), ("output_shape", Int(10)));
    check!(FULL, 1, 0, ("strides", Int(2)), ("auto_pad", Text("SAME_UPPER")), ("output_padding", Int(1)));
    // A stride beyond the kernel: up to two positions may be added, and all of them at the end.
    let wide = [1.0, 10.0, 100.0, 0.0, 2.0, 20.0, 200.0, 0.0, 3.0, 30.0, 300.0, 0.0, 4.0, 40.0, 400.0];
    check!(wide, 0, -2, ("strides", Int(4)), ("output_shape", Int(17)));
    check!(wide, 0, -3, ("strides", Int(4)), ("output_shape", Int(18)));
    check!(wide, -1, 0, ("strides", Int(4)), ("auto_pad", Text("SAME_UPPER")));
    check!(wide, 0, -1, ("strides", Int(4)), ("auto_pad", Text("SAME_LOWER")));
}

#[test]
fn impossible_outputs_are_refused() {
    use Value::Int;
    for shape in [11, 0, -4, i64::MAX, i64::MIN] {
        let text = transposed(&[("strides", &[Int(2)]), ("output_shape", &[Int(shape)])]).unwrap_err();
        assert!(text.contains("ConvTranspose"), "{shape}: {text}");
    }
    // The output of two billion positions would be computed; one of 2^62 cannot be.
    let huge = transposed(&[("strides", &[Int(1 << 31)]), ("pads", &[Int(0), Int(-1)])]);
    assert!(huge.unwrap_err().contains("pads"));
}
