//! The training step around a model: labels, loss, gradients, updates.

use super::{
    ImportOptions, ImportedModel,
    error::{NodeError, NodeResult, OnnxError, shown},
    importer::{Importer, NodeValue},
    view::View,
};
use crate::pending::TensorSource;
use rustc_hash::FxHashMap;
use shardwright_graph::{DType, GraphBuilder, TensorId, fuse_attention, ops::Reduce, train};
use shardwright_zoo::layers;
use std::str::FromStr;

/// The loss that is trained.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Loss {
    /// Mean cross-entropy of the first output against labels. The classes are its last dimension, or its second if it has
    /// more than three dimensions (images, as in PyTorch).
    #[default]
    CrossEntropy,
    /// Mean squared error between the first output and a target.
    Mse,
    /// The mean of the first output.
    Output,
}

impl Loss {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::CrossEntropy, Self::Mse, Self::Output];

    /// The name of the loss on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::CrossEntropy => "cross-entropy",
            Self::Mse => "mse",
            Self::Output => "output",
        }
    }
}

impl FromStr for Loss {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|loss| loss.name() == text);
        found.ok_or_else(|| format!("there is no loss `{text}`; choose cross-entropy, mse or output"))
    }
}

/// Finishes an import: adds the outputs and, if requested, the training step.
pub(crate) fn finish(
    mut cx: Importer<'_>,
    mut inputs: Vec<(String, TensorId)>,
    options: &ImportOptions,
) -> Result<ImportedModel, OnnxError> {
    let model = cx.model;
    let named =
        |name: &str, t: NodeError| OnnxError::Model(format!("output `{}`: {}", shown(name), t.reason()));
    let mut notes = missing_weights(&cx);
    let mut outputs = Vec::new();
    if options.training {
        let info =
            model.graph.output.first().ok_or_else(|| OnnxError::Model("the model has no output".into()))?;
        cx.name = "loss".into();
        let loss = output_view(&mut cx, &info.name)
            .and_then(|view| add_loss(&mut cx, &view, options.loss))
            .map_err(|t| named(&info.name, t))?;
        cx.b.output(loss);
        let moved = fuse(&mut cx, &mut notes)?;
        let loss = moved(loss);
        inputs.iter_mut().for_each(|(_, t)| *t = moved(*t));
        train(&mut cx.b, loss, &options.optimizer).map_err(|e| OnnxError::Model(e.to_string()))?;
        if model.graph.output.len() > 1 {
            notes.push(format!("the loss uses the first of {} outputs", model.graph.output.len()));
        }
    } else {
        for info in &model.graph.output {
            cx.name = shown(&info.name);
            let tensor = output_view(&mut cx, &info.name).and_then(|view| cx.plain(&view));
            let tensor = tensor.map_err(|t| named(&info.name, t))?;
            cx.b.output(tensor);
            outputs.push((info.name.clone(), tensor));
        }
        let moved = fuse(&mut cx, &mut notes)?;
        inputs.iter_mut().chain(&mut outputs).for_each(|(_, t)| *t = moved(*t));
    }
    notes.append(&mut cx.notes);
    Ok(ImportedModel { graph: cx.b.finish(), sources: cx.sources, inputs, outputs, notes })
}

/// Fuses attention that the file computes by products and softmax. Returns the new tensor of each source and output.
fn fuse(
    cx: &mut Importer<'_>,
    notes: &mut Vec<String>,
) -> Result<impl Fn(TensorId) -> TensorId + use<>, OnnxError> {
    let mut tensors = Vec::new();
    if cx.fuse_attention {
        let graph = std::mem::take(&mut cx.b).finish();
        let stored: FxHashMap<TensorId, &TensorSource> =
            cx.sources.iter().filter(|s| s.selections.is_empty()).map(|s| (s.tensor, s)).collect();
        let contents = |t: TensorId| {
            let literal = stored.get(&t)?.stored.fold(cx.external).ok().flatten()?;
            (!literal.assumed).then(|| literal.to_reals())
        };
        let fusion = fuse_attention(graph, &[], &contents).map_err(|e| OnnxError::Model(e.to_string()))?;
        notes.extend(fusion.note());
        cx.b = GraphBuilder::resume(fusion.graph);
        tensors = fusion.tensors;
    }
    // Sources and outputs are never intermediate results.
    let moved = move |t: TensorId| tensors.get(t.index()).copied().flatten().unwrap_or(t);
    cx.sources.iter_mut().for_each(|source| source.tensor = moved(source.tensor));
    Ok(moved)
}

fn output_view(cx: &mut Importer<'_>, name: &str) -> NodeResult<View> {
    match cx.value(name).cloned() {
        Some(NodeValue::View(view)) => Ok(view),
        Some(NodeValue::Known(literal)) => cx.constant(name, &literal),
        Some(NodeValue::Parts(axis, parts)) => cx.join(axis, &parts),
        Some(NodeValue::Broken) | None => Err(NodeError::invalid("no node computes it")),
    }
}

fn add_loss(cx: &mut Importer<'_>, view: &View, loss: Loss) -> NodeResult<TensorId> {
    let shape = view.shape();
    if !cx.dtype(view).is_float() {
        return Err(NodeError::invalid(format!("elements of type {} cannot be trained", cx.dtype(view))));
    }
    match loss {
        Loss::CrossEntropy => {
            let rank = shape.len();
            let mut order: Vec<usize> = (0..rank).collect();
            if rank > 3 {
                let classes = order.remove(1);
                order.push(classes);
            }
            let logits = cx.plain(&view.transpose(&order))?;
            let Some((&classes, labels)) = cx.b.shape(logits).split_last() else {
                return Err(NodeError::invalid("a single number has no classes: use --loss output"));
            };
            let labels = labels.to_vec();
            let labels = layers::ids(&mut cx.b, "labels", &labels, classes)?;
            Ok(layers::cross_entropy(&mut cx.b, "loss", logits, labels)?)
        }
        Loss::Mse => {
            let output = cx.plain(view)?;
            let dtype: DType = cx.dtype(view);
            let target = layers::data(&mut cx.b, "target", dtype, &shape)?;
            Ok(layers::mse(&mut cx.b, "loss", output, target)?)
        }
        Loss::Output => {
            let output = cx.plain(view)?;
            mean(&mut cx.b, output)
        }
    }
}

fn mean(b: &mut GraphBuilder, output: TensorId) -> NodeResult<TensorId> {
    let ty = b.ty(output).clone();
    if ty.rank() == 0 {
        return Ok(output);
    }
    let op = Reduce::mean((0..ty.rank()).collect(), &ty.shape);
    Ok(b.emit("loss", op, &[output])?)
}

/// Notes about weights whose contents the file lacks.
fn missing_weights(cx: &Importer<'_>) -> Vec<String> {
    let missing: Vec<&str> =
        cx.sources.iter().filter(|s| s.stored.is_missing()).map(|s| s.stored.name.as_str()).collect();
    let external = cx.sources.iter().filter(|s| s.stored.is_external()).count();
    let mut notes = Vec::new();
    if let Some(first) = missing.first() {
        let rest = match missing.len() - 1 {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        notes.push(format!(
            "the file lacks the contents of `{}`{rest}: weights start from seeded values, whole numbers from 0, truth values from true",
            shown(first)
        ));
    }
    if external > 0 {
        notes.push(format!("{external} weights are in external files; a run seeds those that are missing"));
    }
    notes
}
