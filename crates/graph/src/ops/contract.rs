//! General contraction in einsum form: `mk,kn->mn` is a matrix product, `bqhd,bkhd->bhqk` attention scores.
//!
//! Each letter is a factor. Letters of the output that both operands have are batch letters; letters that
//! the output lacks are summed away.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, accepted, arity, same_float, scratch_bytes},
    ops::Op,
    region::Region,
    require,
    rule::{FactorIndex, Rule, TensorMap},
    types::{DType, MAX_RANK, Shape, TensorType},
    workload::{Gemm, RooflineKind, Workload, WorkloadClass, WorkloadSizes},
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
    /// Whether the operands are rounded to 8-bit floats before they are multiplied, where the device can. Storage, and the
    /// result, keep their type.
    pub eight_bit: bool,
}

/// How a [`Contract`] is stored: as its spec.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecText {
    spec: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    eight_bit: bool,
}

impl TryFrom<SpecText> for Contract {
    type Error = OpError;
    fn try_from(text: SpecText) -> Result<Self, OpError> {
        Ok(Contract { eight_bit: text.eight_bit, ..Contract::parse(&text.spec)? })
    }
}

impl From<Contract> for SpecText {
    fn from(op: Contract) -> Self {
        SpecText { spec: op.to_string(), eight_bit: op.eight_bit }
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
        Ok(Self { operands, result, eight_bit: false })
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

    /// Every letter with its size, in the order of [`Contract::all_letters`].
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
        let ordered = self.all_letters().into_iter().map(|c| {
            let found = sizes.iter().find(|(d, _)| *d == c).copied();
            found.ok_or_else(|| OpError::new(format!("einsum `{self}`: no operand has `{}`", c as char)))
        });
        ordered.collect()
    }
}

/// Matrix products by the order of their operands' dimensions. Sizes: batch, rows, columns, depth. Cost files may hold
/// one table for all orders.
static GEMM: WorkloadClass = WorkloadClass {
    name: "gemm",
    fallback: None,
    roofline: |sizes| product(sizes, |[_, n, k]| [k, n, n]),
    bytes: gemm_bytes,
};
static GEMM_NT: WorkloadClass = WorkloadClass {
    name: "gemm_nt",
    fallback: Some("gemm"),
    roofline: |sizes| product(sizes, |[_, n, k]| [k, k, n]),
    ..GEMM
};
static GEMM_TN: WorkloadClass = WorkloadClass {
    name: "gemm_tn",
    fallback: Some("gemm"),
    roofline: |sizes| product(sizes, |[m, n, _]| [m, n, n]),
    ..GEMM
};
static GEMM_TT: WorkloadClass = WorkloadClass {
    name: "gemm_tt",
    fallback: Some("gemm"),
    roofline: |sizes| product(sizes, |[m, n, k]| [m, k, n]),
    ..GEMM
};

/// The same in 8-bit floats. Its vectors of 16 bytes hold twice as many numbers, so sizes align at half of theirs.
static GEMM_F8: WorkloadClass = WorkloadClass {
    name: "gemm_f8",
    fallback: None,
    roofline: |sizes| {
        let &[batch, m, n, k] = sizes else { return None };
        let half = |size: u64| if size.is_multiple_of(2) { size / 2 } else { size };
        let align = Gemm::alignment([m, n, k].map(half));
        Some(RooflineKind::EightBitProduct(Gemm { steps: 1, batch, m, n, k, align }))
    },
    bytes: gemm_bytes,
};

/// The product of these sizes; `contiguous` picks the contiguous sizes of both operands and the result from rows, columns and
/// depth.
fn product(sizes: &[u64], contiguous: fn([u64; 3]) -> [u64; 3]) -> Option<RooflineKind> {
    let &[batch, m, n, k] = sizes else { return None };
    let align = Gemm::alignment(contiguous([m, n, k]));
    Some(RooflineKind::Product(Gemm { steps: 1, batch, m, n, k, align }))
}

fn gemm_bytes(workload: &Workload, sizes: &[u64]) -> u64 {
    let (batch, m, n, k) = (sizes[0], sizes[1], sizes[2], sizes[3]);
    let operands =
        [(m, k), (k, n), (m, n)].iter().fold(0u64, |sum, (a, b)| sum.saturating_add(a.saturating_mul(*b)));
    batch.saturating_mul(operands).saturating_mul(workload.dtype.bytes())
}

impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |letters: &Letters| String::from_utf8_lossy(letters).into_owned();
        let operands: Vec<_> = self.operands.iter().map(text).collect();
        write!(f, "{}->{}", operands.join(","), text(&self.result))
    }
}

/// Products of at most this many rows may be computed transposed.
pub const FEW_ROWS: u64 = 256;

/// Products of at least this depth may be computed transposed.
pub const FEW_ROWS_DEPTH: u64 = 256;

impl Operator for Contract {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, self.operands.len())?;
        same_float(inputs)?;
        let sizes = self.sizes(inputs)?;
        // The iteration space bounds the flops, which must fit a u64 with room to add up.
        let iterations = sizes.iter().try_fold(1u64, |n, (_, s)| n.checked_mul(*s));
        require!(iterations.is_some_and(|n| n < 1 << 60), "einsum `{self}`: absurdly many operations");
        // The result's letters come first.
        let shape: Shape = sizes.iter().take(self.result.len()).map(|&(_, size)| size).collect();
        Ok(vec![TensorType::new(inputs[0].dtype, shape)])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let Some(sizes) = accepted(self.sizes(inputs)) else { return Rule::replicated(inputs, outputs) };
        let mut rule = Rule::default();
        for &(c, size) in &sizes {
            rule.factor(letter_name(c), size);
        }
        let map = |letters: &Letters| {
            // Every letter has a size, so that none is left out.
            let index = |c: &u8| sizes.iter().position(|(d, _)| d == c).map(|i| i as FactorIndex);
            TensorMap::of(&letters.iter().filter_map(index).collect::<SmallVec<[FactorIndex; 8]>>())
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
            let mut grad =
                cx.emit(Contract { operands, result: result.clone(), eight_bit: self.eight_bit }, &tensors)?;
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

    /// Letters in both operands and the result are batch, those in the result and one operand rows or columns, the
    /// others depth. One operand alone is no product. Kernel time depends on the order of the operands' dimensions: `t`
    /// in the class marks a first operand that ends in rows, or a second that ends in depth.
    fn workload(
        &self,
        inputs: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        let second = self.operands.get(1)?;
        let [mut batch, mut m, mut n, mut k] = [1; 4];
        for (letter, size) in accepted(self.sizes(inputs))? {
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
        let orders = (ends_in_depth(&self.operands[0]), ends_in_depth(second));
        let class = match orders {
            _ if self.eight_bit => &GEMM_F8,
            (true, false) => &GEMM,
            (true, true) => &GEMM_NT,
            (false, false) => &GEMM_TN,
            (false, true) => &GEMM_TT,
        };
        Some((class, WorkloadSizes::from_slice(&[batch, m, n, k])))
    }

    fn workload_classes() -> Vec<&'static WorkloadClass> {
        vec![&GEMM, &GEMM_NT, &GEMM_TN, &GEMM_TT, &GEMM_F8]
    }

    /// Matrix units take 8-bit operands whose rows, columns and depth are multiples of 16 (cuBLASLt, Transformer Engine).
    fn in_eight_bits(&self, inputs: &[TensorType]) -> Option<Op> {
        let narrow = inputs.iter().all(|ty| matches!(ty.dtype, DType::Bf16 | DType::F16));
        let (_, sizes) = self.workload(inputs, &[])?;
        let whole = sizes[1..].iter().all(|size| size.is_multiple_of(16));
        (narrow && whole).then(|| Contract { eight_bit: true, ..self.clone() }.into())
    }

    fn is_eight_bit(&self) -> bool {
        self.eight_bit
    }

    fn xla_is_dot(&self) -> bool {
        true
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // A product of few rows is computed transposed.
        let (Some((_, sizes)), Some(second)) = (self.workload(inputs, &[]), self.operands.get(1)) else {
            return 0;
        };
        let [_, rows, columns, depth] = sizes[..] else { return 0 };
        let is_row = |letter: &&u8| self.result.contains(letter) && !second.contains(letter);
        let row_letters = self.operands[0].iter().filter(is_row).count();
        // Several letters may be multiplied in parts.
        let few = if row_letters == 1 { (2..=FEW_ROWS).contains(&rows) } else { rows >= 2 };
        if !few || depth < FEW_ROWS_DEPTH {
            return 0;
        }
        rows.min(FEW_ROWS).min(columns / 2).saturating_mul(columns).saturating_mul(scratch_bytes(&inputs[0]))
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Contract {
        fn golden() -> Golden {
            Golden::new(
                Contract::parse("mk,kn->mn").unwrap(),
                &["f32[8,16]", "f32[16,4]"],
                "([m, k], [k, n])->([m, n]) {m=8, n=4, k=16} reduction={k}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let specs = [
                "mk,kn->mn",
                "mk,nk->mn",
                "km,kn->nm",
                "bmk,bkn->bmn",
                "bqhd,bkhd->bhqk",
                "bhqk,bkhd->bqhd",
                "bsk,kn->bsn",
                "gtec,gtm->egcm",
                "ab->ba",
                "abc->b",
                "m,n->mn",
                "k,k->",
                "mk,k->m",
                "amk,kn->mn",
                "abmk,bkn->abmn",
                "ab,cd->",
            ];
            let spec = Contract::parse(rng.pick(&specs)).unwrap();
            let sizes: Vec<u64> = (0..128).map(|_| rng.size()).collect();
            let inputs = spec
                .operands
                .iter()
                .map(|o| f64s(o.iter().map(|&c| sizes[c as usize]).collect::<Shape>()))
                .collect();
            Case::new(spec, inputs)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(dtype: DType, spec: &str, shapes: [&[u64]; 2]) -> Workload {
        let op: Op = Contract::parse(spec).unwrap().into();
        let inputs = shapes.map(|s| TensorType::new(dtype, s));
        let outputs = op.operator().infer(&inputs).unwrap();
        op.workload(&inputs, &outputs)
    }

    #[test]
    fn products_are_classed_by_the_order_of_their_operands() {
        let class = |spec: &str, shapes: [&[u64]; 2]| workload(DType::F32, spec, shapes).class.name;
        assert_eq!(class("mk,kn->mn", [&[3, 5], &[5, 7]]), "gemm");
        assert_eq!(class("mn,kn->mk", [&[3, 7], &[5, 7]]), "gemm_nt", "the gradient by the first operand");
        assert_eq!(class("mk,mn->kn", [&[3, 5], &[3, 7]]), "gemm_tn", "the gradient by the second");
        assert_eq!(class("km,nk->mn", [&[5, 3], &[7, 5]]), "gemm_tt");
        assert_eq!(class("mkb,bkn->bmn", [&[3, 5, 2], &[2, 5, 7]]), "gemm", "batches do not count");
    }

    #[test]
    fn eight_bit_products_are_a_class_of_their_own_and_so_are_their_gradients() {
        let types = |dtype, m| [TensorType::new(dtype, [m, 32]), TensorType::new(dtype, [32, 48])];
        let plain = Contract::parse("mk,kn->mn").unwrap();
        assert_eq!(plain.in_eight_bits(&types(DType::F32, 64)), None, "only 16-bit floats");
        assert_eq!(plain.in_eight_bits(&types(DType::Bf16, 40)), None, "40 is no multiple of 16");
        let narrow = plain.in_eight_bits(&types(DType::Bf16, 64)).unwrap();
        assert!(narrow.operator().is_eight_bit() && !plain.is_eight_bit());
        let work = narrow.workload(&types(DType::Bf16, 64), &[TensorType::new(DType::Bf16, [64, 48])]);
        assert_eq!((work.class.name, work.dtype), ("gemm_f8", DType::Bf16));
        let text = serde_json::to_string(&narrow).unwrap();
        assert!(text.contains("eight_bit"), "{text}");
        assert_eq!(serde_json::from_str::<Op>(&text).unwrap(), narrow);
    }

    #[test]
    fn letters_become_batch_rows_columns_and_depth() {
        let check = |spec: &str, shapes: [&[u64]; 2], expected: [u64; 4]| {
            let workload = workload(DType::Bf16, spec, shapes);
            assert_eq!(workload.sizes[..], expected, "{spec}");
            assert_eq!(workload.resized(&expected), workload, "{spec}");
        };
        check("mk,kn->mn", [&[3, 5], &[5, 7]], [1, 3, 7, 5]);
        check("bqhd,bkhd->bhqk", [&[2, 3, 4, 5], &[2, 6, 4, 5]], [8, 3, 6, 5]);
        check("bsk,kn->bsn", [&[2, 3, 5], &[5, 7]], [1, 6, 7, 5]);
    }
}
