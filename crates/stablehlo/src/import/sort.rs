//! Sort and top-k.

use super::{
    super::{
        error::Result,
        syntax::{Attribute, Block, Operation},
    },
    Importer, ResolvedOperation,
    value::SymbolicValue,
};
use shardwright_graph::{
    Op,
    ops::{Sort, TopK},
};

/// Whether a comparator orders by its first pair of arguments: `Some(true)` for descending order.
fn order(body: &Block<'_>) -> Option<bool> {
    let (last, before) = body.operations.split_last()?;
    let result = last.operands.first()?.name;
    let compare = before.iter().find(|op| op.results.first().is_some_and(|r| r.0 == result))?;
    let Some(Attribute::Dialect(_, text)) = compare.attribute("comparison_direction") else { return None };
    let falling = match text.rsplit(' ').next()? {
        "LT" => false,
        "GT" => true,
        _ => return None,
    };
    let [a, b] = [body.arguments.first()?.name, body.arguments.get(1)?.name];
    let sides = [
        side(before, compare.operands.first()?.name, [a, b], 0)?,
        side(before, compare.operands.get(1)?.name, [a, b], 0)?,
    ];
    match (compare.name, sides) {
        ("stablehlo.compare", [true, false]) => Some(falling),
        ("stablehlo.compare", [false, true]) => Some(!falling),
        _ => None,
    }
}

/// The argument that a value equals, apart from signed zeros and NaN: the first or the second.
fn side(operations: &[Operation<'_>], name: &str, arguments: [&str; 2], depth: usize) -> Option<bool> {
    if let Some(i) = arguments.iter().position(|a| *a == name) {
        return Some(i == 0);
    }
    let made = operations.iter().find(|op| op.results.first().is_some_and(|r| r.0 == name))?;
    let constant = |name: &str| {
        operations
            .iter()
            .any(|op| op.name == "stablehlo.constant" && op.results.first().is_some_and(|r| r.0 == name))
    };
    // `select(x == 0 or x is NaN, constant, x)`.
    match (made.name, &made.operands[..]) {
        ("stablehlo.select", [_, a, b]) if constant(a.name) && depth < 4 => {
            side(operations, b.name, arguments, depth + 1)
        }
        _ => None,
    }
}

impl<'a> Importer<'a> {
    pub fn sort(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let rank = op.types.first().map_or(0, |t| t.ty.rank());
        let axis = op.int_or("dimension", -1)?;
        let axis = if axis < 0 { axis + rank as i64 } else { axis };
        let axis = op.dims(&[axis], rank)?[0];
        let unsigned = op.types.first().is_some_and(|t| t.unsigned);
        match op.operation.regions.first().and_then(order) {
            Some(descending) if !unsigned => {
                let slots = op.slots(&mut self.draft)?;
                let made = self.draft.add(Op::from(Sort { axis, descending }), &slots)?;
                Ok(made.into_iter().map(SymbolicValue::Tensor).collect())
            }
            _ => self.opaque(op, "sort", "its comparator is not supported"),
        }
    }

    pub fn top_k(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let k = u64::try_from(op.int("k")?).map_err(|_| op.error("`k` is negative"))?;
        let x = op.slot(0, &mut self.draft)?;
        let made = self.draft.add(Op::from(TopK { k }), &[x])?;
        Ok(made.into_iter().map(SymbolicValue::Tensor).collect())
    }
}
