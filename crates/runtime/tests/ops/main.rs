//! Generic tests over every op kind: sharding rules and gradients against the kernels. A new op kind adds
//! a generator to `cases.rs` and is covered.

mod case;
mod cases;
mod gradients;
mod nn_cases;
mod nn_reference;
mod reference;
mod rules;
mod shape_cases;
mod window_cases;
