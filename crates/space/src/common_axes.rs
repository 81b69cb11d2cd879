//! Two plans on one mesh: the coarsest one that refines the axes of both.
//!
//! Plans of one machine may have different axes: a recipe is planned on the axes where it is best, and a search refines merged
//! ones. A config on merged axes is a config on finer axes too, where each finer axis has the use of its merged axis.

use crate::{
    assignment::Assignment,
    config::{AxisUse, Config},
    pipeline::Pipeline,
};
use shardwright_machine::{AxisId, AxisSet, Machine, Mesh, MeshError};

/// The coarsest mesh of the machine that refines two of its meshes.
///
/// # Errors
/// Where the meshes are not of the machine.
pub fn common_axes(machine: &Machine, one: &Mesh, other: &Mesh) -> Result<Mesh, MeshError> {
    let parts = one.axes().iter().flat_map(|axis| {
        other.axes().iter().map(|other| axis.primes.intersect(other.primes)).filter(|part| !part.is_empty())
    });
    machine.mesh().merge_axes(&parts.collect::<Vec<AxisSet>>())
}

/// An assignment on a finer mesh.
pub fn on_finer_axes(assignment: &Assignment, coarse: &Mesh, finer: &Mesh) -> Assignment {
    let inside =
        |axis: AxisId, of: AxisId| !coarse.axis(of).primes.intersect(finer.axis(axis).primes).is_empty();
    let config = |own: &Config| {
        let mut config = Config::replicated(finer.len());
        for parent in coarse.all().iter() {
            let mut children: Vec<AxisId> = finer.all().iter().filter(|&axis| inside(axis, parent)).collect();
            let mut used = own.get(parent);
            // The innermost digit of a pin is the last.
            children.reverse();
            for child in children {
                let size = finer.axis(child).size as u16;
                match &mut used {
                    AxisUse::Pin(digit) => {
                        config.set(child, AxisUse::Pin(*digit % size));
                        *digit /= size;
                    }
                    other => config.set(child, *other),
                }
            }
        }
        config
    };
    let pipeline = assignment.pipeline.as_ref().map(|pipeline| {
        let children = finer.all().iter().filter(|&axis| pipeline.axes.iter().any(|of| inside(axis, of)));
        Pipeline { axes: children.collect(), ..pipeline.clone() }
    });
    Assignment { configs: assignment.configs.iter().map(config).collect(), pipeline, ..assignment.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::configs;
    use shardwright_graph::{DType, Op, TensorType, ops::Contract};
    use shardwright_machine::builtin;

    #[test]
    fn merged_axes_meet_in_the_coarsest_mesh_that_refines_both() {
        let machine = builtin("p100x16").unwrap();
        let prime = machine.mesh();
        let merged = |groups: &[&[u32]]| {
            let groups = groups.iter().map(|group| group.iter().map(|&axis| AxisId(axis)).collect());
            prime.merge_axes(&groups.collect::<Vec<AxisSet>>()).unwrap()
        };
        let (nodes, gpus) = (merged(&[&[0, 1], &[2], &[3]]), merged(&[&[0], &[1], &[2, 3]]));
        assert_eq!(common_axes(&machine, &nodes, &gpus).unwrap(), *prime);
        assert_eq!(common_axes(&machine, &nodes, &prime.per_level()).unwrap(), nodes);
        assert_eq!(common_axes(&machine, &nodes, &nodes).unwrap(), nodes);
    }

    #[test]
    fn finer_axes_change_neither_parts_nor_devices() {
        let op: Op = Contract::parse("nc,co->no").unwrap().into();
        let inputs = [TensorType::new(DType::F32, [64, 64]), TensorType::new(DType::F32, [64, 64])];
        let rule = op.rule(&inputs, &op.operator().infer(&inputs).unwrap());
        let machine = builtin("p100x16").unwrap();
        let (prime, merged) = (machine.mesh(), machine.mesh().per_level());
        let own = Assignment::new(configs(&rule, &merged));
        let finer = on_finer_axes(&own, &merged, prime);
        for (own, finer) in own.configs.iter().zip(&finer.configs) {
            assert_eq!(own.parts(&rule, &merged), finer.parts(&rule, prime));
        }
        let pinned = Assignment::new(vec![Config::new([AxisUse::Pin(2), AxisUse::Pin(1)])]);
        let digits = [1, 0, 0, 1].map(AxisUse::Pin);
        assert_eq!(on_finer_axes(&pinned, &merged, prime).configs, [Config::new(digits)]);
    }
}
