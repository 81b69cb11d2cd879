//! Attention by calls to cuDNN. They state their scale, mask and order of dimensions in `backend_config`, and become fused ops.

use super::{
    super::{
        error::Result,
        syntax::{Attribute, Type},
    },
    Importer, ResolvedOperation, stated_rule,
    value::SymbolicValue,
};
use shardwright_graph::ops::{Attention, AttentionGrad};

const CUDNN: &str = "__cudnn$fmha";
/// Whether a value of this type has no elements: a workspace that is not there yet, or an operand that is left out.
pub(super) fn is_empty(ty: &Type<'_>) -> bool {
    matches!(ty, Type::Tensor(ty) if ty.sizes.split('x').any(|size| size == "0"))
}

/// The text behind a key of a JSON object, up to the end of the line.
fn behind<'t>(config: &'t str, key: &str) -> Option<&'t str> {
    let (_, rest) = config.split_once(&format!("\"{key}\""))?;
    Some(rest.trim_start().strip_prefix(':')?.trim_start())
}

fn number(config: &str, key: &str) -> Option<f64> {
    let rest = behind(config, key)?.trim_start_matches('"');
    let end = rest.find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c)).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

impl<'a> Importer<'a> {
    /// A call to cuDNN's attention; `None` for other calls.
    pub fn cudnn_call(
        &mut self,
        name: &str,
        op: &ResolvedOperation<'_, 'a>,
    ) -> Result<Option<Vec<SymbolicValue>>> {
        let told = self.options.opaque.iter().any(|known| known == name || known == "*")
            || self.options.rules.iter().any(|(known, _)| known == name)
            || stated_rule(op.operation).is_some();
        let Some(kind) = name.strip_prefix(CUDNN).filter(|_| !told) else { return Ok(None) };
        let (kind, backward) = kind.strip_suffix("Backward").map_or((kind, false), |kind| (kind, true));
        let biased = match kind {
            "Softmax" => false,
            "ScaleBiasSoftmax" => true,
            _ => return Err(refused(op, name, "its dropout or its type cannot be planned")),
        };
        // Quotation marks are escaped in MLIR's texts.
        let config = match op.operation.attribute("backend_config") {
            Some(Attribute::Text(text)) => text.replace("\\22", "\""),
            _ => return Err(refused(op, name, "`backend_config` is missing")),
        };
        let forward = self.cudnn_attention(op, name, &config, backward)?;
        let mut slots = op.slots(&mut self.draft)?;
        let transposed = |values: &mut Self, slot| {
            // Results are written with heads first, whatever the order in memory.
            let turned =
                if forward.heads_first { Ok(slot) } else { values.draft.transpose(slot, &[0, 2, 1, 3]) };
            turned.map(SymbolicValue::Tensor)
        };
        let expected = match (backward, biased) {
            (false, false) => 3,
            (false, true) => 4,
            (true, false) => 6,
            (true, true) => 7,
        };
        if slots.len() != expected {
            let reason = format!("it has {} operands instead of {expected}", slots.len());
            return Err(refused(op, name, &reason));
        }
        if !backward {
            let made = self.draft.add(forward.clone(), &slots)?;
            let mut values = vec![transposed(self, made[0])?, SymbolicValue::Tensor(made[1])];
            values.truncate(op.results.len());
            return Ok(Some(values));
        }
        // Queries, keys, values, statistics, gradient, perhaps a bias, result.
        let result = slots.pop().ok_or_else(|| op.error("operands are missing"))?;
        slots.insert(3, result);
        let bias_grad = op.results.len() == 4;
        let made = self.draft.add(AttentionGrad { forward: forward.clone(), bias_grad }, &slots)?;
        let mut values = made[..3].iter().map(|&slot| transposed(self, slot)).collect::<Result<Vec<_>>>()?;
        values.extend(made.get(3).map(|&slot| SymbolicValue::Tensor(slot)));
        Ok(Some(values))
    }

    /// The attributes of a cuDNN call.
    fn cudnn_attention(
        &self,
        op: &ResolvedOperation<'_, 'a>,
        name: &str,
        config: &str,
        backward: bool,
    ) -> Result<Attention> {
        let products =
            if backward { "bmm1_grad_gemm2_dot_dimension_numbers" } else { "bmm1_dot_dimension_numbers" };
        let keys = if backward { "rhs_batch_dimensions" } else { "lhs_batch_dimensions" };
        let batch = behind(config, products).and_then(|rest| behind(rest, keys)).and_then(|rest| {
            let (list, _) = rest.strip_prefix('[')?.split_once(']')?;
            Some(list.replace(['"', ' '], ""))
        });
        let heads_first = match batch.as_deref() {
            Some("0,1") => true,
            Some("0,2") => false,
            _ => return Err(refused(op, name, "its order of dimensions is not known")),
        };
        let [query, key] = [0, 1].map(|i| op.types.get(i).map(|typed| typed.ty.shape.clone()));
        let at = if heads_first { 2 } else { 1 };
        let size = |shape: Option<shardwright_graph::Shape>| shape.and_then(|shape| shape.get(at).copied());
        let (Some(queries), Some(keys)) = (size(query), size(key)) else {
            return Err(refused(op, name, "its operands have too few dimensions"));
        };
        let scale = number(config, "fmha_scale").ok_or_else(|| refused(op, name, "its scale is missing"))?;
        let mut attention = Attention { heads_first, ..Attention::new(scale, queries, keys) };
        match behind(config, "mask_type").and_then(|rest| rest.split('"').nth(1)) {
            Some("NO_MASK") => {}
            Some("CAUSAL") => attention = attention.causal(),
            other => {
                let mask = other.unwrap_or("missing");
                return Err(refused(op, name, &format!("its mask ({mask}) cannot be planned")));
            }
        }
        let window = number(config, "sliding_window_length").unwrap_or(0.0);
        if window >= 1.0 {
            attention.before = Some(window as u64 - 1);
        }
        let plain = number(config, "dropout_rate").unwrap_or(0.0) == 0.0
            && number(config, "max_seg_per_batch").unwrap_or(1.0) <= 1.0;
        match plain {
            true => Ok(attention),
            false => Err(refused(op, name, "packed sequences and dropout cannot be planned")),
        }
    }
}

fn refused(op: &ResolvedOperation<'_, '_>, name: &str, reason: &str) -> super::super::error::TextError {
    op.error(format!(
        "a call to `{name}`: {reason}; lower the step with `implementation=\"xla\"`, or give its rule: `--rule '{name}=b q h _, b k h _, b k h _ -> b q h _'`"
    ))
}
