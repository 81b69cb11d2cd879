//! A model's inputs: their sizes, fixed by the file or by the user, and their tensors in the graph.

use super::{
    ImportOptions,
    error::{OnnxError, shown},
    importer::{Base, Importer, NodeValue},
    model::Model,
    proto::{Dimension, ValueInfo},
    rebatch::Rebatch,
    storage::element_type,
    view::View,
};
use shardwright_graph::{DType, Init, MAX_RANK, Real, Role, TensorId, TensorType};
use std::collections::HashSet;

/// An input with known sizes.
pub(crate) struct Input {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
}

/// The inputs that are data. Old files list stored tensors among the inputs.
fn data_inputs(model: &Model) -> Vec<&ValueInfo> {
    let stored: HashSet<&str> = model.graph.initializer.iter().map(|t| t.name.as_str()).collect();
    model.graph.input.iter().filter(|i| !stored.contains(i.name.as_str())).collect()
}

fn declared(info: &ValueInfo) -> Option<(i32, &[Dimension])> {
    let tensor = info.r#type.as_ref()?.tensor.as_ref()?;
    Some((tensor.elem_type, &tensor.shape.as_ref()?.dim))
}

/// Determines the sizes of all inputs.
pub(crate) fn bind(model: &Model, options: &ImportOptions) -> Result<(Vec<Input>, Rebatch), OnnxError> {
    let mut infos = data_inputs(model);
    infos.retain(|info| !options.constants.iter().any(|(name, _)| *name == info.name));
    let first = infos.iter().filter_map(|i| declared(i)).find_map(|(_, dims)| dims.first());
    let mut rebatch = Rebatch::default();
    let mut batch_symbol = None;
    if let (Some(batch), Some(dim)) = (options.batch, first) {
        match (dim.value, &dim.param) {
            (Some(old), _) => {
                let old = u64::try_from(old)
                    .map_err(|_| OnnxError::Model(format!("the first input declares a batch of {old}")))?;
                rebatch.change = (old != batch).then_some((old, batch));
            }
            // An unnamed dimension has the empty symbol; it matches other unnamed first dimensions.
            (None, symbol) => batch_symbol = Some((symbol.clone().unwrap_or_default(), batch)),
        }
    }
    let mut unbound = Vec::new();
    let mut used = HashSet::new();
    let mut inputs = Vec::with_capacity(infos.len());
    for info in infos {
        let wrong = |reason: String| OnnxError::Model(format!("input `{}`: {reason}", shown(&info.name)));
        let (elements, dims) =
            declared(info).ok_or_else(|| wrong("it is not a tensor of known rank".into()))?;
        if dims.len() > MAX_RANK {
            return Err(wrong(format!("{} dimensions exceed the limit", dims.len())));
        }
        let mut shape = Vec::with_capacity(dims.len());
        for (d, dim) in dims.iter().enumerate() {
            let symbol = dim.param.as_deref().unwrap_or_default();
            let named = options.dims.iter().find(|(name, _)| !symbol.is_empty() && name == symbol);
            let batch = batch_symbol.as_ref().filter(|(name, _)| d == 0 && name == symbol);
            let size = match (dim.value, named.or(batch)) {
                (Some(size), _) => {
                    let size =
                        u64::try_from(size).map_err(|_| wrong(format!("a dimension has size {size}")))?;
                    match rebatch.change {
                        Some((old, new)) if d == 0 && size == old => new,
                        _ => size,
                    }
                }
                (None, Some((_, size))) => *size,
                (None, None) => {
                    let name =
                        if symbol.is_empty() { "unnamed".into() } else { format!("`{}`", shown(symbol)) };
                    unbound.push(format!("{name} (dimension {d} of input `{}`)", shown(&info.name)));
                    1
                }
            };
            used.insert(symbol);
            shape.push(size);
        }
        let dtype = element_type(elements).map_err(|t| wrong(t.reason()))?;
        inputs.push(Input { name: info.name.clone(), dtype, shape });
    }
    if !unbound.is_empty() {
        return Err(OnnxError::Unbound(unbound));
    }
    if let Some((name, _)) = options.dims.iter().find(|(name, _)| !used.contains(name.as_str())) {
        let mut known: Vec<_> = used.into_iter().filter(|n| !n.is_empty()).map(shown).collect();
        known.sort();
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        return Err(OnnxError::Model(format!(
            "no input has a dimension `{}`; dimensions without a size: {known}",
            shown(name)
        )));
    }
    Ok((inputs, rebatch))
}

/// Adds the inputs to the graph.
pub(crate) fn declare(
    cx: &mut Importer<'_>,
    inputs: &[Input],
    options: &ImportOptions,
) -> Result<Vec<(String, TensorId)>, OnnxError> {
    for (name, literal) in &options.constants {
        cx.bind(name, NodeValue::Known(literal.clone().into()));
    }
    let mut declared = Vec::with_capacity(inputs.len());
    for input in inputs {
        let ty = TensorType::new(input.dtype, input.shape.as_slice());
        let init = match input.dtype {
            dtype if dtype.is_float() => Init::Normal(Real(1.0)),
            DType::Bool => Init::Constant(Real(1.0)),
            // Ids stay within the table that they index; other whole numbers are mostly masks.
            _ => cx.hints.below.get(&input.name).map_or(Init::Constant(Real(1.0)), |&n| Init::Below(n)),
        };
        let source = cx.b.source(&shown(&input.name), ty, Role::Input, init);
        let tensor = source.map_err(|e| OnnxError::Model(e.to_string()))?;
        cx.bind(&input.name, NodeValue::View(View::plain(Base::Tensor(tensor), &input.shape)));
        declared.push((input.name.clone(), tensor));
    }
    Ok(declared)
}

/// Notes outputs that still have the file's batch although another one is requested.
fn check_batch(cx: &mut Importer<'_>) {
    let Some((old, new)) = cx.rebatch.change else { return };
    for info in &cx.model.graph.output {
        let declared = declared(info).and_then(|(_, dims)| dims.first()?.value);
        let Some(NodeValue::View(view)) = cx.value(&info.name) else { continue };
        if declared.and_then(|d| u64::try_from(d).ok()) == Some(old) && view.shape().first() == Some(&old) {
            cx.notes.push(format!(
                "output `{}` keeps the file's batch of {old}, although --batch {new} is requested",
                shown(&info.name)
            ));
        }
    }
}

/// Compares inferred shapes with those that the file declares. A difference becomes a note, since one of the two is
/// wrong.
pub(crate) fn check_declared(cx: &mut Importer<'_>, options: &ImportOptions) {
    if options.batch.is_some() {
        check_batch(cx);
        return;
    }
    let graph = &cx.model.graph;
    let mut different = Vec::new();
    for info in graph.value_info.iter().chain(&graph.output) {
        let Some((_, dims)) = declared(info) else { continue };
        let shape = match cx.value(&info.name) {
            Some(NodeValue::View(view)) => view.shape(),
            Some(NodeValue::Known(literal)) => literal.shape.clone(),
            _ => continue,
        };
        let agrees =
            |(dim, &size): (&Dimension, &u64)| dim.value.is_none_or(|v| u64::try_from(v) == Ok(size));
        if dims.len() != shape.len() || !dims.iter().zip(&shape).all(agrees) {
            different.push((info.name.as_str(), shape));
        }
    }
    if let Some((name, shape)) = different.first() {
        cx.notes.push(format!(
            "the shapes of {} values differ from those that the file declares; the first is `{}`, inferred as {shape:?}",
            different.len(),
            shown(name)
        ));
    }
}
