//! Comparisons, and choosing between two tensors by a truth value; both broadcast like NumPy.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements},
    ops::{Op, binary::broadcast_shape},
    region::Region,
    require,
    rule::Rule,
    types::{DType, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// Which comparison.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompareFn {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

/// `z = x f y`, as truth values.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compare {
    /// Which comparison.
    pub f: CompareFn,
}

impl Operator for Compare {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        let (a, b) = (&inputs[0], &inputs[1]);
        require!(a.dtype == b.dtype, "element types differ: {} and {}", a.dtype, b.dtype);
        Ok(vec![TensorType::new(DType::Bool, broadcast_shape(&a.shape, &b.shape)?)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![None; 2])
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

/// `z = if condition { x } else { y }`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Select {}

impl Operator for Select {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 3)?;
        let (c, a, b) = (&inputs[0], &inputs[1], &inputs[2]);
        require!(c.dtype == DType::Bool, "the condition must be truth values, got {}", c.dtype);
        require!(a.dtype == b.dtype, "element types differ: {} and {}", a.dtype, b.dtype);
        let shape = broadcast_shape(&broadcast_shape(&c.shape, &a.shape)?, &b.shape)?;
        Ok(vec![TensorType::new(a.dtype, shape)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dz) = cx.grad(0) else { return Ok(vec![None; 3]) };
        let condition = cx.input(0);
        let mut grads = vec![None; 3];
        let dtype = cx.ty(dz).dtype;
        for (i, grad) in grads.iter_mut().enumerate().skip(1) {
            if cx.wants(i) {
                let zero = cx.zeros(TensorType::new(dtype, Shape::scalar()))?;
                let branches = if i == 1 { [condition, dz, zero] } else { [condition, zero, dz] };
                let full = cx.emit(Select {}, &branches)?;
                let shape = cx.input_type(i).shape.clone();
                *grad = Some(cx.unbroadcast(full, &shape)?);
            }
        }
        Ok(grads)
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, bools, f64s},
        graph::Init,
    };

    impl Examples for Compare {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Compare { f: CompareFn::Lt },
                &["f32[8,6]", "f32[1,6]"],
                "([d0, d1], [_, d1])->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            use CompareFn::*;
            let shape = rng.shape(0, 3);
            let other = rng.broadcastable(&shape);
            let whole = |s: &[u64]| (TensorType::new(DType::I64, s), Init::Below(3));
            Case::new(Compare { f: rng.pick(&[Eq, Ne, Lt, Le, Gt, Ge]) }, vec![whole(&shape), whole(&other)])
        }
    }

    impl Examples for Select {
        fn golden() -> Golden {
            Golden::new(
                Select {},
                &["bool[8,6]", "f32[8,6]", "f32[]"],
                "([d0, d1], [d0, d1], [])->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 3);
            let mut shapes = [shape.clone(), rng.broadcastable(&shape), rng.broadcastable(&shape)];
            shapes.rotate_left(rng.between(0, 2) as usize);
            Case::new(Select {}, vec![bools(&shapes[0][..]), f64s(&shapes[1][..]), f64s(&shapes[2][..])])
        }
    }
}
