//! Reshape: the same elements in the same order, with other dimensions.
//!
//! The rule finds the factors that input and output dimensions have in common: `[b, s, 768] -> [b, s, 12, 64]`
//! has factors `b`, `s`, 12 and 64. Both shapes are cut into the smallest groups of equal product; within a
//! group, common factors are taken from the major side as long as one divides the other.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, FactorIndex, Rule, TensorMap, dim_name},
    types::{Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// The same elements in another shape.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reshape {
    /// The new shape.
    pub shape: Shape,
}

/// One side of a group of dimensions, with the factors found so far.
struct Side<'a> {
    sizes: &'a [u64],
    maps: &'a mut [DimMap],
    /// The dimension that the next factor belongs to.
    dim: usize,
    /// The size of that dimension over its factors so far.
    rest: u64,
}

impl<'a> Side<'a> {
    fn new(sizes: &'a [u64], maps: &'a mut [DimMap]) -> Self {
        debug_assert!(!sizes.is_empty(), "a group has dimensions on both sides");
        let mut side = Self { sizes, maps, dim: 0, rest: sizes[0] };
        side.advance();
        side
    }

    fn advance(&mut self) {
        while self.rest == 1 && self.dim + 1 < self.sizes.len() {
            self.dim += 1;
            self.rest = self.sizes[self.dim];
        }
    }

    /// Whether the next factor leads its dimension.
    fn leads(&self) -> bool {
        self.maps[self.dim].factors.is_empty()
    }

    fn take(&mut self, factor: FactorIndex, size: u64) {
        self.maps[self.dim].factors.push(factor);
        self.rest /= size;
        self.advance();
    }

    /// Covers the rest of each dimension by a factor that must stay whole.
    fn close(mut self, rule: &mut Rule) {
        while self.rest > 1 {
            let factor = rule.whole_factor(dim_name(rule.factors.len()), self.rest);
            self.take(factor, self.rest);
        }
    }
}

/// Finds the common factors of one group of dimensions with equal product, from the major side.
fn factorise(rule: &mut Rule, mut a: Side<'_>, mut b: Side<'_>) {
    loop {
        let size = gcd(a.rest, b.rest);
        if size == 1 {
            break;
        }
        // A split of a factor is a block of both tensors only where it leads both dimensions.
        let name = dim_name(rule.factors.len());
        let factor =
            if a.leads() && b.leads() { rule.factor(name, size) } else { rule.whole_factor(name, size) };
        let in_step = size == a.rest || size == b.rest;
        a.take(factor, size);
        b.take(factor, size);
        if !in_step {
            break;
        }
    }
    a.close(rule);
    b.close(rule);
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Operator for Reshape {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        self.shape.check().map_err(OpError::new)?;
        let x = &inputs[0];
        require!(
            x.shape.elements() == self.shape.elements(),
            "{x} does not have the elements of {}",
            self.shape
        );
        Ok(vec![TensorType::new(x.dtype, self.shape.clone())])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = Rule::default();
        let (from, to) = (&inputs[0].shape, &self.shape);
        let mut maps = [vec![DimMap::opaque(); from.rank()], vec![DimMap::opaque(); to.rank()]];
        let [from_maps, to_maps] = &mut maps;
        let (mut i, mut j) = (0, 0);
        while i < from.rank() && j < to.rank() {
            // The smallest group of dimensions with the same product on both sides.
            let (start_i, start_j) = (i, j);
            let (mut product_a, mut product_b) = (from[i], to[j]);
            (i, j) = (i + 1, j + 1);
            while product_a != product_b {
                if product_a < product_b {
                    product_a *= from[i];
                    i += 1;
                } else {
                    product_b *= to[j];
                    j += 1;
                }
            }
            factorise(
                &mut rule,
                Side::new(&from[start_i..i], &mut from_maps[start_i..i]),
                Side::new(&to[start_j..j], &mut to_maps[start_j..j]),
            );
        }
        let [from_maps, to_maps] = maps;
        rule.inputs.push(TensorMap::new(from_maps));
        rule.outputs.push(TensorMap::new(to_maps));
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let shape = cx.input_type(0).shape.clone();
        Ok(vec![Some(cx.emit(Reshape { shape }, &[dy])?)])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn is_view(&self) -> bool {
        true
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Reshape { shape: region.output_shape(0) }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Reshape {
        fn golden() -> Golden {
            Golden::new(
                Reshape { shape: [8, 12, 64].into() },
                &["f32[8,768]"],
                "([d0, d1d2])->([d0, d1, d2]) {d0=8, d1=12, d2=64} whole={d2}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 4);
            // Merge some neighbours, then split some sizes again.
            let mut merged: Vec<u64> = vec![];
            for &n in &shape {
                match merged.last_mut() {
                    Some(last) if rng.flip() => *last *= n,
                    _ => merged.push(n),
                }
            }
            let mut to = vec![];
            for n in merged {
                let divisors: Vec<u64> = (1..=n).filter(|d| n % d == 0).collect();
                let d = rng.pick(&divisors);
                if rng.flip() { to.extend([d, n / d]) } else { to.push(n) }
            }
            Case::new(Reshape { shape: Shape::new(&to) }, vec![f64s(&shape[..])])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    fn rule(from: &[u64], to: &[u64]) -> String {
        let op = Reshape { shape: Shape::new(to) };
        let inputs = [TensorType::new(DType::F32, from)];
        let outputs = op.infer(&inputs).unwrap();
        let rule = op.rule(&inputs, &outputs);
        assert_eq!(rule.check(&inputs, &outputs), Ok(()));
        rule.to_string()
    }

    #[test]
    fn merged_and_split_dimensions_share_their_factors() {
        let check = |from: &[u64], to: &[u64], expected: &str| assert_eq!(rule(from, to), expected);
        check(&[8, 768], &[8, 12, 64], "([d0, d1d2])->([d0, d1, d2]) {d0=8, d1=12, d2=64} whole={d2}");
        check(&[8, 12, 64], &[96, 64], "([d0, d1, d2])->([d0d1, d2]) {d0=8, d1=12, d2=64} whole={d1}");
        check(
            &[6, 4],
            &[4, 6],
            "([d0d1, d2])->([d0d3, d4]) {d0=2, d1=3, d2=4, d3=2, d4=6} whole={d1, d2, d3, d4}",
        );
        check(&[1, 5], &[5, 1], "([_, d0])->([d0, _]) {d0=5}");
        check(&[3, 5], &[15], "([d0, d1])->([d0d1]) {d0=3, d1=5} whole={d1}");
        check(&[1], &[], "([_])->([]) {}");
    }
}
