//! What each axis of a mesh may do to each op of a training step, and how tensors lie when it does.
//!
//! A [`Config`] says for every mesh axis whether it splits one of the op's factors, repeats the op or pins it.
//! [`configs`] lists an op's configs, [`Grain`] finds the finest mesh on which they are few enough to search,
//! [`LayerSplit`] carries the config of a layer's forward op over to its backward and update ops, and
//! [`input_layout`], [`output_layout`], [`place`] and [`halos`] say where every tensor lies. What any of it costs is not
//! known here.
//!
//! ```
//! use shardwright_graph::{DType, Op, TensorType, ops::Contract};
//! use shardwright_machine::builtin;
//! use shardwright_space::configs;
//!
//! let machine = builtin("flat:4")?;
//! let op: Op = Contract::parse("nc,co->no")?.into();
//! let inputs = [TensorType::new(DType::F32, [8, 6]), TensorType::new(DType::F32, [6, 3])];
//! let outputs = op.operator().infer(&inputs)?;
//! let rule = op.rule(&inputs, &outputs);
//! // Two binary axes; 3 outputs cannot be halved, 6 inputs only once.
//! let shown: Vec<String> = configs(&rule, machine.mesh()).iter().map(|c| c.show(&rule, machine.mesh())).collect();
//! assert_eq!(shown, ["n4", "n2·c2", "n2", "c2", "whole"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod grain;
mod layer;
mod layout;
mod placed;
mod window;

pub use config::{AxisUse, Config, configs, configs_with_pins, count_configs};
pub use grain::Grain;
pub use layer::LayerSplit;
pub use layout::{OpShapes, input_layout, output_layout};
pub use placed::{Fetch, Placed, Places, elementwise_config, place};
pub use window::{Halo, WindowCut, halos, window_cuts};
