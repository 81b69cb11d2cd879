//! General contraction in einsum form: `mk,kn->mn` is a matrix product, `bqhd,bkhd->bhqk` attention scores.
//!
//! Each letter is a factor. Letters of the output that both operands have are batch letters; letters that
//! the output lacks are summed away.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, same_float},
    ops::Op,
    region::Region,
    require,
    rule::{FactorIndex, Rule, TensorMap},
    types::{MAX_RANK, Shape, TensorType},
    workload::WorkloadSizes,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;

/// The letters of one operand or of the result.
pub type Letters = SmallVec<[u8; 8]>;

/// An einsum over one or two operands.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "SpecText", into = "SpecText")]
pub struct Contract {
    /// Letters of each operand, one per dimension.
    pub operands: SmallVec<[Letters; 2]>,
    /// Letters of the result.
    pub result: Letters,
}

/// How a [`Contract`] is stored: as its spec.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecText {
    spec: String,
}

impl TryFrom<SpecText> for Contract {
    type Error = OpError;
    fn try_from(text: SpecText) -> Result<Self, OpError> {
        Contract::parse(&text.spec)
    }
}

impl From<Contract> for SpecText {
    fn from(op: Contract) -> Self {
        SpecText { spec: op.to_string() }
    }
}

/// All letters as static strings, for factor names.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

fn letter_name(letter: u8) -> &'static str {
    // Parsing admits ASCII letters only, so the position always exists.
    let i = if letter.is_ascii_lowercase() { letter - b'a' } else { letter - b'A' + 26 } as usize;
    &LETTERS[i..i + 1]
}

impl Contract {
    /// Reads `mk,kn->mn`.
    pub fn parse(spec: &str) -> Result<Self, OpError> {
        let (operands, result) =
            spec.split_once("->").ok_or_else(|| OpError::new(format!("einsum `{spec}` has no `->`")))?;
        let letters = |text: &str| -> Result<Letters, OpError> {
            require!(text.len() <= MAX_RANK, "einsum `{spec}`: more than {MAX_RANK} letters in one operand");
            for (i, c) in text.bytes().enumerate() {
                require!(c.is_ascii_alphabetic(), "einsum `{spec}`: `{}` is not a letter", c as char);
                require!(
                    !text.as_bytes()[..i].contains(&c),
                    "einsum `{spec}`: `{}` twice in one operand",
                    c as char
                );
            }
            Ok(Letters::from_slice(text.as_bytes()))
        };
        let operands = operands.split(',').map(letters).collect::<Result<SmallVec<[Letters; 2]>, _>>()?;
        require!(operands.len() <= 2, "einsum `{spec}`: one or two operands, got {}", operands.len());
        let result = letters(result)?;
        for &c in &result {
            let known = operands.iter().any(|o| o.contains(&c));
            require!(known, "einsum `{spec}`: `{}` of the result is in no operand", c as char);
        }
        Ok(Self { operands, result })
    }

    /// Every letter once: the result's first, then the summed ones in order of appearance.
    pub fn all_letters(&self) -> Letters {
        let mut all = self.result.clone();
        for &c in self.operands.iter().flatten() {
            if !all.contains(&c) {
                all.push(c);
            }
        }
        all
    }

    fn sizes(&self, inputs: &[TensorType]) -> Result<SmallVec<[(u8, u64); 8]>, OpError> {
        let mut sizes: SmallVec<[(u8, u64); 8]> = SmallVec::new();
        for (letters, ty) in self.operands.iter().zip(inputs) {
            require!(letters.len() == ty.rank(), "einsum `{self}` does not fit an operand {ty}");
            for (&c, &size) in letters.iter().zip(ty.shape.iter()) {
                match sizes.iter().find(|(d, _)| *d == c) {
                    Some(&(_, known)) => {
                        require!(known == size, "einsum `{self}`: `{}` is {known} and {size}", c as char);
                    }
                    None => sizes.push((c, size)),
                }
            }
        }
        Ok(sizes)
    }
}

impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |letters: &Letters| String::from_utf8_lossy(letters).into_owned();
        let operands: Vec<_> = self.operands.iter().map(text).collect();
        write!(f, "{}->{}", operands.join(","), text(&self.result))
    }
}

impl Operator for Contract {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, self.operands.len())?;
        same_float(inputs)?;
        let sizes = self.sizes(inputs)?;
        let size_of = |c: &u8| sizes.iter().find(|(d, _)| d == c).map_or(1, |p| p.1);
        // The iteration space bounds the flops, which must fit a u64 with room to add up.
        let iterations = sizes.iter().try_fold(1u64, |n, (_, s)| n.checked_mul(*s));
        require!(iterations.is_some_and(|n| n < 1 << 60), "einsum `{self}`: absurdly many operations");
        Ok(vec![TensorType::new(inputs[0].dtype, self.result.iter().map(size_of).collect::<Shape>())])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = Rule::default();
        let all = self.all_letters();
        let sizes = self.sizes(inputs).unwrap_or_default();
        for &c in &all {
            rule.factor(letter_name(c), sizes.iter().find(|(d, _)| *d == c).map_or(1, |p| p.1));
        }
        let map = |letters: &Letters| {
            let index = |c: &u8| all.iter().position(|d| d == c).unwrap_or(0) as FactorIndex;
            TensorMap::of(&letters.iter().map(index).collect::<SmallVec<[FactorIndex; 8]>>())
        };
        rule.inputs = self.operands.iter().map(map).collect();
        rule.outputs.push(map(&self.result));
        rule
    }

    /// The gradient of a contraction is a contraction with the same letters, so that factors keep their
    /// names: `mk,kn->mn` gives `mn,kn->mk` and `mk,mn->kn`.
    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; self.operands.len()]) };
        let mut grads = vec![None; self.operands.len()];
        for i in 0..self.operands.len() {
            if !cx.wants(i) {
                continue;
            }
            // The gradient takes the operand's place; the other operand stays where it was.
            let mut operands = self.operands.clone();
            let mut tensors: SmallVec<[TensorId; 2]> = (0..operands.len()).map(|j| cx.input(j)).collect();
            operands[i] = self.result.clone();
            tensors[i] = dy;
            let present: Letters = operands.iter().flatten().copied().collect();
            let missing = self.operands[i].iter().any(|c| !present.contains(c));
            let result: Letters = self.operands[i].iter().copied().filter(|c| present.contains(c)).collect();
            let mut grad = cx.emit(Contract { operands, result: result.clone() }, &tensors)?;
            if missing {
                // A letter that only this operand had was summed away alone: its gradient repeats along it.
                let letters = &self.operands[i];
                let dims = result.iter().filter_map(|c| letters.iter().position(|d| d == c)).collect();
                let shape = cx.input_type(i).shape.clone();
                grad = cx.broadcast(grad, shape, dims)?;
            }
            grads[i] = Some(grad);
        }
        Ok(grads)
    }

    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        self.rule(inputs, outputs).iterations().saturating_mul(2)
    }

    /// Letters in both operands and the result are batch, those in the result and one operand rows or
    /// columns, the others depth. One operand alone is no product. Kernels are not equally fast whichever way the
    /// operands lie: a `t` in the class says whose columns (of the first) or rows (of the second) lie side by side.
    fn workload(&self, inputs: &[TensorType], _: &[TensorType]) -> Option<(&'static str, WorkloadSizes)> {
        let second = self.operands.get(1)?;
        let [mut batch, mut m, mut n, mut k] = [1; 4];
        for (letter, size) in self.sizes(inputs).ok()? {
            let kept = self.result.contains(&letter);
            let group = match (kept, self.operands[0].contains(&letter), second.contains(&letter)) {
                (true, true, true) => &mut batch,
                (true, true, false) => &mut m,
                (true, ..) => &mut n,
                (false, ..) => &mut k,
            };
            *group *= size;
        }
        let ends_in_depth = |operand: &Letters| {
            let other = |letter: &&u8| {
                !(self.result.contains(*letter) && self.operands.iter().all(|o| o.contains(*letter)))
            };
            operand.iter().rev().find(other).is_some_and(|letter| !self.result.contains(letter))
        };
        let class = match (ends_in_depth(&self.operands[0]), ends_in_depth(second)) {
            (true, false) => "gemm",
            (true, true) => "gemm_nt",
            (false, false) => "gemm_tn",
            (false, true) => "gemm_tt",
        };
        Some((class, WorkloadSizes::from_slice(&[batch, m, n, k])))
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}
