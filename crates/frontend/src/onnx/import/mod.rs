//! The importers of ONNX's ops, one file per family.

mod activation;
mod attention;
mod control;
mod elementwise;
mod gather;
mod largest;
mod loss;
mod movement;
mod norm;
mod product;
mod rearrange;
mod recurrent;
mod reduce;
mod resize;
mod scatter;
mod window;

use super::{
    attributes::is_standard,
    error::{Tried, Trouble},
    importer::Importer,
    proto::Node,
};

/// Reads a node's inputs, adds ops, binds its outputs.
pub(crate) type Import = fn(&mut Importer<'_>, &Node) -> Tried;

/// A family's ops by name.
type Family = fn(&str) -> Option<Import>;

const FAMILIES: &[Family] = &[
    activation::find,
    attention::find,
    control::find,
    elementwise::find,
    gather::find,
    largest::find,
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
pub(crate) fn find(node: &Node) -> Tried<Import> {
    let known = FAMILIES.iter().find_map(|family| family(&node.op_type));
    known.filter(|_| is_standard(&node.domain)).ok_or_else(|| Trouble::unsupported(""))
}
