//! Configs of ops and layouts of tensors: what each mesh axis may do to each op of a training step.
//!
//! - A [`Config`] says for every mesh axis whether it splits one of the op's factors, replicates the op or pins it.
//! - [`configs`] lists an op's configs. [`SearchMesh`] is the finest mesh on which they are few enough to search.
//! - [`LayerSplit`] derives the configs of a layer's backward and update ops from that of its forward op.
//! - [`input_layout`], [`output_layout`], [`assign_layouts`] and [`halos`] give the layouts of tensors.
//! - [`completion`] names the result that an op reduces itself.
//! - An [`Assignment`] holds every choice for a step; [`Transfers`] says which tensors move under it.
//!
//! Costs belong to later crates.
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

mod assignment;
mod common_axes;
mod completion;
mod config;
mod layer;
mod layout;
mod pipeline;
mod search_mesh;
mod tensor_layouts;
mod transfers;
mod window;

pub use assignment::{Assignment, AssignmentError};
pub use common_axes::{common_axes, on_finer_axes};
pub use completion::{Completion, completes, completion};
pub use config::{AxisUse, Config, configs, configs_in_any_order, configs_with_pins, count_configs};
pub use layer::LayerSplit;
pub use layout::{OpShapes, input_layout, output_layout};
pub use pipeline::{Pipeline, reads_data};
pub use search_mesh::SearchMesh;
pub use tensor_layouts::{Fetch, TensorLayout, TensorLayouts, assign_layouts, elementwise_config};
pub use transfers::{
    Endpoint, FetchGroup, Pass, Sharing, Transfer, Transfers, UPDATE, constrained_view, pass_of,
    reduce_partials,
};
pub use window::{Halo, WindowCut, halos, window_cuts};
