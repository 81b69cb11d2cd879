//! Typed training graphs: what is computed, and the one thing each op says about parallelism.
//!
//! A [`Graph`] holds a whole training step: forward, backward and update ops in topological order. Each op
//! kind ([`ops`]) states its shapes, its sharding [`Rule`], its gradient and its cost; everything else in
//! Shardwright works through the [`Operator`] trait and names no op kinds.

pub mod autodiff;
mod builder;
mod graph;
mod ids;
pub mod json;
mod operator;
pub mod ops;
mod region;
mod rule;
pub mod soap;
pub mod text;
mod train;
mod types;
pub mod verify;
mod workload;

pub use autodiff::GradContext;
pub use builder::{BuildError, GraphBuilder};
pub use graph::{Carry, Consumers, Graph, Init, Layer, Node, Phase, Role, Tensor, WeightGradient};
pub use ids::{LayerId, OpId, TensorId};
pub use json::ReadError;
pub use operator::{OpError, Operator};
pub use ops::Op;
pub use region::{Block, Region};
pub use rule::{Combine, DimMap, Factor, FactorIndex, Reach, Rule, TensorMap, Window, dim_name};
pub use soap::{FactorKind, factor_kinds};
pub use text::TextError;
pub use train::{Optimizer, train};
pub use types::{DType, Dims, MAX_ELEMENTS, MAX_RANK, Real, Shape, TensorType};
pub use workload::{Gemm, Workload, WorkloadSizes};
