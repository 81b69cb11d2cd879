//! The sub-mesh of a pipeline stage, and what its axes are for.
//!
//! Devices are numbered as trainers do: tensor parallelism innermost, then context, then data parallelism, then stages. So a
//! stage is a run of neighbouring devices, and tensor-parallel groups stay on the fastest links.

use shardwright_machine::{AxisId, AxisSet, Machine, Mesh};

/// What an axis of a stage's mesh is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AxisRole {
    /// Pipeline stages.
    Stage,
    /// Replicas that read different samples.
    Data,
    /// The same, and experts are divided among them.
    Expert,
    /// Parts of a sequence.
    Context,
    /// Parts of weights.
    Tensor,
}

/// A mesh whose axes have roles.
pub(crate) struct RoleMesh {
    pub mesh: Mesh,
    /// Per axis.
    pub roles: Vec<AxisRole>,
}

/// Degrees of the roles, innermost first.
pub(super) type RoleDegrees = [(AxisRole, u32); 5];

impl RoleMesh {
    /// The machine's mesh, its axes merged by role. The degrees multiply to the machine's devices.
    ///
    /// # Errors
    /// The role whose degree is not made of whole axes.
    pub fn new(machine: &Machine, degrees: RoleDegrees) -> Result<Self, (AxisRole, u32)> {
        let prime = machine.mesh();
        let mut roles = vec![AxisRole::Stage; prime.len()];
        let mut left = degrees.into_iter().peekable();
        let mut rest = left.peek().map_or(1, |(_, degree)| *degree);
        for at in (0..prime.len()).rev() {
            let size = prime.axis(AxisId(at as u32)).size;
            while rest == 1 && left.next().is_some() {
                rest = left.peek().map_or(1, |(_, degree)| *degree);
            }
            let Some(&(role, degree)) = left.peek() else { break };
            if !rest.is_multiple_of(size) {
                return Err((role, degree));
            }
            roles[at] = role;
            rest /= size;
        }
        let mut groups: Vec<AxisSet> = Vec::new();
        let mut merged: Vec<AxisRole> = Vec::new();
        for (at, axis) in prime.axes().iter().enumerate() {
            let id = AxisId(at as u32);
            let joins = at > 0
                && roles[at - 1] == roles[at]
                && prime.axes()[at - 1].level == axis.level
                && prime.axes()[at - 1].dim == axis.dim;
            match groups.last_mut().filter(|_| joins) {
                Some(group) => *group = group.with(id),
                None => {
                    groups.push(AxisSet::of(id));
                    merged.push(roles[at]);
                }
            }
        }
        match prime.merge_axes(&groups) {
            Ok(mesh) => Ok(Self { mesh, roles: merged }),
            Err(_) => Ok(Self { mesh: prime.clone(), roles }),
        }
    }

    /// The axes of a role.
    pub fn axes(&self, wanted: impl Fn(AxisRole) -> bool) -> AxisSet {
        let axes = self.roles.iter().enumerate().filter(|(_, role)| wanted(**role));
        axes.map(|(at, _)| AxisId(at as u32)).collect()
    }
}
