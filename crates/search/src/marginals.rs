//! Min-marginals: for every choice of every variable, the least cost of an assignment with it.
//!
//! PaSE's tables hold, for every vertex of the elimination order, the least cost of the part below it given its dependent
//! set ([`crate::pase`]). A pass from the last vertex to the first computes the least cost of the part above. Their sum,
//! minimised over the dependent set, gives a vertex's min-marginals. Both passes together give those of all variables
//! exactly, if the tables are small enough. Memory limits are ignored, as in PaSE. Networks with too large tables are
//! refused; the caller may fix a choice and search instead.

use crate::control::Control;
use crate::minsum::{self, INFINITE};
use crate::network::{Network, VarId};
use crate::outcome::StopReason;
use crate::pairwise::Pairwise;
use crate::pase::{Factor, Program, SequenceVertex, generate_sequence};

/// The least cost with each choice; see the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MinMarginals {
    /// Prefix sums of choice counts.
    first_choice: Vec<usize>,
    least: Vec<i64>,
}

impl MinMarginals {
    /// The least cost of an assignment with this choice; `None` if all are forbidden.
    pub fn least(&self, variable: VarId, choice: u32) -> Option<i64> {
        let least = self.least[self.first_choice[variable.index()] + choice as usize];
        (least < INFINITE).then_some(least)
    }
}

/// The min-marginals of a network without its memory.
///
/// # Errors
/// [`StopReason::Refused`] if that takes more than `most_additions` additions or more memory than `control` allows;
/// otherwise the reason why `control` stopped it.
pub fn min_marginals(
    network: &Network,
    most_additions: f64,
    control: &Control<'_>,
) -> Result<MinMarginals, StopReason> {
    let costs = Pairwise::of(network);
    // Every table of the upward pass needs one of the downward pass.
    let half = Control { memory_bytes: control.memory_bytes / 2, ..control.clone() };
    let sequence = generate_sequence(&costs, &half).map_err(|reason| match reason {
        StopReason::Refused(_) => StopReason::Refused(
            "its tables do not fit the memory: the network is too densely connected".into(),
        ),
        other => other,
    })?;
    let mut program = Program::new(&costs, &sequence);
    let additions: f64 = sequence.iter().map(|step| work(&costs, step, &program)).sum();
    if additions > most_additions {
        return Err(StopReason::Refused(format!(
            "it takes {additions:.0e} additions, more than {most_additions:.0e}"
        )));
    }
    let optimum = program.eliminate(&sequence, control)?;
    let mut first_choice = vec![0];
    for v in 0..network.variables() {
        first_choice.push(first_choice[v] + costs.choices(v as u32));
    }
    let mut least = vec![INFINITE; first_choice[network.variables()]];
    if optimum >= INFINITE {
        return Ok(MinMarginals { first_choice, least });
    }
    // Per vertex: the least cost of everything outside, for every combination over its dependent set.
    let mut above: Vec<Vec<i64>> = sequence.iter().map(|_| Vec::new()).collect();
    for at in (0..sequence.len()).rev() {
        if let Some(reason) = control.stop(0) {
            return Err(reason);
        }
        let step = &sequence[at];
        let factors = &program.waiting[step.vertex as usize];
        let own = first_choice[step.vertex as usize]..first_choice[step.vertex as usize + 1];
        let outside = match &step.dependent[..] {
            // Outside the last vertex of a component are only the other components, each at its optimum.
            [] => vec![optimum - alone(&costs, step, factors)],
            _ => std::mem::take(&mut above[at]),
        };
        for factor in factors {
            if let Some(made_by) = factor.made_by {
                above[made_by] = vec![INFINITE; factor.cells.len()];
            }
        }
        descend(&costs, step, factors, &outside, &mut least[own], &mut above);
    }
    Ok(MinMarginals { first_choice, least })
}

/// Additions of both passes at a vertex.
fn work(costs: &Pairwise, step: &SequenceVertex, program: &Program<'_>) -> f64 {
    let cells: f64 = step.dependent.iter().map(|&u| costs.choices(u) as f64).product();
    let pairs = program.waiting[step.vertex as usize].len();
    cells * costs.choices(step.vertex) as f64 * (4 + pairs) as f64
}

/// The least cost of the connected component whose last vertex this is.
fn alone(costs: &Pairwise, step: &SequenceVertex, factors: &[Factor]) -> i64 {
    let mut row = costs.unary[step.vertex as usize].clone();
    factors.iter().for_each(|factor| minsum::add_row(&mut row, &factor.cells));
    row.into_iter().min().unwrap_or(INFINITE)
}

/// Propagates the costs outside a vertex to its own marginals and to the vertices below it.
fn descend(
    costs: &Pairwise,
    step: &SequenceVertex,
    factors: &[Factor],
    outside: &[i64],
    least: &mut [i64],
    above: &mut [Vec<i64>],
) {
    let unary = &costs.unary[step.vertex as usize];
    let sizes: Vec<usize> = step.dependent.iter().map(|&u| costs.choices(u)).collect();
    // The strides of a factor along the members of the dependent set.
    let strides = |factor: &Factor| {
        let mut strides = vec![0; sizes.len()];
        let mut stride = unary.len();
        for &u in factor.scope.iter().rev() {
            if let Some(place) = step.dependent.iter().position(|&member| member == u) {
                strides[place] = stride;
            }
            stride *= costs.choices(u);
        }
        strides
    };
    let factors: Vec<(&Factor, Vec<usize>)> = factors.iter().map(|own| (own, strides(own))).collect();
    let mut places = vec![0; factors.len()];
    let mut digits = vec![0; sizes.len()];
    let mut row = vec![0; unary.len()];
    for prefix in 0..sizes.iter().product::<usize>() {
        let mut rest = prefix;
        for (digit, &size) in digits.iter_mut().zip(&sizes).rev() {
            *digit = rest % size;
            rest /= size;
        }
        let outside = outside[prefix];
        if outside >= INFINITE {
            continue;
        }
        row.copy_from_slice(unary);
        for ((factor, strides), place) in factors.iter().zip(&mut places) {
            *place = strides.iter().zip(&digits).map(|(stride, digit)| stride * digit).sum();
            minsum::add_row(&mut row, &factor.cells[*place..][..unary.len()]);
        }
        for (least, cost) in least.iter_mut().zip(&mut row) {
            *cost = minsum::add(*cost, outside);
            *least = (*least).min(*cost);
        }
        for ((factor, _), &place) in factors.iter().zip(&places) {
            let Some(made_by) = factor.made_by else { continue };
            let theirs = &factor.cells[place..][..unary.len()];
            for ((above, &cost), &theirs) in above[made_by][place..].iter_mut().zip(&row).zip(theirs) {
                // Without the factor's own cost. If that is infinite, the whole cost is infinite too.
                if cost < INFINITE {
                    *above = (*above).min(cost - theirs);
                }
            }
        }
    }
}
