//! Access to an operation's attributes and operands, with errors that name the operation.

use super::{
    super::{
        error::{Result, TextError},
        syntax::{Attribute, DenseValues},
    },
    ResolvedOperation,
    draft::{DraftGraph, Slot},
    value::{HloType, SymbolicValue},
};
use shardwright_graph::Dims;
use smallvec::SmallVec;

/// A short list of whole numbers.
pub(super) type Ints = SmallVec<[i64; 6]>;

impl<'a> ResolvedOperation<'_, 'a> {
    pub fn error(&self, reason: impl AsRef<str>) -> TextError {
        TextError::new(self.operation.at, format!("{}: {}", self.operation.name, reason.as_ref()))
    }

    /// Checks the number of operands.
    pub fn arity(&self, count: usize) -> Result<()> {
        if self.operands.len() != count {
            return Err(self.error(format!("expected {count} operands, got {}", self.operands.len())));
        }
        Ok(())
    }

    /// The type of the only result.
    pub fn result(&self) -> Result<&HloType> {
        match self.results {
            [result] => Ok(result),
            _ => Err(self.error(format!("expected one result, got {}", self.results.len()))),
        }
    }

    /// An operand as a tensor.
    pub fn slot(&self, i: usize, draft: &mut DraftGraph) -> Result<Slot> {
        self.operand(i)?.slot(draft)
    }

    pub fn operand(&self, i: usize) -> Result<&SymbolicValue> {
        self.operands.get(i).ok_or_else(|| self.error(format!("operand {i} is missing")))
    }

    pub fn slots(&self, draft: &mut DraftGraph) -> Result<Vec<Slot>> {
        self.operands.iter().map(|value| value.slot(draft)).collect()
    }

    fn attribute(&self, name: &str) -> Result<&Attribute<'a>> {
        self.operation.attribute(name).ok_or_else(|| self.error(format!("`{name}` is missing")))
    }

    /// A list of whole numbers, in any of its written forms.
    pub fn ints(&self, name: &str) -> Result<Ints> {
        self.int_list(self.attribute(name)?)
            .ok_or_else(|| self.error(format!("`{name}` is not a list of whole numbers")))
    }

    /// A list of this many whole numbers; all `default` if it is missing.
    pub fn ints_or(&self, name: &str, default: i64, count: usize) -> Result<Ints> {
        let ints = match self.operation.attribute(name) {
            Some(_) => self.ints(name)?,
            None => SmallVec::from_elem(default, count),
        };
        if ints.len() != count {
            return Err(self.error(format!("`{name}` has {} numbers, not {count}", ints.len())));
        }
        Ok(ints)
    }

    /// A list of this many sizes; ones if it is missing.
    pub fn sizes_or_ones(&self, name: &str, count: usize) -> Result<Dims> {
        let ints = self.ints_or(name, 1, count)?;
        let sizes: Option<Dims> = ints.iter().map(|&n| u64::try_from(n).ok().filter(|&n| n > 0)).collect();
        sizes.ok_or_else(|| self.error(format!("`{name}` must be positive")))
    }

    fn int_list(&self, attribute: &Attribute<'_>) -> Option<Ints> {
        match attribute {
            Attribute::Array(_, items) => items.iter().map(|item| parse(item)).collect(),
            Attribute::List(items) => items.iter().map(scalar).collect(),
            Attribute::Dense(dense) => match &dense.values {
                DenseValues::List(items) => items.iter().map(|item| parse(item)).collect(),
                DenseValues::Splat(item) => {
                    let count = HloType::of_tensor(&dense.ty, dense.at).ok().map(|t| t.ty.shape.elements());
                    let count =
                        dense.ty.element.starts_with('i').then_some(()).and(count).filter(|&n| n <= 64)?;
                    Some(SmallVec::from_elem(parse(item)?, count as usize))
                }
                DenseValues::Bytes(_) => None,
            },
            _ => None,
        }
    }

    /// This many pairs of whole numbers (pads); `(0, 0)` if they are missing.
    pub fn pairs(&self, name: &str, count: usize) -> Result<SmallVec<[(i64, i64); 6]>> {
        let flat: Option<Ints> = match self.operation.attribute(name) {
            None => Some(SmallVec::from_elem(0, 2 * count)),
            Some(Attribute::List(items)) => {
                let lists: Option<Vec<Ints>> = items.iter().map(|item| self.int_list(item)).collect();
                lists.map(|lists| lists.into_iter().flatten().collect())
            }
            Some(other) => self.int_list(other),
        };
        let flat = flat.filter(|flat| flat.len() == 2 * count);
        let flat =
            flat.ok_or_else(|| self.error(format!("`{name}` is not {count} pairs of whole numbers")))?;
        Ok(flat.chunks(2).map(|pair| (pair[0], pair[1])).collect())
    }

    /// One whole number.
    pub fn int(&self, name: &str) -> Result<i64> {
        scalar(self.attribute(name)?).ok_or_else(|| self.error(format!("`{name}` is not a whole number")))
    }

    pub fn int_or(&self, name: &str, default: i64) -> Result<i64> {
        if self.operation.attribute(name).is_some() { self.int(name) } else { Ok(default) }
    }

    /// This many truth values; false if they are missing.
    pub fn flags(&self, name: &str, count: usize) -> Result<SmallVec<[bool; 4]>> {
        let flags: Option<SmallVec<[bool; 4]>> = match self.operation.attribute(name) {
            None => Some(SmallVec::from_elem(false, count)),
            Some(Attribute::List(items)) => {
                items.iter().map(|item| if let Attribute::Bool(b) = item { Some(*b) } else { None }).collect()
            }
            Some(Attribute::Array(_, items)) => items.iter().map(|item| item.parse().ok()).collect(),
            Some(_) => None,
        };
        flags
            .filter(|flags| flags.len() == count)
            .ok_or_else(|| self.error(format!("`{name}` is not {count} truth values")))
    }

    /// The word of an enumeration: `LT` of `#stablehlo<comparison_direction LT>`.
    pub fn word(&self, name: &str) -> Result<&str> {
        match self.attribute(name)? {
            Attribute::Dialect(_, body) => Ok(body.rsplit_once(' ').map_or(&body[..], |(_, word)| word)),
            _ => Err(self.error(format!("`{name}` is not an enumeration of StableHLO"))),
        }
    }

    /// The text between the brackets of a dialect attribute.
    pub fn body(&self, name: &str) -> Result<&str> {
        match self.attribute(name)? {
            Attribute::Dialect(_, body) => Ok(body),
            _ => Err(self.error(format!("`{name}` is not an attribute of StableHLO"))),
        }
    }

    /// A list in the body of a dialect attribute, `key = [1, 2]`; empty if it is missing, as in MLIR.
    pub fn field(&self, name: &str, key: &str) -> Result<Ints> {
        let Some(text) = find_field(self.body(name)?, key) else { return Ok(Ints::new()) };
        let inside = text.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(inside, _)| inside);
        let numbers = |inside: &str| {
            inside.split(',').map(str::trim).filter(|n| !n.is_empty()).map(parse).collect::<Option<Ints>>()
        };
        inside.and_then(numbers).ok_or_else(|| self.error(format!("`{key}` is not a list of whole numbers")))
    }

    /// A number in the body of a dialect attribute, `key = 1`; zero if it is missing, as in MLIR.
    pub fn field_int(&self, name: &str, key: &str) -> Result<i64> {
        let Some(text) = find_field(self.body(name)?, key) else { return Ok(0) };
        let number = text.split_once([',', '>']).map_or(text, |(number, _)| number).trim();
        parse(number).ok_or_else(|| self.error(format!("`{key}` is not a whole number")))
    }

    /// Dimensions of a tensor of this rank, without repetition.
    pub fn dims(&self, numbers: &[i64], rank: usize) -> Result<SmallVec<[usize; 4]>> {
        let mut dims: SmallVec<[usize; 4]> = SmallVec::new();
        for &number in numbers {
            match usize::try_from(number).ok().filter(|d| *d < rank && !dims.contains(d)) {
                Some(d) => dims.push(d),
                None => {
                    return Err(
                        self.error(format!("{numbers:?} are not dimensions of a tensor of rank {rank}"))
                    );
                }
            }
        }
        Ok(dims)
    }
}

/// The text after `key = ` in a list of such pairs.
fn find_field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let mut rest = text;
    loop {
        let at = rest.find(key)?;
        let before = rest[..at].chars().next_back();
        let after = rest[at + key.len()..].trim_start();
        if before.is_none_or(|c| !c.is_alphanumeric() && c != '_')
            && let Some(value) = after.strip_prefix('=')
        {
            return Some(value.trim_start());
        }
        rest = &rest[at + key.len()..];
    }
}

fn parse(text: &str) -> Option<i64> {
    text.parse().ok()
}

fn scalar(attribute: &Attribute<'_>) -> Option<i64> {
    match attribute {
        Attribute::Number(text, _) => parse(text),
        _ => None,
    }
}
