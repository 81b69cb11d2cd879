//! Generic tests over every op kind: sharding rules and gradients against the kernels, on the examples that the kind's
//! own file has. Then kernels against definitions.

mod attention;
mod case;
mod experts;
mod gradients;
mod nn_reference;
mod reference;
mod rules;
