//! Lowered programs compared with the serial interpreter: any legal config of every op gives the serial numbers, and sends
//! the bytes that the cost model predicts.

#[allow(dead_code)]
#[path = "../ops/case.rs"]
mod case;

mod check;
mod coverage;
mod dags;
mod graphs;
mod ops;
