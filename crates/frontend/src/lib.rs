//! Where training graphs come from: [`layers`] to build them with, and a [`zoo`] of published models.
//!
//! This crate turns descriptions into [`shardwright_graph::Graph`]s. It plans nothing and runs nothing.

pub mod layers;
pub mod stablehlo;
pub mod zoo;
