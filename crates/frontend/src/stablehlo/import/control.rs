//! Calls, loops and branches.
//!
//! Calls are inlined. A loop is run while the text is read: its counter is a known number, so the condition is too.
//! Each iteration becomes ops, and all iterations' ops of one place in the text share a layer: they are planned as
//! one, and cost what all of them cost. Both sides of a branch are computed and the result selected.

use super::{
    super::{
        error::Result,
        syntax::{Attribute, Block},
    },
    Importer, Reading, Scope, body_of, fold,
    value::Value,
};
use shardwright_graph::{
    DType,
    ops::{Compare, CompareFn, Select},
};

impl<'a> Importer<'a> {
    pub fn call(&mut self, op: &Reading<'_, 'a>) -> Result<Vec<Value>> {
        let Some(Attribute::Symbol(name)) = op.operation.attribute("callee") else {
            return Err(op.fault("what is called is not said"));
        };
        let function = self.functions.get(name).copied();
        let function = function.ok_or_else(|| op.fault(format!("there is no function @{name}")))?;
        self.within(op.operation.at, (*name).to_string(), |importer| {
            importer.block(body_of(function)?, op.operands.to_vec(), None)
        })
    }

    /// Runs `walk` inside a call or a loop.
    fn within<T>(&mut self, at: usize, name: String, walk: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = self.steps.path;
        self.steps.path = self.path_to(at);
        self.scope.push(name);
        let result = walk(self);
        self.scope.pop();
        self.steps.path = outer;
        result
    }

    pub fn while_loop(&mut self, op: &Reading<'_, 'a>, scope: &Scope<'_, 'a>) -> Result<Vec<Value>> {
        let [condition, body] = &op.operation.regions[..] else {
            return Err(op.fault("a loop has a condition and a body"));
        };
        let short =
            op.operation.results.first().map_or("while".to_string(), |(name, _)| format!("while.{name}"));
        let mut values = op.operands.to_vec();
        let outer = self.steps.in_loop.replace(op.operation.at);
        for iteration in 0u64.. {
            let name = if iteration == 0 { short.clone() } else { format!("{short}[{iteration}]") };
            let known = values.clone();
            self.steps.at = op.operation.at;
            self.walk(op.operation.at)?;
            let next = self.within(op.operation.at, name, |importer| {
                let holds = importer.block(condition, known.clone(), Some(scope))?;
                match holds.first().and_then(Value::splat) {
                    Some(0.0) => Ok(None),
                    Some(_) => {
                        importer.steps.at = op.operation.at;
                        importer.block(body, known, Some(scope)).map(Some)
                    }
                    None => Err(op.fault(
                        "how often this loop runs depends on data; only loops with a fixed count can be planned \
                         (`lax.scan`, `lax.fori_loop` with constant bounds)",
                    )),
                }
            })?;
            match next {
                Some(next) => values = next,
                None => break,
            }
        }
        self.steps.in_loop = outer;
        Ok(values)
    }

    /// `case` and `if`: by index, the last branch for any other; `if` has its true branch first.
    pub fn case(&mut self, op: &Reading<'_, 'a>, scope: &Scope<'_, 'a>) -> Result<Vec<Value>> {
        op.arity(1)?;
        let branches: Vec<&'a Block<'a>> = op.operation.regions.iter().collect();
        let Some(last) = branches.len().checked_sub(1) else { return Err(op.fault("there are no branches")) };
        let truth = op.types[0].ty.dtype == DType::Bool;
        let short =
            op.operation.results.first().map_or("case".to_string(), |(name, _)| format!("case.{name}"));
        let run = |importer: &mut Self, branch: usize| {
            importer.steps.at = op.operation.at;
            // Each branch is a place of its own: the branch's number tells them apart.
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
            self.steps.at = op.operation.at;
            let index = op.slot(0, &mut self.steps)?;
            let condition = if truth {
                index
            } else {
                let number = self.steps.number(op.types[0].ty.dtype, branch as f64)?;
                self.steps.one(Compare { f: CompareFn::Eq }, &[index, number])?
            };
            for (chosen, other) in chosen.iter_mut().zip(other) {
                let [a, b] = [other.slot(&mut self.steps)?, chosen.slot(&mut self.steps)?];
                *chosen = Value::Tensor(self.steps.one(Select {}, &[condition, a, b])?);
            }
        }
        self.note(format!("{}: both sides of a branch are computed, and paid for", self.steps.name));
        Ok(chosen)
    }

    /// A number for each of a list of operands, if all are known.
    pub fn known(operands: &[Value]) -> Option<Vec<i64>> {
        operands.iter().map(|value| value.splat().map(|x| fold::rounded(x, DType::I64) as i64)).collect()
    }
}
