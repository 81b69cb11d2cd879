//! The weights that a run starts from: those in the model's file, and seeded ones for the rest.

use serde::Serialize;
use shardwright_frontend::onnx::{Literal, Numbers};
use shardwright_graph::{DType, Graph, Role, TensorId, TensorType};
use shardwright_request::Request;
use shardwright_runtime::{Data, Value};

/// What a run starts from.
pub struct Weights {
    /// Weights and constants whose values are known, in the order of the graph's tensors.
    pub given: Vec<(TensorId, Value)>,
    /// Where the model's weights come from.
    pub origin: Origin,
}

/// How many of a model's weights come from where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Origin {
    /// From the model's file, or files beside it.
    pub from_file: usize,
    /// Drawn by the seed, as the file does not have them.
    pub seeded: usize,
}

impl Weights {
    /// Reads what the model's file has.
    pub fn of(request: &Request) -> anyhow::Result<Self> {
        let stored = request.stored.as_ref().map(|stored| stored.load()).transpose()?.unwrap_or_default();
        let graph = &request.graph;
        let given: Vec<_> =
            stored.into_iter().map(|(t, literal)| (t, value(literal, &graph.tensor(t).ty))).collect();
        let origin = Origin::of(graph, &given);
        Ok(Self { given, origin })
    }
}

impl Origin {
    fn of(graph: &Graph, given: &[(TensorId, Value)]) -> Self {
        let is_weight = |(t, _): &&(TensorId, Value)| graph.tensor(*t).role == Role::Parameter;
        let from_file = given.iter().filter(is_weight).count();
        Self { from_file, seeded: graph.parameters().count() - from_file }
    }
}

/// Contents as a value of this type, which has as many elements.
fn value(literal: Literal, ty: &TensorType) -> Value {
    let data = match (ty.dtype, literal.numbers) {
        (DType::I64, Numbers::Ints(whole)) => Data::I64(whole),
        (dtype, Numbers::Ints(whole)) => Data::of_reals(dtype, whole.into_iter().map(|x| x as f64).collect()),
        (dtype, Numbers::Reals(reals)) => Data::of_reals(dtype, reals),
    };
    Value::new(ty.shape.clone(), data)
}
