//! The two derivatives of a convolution: by its input (also known as transposed convolution) and by its
//! weight. Each is linear in its operands, so their own derivatives are convolution ops again.

use super::conv::{
    Conv, ConvGeometry, ConvTypes, conv_bytes, conv_roofline, input_gradient, tile_scratch_bytes,
    weight_gradient,
};
use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity, same_float},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{Dims, Shape, TensorType},
    workload::{ConvolutionPass, WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};

/// Derivative of a convolution by its input: `(dy, w) -> dx`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvGradInput {
    /// The convolution's geometry.
    pub geometry: ConvGeometry,
    /// Spatial sizes of the convolution's input: a stride leaves them open.
    pub input: Dims,
}

static CONV_GRAD_INPUT: WorkloadClass = WorkloadClass {
    name: "conv_grad_input",
    fallback: None,
    roofline: |sizes| conv_roofline(ConvolutionPass::InputGradient, sizes),
    bytes: conv_bytes,
};

impl ConvGradInput {
    fn types(&self, inputs: &[TensorType]) -> Result<ConvTypes, OpError> {
        let (dy, w) = (&inputs[0].shape, &inputs[1].shape);
        require!(dy.rank() >= 3 && w.rank() >= 3, "{dy} and {w} have no spatial dimensions");
        let channels = w[1].checked_mul(self.geometry.groups);
        let channels = channels.ok_or_else(|| OpError::new("absurdly many input channels"))?;
        let x: Shape = [dy[0], channels].into_iter().chain(self.input.iter().copied()).collect();
        x.check().map_err(OpError::new)?;
        matching(ConvTypes::infer(&self.geometry, &x, w)?, dy)
    }
}

/// Refuses a gradient that does not have the shape of the convolution's output.
fn matching(types: ConvTypes, dy: &Shape) -> Result<ConvTypes, OpError> {
    require!(types.y == *dy, "the convolution's output is {}, its gradient {dy}", types.y);
    Ok(types)
}

impl Operator for ConvGradInput {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        same_float(inputs)?;
        Ok(vec![TensorType::new(inputs[0].dtype, self.types(inputs)?.x)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(types) = accepted(self.types(inputs)) else { return Rule::replicated(inputs, outputs) };
        types.rule(self.geometry.groups, ConvolutionPass::InputGradient)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(gx) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let (dy, w) = (cx.input(0), cx.input(1));
        let conv = Conv { geometry: self.geometry.clone() };
        Ok(vec![
            if cx.wants(0) { Some(cx.emit(conv, &[gx, w])?) } else { None },
            if cx.wants(1) { Some(weight_gradient(cx, &self.geometry, gx, dy, w)?) } else { None },
        ])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        accepted(self.types(inputs)).map_or(0, |t| t.flops())
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        accepted(self.types(inputs)).map(|types| (&CONV_GRAD_INPUT, types.workload(self.geometry.groups)))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&CONV_GRAD_INPUT]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        tile_scratch_bytes(self.geometry.groups, [&outputs[0], &inputs[1], &inputs[0]])
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let Some(types) = accepted(self.types(region.inputs)) else { return self.clone().into() };
        let input = Dims::from_slice(&region.output_shape(0)[2..]);
        ConvGradInput { geometry: types.local(&self.geometry, region, ConvolutionPass::InputGradient), input }
            .into()
    }
}

/// Derivative of a convolution by its weight: `(x, dy) -> dw`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvGradWeight {
    /// The convolution's geometry.
    pub geometry: ConvGeometry,
    /// Spatial sizes of the weight: a stride leaves them open.
    pub kernel: Dims,
}

static CONV_GRAD_WEIGHT: WorkloadClass = WorkloadClass {
    name: "conv_grad_weight",
    fallback: None,
    roofline: |sizes| conv_roofline(ConvolutionPass::WeightGradient, sizes),
    bytes: conv_bytes,
};

impl ConvGradWeight {
    fn types(&self, inputs: &[TensorType]) -> Result<ConvTypes, OpError> {
        let (x, dy) = (&inputs[0].shape, &inputs[1].shape);
        require!(x.rank() >= 3 && dy.rank() >= 3, "{x} and {dy} have no spatial dimensions");
        require!(self.geometry.groups > 0, "there must be at least one group");
        let channels = [dy[1], x[1] / self.geometry.groups];
        let w: Shape = channels.into_iter().chain(self.kernel.iter().copied()).collect();
        w.check().map_err(OpError::new)?;
        matching(ConvTypes::infer(&self.geometry, x, &w)?, dy)
    }
}

impl Operator for ConvGradWeight {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        same_float(inputs)?;
        Ok(vec![TensorType::new(inputs[0].dtype, self.types(inputs)?.w)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(types) = accepted(self.types(inputs)) else { return Rule::replicated(inputs, outputs) };
        types.rule(self.geometry.groups, ConvolutionPass::WeightGradient)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(gw) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let (x, dy) = (cx.input(0), cx.input(1));
        let conv = Conv { geometry: self.geometry.clone() };
        Ok(vec![
            if cx.wants(0) { Some(input_gradient(cx, &self.geometry, dy, gw, x)?) } else { None },
            if cx.wants(1) { Some(cx.emit(conv, &[x, gw])?) } else { None },
        ])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        accepted(self.types(inputs)).map_or(0, |t| t.flops())
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        accepted(self.types(inputs)).map(|types| (&CONV_GRAD_WEIGHT, types.workload(self.geometry.groups)))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&CONV_GRAD_WEIGHT]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        tile_scratch_bytes(self.geometry.groups, [&inputs[0], &outputs[0], &inputs[1]])
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let Some(types) = accepted(self.types(region.inputs)) else { return self.clone().into() };
        let kernel = self.kernel.clone();
        ConvGradWeight {
            geometry: types.local(&self.geometry, region, ConvolutionPass::WeightGradient),
            kernel,
        }
        .into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        ops::conv::examples::{convolution, same_conv},
    };
    use smallvec::smallvec;

    impl Examples for ConvGradInput {
        fn golden() -> Golden {
            Golden::new(
                ConvGradInput { geometry: same_conv(), input: smallvec![12, 12] },
                &["f32[8,6,12,12]", "f32[6,3,3,3]"],
                "([n, o, h<3*1-1, w<3*1-1], [o, c, kh, kw])->([n, c, h, w]) {n=8, o=6, c=3, h=12, w=12, kh=3, kw=3} reduction={o} whole={kh, kw}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, _, input, [_, w, y]) = convolution(rng);
            Case::new(ConvGradInput { geometry, input }, vec![f64s(y), f64s(w)])
        }
    }

    impl Examples for ConvGradWeight {
        fn golden() -> Golden {
            Golden::new(
                ConvGradWeight { geometry: same_conv(), kernel: smallvec![3, 3] },
                &["f32[8,3,12,12]", "f32[8,6,12,12]"],
                "([n, c, h>3*1-1, w>3*1-1], [n, o, h, w])->([o, c, kh, kw]) {n=8, o=6, c=3, h=12, w=12, kh=3, kw=3} reduction={n, h, w} whole={kh, kw}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (geometry, kernel, _, [x, _, y]) = convolution(rng);
            Case::new(ConvGradWeight { geometry, kernel }, vec![f64s(x), f64s(y)])
        }
    }
}
