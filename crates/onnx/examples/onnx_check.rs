//! Runs ONNX test cases through the interpreter and compares the results: `onnx_check [--train BATCH] FOLDER...`. Without
//! arguments, the folders are read from standard input, one per line.
//!
//! With `--train` the models are trained for one step at that batch instead, from the file's weights and seeded data.
//!
//! A folder holds `model.onnx`, `input_0.pb`, ... and `output_0.pb`, ..., as ONNX's tests do. Each case prints one line:
//! verdict, folder, reason. The verdicts are `ok`, `differs`, `unknown` (unsupported op), `refused` (unsupported variant
//! or element type) and `error`.

use bytes::Bytes;
use shardwright_graph::{DType, TensorType};
use shardwright_onnx::{self as onnx, ImportOptions, Literal, NoExternalData, Numbers, StoredTensor};
use shardwright_runtime::{Data, HostTensor, Serial};
use std::io::{BufRead, Write};
use std::path::Path;

/// The relative tolerance of ONNX's test runner.
const RELATIVE: f64 = 1e-3;
const ABSOLUTE: f64 = 1e-7;
/// The relative tolerance of 16-bit floats, which have seven or ten fraction bits.
const NARROW: f64 = 2e-2;

fn main() -> std::io::Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut batch = None;
    if arguments.first().is_some_and(|first| first == "--train") {
        batch = arguments.get(1).and_then(|batch| batch.parse().ok());
        arguments.drain(..arguments.len().min(2));
    }
    let folders = if arguments.is_empty() {
        std::io::stdin().lock().lines().collect::<Result<Vec<_>, _>>()?
    } else {
        arguments
    };
    let mut out = std::io::stdout().lock();
    for folder in folders {
        let folder_path = Path::new(&folder);
        let outcome = batch.map_or_else(|| check(folder_path), |batch| train(folder_path, batch));
        let (verdict, reason) = match outcome {
            Ok(()) => ("ok", String::new()),
            Err(Failure::Differs(reason)) => ("differs", reason),
            Err(Failure::Unknown(reason)) => ("unknown", reason),
            Err(Failure::Refused(reason)) => ("refused", reason),
            Err(Failure::Other(reason)) => ("error", reason),
        };
        writeln!(out, "{verdict}\t{folder}\t{}", reason.replace('\n', " "))?;
    }
    Ok(())
}

enum Failure {
    Differs(String),
    Unknown(String),
    Refused(String),
    Other(String),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Other(error.to_string())
    }
}

fn other(error: impl ToString) -> Failure {
    Failure::Other(error.to_string())
}

/// Tensors `NAME_0.pb`, `NAME_1.pb`, ... of a folder.
fn tensors(folder: &Path, name: &str) -> Result<Vec<StoredTensor>, Failure> {
    let mut all = Vec::new();
    for i in 0.. {
        let path = folder.join(format!("{name}_{i}.pb"));
        if !path.exists() {
            break;
        }
        all.push(onnx::read_tensor(&Bytes::from(std::fs::read(path)?)).map_err(unreadable)?);
    }
    Ok(all)
}

fn unreadable(error: onnx::OnnxError) -> Failure {
    let text = error.to_string();
    match &error {
        onnx::OnnxError::Unsupported(ops) if ops.iter().any(|op| op.reason.is_empty()) => {
            Failure::Unknown(text)
        }
        onnx::OnnxError::Unsupported(_) => Failure::Refused(text),
        _ if text.ends_with("not supported") => Failure::Refused(text),
        _ => Failure::Other(text),
    }
}

fn check(folder: &Path) -> Result<(), Failure> {
    let bytes = Bytes::from(std::fs::read(folder.join("model.onnx"))?);
    let (inputs, expected) = (tensors(folder, "input")?, tensors(folder, "output")?);
    // Plans need known shapes, axes and limits, which node tests pass as inputs. As few inputs as necessary become
    // constants, from the last one on.
    let mut refused = None;
    for data in [inputs.len(), 1, 0] {
        let mut options = ImportOptions { training: false, ..ImportOptions::default() };
        for stored in inputs.iter().skip(data) {
            if let Some(literal) = stored.load(&NoExternalData).map_err(other)? {
                options.constants.push((stored.name.clone(), literal));
            }
        }
        match onnx::import(&bytes, &options, &NoExternalData) {
            Ok(model) => return evaluate(&model, inputs.get(..data).unwrap_or(&inputs), &expected),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.map_or_else(|| other("no import was attempted"), unreadable))
}

/// Trains one step at another batch. A model whose output is a single number is its own loss.
fn train(folder: &Path, batch: u64) -> Result<(), Failure> {
    let bytes = Bytes::from(std::fs::read(folder.join("model.onnx"))?);
    let outputs = tensors(folder, "output")?;
    let scalar = outputs.first().is_some_and(|output| output.shape.is_empty());
    let loss = if scalar { onnx::Loss::Output } else { onnx::Loss::CrossEntropy };
    let options = ImportOptions { batch: Some(batch), loss, ..ImportOptions::default() };
    let model = onnx::import(&bytes, &options, &NoExternalData).map_err(unreadable)?;
    shardwright_graph::verify::verify(&model.graph).map_err(other)?;
    let mut run = Serial::new(&model.graph, 0, &[]);
    for source in &model.sources {
        if let Some(literal) = source.load(&NoExternalData).map_err(other)? {
            run.set(source.tensor, value(&literal, &model.graph.tensor(source.tensor).ty)).map_err(other)?;
        }
    }
    run.step().map_err(other)?;
    match run.loss() {
        Some(loss) if loss.is_finite() => Ok(()),
        loss => Err(Failure::Differs(format!("the loss is {loss:?}"))),
    }
}

fn evaluate(
    model: &onnx::ImportedModel,
    inputs: &[StoredTensor],
    expected: &[StoredTensor],
) -> Result<(), Failure> {
    let mut run = Serial::new(&model.graph, 0, &[]);
    for source in &model.sources {
        if let Some(literal) = source.load(&NoExternalData).map_err(other)? {
            run.set(source.tensor, value(&literal, &model.graph.tensor(source.tensor).ty)).map_err(other)?;
        }
    }
    for ((name, tensor), stored) in model.inputs.iter().zip(inputs) {
        let literal = stored.load(&NoExternalData).map_err(other)?;
        let literal = literal.ok_or_else(|| other(format!("input {name} has no contents")))?;
        run.set(*tensor, value(&literal, &model.graph.tensor(*tensor).ty)).map_err(other)?;
    }
    run.evaluate().map_err(other)?;
    for ((name, tensor), stored) in model.outputs.iter().zip(expected) {
        let literal = stored.load(&NoExternalData).map_err(other)?;
        let literal = literal.ok_or_else(|| other(format!("output {name} has no contents")))?;
        let found = run.value(*tensor).ok_or_else(|| other(format!("output {name} was not computed")))?;
        compare(name, &literal, found)?;
    }
    Ok(())
}

/// Contents as a value of this type, with the same number of elements.
fn value(literal: &Literal, ty: &TensorType) -> HostTensor {
    let data = match &literal.numbers {
        Numbers::Ints(v) if ty.dtype == DType::I64 => Data::I64(v.clone()),
        Numbers::Ints(v) => Data::of_reals(ty.dtype, v.iter().map(|&x| x as f64).collect()),
        Numbers::Reals(v) => Data::of_reals(ty.dtype, v.clone()),
    };
    HostTensor::new(ty.shape.clone(), data)
}

fn compare(name: &str, expected: &Literal, found: &HostTensor) -> Result<(), Failure> {
    let shape = found.ty().shape;
    if shape[..] != expected.shape[..] {
        return Err(Failure::Differs(format!("{name} has shape {shape}, expected {:?}", expected.shape)));
    }
    let expected_numbers = match &expected.numbers {
        Numbers::Reals(v) => v.clone(),
        Numbers::Ints(v) => v.iter().map(|&x| x as f64).collect(),
    };
    let relative = if matches!(expected.dtype, DType::F16 | DType::Bf16) { NARROW } else { RELATIVE };
    let largest = expected_numbers.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs()));
    for (i, (&want, got)) in expected_numbers.iter().zip(found.to_f64_vec()).enumerate() {
        let same = want == got || want.is_nan() && got.is_nan();
        // A sum with cancellation is only as exact as its terms.
        let allowed = ABSOLUTE.max(1e-6 * largest) + relative * want.abs();
        let near = (want - got).abs() <= allowed;
        if !same && !near {
            return Err(Failure::Differs(format!("{name}[{i}] is {got}, expected {want}")));
        }
    }
    Ok(())
}
