//! Runs StableHLO programs through the interpreter and compares the results with JAX's. The cases are read from standard input,
//! one path per line without its ending: `CASE.mlir` is the text, `CASE.json` holds inputs and outputs as flat lists.
//!
//! Each case prints one line: verdict, case, reason. The verdicts are `ok`, `differs` and `refused`. `scripts/stablehlo_fuzz.py`
//! writes the cases.

use serde_json::Value;
use shardwright_graph::{DType, Shape};
use shardwright_runtime::{Data, HostTensor, Serial};
use shardwright_stablehlo::{ImportOptions, import};
use std::io::{BufRead, Write};

/// Relative to the largest number of a result.
const TOLERANCE: f64 = 2e-4;

enum Failure {
    Differs(String),
    Refused(String),
}

fn refused(error: impl ToString) -> Failure {
    Failure::Refused(error.to_string())
}

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for case in std::io::stdin().lock().lines() {
        let case = case?;
        let (verdict, reason) = match check(&case) {
            Ok(()) => ("ok", String::new()),
            Err(Failure::Differs(reason)) => ("differs", reason),
            Err(Failure::Refused(reason)) => ("refused", reason),
        };
        writeln!(out, "{verdict}\t{case}\t{}", reason.replace(['\n', '\t'], " "))?;
    }
    Ok(())
}

fn numbers(stored: &Value, key: &str) -> Vec<Vec<f64>> {
    let list = |value: &Value| {
        value.as_array().into_iter().flatten().map(|x| x.as_f64().unwrap_or(f64::NAN)).collect()
    };
    stored[key].as_array().into_iter().flatten().map(list).collect()
}

fn tensor(dtype: DType, shape: &Shape, numbers: Vec<f64>) -> HostTensor {
    let data = match dtype {
        DType::I64 => Data::I64(numbers.iter().map(|&x| x as i64).collect()),
        dtype => Data::of_reals(dtype, numbers),
    };
    HostTensor::new(shape.clone(), data)
}

fn check(case: &str) -> Result<(), Failure> {
    let text = std::fs::read_to_string(format!("{case}.mlir")).map_err(refused)?;
    let stored = std::fs::read(format!("{case}.json")).map_err(refused)?;
    let stored: Value = serde_json::from_slice(&stored).map_err(refused)?;
    let program = import(&text, "case", &ImportOptions::default()).map_err(refused)?;
    if let Some(note) = program.notes.iter().find(|note| note.contains("opaque")) {
        return Err(Failure::Refused(note.clone()));
    }
    let graph = &program.graph;
    let mut serial = Serial::new(graph, 0, &program.results);
    for (&argument, numbers) in program.arguments.iter().zip(numbers(&stored, "inputs")) {
        let ty = &graph.tensor(argument).ty;
        serial.set(argument, tensor(ty.dtype, &ty.shape, numbers)).map_err(refused)?;
    }
    serial.evaluate().map_err(|e| Failure::Differs(e.to_string()))?;
    let expected = numbers(&stored, "outputs");
    if expected.len() != program.results.len() {
        return Err(Failure::Differs(format!(
            "{} results, expected {}",
            program.results.len(),
            expected.len()
        )));
    }
    for (i, (&result, expected)) in program.results.iter().zip(&expected).enumerate() {
        let found = serial.value(result).map(HostTensor::to_f64_vec).unwrap_or_default();
        if found.len() != expected.len() {
            return Err(Failure::Differs(format!(
                "result {i} has {} elements, expected {}",
                found.len(),
                expected.len()
            )));
        }
        let scale = expected.iter().filter(|x| x.is_finite()).fold(1.0f64, |most, x| most.max(x.abs()));
        for (at, (a, b)) in found.iter().zip(expected).enumerate() {
            let same = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= TOLERANCE * scale;
            if !same {
                return Err(Failure::Differs(format!("result {i}[{at}] is {a}, JAX has {b}")));
            }
        }
    }
    Ok(())
}
