//! LSTM over time: the recurrent part. The input projection is a separate contraction.
//!
//! Per step, with the gates i, f, g, o in this order and `gx` holding the projected input and bias:
//! `a = gx[t] + h·u`, `i, f, o = sigmoid(a)`, `g = tanh(a)`, `c = f*c + i*g`, `h = o*tanh(c)`.
//!
//! Time is sequential, so `t` stays whole, and so does the hidden dimension over several steps, because each
//! step reads all of the last. A single step may be split by `h`, the hidden units that are computed; `k`
//! are the hidden units that are read.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity, same_float, scratch_bytes},
    ops::Op,
    region::Region,
    require,
    rule::{FactorIndex, Rule, TensorMap},
    types::TensorType,
    workload::{Gemm, RooflineKind, Workload, WorkloadClass, WorkloadSizes},
};
use serde::{Deserialize, Serialize};

/// Inputs: `gx[t,b,4,h]`, `u[k,4,h]`, `h0[b,k]`, `c0[b,h]`. Outputs: hidden state `y[t,b,h]`, cell state
/// `c[t,b,h]`, gates after activation `[t,b,4,h]` (kept for the gradient; none flows into them).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lstm {}

/// Gradient of [`Lstm`].
///
/// Inputs: `u`, `h0`, `c0`, `y`, `c`, gates, then the gradients of `y` and `c`, as far as given.
/// Outputs: gradients of `gx`, `u`, `h0`, `c0`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LstmGrad {
    /// Whether a gradient of `y` is given.
    pub dy: bool,
    /// Whether a gradient of `c` is given.
    pub dc: bool,
}

/// Time steps, batch, hidden units read and computed.
struct Sizes {
    t: u64,
    b: u64,
    k: u64,
    h: u64,
}

impl Sizes {
    /// Takes the sizes from the gates and the weights; refuses impossible sizes.
    fn of(gates: &TensorType, u: &TensorType) -> Result<Self, OpError> {
        let (&[t, b, 4, h], &[k, 4, width]) = (&gates.shape[..], &u.shape[..]) else {
            return Err(OpError::new(format!("needs gates [t,b,4,h] and weights [k,4,h], got {gates}, {u}")));
        };
        require!(width == h, "gates {gates} and weights {u} differ in their last dimension");
        require!(t == 1 || k == h, "over several steps, weights {u} must read as many units as they give");
        let work = t.checked_mul(b).and_then(|n| n.checked_mul(u.shape.elements()));
        require!(work.is_some_and(|n| n < 1 << 60), "absurdly many operations");
        Ok(Self { t, b, k, h })
    }

    /// Steps, batch, units of the state that is read and of the one that is made.
    fn workload(&self) -> WorkloadSizes {
        WorkloadSizes::from_slice(&[self.t, self.b, self.k, self.h])
    }

    fn rule(&self) -> (Rule, Loops) {
        let mut rule = Rule::default();
        let t = rule.whole_factor("t", self.t);
        let b = rule.factor("b", self.b);
        let gate = rule.whole_factor("gate", 4);
        let h = if self.t == 1 { rule.factor("h", self.h) } else { rule.whole_factor("h", self.h) };
        let k = rule.whole_factor("k", self.k);
        (rule, Loops { t, b, gate, h, k })
    }
}

/// The recurrent products of all steps. Sizes: those of [`Sizes::workload`].
static LSTM: WorkloadClass =
    WorkloadClass { name: "lstm", fallback: None, roofline: |sizes| roofline(1, sizes), bytes: moved_bytes };
/// The same backwards: a second product per step gives the gradient of the weights.
static LSTM_GRAD: WorkloadClass =
    WorkloadClass { name: "lstm_grad", roofline: |sizes| roofline(2, sizes), ..LSTM };

/// Per step, `products` times the hidden state by the weights of all four gates.
fn roofline(products: u64, sizes: &[u64]) -> Option<RooflineKind> {
    let &[steps, m, k, hidden] = sizes else { return None };
    Some(RooflineKind::Product(Gemm {
        steps,
        batch: products,
        m,
        n: hidden.saturating_mul(4),
        k,
        align: Gemm::ALIGNED,
    }))
}

/// The weights stay in the cache, so that the bytes are proportional to the states of all steps.
fn moved_bytes(workload: &Workload, sizes: &[u64]) -> u64 {
    let states = |sizes: &[u64]| {
        [0, 1, 3].iter().filter_map(|&i| sizes.get(i)).fold(1u64, |n, &s| n.saturating_mul(s)).max(1)
    };
    (workload.bytes as f64 * (states(sizes) as f64 / states(&workload.sizes) as f64)) as u64
}

fn expect(what: &str, ty: &TensorType, shape: &[u64]) -> Result<(), OpError> {
    require!(ty.shape[..] == *shape, "{what} must have the shape {shape:?}, got {ty}");
    Ok(())
}

/// The factors of both ops.
struct Loops {
    t: FactorIndex,
    b: FactorIndex,
    gate: FactorIndex,
    h: FactorIndex,
    k: FactorIndex,
}

impl Loops {
    fn weights(&self) -> TensorMap {
        TensorMap::of(&[self.k, self.gate, self.h])
    }

    fn gates(&self) -> TensorMap {
        TensorMap::of(&[self.t, self.b, self.gate, self.h])
    }

    fn states(&self) -> TensorMap {
        TensorMap::of(&[self.t, self.b, self.h])
    }

    fn first_hidden(&self) -> TensorMap {
        TensorMap::of(&[self.b, self.k])
    }

    fn first_cell(&self) -> TensorMap {
        TensorMap::of(&[self.b, self.h])
    }
}

impl Operator for Lstm {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 4)?;
        same_float(inputs)?;
        let Sizes { t, b, k, h } = Sizes::of(&inputs[0], &inputs[1])?;
        expect("the first hidden state", &inputs[2], &[b, k])?;
        expect("the first cell state", &inputs[3], &[b, h])?;
        let states = TensorType::new(inputs[0].dtype, [t, b, h]);
        Ok(vec![states.clone(), states, inputs[0].clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(sizes) = accepted(Sizes::of(&inputs[0], &inputs[1])) else {
            return Rule::replicated(inputs, outputs);
        };
        let (mut rule, loops) = sizes.rule();
        rule.inputs.extend([loops.gates(), loops.weights(), loops.first_hidden(), loops.first_cell()]);
        rule.outputs.extend([loops.states(), loops.states(), loops.gates()]);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        require!(cx.grad(2).is_none(), "the gates are kept for the gradient only; none flows into them");
        let back = LstmGrad { dy: cx.grad(0).is_some(), dc: cx.grad(1).is_some() };
        let mut inputs = vec![cx.input(1), cx.input(2), cx.input(3)];
        inputs.extend([cx.output(0), cx.output(1), cx.output(2)]);
        inputs.extend(cx.grad(0));
        inputs.extend(cx.grad(1));
        Ok(cx.add(back, &inputs)?.into_iter().map(Some).collect())
    }

    /// The products with `u`, and about 30 for the gates and states of each unit.
    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let products = steps(&inputs[0]).saturating_mul(inputs[1].shape.elements()).saturating_mul(2);
        products.saturating_add(outputs[0].shape.elements().saturating_mul(30))
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        accepted(Sizes::of(&inputs[0], &inputs[1])).map(|s| (&LSTM, s.workload()))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&LSTM]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // The transposed gates of a step.
        inputs[3].shape.elements().saturating_mul(4 * scratch_bytes(&inputs[3]))
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

/// Steps times batch: how often the weights are used.
fn steps(gates: &TensorType) -> u64 {
    gates.shape[0].saturating_mul(gates.shape[1])
}

impl Operator for LstmGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(self.dy || self.dc, "needs the gradient of y, of c or both");
        arity(inputs, 6 + usize::from(self.dy) + usize::from(self.dc))?;
        same_float(inputs)?;
        let [u, h0, c0, gates] = [&inputs[0], &inputs[1], &inputs[2], &inputs[5]];
        let Sizes { t, b, k, h } = Sizes::of(gates, u)?;
        expect("the first hidden state", h0, &[b, k])?;
        expect("the first cell state", c0, &[b, h])?;
        for x in inputs[3..5].iter().chain(&inputs[6..]) {
            expect("a state or its gradient", x, &[t, b, h])?;
        }
        Ok(vec![gates.clone(), u.clone(), h0.clone(), c0.clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(sizes) = accepted(Sizes::of(&inputs[5], &inputs[0])) else {
            return Rule::replicated(inputs, outputs);
        };
        let (mut rule, loops) = sizes.rule();
        rule.inputs.extend([loops.weights(), loops.first_hidden(), loops.first_cell()]);
        rule.inputs.extend([loops.states(), loops.states(), loops.gates()]);
        rule.inputs.extend(inputs[6..].iter().map(|_| loops.states()));
        rule.outputs.extend([loops.gates(), loops.weights(), loops.first_hidden(), loops.first_cell()]);
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("second derivatives are not supported"))
    }

    /// Two products for the forward op's one, and about 40 for the gates and states of each unit.
    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        let products = steps(&inputs[5]).saturating_mul(inputs[0].shape.elements()).saturating_mul(4);
        products.saturating_add(inputs[3].shape.elements().saturating_mul(40))
    }

    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        accepted(Sizes::of(&inputs[5], &inputs[0])).map(|s| (&LSTM_GRAD, s.workload()))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&LSTM_GRAD]
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // The transposed gradient of a hidden state.
        inputs[1].shape.elements().saturating_mul(scratch_bytes(&inputs[1]))
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Lstm {
        const AUXILIARY_OUTPUTS: &[usize] = &[2];

        fn golden() -> Golden {
            Golden::new(
                Lstm {},
                &["f32[5,8,4,6]", "f32[6,4,6]", "f32[8,6]", "f32[8,6]"],
                "([t, b, gate, h], [k, gate, h], [b, k], [b, h])->([t, b, h], [t, b, h], [t, b, gate, h]) {t=5, b=8, gate=4, h=6, k=6} whole={t, gate, h, k}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (t, b, h) = (rng.pick(&[1, 1, 3]), rng.size(), rng.size());
            Case::new(Lstm {}, vec![f64s([t, b, 4, h]), f64s([h, 4, h]), f64s([b, h]), f64s([b, h])])
        }
    }

    impl Examples for LstmGrad {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                LstmGrad { dy: true, dc: false },
                &[
                    "f32[6,4,6]",
                    "f32[8,6]",
                    "f32[8,6]",
                    "f32[5,8,6]",
                    "f32[5,8,6]",
                    "f32[5,8,4,6]",
                    "f32[5,8,6]",
                ],
                "([k, gate, h], [b, k], [b, h], [t, b, h], [t, b, h], [t, b, gate, h], [t, b, h])->([t, b, gate, h], [k, gate, h], [b, k], [b, h]) {t=5, b=8, gate=4, h=6, k=6} reduction={b} whole={t, gate, h, k}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let (t, b, h) = (rng.pick(&[1, 1, 3]), rng.size(), rng.size());
            let (dy, dc) = rng.pick(&[(true, false), (false, true), (true, true)]);
            let mut inputs = vec![f64s([h, 4, h]), f64s([b, h]), f64s([b, h])];
            inputs.extend([f64s([t, b, h]), f64s([t, b, h]), f64s([t, b, 4, h])]);
            inputs.extend((0..usize::from(dy) + usize::from(dc)).map(|_| f64s([t, b, h])));
            Case::new(LstmGrad { dy, dc }, inputs)
        }
    }
}
