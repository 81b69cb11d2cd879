//! Where training graphs come from: [`layers`] to build them with, a [`zoo`] of published models, and the readers of
//! [`onnx`] and [`stablehlo`] files.
//!
//! This crate turns descriptions into [`shardwright_graph::Graph`]s. It plans nothing and runs nothing.

pub mod layers;
pub mod onnx;
pub mod stablehlo;
pub mod zoo;
