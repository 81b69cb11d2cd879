//! The step around a model: labels, loss, gradients, updates.

use super::{
    ImportOptions, Imported,
    error::{OnnxError, Tried, Trouble, shown},
    importer::{Importer, Value},
    view::View,
};
use crate::layers;
use shardwright_graph::{DType, GraphBuilder, TensorId, ops::Reduce, train};
use std::str::FromStr;

/// What is trained.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Loss {
    /// Mean cross-entropy of the first output against labels. Classes are its last dimension; the second, where
    /// there are more than three (images, as PyTorch has them).
    #[default]
    CrossEntropy,
    /// Mean squared difference of the first output and a target.
    Mse,
    /// The first output is the loss, or its mean is.
    Output,
}

impl Loss {
    const ALL: [Self; 3] = [Self::CrossEntropy, Self::Mse, Self::Output];

    /// What it is called.
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
        found.ok_or_else(|| format!("there is no loss {text}; choose cross-entropy, mse or output"))
    }
}

/// Ends an import: outputs, and the training step unless only inference is wanted.
pub(crate) fn finish(
    mut cx: Importer<'_>,
    inputs: Vec<(String, TensorId)>,
    options: &ImportOptions,
) -> Result<Imported, OnnxError> {
    let model = cx.model;
    let named =
        |name: &str, t: Trouble| OnnxError::Model(format!("output `{}`: {}", shown(name), t.reason()));
    let mut notes = missing_weights(&cx);
    let mut outputs = Vec::new();
    if options.training {
        let info = model.graph.output.first().ok_or_else(|| OnnxError::Model("it has no output".into()))?;
        cx.name = "loss".into();
        let loss = output_view(&mut cx, &info.name)
            .and_then(|view| add_loss(&mut cx, &view, options.loss))
            .map_err(|t| named(&info.name, t))?;
        cx.b.output(loss);
        train(&mut cx.b, loss, &options.optimizer).map_err(|e| OnnxError::Model(e.to_string()))?;
        if model.graph.output.len() > 1 {
            notes.push(format!("the loss is that of the first of {} outputs", model.graph.output.len()));
        }
    } else {
        for info in &model.graph.output {
            cx.name = shown(&info.name);
            let tensor = output_view(&mut cx, &info.name).and_then(|view| cx.plain(&view));
            let tensor = tensor.map_err(|t| named(&info.name, t))?;
            cx.b.output(tensor);
            outputs.push((info.name.clone(), tensor));
        }
    }
    notes.append(&mut cx.notes);
    Ok(Imported { graph: cx.b.finish(), sources: cx.sources, inputs, outputs, notes })
}

fn output_view(cx: &mut Importer<'_>, name: &str) -> Tried<View> {
    match cx.value(name).cloned() {
        Some(Value::View(view)) => Ok(view),
        Some(Value::Known(literal)) => cx.constant(name, &literal),
        Some(Value::Parts(axis, parts)) => cx.join(axis, &parts),
        Some(Value::Broken) | None => Err(Trouble::wrong("no node makes it")),
    }
}

fn add_loss(cx: &mut Importer<'_>, view: &View, loss: Loss) -> Tried<TensorId> {
    let shape = view.shape();
    if !cx.dtype(view).is_float() {
        return Err(Trouble::wrong(format!("{} elements cannot be trained", cx.dtype(view))));
    }
    match loss {
        Loss::CrossEntropy => {
            let rank = shape.len();
            if rank == 0 {
                return Err(Trouble::wrong("a single number has no classes: use --loss output"));
            }
            let mut order: Vec<usize> = (0..rank).collect();
            if rank > 3 {
                let classes = order.remove(1);
                order.push(classes);
            }
            let logits = cx.plain(&view.transpose(&order))?;
            let mut labels = cx.b.shape(logits).to_vec();
            let classes = labels.pop().unwrap_or(1);
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

fn mean(b: &mut GraphBuilder, output: TensorId) -> Tried<TensorId> {
    let ty = b.ty(output).clone();
    if ty.rank() == 0 {
        return Ok(output);
    }
    let op = Reduce::mean((0..ty.rank()).collect(), &ty.shape);
    Ok(b.emit("loss", op, &[output])?)
}

/// Says which weights the file comes without.
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
            "the file lacks the contents of `{}`{rest}: weights are seeded, whole numbers taken as 0, truth values as true",
            shown(first)
        ));
    }
    if external > 0 {
        notes.push(format!(
            "{external} weights lie in other files; where those are missing, a run seeds them"
        ));
    }
    notes
}
