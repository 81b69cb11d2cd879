//! Typed training graphs: ops with their types, gradients, costs, and sharding rules.
//!
//! A [`Graph`] holds a whole training step: forward, backward and update ops in topological order. Each op
//! kind ([`ops`]) states its shapes, its sharding [`Rule`], its gradient and its cost; everything else in
//! Shardwright works through the [`Operator`] trait and names no op kinds.
//!
//! A two-layer perceptron, its gradients, and the factors that its first layer can be split along:
//!
//! ```
//! use shardwright_graph::{autodiff, ops::*, *};
//!
//! # fn main() -> Result<(), BuildError> {
//! let f32 = |shape: &[u64]| TensorType::new(DType::F32, shape);
//! let mut b = GraphBuilder::new("mlp");
//! let x = b.source("x", f32(&[64, 100]), Role::Input, Init::Normal(Real(1.0)))?;
//! let w1 = b.source("w1", f32(&[100, 300]), Role::Parameter, Init::Normal(Real(0.1)))?;
//! let w2 = b.source("w2", f32(&[300, 10]), Role::Parameter, Init::Normal(Real(0.1)))?;
//! let linear = Contract::parse("mk,kn->mn").map_err(|e| BuildError::Model(e.to_string()))?;
//! let hidden = b.emit("fc1", linear.clone(), &[x, w1])?;
//! let hidden = b.emit("relu", Unary { f: UnaryFn::Relu }, &[hidden])?;
//! let y = b.emit("fc2", linear, &[hidden, w2])?;
//! let loss = b.emit("loss", Reduce::mean((0..2).collect(), b.shape(y)), &[y])?;
//! b.output(loss);
//! autodiff::differentiate(&mut b, loss)?;
//! let graph = b.finish();
//!
//! // Batch m and features n may be split freely; splitting k leaves partial sums to add up.
//! let fc1 = graph.op_ids().next().unwrap();
//! assert_eq!(graph.rule(fc1).to_string(), "([m, k], [k, n])->([m, n]) {m=64, n=300, k=100} reduction={k}");
//! assert_eq!(factor_kinds(&graph)[0][..], [FactorKind::Sample, FactorKind::Parameter, FactorKind::Reduction]);
//!
//! // The backward ops belong to the layers of their forward ops, and everything has a readable form.
//! let text = graph.to_string();
//! assert!(text.contains("fc1.grad: f32[100,300] = contract("));
//! assert!(text.contains(r#"{"spec":"mk,mn->kn"} @fc1 backward"#));
//! assert_eq!(Graph::from_json(graph.to_json().as_bytes()), Ok(graph));
//! # Ok(())
//! # }
//! ```

pub mod autodiff;
pub mod block;
mod block_chain;
mod builder;
mod compiler_recompute;
mod eight_bit;
#[doc(hidden)]
pub mod examples;
mod fuse_attention;
mod graph;
mod ids;
pub mod json;
mod microbatch;
mod operator;
pub mod ops;
mod printable;
mod recompute_policy;
mod region;
mod remat;
mod repeated_blocks;
mod rule;
pub mod soap;
pub mod text;
mod train;
mod types;
mod updates_last;
pub mod verify;
mod work;
mod workload;

pub use autodiff::GradContext;
pub use block_chain::{BlockChain, ChainError, ChainSegment};
pub use builder::{BuildError, GraphBuilder};
pub use compiler_recompute::compiler_recompute;
pub use fuse_attention::{AttentionFusion, fuse_attention};
pub use graph::{
    Carry, Consumers, Graph, Init, Layer, Node, Phase, Role, SlicedTensor, Tensor, WeightGradient,
};
pub use ids::{LayerId, OpId, TensorId};
pub use json::ReadError;
pub use microbatch::{MicroBatchError, MicroBatched, micro_batch_counts, microbatch};
pub use operator::{OpError, Operator, UPDATE_CHUNK};
pub use ops::Op;
pub use printable::printable;
pub use recompute_policy::RecomputePolicy;
pub use region::{Block, Region};
pub use remat::{RematError, recomputed_ops, remat, remat_whole};
pub use repeated_blocks::block_positions;
pub use rule::{DimMap, Factor, FactorIndex, Reach, Reduction, Rule, TensorMap, Window, dim_name};
pub use soap::{FactorKind, batch_dims, factor_kinds};
pub use text::TextError;
pub use train::{GradientPrecision, MASTER_SUFFIX, Optimizer, train, train_mixed};
pub use types::{DType, Dims, MAX_ELEMENTS, MAX_RANK, Real, Shape, TensorType};
pub use updates_last::updates_last;
pub use work::StepSize;
pub use workload::{
    AttentionPass, ConvolutionPass, Filter3x3, Gemm, RooflineKind, Workload, WorkloadClass, WorkloadSizes,
};
