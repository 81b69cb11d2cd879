//! Lowered programs against the serial interpreter: any legal config of every op gives the serial numbers, and sends
//! the bytes that the cost model predicts.

#[allow(dead_code)]
#[path = "../ops/case.rs"]
mod case;
#[allow(dead_code)]
#[path = "../ops/cases.rs"]
mod cases;
#[path = "../ops/nn_cases.rs"]
mod nn_cases;
#[path = "../ops/shape_cases.rs"]
mod shape_cases;
#[path = "../ops/window_cases.rs"]
mod window_cases;

mod check;
mod coverage;
mod dags;
mod graphs;
mod ops;
