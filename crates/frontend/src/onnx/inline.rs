//! Replaces calls of a model's own functions by their nodes.
//!
//! Values inside get the name of the calling node before theirs, and so do nodes, so that names stay unique and
//! say where they come from. Attributes that refer to the function's are replaced by what the call gives.

use super::{
    error::{OnnxError, shown},
    proto::{Attribute, Function, Graph, Node},
};
use std::collections::HashMap;

/// The most nodes that a model may have once its functions are inlined.
const MOST_NODES: usize = 1_000_000;
/// How deeply functions may call functions; deeper is a function that calls itself.
const MOST_CALLS: usize = 32;

/// The graph with all function calls inlined.
pub(crate) fn inline_functions(mut graph: Graph, functions: &[Function]) -> Result<Graph, OnnxError> {
    if functions.is_empty() {
        return Ok(graph);
    }
    let mut by_name = HashMap::new();
    for function in functions {
        let key = (function.domain.as_str(), function.name.as_str(), function.overload.as_str());
        if by_name.insert(key, function).is_some() {
            return Err(OnnxError::Model(format!("function `{}` is there twice", shown(&function.name))));
        }
    }
    let mut inliner = Inliner { functions: by_name, nodes: Vec::new() };
    for node in std::mem::take(&mut graph.node) {
        inliner.add(node, 0)?;
    }
    graph.node = inliner.nodes;
    Ok(graph)
}

struct Inliner<'a> {
    functions: HashMap<(&'a str, &'a str, &'a str), &'a Function>,
    nodes: Vec<Node>,
}

impl Inliner<'_> {
    fn add(&mut self, node: Node, depth: usize) -> Result<(), OnnxError> {
        let key = (node.domain.as_str(), node.op_type.as_str(), node.overload.as_str());
        let Some(&function) = self.functions.get(&key) else {
            self.nodes.push(node);
            if self.nodes.len() > MOST_NODES {
                return Err(OnnxError::Model("its functions expand to over a million nodes".into()));
            }
            return Ok(());
        };
        if depth >= MOST_CALLS {
            return Err(OnnxError::Model(format!("function `{}` calls itself", shown(&function.name))));
        }
        let call = Call::new(&node, function);
        for inner in &function.node {
            let inner = call.instantiate(inner, 0)?;
            self.add(inner, depth + 1)?;
        }
        Ok(())
    }
}

/// One call of a function.
struct Call<'a> {
    prefix: &'a str,
    /// What the function's inputs and outputs are called outside.
    outside: HashMap<&'a str, &'a str>,
    /// The attributes that the call gives, or their defaults.
    attributes: HashMap<&'a str, &'a Attribute>,
}

impl<'a> Call<'a> {
    fn new(node: &'a Node, function: &'a Function) -> Self {
        let mut outside = HashMap::new();
        let names = |given: &'a [String], formal: &'a [String]| {
            // Inputs that the call leaves out are left out inside, too.
            formal.iter().enumerate().map(|(i, f)| (f.as_str(), given.get(i).map_or("", String::as_str)))
        };
        outside.extend(names(&node.input, &function.input));
        let made = names(&node.output, &function.output).filter(|(_, given)| !given.is_empty());
        outside.extend(made);
        let defaults = function.attribute_proto.iter().map(|a| (a.name.as_str(), a));
        let given = node.attribute.iter().map(|a| (a.name.as_str(), a));
        Self { prefix: node.label(), outside, attributes: defaults.chain(given).collect() }
    }

    fn rename(&self, name: &str) -> String {
        match self.outside.get(name) {
            Some(outside) => (*outside).to_string(),
            None if name.is_empty() => String::new(),
            None => format!("{}/{name}", self.prefix),
        }
    }

    fn instantiate(&self, node: &Node, depth: usize) -> Result<Node, OnnxError> {
        if depth > MOST_CALLS {
            return Err(OnnxError::Model("subgraphs nest too deeply".into()));
        }
        let mut copy = node.clone();
        copy.name = format!("{}/{}", self.prefix, node.label());
        copy.input = node.input.iter().map(|n| self.rename(n)).collect();
        copy.output = node.output.iter().map(|n| self.rename(n)).collect();
        let mut attributes = Vec::with_capacity(node.attribute.len());
        for attribute in &node.attribute {
            if !attribute.ref_attr_name.is_empty() {
                // Neither given nor with a default: the op's own default holds.
                if let Some(&given) = self.attributes.get(attribute.ref_attr_name.as_str()) {
                    attributes.push(Attribute { name: attribute.name.clone(), ..given.clone() });
                }
                continue;
            }
            let mut attribute = attribute.clone();
            if let Some(graph) = &mut attribute.g {
                self.rename_graph(graph, depth)?;
            }
            attributes.push(attribute);
        }
        copy.attribute = attributes;
        Ok(copy)
    }

    /// Subgraphs read values of the function around them.
    fn rename_graph(&self, graph: &mut Graph, depth: usize) -> Result<(), OnnxError> {
        for node in &mut graph.node {
            *node = self.instantiate(node, depth + 1)?;
        }
        let infos = graph.input.iter_mut().chain(&mut graph.output);
        infos.for_each(|info| info.name = self.rename(&info.name));
        graph.initializer.iter_mut().for_each(|t| t.name = self.rename(&t.name));
        Ok(())
    }
}
