//! The importers of ONNX's ops, one file per family.

mod activation;
mod attention;
mod control;
mod elementwise;
mod gather;
mod loss;
mod movement;
mod norm;
mod product;
mod rearrange;
mod recurrent;
mod reduce;
mod resize;
mod scatter;
mod top_k;
mod window;

use super::{
    attributes::is_standard,
    error::{NodeError, NodeResult},
    importer::Importer,
    proto::Node,
};

/// Imports a node: reads its inputs, adds ops, binds its outputs.
pub(crate) type Import = fn(&mut Importer<'_>, &Node) -> NodeResult;

/// The importers of a family of ops, by op name.
type Family = fn(&str) -> Option<Import>;

const FAMILIES: &[Family] = &[
    activation::find,
    attention::find,
    control::find,
    elementwise::find,
    gather::find,
    top_k::find,
    loss::find,
    movement::find,
    norm::find,
    product::find,
    rearrange::find,
    recurrent::find,
    reduce::find,
    resize::find,
    scatter::find,
    window::find,
];

/// The importer of a node.
pub(crate) fn find(node: &Node) -> NodeResult<Import> {
    let known = FAMILIES.iter().find_map(|family| family(&node.op_type));
    known.filter(|_| is_standard(&node.domain)).ok_or_else(|| NodeError::unsupported(""))
}
