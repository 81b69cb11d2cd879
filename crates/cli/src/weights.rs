//! The initial weights of a run: from the model's file, and seeded where the file has none.

use serde::Serialize;
use shardwright_graph::{DType, Graph, Role, TensorId, TensorType};
use shardwright_onnx::{Literal, Numbers};
use shardwright_request::Inputs;
use shardwright_runtime::{Data, HostTensor};

/// The initial weights of a run.
pub struct Weights {
    /// Weights and constants with known values, in the order of the graph's tensors.
    pub given: Vec<(TensorId, HostTensor)>,
    /// How many weights come from the file.
    pub origin: Origin,
}

/// Numbers of a model's weights by their origin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Origin {
    /// Weights from the model's file, or files beside it.
    pub from_file: usize,
    /// Weights drawn from the seed, since the file lacks them.
    pub seeded: usize,
}

impl Weights {
    /// Reads the weights of the model's file; all are seeded where there is no file.
    pub fn of(inputs: &Inputs) -> anyhow::Result<Self> {
        let stored = inputs.stored.as_ref().map(|stored| stored.load()).transpose()?.unwrap_or_default();
        let graph = &inputs.graph;
        let given: Vec<_> =
            stored.into_iter().map(|(t, literal)| (t, tensor(literal, &graph.tensor(t).ty))).collect();
        let origin = Origin::of(graph, &given);
        Ok(Self { given, origin })
    }
}

impl Origin {
    fn of(graph: &Graph, given: &[(TensorId, HostTensor)]) -> Self {
        let is_weight = |(t, _): &&(TensorId, HostTensor)| graph.tensor(*t).role == Role::Parameter;
        let from_file = given.iter().filter(is_weight).count();
        Self { from_file, seeded: graph.parameters().count() - from_file }
    }
}

/// A literal as a tensor of this type, which has as many elements.
fn tensor(literal: Literal, ty: &TensorType) -> HostTensor {
    let data = match (ty.dtype, literal.numbers) {
        (DType::I64, Numbers::Ints(whole)) => Data::I64(whole),
        (dtype, Numbers::Ints(whole)) => Data::of_reals(dtype, whole.into_iter().map(|x| x as f64).collect()),
        (dtype, Numbers::Reals(reals)) => Data::of_reals(dtype, reals),
    };
    HostTensor::new(ty.shape.clone(), data)
}
