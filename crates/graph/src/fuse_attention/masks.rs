//! Factors and masks between the product of queries and keys and the softmax.

use super::{
    constants::{Bounds, MaskLetters},
    pattern::{Dim, Matcher, Roles, role},
    rows::{DimLetters, Rows},
};
use crate::{
    ids::TensorId,
    ops::{Attention, Binary, BinaryFn, Op, Unary, UnaryFn},
};

/// Numbers up to this hide a key: its weight is zero in every precision.
const HIDDEN: f64 = -1e4;

/// A mask between product and softmax. Dimensions of size one have no role.
#[derive(Clone, Debug)]
pub(super) enum Mask {
    /// Numbers that are added.
    Bias { numbers: TensorId, dims: Vec<Option<Dim>> },
    /// The number `hidden` where the truth value `cond` equals `hides`.
    Hide { cond: TensorId, dims: Vec<Option<Dim>>, hidden: f64, hides: bool },
}

/// The way of scores from the product to the softmax.
pub(super) struct Chain {
    pub scale: f64,
    pub masks: Vec<ChainMask>,
    /// What the softmax reads.
    pub end: TensorId,
}

/// A mask on that way, with the letters of its dimensions.
pub(super) enum ChainMask {
    Bias { numbers: TensorId, letters: DimLetters },
    Hide { cond: TensorId, letters: DimLetters, hidden: f64, hides: bool },
}

impl Matcher<'_> {
    /// Follows scores through factors and masks.
    pub fn chain(&self, rows: &Rows<'_>, from: TensorId) -> Option<Chain> {
        let graph = self.constants.graph;
        let mut chain = Chain { scale: 1.0, masks: Vec::new(), end: from };
        loop {
            let &[reader] = self.consumers.of(chain.end) else { return Some(chain) };
            let node = graph.node(reader);
            let Some(&made) = node.outputs.first().filter(|t| rows.letters.contains_key(t)) else {
                return Some(chain);
            };
            let at = node.inputs.iter().position(|t| *t == chain.end)?;
            let outside = |i: usize| rows.outside.get(node.inputs.get(i)?).cloned();
            match &node.op {
                Op::Cast(_) | Op::Transpose(_) | Op::Reshape(_) => {}
                // A factor behind a mask would scale the mask too.
                Op::Unary(Unary { f: UnaryFn::Affine { scale, shift } })
                    if shift.0 == 0.0 && chain.masks.is_empty() =>
                {
                    chain.scale *= scale.0;
                }
                Op::Binary(Binary { f: f @ (BinaryFn::Mul | BinaryFn::Div) }) => {
                    let number = self.constants.number(node.inputs[1 - at]);
                    let Some(number) = number.filter(|_| chain.masks.is_empty()) else { return Some(chain) };
                    match f {
                        BinaryFn::Mul => chain.scale *= number,
                        _ if at == 0 => chain.scale /= number,
                        _ => return Some(chain),
                    }
                }
                Op::Binary(Binary { f: BinaryFn::Add }) => {
                    let Some(letters) = outside(1 - at) else { return Some(chain) };
                    chain.masks.push(self.added(node.inputs[1 - at], letters));
                }
                Op::Select(_) if at != 0 => {
                    let hidden = self.constants.number(node.inputs[3 - at]).filter(|x| *x <= HIDDEN);
                    let (Some(hidden), Some(letters)) = (hidden, outside(0)) else { return Some(chain) };
                    let (cond, hides) = (node.inputs[0], at == 2);
                    chain.masks.push(ChainMask::Hide { cond, letters, hidden, hides });
                }
                _ => return Some(chain),
            }
            chain.end = made;
        }
    }

    /// A mask that is added: a selection of zero or a very negative number hides keys, all else is a bias.
    fn added(&self, numbers: TensorId, letters: DimLetters) -> ChainMask {
        let graph = self.constants.graph;
        let select = || {
            let node = graph.node(graph.tensor(numbers).producer?);
            let Op::Select(_) = node.op else { return None };
            let letters = self.constants.before(node, 0, &letters)?;
            let [a, b] = [1, 2].map(|i| self.constants.number(node.inputs[i]));
            let (hidden, hides) = match (a?, b?) {
                (0.0, hidden) => (hidden, false),
                (hidden, 0.0) => (hidden, true),
                _ => return None,
            };
            let cond = node.inputs[0];
            (hidden <= HIDDEN).then_some(ChainMask::Hide { cond, letters, hidden, hides })
        };
        select().unwrap_or(ChainMask::Bias { numbers, letters })
    }

    /// The bounds that a mask states.
    pub fn bounds(&self, mask: &ChainMask, roles: &Roles) -> Option<Bounds> {
        let letter = |dim: Dim| roles.iter().find(|(_, d)| *d == dim).map(|(l, _)| *l);
        let names = MaskLetters { query: letter(Dim::Q)?, key: letter(Dim::K)? };
        match mask {
            ChainMask::Bias { numbers, letters } => {
                // A bias that is neither zero nor hides is more than a mask.
                let mut pure = true;
                let shows = |x: f64| x == 0.0;
                let bounds = self.constants.stored(*numbers, letters, names, &shows)?;
                self.constants.each(*numbers, &mut |x| pure &= x == 0.0 || x <= HIDDEN);
                pure.then_some(bounds)
            }
            ChainMask::Hide { cond, letters, hides, .. } => {
                self.constants.bounds(*cond, letters, names, *hides)
            }
        }
    }

    /// Bounds and remaining masks. One pair of bounds is an attribute; what does not fit beside it stays a mask.
    pub fn masks(
        &self,
        chain: &Chain,
        roles: &Roles,
        (queries, keys): (u64, u64),
    ) -> Option<(Bounds, Vec<Mask>)> {
        let mut bounds = Bounds::default();
        let mut masks = Vec::new();
        for mask in &chain.masks {
            let found = self.bounds(mask, roles).map(|found| bounds.and(found));
            if let Some(found) = found.filter(|found| found.every_query_sees(queries, keys)) {
                bounds = found;
                continue;
            }
            let dims = |letters: &DimLetters| -> Option<Vec<Option<Dim>>> {
                letters.iter().map(|l| l.map_or(Some(None), |l| role(roles, l).map(Some))).collect()
            };
            masks.push(match mask {
                ChainMask::Bias { numbers, letters } => {
                    Mask::Bias { numbers: *numbers, dims: dims(letters)? }
                }
                ChainMask::Hide { cond, letters, hidden, hides } => {
                    Mask::Hide { cond: *cond, dims: dims(letters)?, hidden: *hidden, hides: *hides }
                }
            });
        }
        Some((bounds, masks))
    }
}

/// Writes bounds as attributes.
pub(super) fn apply(bounds: Bounds, op: &mut Attention) {
    match bounds {
        Bounds { upper: None, lower: None } => {}
        // Causal, with the first query at this key.
        Bounds { upper: Some(upper), lower: None } => (op.after, op.diagonal) = (Some(0), upper),
        Bounds { upper, lower: Some(lower) } => {
            op.after = upper.map(|u| u as u64);
            op.before = Some(lower as u64);
        }
    }
}
