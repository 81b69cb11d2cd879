//! Calls to kernels that were compiled from Pallas or Triton. Those of attention in JAX's library are known by name: samples and heads
//! split them, and their work is that of attention. Scale and mask are compiled into them. Other kernels need a rule.

use super::{
    super::{
        error::Result,
        syntax::{Attribute, Operation},
    },
    HloType, Importer, ResolvedOperation, config_text, stated_rule,
    value::{Elements, SymbolicValue},
};
use shardwright_graph::{Shape, ops::AttentionKernel};

/// Targets of kernels that were compiled from Pallas or Triton.
const COMPILED: &[&str] = &["tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu"];

/// The target of a custom call.
pub(super) fn target<'a>(operation: &Operation<'a>) -> Option<&'a str> {
    match operation.attribute("call_target_name") {
        Some(Attribute::Text(name) | Attribute::Symbol(name)) => Some(name),
        _ => None,
    }
}

/// The target, if it is that of all compiled kernels.
fn compiled<'a>(operation: &Operation<'a>) -> Option<&'a str> {
    target(operation).filter(|target| COMPILED.iter().any(|known| target.starts_with(known)))
}

/// The name of a call: that of the kernel where a compiler's call states it, else the target. Several kernels share a target.
pub(super) fn call_name<'a>(operation: &Operation<'a>) -> Option<&'a str> {
    let target = target(operation)?;
    if compiled(operation).is_none() {
        return Some(target);
    }
    // Mosaic's calls name their kernel in an attribute, Triton's in their configuration.
    let stated = match operation.attribute("kernel_name") {
        Some(Attribute::Text(name)) => Some(*name),
        _ => config_text(operation, "name"),
    };
    Some(stated.filter(|name| !name.is_empty()).unwrap_or(target))
}

/// The order of dimensions in queries, keys and values.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// `[sample, head, position, size]`; heads alone for one sample.
    HeadsFirst,
    /// `[sample, position, head, size]`.
    PositionsFirst,
}

/// What a kernel computes.
#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
    /// Gradients of keys and values, from scores that are computed again.
    KeyGrads,
    /// The gradient of the queries.
    QueryGrad,
    /// Sums of products of results and gradients, bound by memory.
    Preparation,
}

/// A kernel of attention in JAX's Pallas library, by the beginning of its name.
struct KnownKernel {
    name: &'static str,
    order: Order,
    pass: Pass,
}

const KNOWN: &[KnownKernel] = {
    use {Order::*, Pass::*};
    const fn kernel(name: &'static str, order: Order, pass: Pass) -> KnownKernel {
        KnownKernel { name, order, pass }
    }
    // `jax.experimental.pallas.ops`: tpu.flash_attention, tpu.splash_attention, gpu.attention.
    &[
        kernel("_flash_attention_kernel", HeadsFirst, Forward),
        kernel("_flash_attention_dkv_kernel", HeadsFirst, KeyGrads),
        kernel("_flash_attention_dq_kernel", HeadsFirst, QueryGrad),
        kernel("splash_mha_fwd", HeadsFirst, Forward),
        kernel("splash_mqa_fwd", HeadsFirst, Forward),
        kernel("splash_mha_dkv", HeadsFirst, KeyGrads),
        kernel("splash_mqa_dkv", HeadsFirst, KeyGrads),
        kernel("splash_mha_dq", HeadsFirst, QueryGrad),
        kernel("splash_mqa_dq", HeadsFirst, QueryGrad),
        kernel("mha_forward", PositionsFirst, Forward),
        kernel("mha_backward", PositionsFirst, Backward),
        kernel("mha_preprocess_backward", PositionsFirst, Preparation),
    ]
};

fn known(name: &str) -> Option<&'static KnownKernel> {
    KNOWN.iter().find(|kernel| name.starts_with(kernel.name))
}

/// Dimensions of one tensor: the shared dimension that each is, if any.
type Shared = Vec<Option<u8>>;

impl KnownKernel {
    /// The work of a call with these operands; `None` if they are not those of the kernel.
    fn work(&self, types: &[HloType]) -> Option<AttentionKernel> {
        let mut floats = types.iter().filter(|typed| typed.ty.dtype.is_float()).map(|typed| &typed.ty.shape);
        let [queries, keys, values] = [floats.next()?, floats.next()?, floats.next()?];
        let (q_heads, q, d) = self.parts(queries)?;
        let (k_heads, k, key) = self.parts(keys)?;
        let (v_heads, v, e) = self.parts(values)?;
        if key != d || v_heads != k_heads || v != k || k_heads == 0 || q_heads % k_heads != 0 {
            return None;
        }
        let twice = |size: u64| size.saturating_mul(2);
        let (backward, d, e) = match self.pass {
            Pass::Forward => (false, d, e),
            Pass::Backward => (true, d, e),
            Pass::KeyGrads => (false, twice(d), twice(e)),
            Pass::QueryGrad => (false, twice(d), e),
            Pass::Preparation => return None,
        };
        Some(AttentionKernel { backward, sizes: [k_heads, q_heads / k_heads, q, k, d, e] })
    }

    /// Heads of all samples, positions, and the size of a vector.
    fn parts(&self, shape: &Shape) -> Option<(u64, u64, u64)> {
        let product = |sizes: &[u64]| sizes.iter().fold(1, |n: u64, &size| n.saturating_mul(size));
        match (self.order, &shape[..]) {
            (Order::HeadsFirst, [heads @ .., positions, size]) => Some((product(heads), *positions, *size)),
            (Order::PositionsFirst, [samples @ .., positions, heads, size]) => {
                Some((product(samples).saturating_mul(*heads), *positions, *size))
            }
            _ => None,
        }
    }

    /// Per operand and result, the dimensions that are samples and heads. `None` for a result that is scratch memory. An error if some
    /// tensor is not as JAX's kernel has it.
    fn rule(&self, op: &ResolvedOperation<'_, '_>) -> std::result::Result<Vec<Option<Shared>>, String> {
        let first = op.types.iter().position(|typed| typed.ty.dtype.is_float()).ok_or("it has no queries")?;
        let queries = &op.types[first].ty.shape;
        let tensors = op.types.iter().chain(op.results).enumerate();
        tensors
            .map(|(i, typed)| {
                let shape = &typed.ty.shape;
                let found = match self.order {
                    Order::PositionsFirst => positions_first(queries, shape).map(Some),
                    Order::HeadsFirst if i < first => prefetched(queries, shape).map(Some),
                    Order::HeadsFirst => self.heads_first(op, i, shape, queries),
                };
                found.ok_or_else(|| {
                    format!("its tensor {i} is {}, and its queries are {}", typed.ty, op.types[first].ty)
                })
            })
            .collect()
    }

    fn heads_first(
        &self,
        op: &ResolvedOperation<'_, '_>,
        i: usize,
        shape: &Shape,
        queries: &Shape,
    ) -> Option<Option<Shared>> {
        let lead = queries.rank().checked_sub(2).filter(|lead| (1..=2).contains(lead))?;
        let samples = lead - 1;
        let named = |count: usize| (0..shape.rank()).map(|d| (d < count).then_some(d as u8)).collect();
        if shape.rank() == queries.rank() && shape[..lead] == queries[..lead] {
            return Some(Some(named(lead)));
        }
        // Segments, masks, and keys of all heads have no heads. Results without heads are scratch memory.
        let (is_result, splash) = (i >= op.types.len(), self.name.starts_with("splash"));
        let without_heads = shape.rank() < queries.rank()
            && shape.rank() >= samples
            && shape[..samples] == queries[..samples];
        match (is_result, splash) {
            (false, _) if without_heads => Some(Some(named(samples))),
            (false, true) if shape.rank() < queries.rank() => Some(Some(named(0))),
            (true, true) if shape.rank() < queries.rank() => Some(None),
            _ => None,
        }
    }
}

/// Tables of blocks, which a kernel reads before it starts: one per head, or one for all.
fn prefetched(queries: &Shape, shape: &Shape) -> Option<Shared> {
    let head = queries.rank().checked_sub(3)?;
    let mut dims: Shared = vec![None; shape.rank()];
    match shape.first() {
        Some(&count) if count == queries[head] => dims[0] = Some(head as u8),
        Some(&1) | None => {}
        Some(_) => return None,
    }
    Some(dims)
}

/// Tensors of samples, positions and heads; of samples, heads and positions; and of samples and positions.
fn positions_first(queries: &Shape, shape: &Shape) -> Option<Shared> {
    let &[samples, _, heads, _] = &queries[..] else { return None };
    match shape[..] {
        [n, _, h, _] if n == samples && h == heads => Some(vec![Some(0), None, Some(1), None]),
        [n, h, _] if n == samples && h == heads => Some(vec![Some(0), Some(1), None]),
        [n, _] if n == samples => Some(vec![Some(0), None]),
        _ => None,
    }
}

/// The work of a call that states the name of its kernel and its rule.
pub(super) fn stated_work(op: &ResolvedOperation<'_, '_>) -> Option<AttentionKernel> {
    known(config_text(op.operation, "kernel")?)?.work(op.types)
}

impl<'a> Importer<'a> {
    /// A call to a compiled kernel; `None` for other calls, and for kernels of which users say how they are split.
    pub fn compiled_kernel(
        &mut self,
        name: &str,
        op: &ResolvedOperation<'_, 'a>,
    ) -> Result<Option<Vec<SymbolicValue>>> {
        let told = self.options.opaque.iter().any(|known| known == name || known == "*")
            || self.options.rules.iter().any(|(known, _)| known == name)
            || stated_rule(op.operation).is_some();
        let Some(target) = compiled(op.operation).filter(|_| !told) else { return Ok(None) };
        let Some(kernel) = known(name) else {
            return Err(op.error(format!(
                "a call to `{name}`, a kernel that was compiled from Pallas or Triton, of which only the types are known. If it \
                 computes attention, lower the step with `jax.nn.dot_product_attention` in its place, or give its rule: \
                 `--rule '{name}=b q h _, b k h _, b k h _ -> b q h _'`"
            )));
        };
        let rule = kernel.rule(op).map_err(|reason| {
            op.error(format!(
                "a call to the attention kernel `{name}` (`{target}`): {reason}. Give its rule, `--rule '{name}=b h _ _, b h _ _, \
                 b h _ _ -> b h _ _'`, or lower the step with `jax.nn.dot_product_attention` in its place"
            ))
        })?;
        let (operands, results) = rule.split_at(op.types.len());
        let kept: Vec<HloType> = results
            .iter()
            .zip(op.results)
            .filter(|(dims, _)| dims.is_some())
            .map(|(_, typed)| typed.clone())
            .collect();
        let mut shared: Vec<Shared> = operands.iter().chain(results).flatten().cloned().collect();
        // A dimension that some result lacks stays whole.
        let everywhere: Vec<u8> = (0..2)
            .filter(|dim| shared[op.types.len()..].iter().all(|dims| dims.contains(&Some(*dim))))
            .collect();
        for dim in shared.iter_mut().flatten() {
            *dim = dim.and_then(|d| everywhere.iter().position(|&known| known == d)).map(|d| d as u8);
        }
        let call = ResolvedOperation { results: &kept, ..*op };
        let work = kernel.work(op.types);
        let why = "a kernel of attention, by its name";
        let mut made = self.opaque_call(&call, name, why, shared, work)?.into_iter();
        let value = |(dims, typed): (&Option<Shared>, &HloType)| match dims {
            Some(_) => made.next().unwrap_or_else(SymbolicValue::empty),
            None => SymbolicValue::Constant(typed.ty.clone(), Elements::Splat(0.0)),
        };
        Ok(Some(results.iter().zip(op.results).map(value).collect()))
    }
}
