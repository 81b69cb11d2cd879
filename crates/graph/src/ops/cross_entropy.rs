//! Cross-entropy from logits, in a form whose class dimension (the last) can be split.
//!
//! A softmax needs its dimension whole. Here the row maximum `m` ([`crate::ops::Reduce::max`]) and the sum
//! of exponentials `s` ([`SumExp`]) are separate reductions. A split over classes then costs an all-reduce of one number
//! per row each instead of an all-gather of the logits.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements, row_scratch_bytes, same_float},
    ops::{
        BinaryFn, Op, Unary, UnaryFn,
        reduce::{factors_of, other_axes},
    },
    region::Region,
    require,
    rule::{Rule, TensorMap, dim_name},
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// `s = sum(exp(x - m))` along the last dimension of `x`; `m` has one number per row.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumExp {}

/// `loss = ln(s) + m - logits[label]` per row, from logits, labels, row maxima `m` and their [`SumExp`] `s`.
///
/// A part of a split holds the classes from `base` on. Rows whose label another part holds give zero, so that the parts
/// add up. The gradient goes to the logits alone and accounts for `m` and `s`, which must be the statistics of these
/// logits.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropy {
    /// The first class that the logits hold.
    pub base: u64,
    /// How many classes there are in all.
    pub classes: u64,
}

/// `dlogits = (exp(logits - m) / s - onehot(label)) * dloss`, from logits, labels, `m`, `s` and `dloss`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropyGrad {
    /// The first class that the logits hold.
    pub base: u64,
    /// How many classes there are in all.
    pub classes: u64,
}

/// The type of a tensor with one number per row of `x`.
fn per_row(x: &TensorType) -> Result<TensorType, OpError> {
    require!(x.rank() > 0, "needs a class dimension, got {x}");
    Ok(TensorType::new(x.dtype, x.shape.without(&[x.rank() - 1])))
}

fn require_rows(what: &str, rows: &TensorType, ty: &TensorType) -> Result<(), OpError> {
    require!(ty == rows, "{what} must be {rows}, got {ty}");
    Ok(())
}

/// Checks classes, logits, labels, maxima and sums.
fn check_loss(base: u64, classes: u64, inputs: &[TensorType]) -> Result<TensorType, OpError> {
    let (logits, labels) = (&inputs[0], &inputs[1]);
    same_float(&inputs[..1])?;
    let rows = per_row(logits)?;
    let held = logits.shape[logits.rank() - 1];
    require!(
        base.checked_add(held).is_some_and(|end| end <= classes) && classes < 1 << 48,
        "{held} classes from {base} on are not among {classes}"
    );
    require!(labels.dtype.is_int(), "labels must be whole numbers, got {}", labels.dtype);
    require!(labels.shape == rows.shape, "labels must have shape {}, got {labels}", rows.shape);
    require_rows("the row maxima", &rows, &inputs[2])?;
    require_rows("the sums of exponentials", &rows, &inputs[3])?;
    Ok(rows)
}

/// The rule of an op on logits (the first operand) and operands and results with one element per row or
/// with the logits' shape.
fn rule_of(inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
    let rank = inputs[0].rank();
    let mut rule = Rule::default();
    for (i, &size) in inputs[0].shape.iter().enumerate() {
        rule.factor(dim_name(i), size);
    }
    let map = |t: &TensorType| -> TensorMap {
        let axes = other_axes(rank, &[]);
        factors_of(if t.rank() == rank { &axes } else { &axes[..rank - 1] })
    };
    rule.inputs = inputs.iter().map(map).collect();
    rule.outputs = outputs.iter().map(map).collect();
    rule
}

impl Operator for SumExp {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 2)?;
        same_float(inputs)?;
        let rows = per_row(&inputs[0])?;
        require_rows("the row maxima", &rows, &inputs[1])?;
        Ok(vec![rows])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        rule_of(inputs, outputs)
    }

    /// Not used by [`CrossEntropy`], whose own gradient accounts for the sum; here for other users.
    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(ds) = cx.grad(0) else { return Ok(vec![None; 2]) };
        let (x, m, s) = (cx.input(0), cx.input(1), cx.output(0));
        let shape = cx.ty(x).shape.clone();
        let rows = other_axes(shape.rank() - 1, &[]);
        let mut grads = vec![None; 2];
        if cx.wants(0) {
            let m = cx.broadcast(m, shape.clone(), rows.clone())?;
            let difference = cx.binary(BinaryFn::Sub, x, m)?;
            let exp = cx.emit(Unary { f: UnaryFn::Exp }, &[difference])?;
            let ds = cx.broadcast(ds, shape, rows)?;
            grads[0] = Some(cx.binary(BinaryFn::Mul, exp, ds)?);
        }
        if cx.wants(1) {
            let product = cx.binary(BinaryFn::Mul, s, ds)?;
            grads[1] = Some(cx.emit(Unary { f: UnaryFn::Neg }, &[product])?);
        }
        Ok(grads)
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0]) * 12
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

impl CrossEntropy {
    /// The loss over whole rows of logits of this type. Logits without dimensions have no classes; inference refuses
    /// them.
    pub fn over(logits: &TensorType) -> Self {
        Self { base: 0, classes: logits.shape.last().copied().unwrap_or(0) }
    }
}

/// The first class of a part of a split.
fn local_base(base: u64, region: &Region<'_>) -> u64 {
    let logits = region.input_block(0);
    debug_assert!(!logits.is_empty(), "logits have a class dimension");
    base + logits[logits.len() - 1].start
}

impl Operator for CrossEntropy {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 4)?;
        Ok(vec![check_loss(self.base, self.classes, inputs)?])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        rule_of(inputs, outputs)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let mut grads = vec![None; 4];
        if let Some(dloss) = cx.grad(0)
            && cx.wants(0)
        {
            let op = CrossEntropyGrad { base: self.base, classes: self.classes };
            let inputs = [cx.input(0), cx.input(1), cx.input(2), cx.input(3), dloss];
            grads[0] = Some(cx.emit(op, &inputs)?);
        }
        Ok(grads)
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0]) * 12
    }

    /// One logit per row is read, not all of them.
    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let rest = inputs[1..].iter().chain(outputs).fold(0u64, |n, t| n.saturating_add(t.bytes()));
        rest.saturating_add(outputs[0].bytes())
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        row_scratch_bytes(inputs)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Self { base: local_base(self.base, region), classes: self.classes }.into()
    }
}

impl Operator for CrossEntropyGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 5)?;
        let rows = check_loss(self.base, self.classes, inputs)?;
        require_rows("the gradient of the loss", &rows, &inputs[4])?;
        Ok(vec![inputs[0].clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        rule_of(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0]) * 12
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        row_scratch_bytes(inputs)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Self { base: local_base(self.base, region), classes: self.classes }.into()
    }
}

mod examples {
    use super::*;
    use crate::{
        examples::{Case, CaseInput, Examples, Golden, NORMAL, Rng, f64s, positive},
        graph::Init,
        types::DType,
    };

    /// Logits, labels, maxima and sums; some logits hold a part of the classes.
    fn loss_inputs(rng: &mut Rng) -> (u64, u64, Vec<CaseInput>) {
        let shape = rng.shape(1, 3);
        let (rows, held) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
        let (base, after) = if rng.flip() { (0, 0) } else { (rng.between(0, 3), rng.between(0, 3)) };
        let classes = base + held + after;
        let labels = TensorType::new(rng.pick(&[DType::I32, DType::I64]), rows);
        let inputs = vec![f64s(&shape[..]), (labels, Init::Below(classes)), f64s(rows), positive(rows)];
        (base, classes, inputs)
    }

    impl Examples for CrossEntropy {
        /// Its gradient accounts for that of its statistics: tested in whole layers.
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                CrossEntropy { base: 0, classes: 10 },
                &["f32[8,10]", "i32[8]", "f32[8]", "f32[8]"],
                "([d0, d1], [d0], [d0], [d0])->([d0]) {d0=8, d1=10} reduction={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (base, classes, inputs) = loss_inputs(rng);
            Case::new(CrossEntropy { base, classes }, inputs)
        }
    }

    impl Examples for CrossEntropyGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                CrossEntropyGrad { base: 0, classes: 10 },
                &["f32[8,10]", "i32[8]", "f32[8]", "f32[8]", "f32[8]"],
                "([d0, d1], [d0], [d0], [d0], [d0])->([d0, d1]) {d0=8, d1=10}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (base, classes, mut inputs) = loss_inputs(rng);
            inputs.push((inputs[2].0.clone(), NORMAL));
            Case::new(CrossEntropyGrad { base, classes }, inputs)
        }
    }

    impl Examples for SumExp {
        fn golden() -> Golden {
            Golden::new(
                SumExp {},
                &["f32[8,10]", "f32[8]"],
                "([d0, d1], [d0])->([d0]) {d0=8, d1=10} reduction={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 3);
            Case::new(SumExp {}, vec![f64s(&shape[..]), f64s(&shape[..shape.len() - 1])])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    fn types() -> [TensorType; 4] {
        let rows = TensorType::new(DType::F32, [8]);
        [TensorType::new(DType::F32, [8, 10]), TensorType::new(DType::I32, [8]), rows.clone(), rows]
    }

    #[test]
    fn classes_are_a_reduction_of_the_loss_and_a_dimension_of_its_gradient() {
        let inputs = types();
        let op = CrossEntropy::over(&inputs[0]);
        let outputs = op.infer(&inputs).unwrap();
        let rule = op.rule(&inputs, &outputs);
        assert_eq!(rule.check(&inputs, &outputs), Ok(()));
        assert_eq!(rule.to_string(), "([d0, d1], [d0], [d0], [d0])->([d0]) {d0=8, d1=10} reduction={d1}");
        let mut inputs = inputs.to_vec();
        inputs.push(outputs[0].clone());
        let op = CrossEntropyGrad { base: 0, classes: 10 };
        let outputs = op.infer(&inputs).unwrap();
        let rule = op.rule(&inputs, &outputs);
        assert_eq!(rule.check(&inputs, &outputs), Ok(()));
        assert_eq!(rule.to_string(), "([d0, d1], [d0], [d0], [d0], [d0])->([d0, d1]) {d0=8, d1=10}");
    }

    #[test]
    fn absurd_attributes_are_refused() {
        let inputs = types();
        for (base, classes) in [(0, 9), (1, 10), (u64::MAX, 10), (u64::MAX - 5, u64::MAX), (0, u64::MAX)] {
            assert!(CrossEntropy { base, classes }.infer(&inputs).is_err(), "{base} {classes}");
        }
        assert!(CrossEntropy { base: 90, classes: 100 }.infer(&inputs).is_ok());
        let scalar = TensorType::new(DType::F32, []);
        assert!(SumExp {}.infer(&[scalar.clone(), scalar]).is_err());
        let mut float_labels = types();
        float_labels[1] = float_labels[2].clone();
        assert!(CrossEntropy { base: 0, classes: 10 }.infer(&float_labels).is_err());
    }
}
