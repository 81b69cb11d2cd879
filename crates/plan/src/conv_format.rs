//! The memory format of a step's convolutions, where a compiler chooses one for all of them.
//!
//! PyTorch's compiler (`decide_layout_opt` of `torch/_inductor/graph.py`) puts channels innermost unless a convolution suffers from
//! it: one of groups with several channels each, or one with half as many results as inputs or fewer and a kernel larger than one.
//! U-Net and DenseNet stay contiguous on an H200 (their kernels are preceded by `nchwToNhwc`), ResNet and VGG do not.

use shardwright_cost::Engine;
use shardwright_graph::{Graph, Phase, RooflineKind};
use shardwright_space::OpShapes;

/// Channels up to which a convolution is small; a step of small ones alone stays contiguous.
const SMALL: u64 = 64;

/// Whether a step's convolutions keep contiguous tensors under an engine that prefers channels innermost.
pub(crate) fn keeps_contiguous(graph: &Graph, shapes: &[OpShapes], engine: &Engine) -> bool {
    if !engine.channels_last || !engine.contiguous_if_narrowing {
        return false;
    }
    let mut all_small = true;
    let mut any = false;
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward) {
        let own = &shapes[op.index()];
        let workload = graph.node(op).op.workload(&own.inputs, &own.outputs);
        if !matches!(workload.roofline, RooflineKind::Convolution { .. }) {
            continue;
        }
        // Samples, groups, inputs and results of a group, then sizes of the result, the kernel and the strides.
        let &[_, groups, inputs, results, ref rest @ ..] = &workload.sizes[..] else { continue };
        let kernel = rest.get(rest.len() / 3).copied().unwrap_or(1);
        any = true;
        all_small &= groups * results <= SMALL && inputs <= SMALL;
        if groups > 1 && inputs > 1 || groups * results * 2 <= inputs && kernel > 1 {
            return true;
        }
    }
    any && all_small
}
