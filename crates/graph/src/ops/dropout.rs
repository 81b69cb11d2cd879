//! Dropout whose mask is a pure function of seed, step and global position, so that every split of the
//! tensor drops the same elements and the backward pass needs no stored mask.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements, same_float},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{Dims, Real, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// `y = x * mask / (1 - rate)`, each element of the mask being zero with probability `rate`, else one.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropout {
    /// The probability that an element is dropped: at least zero, less than one.
    pub rate: Real,
    /// Tells the masks of different ops apart.
    pub seed: u64,
    /// Where the tensor begins in the whole one (not zeros in a part of a split).
    pub origin: Dims,
    /// The shape of the whole tensor.
    pub whole: Shape,
}

impl Dropout {
    /// Dropout of a whole tensor of this shape.
    pub fn new(rate: f64, seed: u64, shape: &Shape) -> Self {
        Self { rate: Real(rate), seed, origin: Dims::from_elem(0, shape.rank()), whole: shape.clone() }
    }
}

impl Operator for Dropout {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        same_float(inputs)?;
        let (rate, x) = (self.rate.0, &inputs[0]);
        require!((0.0..1.0).contains(&rate), "rate {rate} is not at least 0 and less than 1");
        self.whole.check().map_err(OpError::new)?;
        require!(
            self.origin.len() == x.rank() && self.whole.rank() == x.rank(),
            "{x} cannot be a part of {}",
            self.whole
        );
        for (d, (&start, &size)) in self.origin.iter().zip(x.shape.iter()).enumerate() {
            let inside = start.checked_add(size).is_some_and(|end| end <= self.whole[d]);
            require!(inside, "dimension {d}: {size} elements from {start} on are not in {}", self.whole);
        }
        Ok(vec![x.clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    /// The same mask on the gradient.
    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        Ok(vec![Some(cx.emit(self.clone(), &[dy])?)])
    }

    fn flops(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        elements(&outputs[0]) * 10
    }

    fn is_random(&self) -> bool {
        true
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let origin =
            self.origin.iter().zip(region.output_block(0)).map(|(&o, part)| o + part.start).collect();
        Self { origin, ..self.clone() }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Dropout {
        fn golden() -> Golden {
            Golden::new(
                Dropout::new(0.1, 7, &[8, 6].into()),
                &["f32[8,6]"],
                "([d0, d1])->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 4);
            let mut op = Dropout::new(rng.pick(&[0.0, 0.1, 0.5, 0.9]), rng.next(), &Shape::new(&shape));
            if rng.flip() {
                // Already a part of something larger.
                for d in 0..shape.len() {
                    op.origin[d] = rng.between(0, 2);
                    op.whole.0[d] += op.origin[d] + rng.between(0, 2);
                }
            }
            Case::new(op, vec![f64s(&shape[..])])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[test]
    fn absurd_attributes_are_refused() {
        let x = [TensorType::new(DType::F32, [4, 6])];
        let shape = Shape::from([4, 6]);
        for rate in [-0.1, 1.0, 2.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(Dropout::new(rate, 1, &shape).infer(&x).is_err(), "{rate}");
        }
        assert!(Dropout::new(0.5, 1, &shape).infer(&x).is_ok());
        assert!(Dropout::new(0.5, 1, &Shape::from([4, 5])).infer(&x).is_err());
        assert!(Dropout::new(0.5, 1, &Shape::from([24])).infer(&x).is_err());
        assert!(Dropout::new(0.5, 1, &Shape::from([1 << 40, 1 << 40])).infer(&x).is_err());
        let mut far = Dropout::new(0.5, 1, &shape);
        far.origin[1] = u64::MAX;
        assert!(far.infer(&x).is_err());
    }

    #[test]
    fn a_part_knows_where_it_lies_in_the_whole() {
        let x = [TensorType::new(DType::F32, [4, 6])];
        let op = Dropout::new(0.5, 1, &x[0].shape);
        let rule = op.rule(&x, &x);
        let region = Region::whole(&rule, &x, &x).split(0, 1, 2).split(1, 2, 3);
        let Op::Dropout(local) = op.localize(&region) else { panic!("not a dropout") };
        assert_eq!(local.origin.as_slice(), [2, 4]);
        assert_eq!(local.whole, op.whole);
    }
}
