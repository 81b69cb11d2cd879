//! Replaces calls of a model's functions by the functions' nodes.
//!
//! Inlined values and nodes are prefixed by the name of the calling node, so that names stay unique and show their
//! origin. Attributes that refer to a function's attribute take the value of the call.

use super::{
    budget::Budget,
    error::{NodeError, OnnxError, shown},
    proto::{Attribute, Function, Graph, Node},
};
use prost::Message;
use std::collections::HashMap;

/// The most nodes and calls that a model's functions may expand to.
const MOST_NODES: u64 = 1_000_000;
/// The most levels of nested subgraphs.
const MOST_NESTED: usize = 32;

/// Domain, name and overload of a function.
type FunctionKey<'f> = (&'f str, &'f str, &'f str);

fn key(function: &Function) -> FunctionKey<'_> {
    (&function.domain, &function.name, &function.overload)
}

/// The graph with all function calls inlined.
pub(crate) fn inline_functions(
    mut graph: Graph,
    functions: &[Function],
    budget: Budget,
) -> Result<Graph, OnnxError> {
    if functions.is_empty() {
        return Ok(graph);
    }
    let mut by_name = HashMap::new();
    for function in functions {
        if by_name.insert(key(function), function).is_some() {
            return Err(OnnxError::Model(format!("function `{}` is defined twice", shown(&function.name))));
        }
    }
    let mut inliner = Inliner { functions: by_name, nodes: Vec::new(), budget };
    inliner.check_calls(&graph.node)?;
    for node in std::mem::take(&mut graph.node) {
        inliner.add(node)?;
    }
    graph.node = inliner.nodes;
    Ok(graph)
}

struct Inliner<'f> {
    functions: HashMap<FunctionKey<'f>, &'f Function>,
    nodes: Vec<Node>,
    budget: Budget,
}

impl<'f> Inliner<'f> {
    /// Adds a node, or the nodes of the functions that it calls. Calls may nest as deeply as there are functions, so the open
    /// calls are a list and not the program's stack.
    fn add(&mut self, node: Node) -> Result<(), OnnxError> {
        let mut open: Vec<Call<'f>> = Vec::new();
        let mut next = Some(node);
        loop {
            let node = match (next.take(), open.last_mut()) {
                (Some(node), _) => node,
                (None, None) => return Ok(()),
                (None, Some(call)) => match call.function.node.get(call.position) {
                    Some(inner) => {
                        call.position += 1;
                        call.instantiate(inner, 0, &mut self.budget)?
                    }
                    None => {
                        open.pop();
                        continue;
                    }
                },
            };
            let Some(function) = self.called(&node) else {
                self.nodes.push(node);
                continue;
            };
            let names = function.input.len() + function.output.len() + function.attribute_proto.len();
            self.budget.work(names).map_err(too_large)?;
            open.push(Call::new(node, function));
        }
    }

    /// Refuses functions that call themselves, and calls that expand to too many nodes, before any node is copied.
    fn check_calls(&self, nodes: &[Node]) -> Result<(), OnnxError> {
        // Per function: the nodes and calls that a call expands to; `None` while they are counted.
        let mut sizes: HashMap<FunctionKey<'f>, Option<u64>> = HashMap::new();
        let mut total = 0u64;
        for node in nodes {
            let Some(called) = self.called(node) else { continue };
            if !sizes.contains_key(&key(called)) {
                self.count_nodes(called, &mut sizes)?;
            }
            total = total.saturating_add(sizes[&key(called)].unwrap_or(0));
        }
        if total > MOST_NODES {
            return Err(OnnxError::Model("the model's functions expand to over a million nodes".into()));
        }
        Ok(())
    }

    /// Counts the nodes that a function and all functions that it calls expand to.
    fn count_nodes(
        &self,
        function: &'f Function,
        sizes: &mut HashMap<FunctionKey<'f>, Option<u64>>,
    ) -> Result<(), OnnxError> {
        sizes.insert(key(function), None);
        // Open functions: the next node, and the nodes so far.
        let mut open: Vec<(&'f Function, usize, u64)> = vec![(function, 0, 1)];
        while let Some((function, position, count)) = open.last_mut() {
            let Some(node) = function.node.get(*position) else {
                sizes.insert(key(function), Some(*count));
                open.pop();
                continue;
            };
            let called = self.called(node);
            match called.map(|called| sizes.get(&key(called))) {
                None => *count = count.saturating_add(1),
                Some(Some(Some(size))) => *count = count.saturating_add(*size),
                Some(Some(None)) => {
                    let name = called.map_or("", |called| &called.name);
                    return Err(OnnxError::Model(format!("function `{}` calls itself", shown(name))));
                }
                Some(None) => {
                    if let Some(called) = called {
                        sizes.insert(key(called), None);
                        open.push((called, 0, 1));
                    }
                    continue;
                }
            }
            *position += 1;
        }
        Ok(())
    }

    /// The function that a node calls; `None` if it is an op.
    fn called(&self, node: &Node) -> Option<&'f Function> {
        self.functions.get(&(node.domain.as_str(), node.op_type.as_str(), node.overload.as_str())).copied()
    }
}

fn too_large(error: NodeError) -> OnnxError {
    OnnxError::Model(error.reason())
}

/// One call of a function.
struct Call<'f> {
    function: &'f Function,
    /// The next node of the function.
    position: usize,
    prefix: String,
    /// The names of the function's inputs and outputs at the call.
    outside: HashMap<&'f str, String>,
    /// The attributes of the call.
    given: HashMap<String, Attribute>,
    /// The defaults of the other attributes.
    defaults: HashMap<&'f str, &'f Attribute>,
}

impl<'f> Call<'f> {
    fn new(node: Node, function: &'f Function) -> Self {
        let mut outside = HashMap::new();
        // Inputs that the call leaves out are left out in the function's nodes.
        for (i, formal) in function.input.iter().enumerate() {
            outside.insert(formal.as_str(), node.input.get(i).cloned().unwrap_or_default());
        }
        for (formal, given) in function.output.iter().zip(&node.output).filter(|(_, given)| !given.is_empty())
        {
            outside.insert(formal.as_str(), given.clone());
        }
        let prefix = node.label().to_string();
        let given = node.attribute.into_iter().map(|a| (a.name.clone(), a)).collect();
        let defaults = function.attribute_proto.iter().map(|a| (a.name.as_str(), a)).collect();
        Self { function, position: 0, prefix, outside, given, defaults }
    }

    /// The value of an attribute of the function; `None`: the default of the op applies.
    fn attribute(&self, name: &str) -> Option<&Attribute> {
        self.given.get(name).or_else(|| self.defaults.get(name).copied())
    }

    fn rename(&self, name: &str) -> String {
        match self.outside.get(name) {
            Some(outside) => outside.clone(),
            None if name.is_empty() => String::new(),
            None => format!("{}/{name}", self.prefix),
        }
    }

    fn instantiate(&self, node: &Node, depth: usize, budget: &mut Budget) -> Result<Node, OnnxError> {
        if depth > MOST_NESTED {
            return Err(OnnxError::Model("subgraphs are nested too deeply".into()));
        }
        let mut copy = node.clone();
        copy.name = format!("{}/{}", self.prefix, node.label());
        copy.input = node.input.iter().map(|n| self.rename(n)).collect();
        copy.output = node.output.iter().map(|n| self.rename(n)).collect();
        let mut attributes = Vec::with_capacity(node.attribute.len());
        for attribute in &node.attribute {
            if !attribute.ref_attr_name.is_empty() {
                if let Some(given) = self.attribute(&attribute.ref_attr_name) {
                    attributes.push(Attribute { name: attribute.name.clone(), ..given.clone() });
                }
                continue;
            }
            let mut attribute = attribute.clone();
            if let Some(graph) = &mut attribute.g {
                self.rename_graph(graph, depth, budget)?;
            }
            attributes.push(attribute);
        }
        copy.attribute = attributes;
        // Names grow with every level of calls. Packed contents are shared, not copied.
        let shared: usize = copy.attribute.iter().flat_map(|a| &a.t).map(|t| t.raw_data.len()).sum();
        budget.bytes(copy.encoded_len().saturating_sub(shared)).map_err(too_large)?;
        Ok(copy)
    }

    /// Renames in a subgraph, which may read values of the enclosing function.
    fn rename_graph(&self, graph: &mut Graph, depth: usize, budget: &mut Budget) -> Result<(), OnnxError> {
        for node in &mut graph.node {
            *node = self.instantiate(node, depth + 1, budget)?;
        }
        let infos = graph.input.iter_mut().chain(&mut graph.output);
        infos.for_each(|info| info.name = self.rename(&info.name));
        graph.initializer.iter_mut().for_each(|t| t.name = self.rename(&t.name));
        Ok(())
    }
}
