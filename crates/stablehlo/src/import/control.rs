//! Calls, loops and branches.
//!
//! Calls are inlined. A loop runs during the import: its counter is a known number, and so is its condition. Each
//! iteration becomes ops. The ops of all iterations at one place in the text share a layer: they are planned as one, at the
//! cost of all. Both sides of a branch are computed, and the result is selected.

use super::{
    super::{
        error::Result,
        syntax::{Attribute, Block},
    },
    Importer, ResolvedOperation, Scope, body_of, fold, shown,
    value::SymbolicValue,
};
use shardwright_graph::{
    DType,
    ops::{Compare, CompareFn, Select},
};

impl<'a> Importer<'a> {
    pub fn call(&mut self, op: &ResolvedOperation<'_, 'a>) -> Result<Vec<SymbolicValue>> {
        let Some(Attribute::Symbol(name)) = op.operation.attribute("callee") else {
            return Err(op.error("`callee` is missing"));
        };
        let function = self.functions.get(name).copied();
        let function = function.ok_or_else(|| op.error(format!("there is no function @{name}")))?;
        if !self.open_functions.insert(name) {
            return Err(op.error(format!("function @{name} calls itself")));
        }
        let result = self.within(op.operation.at, shown(name), |importer| {
            importer.block(body_of(function)?, op.operands.to_vec(), None)
        });
        self.open_functions.remove(name);
        result
    }

    /// Runs `walk` in the scope of a call or a loop.
    fn within<T>(&mut self, at: usize, name: String, walk: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = self.draft.path;
        self.draft.path = self.path_to(at);
        self.scope.push(name);
        let result = walk(self);
        self.scope.pop();
        self.draft.path = outer;
        result
    }

    pub fn while_loop(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<SymbolicValue>> {
        let [condition, body] = &op.operation.regions[..] else {
            return Err(op.error("a loop needs a condition and a body"));
        };
        let short =
            op.operation.results.first().map_or("while".to_string(), |(name, _)| format!("while.{name}"));
        let mut values = op.operands.to_vec();
        let outer = self.draft.in_loop.replace(op.operation.at);
        for iteration in 0u64.. {
            let name = if iteration == 0 { short.clone() } else { format!("{short}[{iteration}]") };
            let known = values.clone();
            self.draft.at = op.operation.at;
            self.walk(op.operation.at, 1)?;
            let next = self.within(op.operation.at, name, |importer| {
                let holds = importer.block(condition, known.clone(), Some(scope))?;
                match holds.first().and_then(SymbolicValue::splat) {
                    Some(0.0) => Ok(None),
                    Some(_) => {
                        importer.draft.at = op.operation.at;
                        importer.block(body, known, Some(scope)).map(Some)
                    }
                    None => Err(op.error(
                        "the number of iterations of this loop depends on data; only loops with a fixed count can be planned \
                         (`lax.scan`, `lax.fori_loop` with constant bounds)",
                    )),
                }
            })?;
            match next {
                Some(next) => values = next,
                None => break,
            }
        }
        self.draft.in_loop = outer;
        Ok(values)
    }

    /// `case` selects a branch by index, the last one for any other index. `if` has its true branch first.
    pub fn case(
        &mut self,
        op: &ResolvedOperation<'_, 'a>,
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<SymbolicValue>> {
        op.arity(1)?;
        let branches: Vec<&'a Block<'a>> = op.operation.regions.iter().collect();
        let Some(last) = branches.len().checked_sub(1) else { return Err(op.error("there are no branches")) };
        let truth = op.types[0].ty.dtype == DType::Bool;
        let short =
            op.operation.results.first().map_or("case".to_string(), |(name, _)| format!("case.{name}"));
        let run = |importer: &mut Self, branch: usize| {
            importer.draft.at = op.operation.at;
            // Each branch gets its own path, numbered by the branch.
            importer.within(op.operation.at + branch, format!("{short}:{branch}"), |importer| {
                importer.block(branches[branch], Vec::new(), Some(scope))
            })
        };
        if let Some(index) = op.operands[0].splat() {
            let branch = match (truth, index) {
                (true, x) => usize::from(x == 0.0).min(last),
                (false, x) if x >= 0.0 && x <= last as f64 => x as usize,
                _ => last,
            };
            return run(self, branch);
        }
        let mut chosen = run(self, last)?;
        for branch in (0..last).rev() {
            let other = run(self, branch)?;
            self.draft.at = op.operation.at;
            let index = op.slot(0, &mut self.draft)?;
            let condition = if truth {
                index
            } else {
                let number = self.draft.number(op.types[0].ty.dtype, branch as f64)?;
                self.draft.one(Compare { f: CompareFn::Eq }, &[index, number])?
            };
            for (chosen, other) in chosen.iter_mut().zip(other) {
                let [a, b] = [other.slot(&mut self.draft)?, chosen.slot(&mut self.draft)?];
                *chosen = SymbolicValue::Tensor(self.draft.one(Select {}, &[condition, a, b])?);
            }
        }
        self.note(format!(
            "{}: both sides of a branch are computed, and both count in the cost",
            self.draft.name
        ));
        Ok(chosen)
    }

    /// The number of each operand, if all are known.
    pub fn known(operands: &[SymbolicValue]) -> Option<Vec<i64>> {
        operands.iter().map(|value| value.splat().map(|x| fold::rounded(x, DType::I64) as i64)).collect()
    }
}
