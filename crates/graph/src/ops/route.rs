//! Routing: the experts that each token goes to, by its scores. Gates of mixtures of experts.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements, same_float},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// Positions of the `k` largest elements of each row (the last dimension), largest first (`i32`).
///
/// With several `groups` of neighbouring positions, only those of the `top_groups` best groups are chosen from. A group is as
/// good as the sum of its `group_scores` largest elements: 1 in DeepSeek-V2, 2 in V3 (arXiv 2412.19437). Of equal elements or
/// groups those at lower positions count as larger. NaN counts as smaller than every number.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// Elements chosen from each row.
    pub k: u64,
    /// Groups of positions; 1: no groups.
    pub groups: u64,
    /// Groups that are chosen from.
    pub top_groups: u64,
    /// Elements of a group that are added up to rank it.
    pub group_scores: u64,
}

impl Route {
    /// The `k` largest, without groups.
    pub fn top(k: u64) -> Self {
        Self { k, groups: 1, top_groups: 1, group_scores: 1 }
    }
}

impl Operator for Route {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        same_float(inputs)?;
        let x = &inputs[0];
        let row = x.shape.last().copied().unwrap_or(0);
        let Self { k, groups, top_groups, group_scores } = *self;
        require!((1..1 << 31).contains(&row), "rows of {x} have no positions, or more than an i32 counts");
        require!(groups > 0 && row.is_multiple_of(groups), "{groups} groups do not divide the rows of {x}");
        require!((1..=groups).contains(&top_groups), "cannot choose {top_groups} of {groups} groups");
        let size = row / groups;
        require!(
            (1..=size).contains(&group_scores),
            "cannot rank groups of {size} by their {group_scores} largest"
        );
        require!(
            (1..=size * top_groups).contains(&k),
            "cannot choose {k} elements from {top_groups} groups of {size} in the rows of {x}"
        );
        let mut shape = x.shape.clone();
        shape.0[x.rank() - 1] = k;
        Ok(vec![TensorType::new(DType::I32, shape)])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let last = inputs[0].rank() - 1;
        let (mut rule, map) = Rule::over_dims_where(&inputs[0].shape, |d| d != last);
        rule.inputs.push(map.clone());
        rule.outputs.push(map);
        rule
    }

    /// The choice is constant almost everywhere.
    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![None])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // The positions of a row, its groups, and their scores.
        let row = inputs[0].shape.last().copied().unwrap_or(1);
        row.saturating_add(self.groups.saturating_mul(2)).saturating_mul(8)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Route {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Route { k: 2, groups: 5, top_groups: 3, group_scores: 2 },
                &["f32[8,6,10]"],
                "([d0, d1, _])->([d0, d1, _]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let mut shape = rng.shape(1, 3);
            let (groups, size) = (rng.between(1, 4), rng.between(1, 3));
            shape.push(groups * size);
            let top_groups = rng.between(1, groups);
            let (group_scores, k) = (rng.between(1, size), rng.between(1, top_groups * size));
            Case::new(Route { k, groups, top_groups, group_scores }, vec![f64s(&shape[..])])
        }
    }
}
