"""Softmax and attention."""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING, Any

import torch

from .._graph import AtenCall, Input
from ._elementwise import dropped
from ._matrix import product
from ._table import X, Y, Z, affine, aten, binary, calls, positive, require, translates

if TYPE_CHECKING:
    from .._translate import Translator


@translates(aten.softmax.int, aten._softmax.default)
def softmax(t: Translator, x: Any, dim: int, *_: Any) -> int:
    return _along(t, "", "softmax", t.tensor(x, t.result_dtype()), dim)


@translates(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(t: Translator, x: Any, dim: int, *_: Any) -> int:
    return _along(t, "", "log_softmax", t.tensor(x, t.result_dtype()), dim)


def _along(t: Translator, name: str, kind: str, x: int, dim: int) -> int:
    axis = positive(dim, len(t.shape(x)))
    target = aten.softmax.int if kind == "softmax" else aten.log_softmax.int
    # `aten._softmax` refuses `half_to_float` for an input that is cast already, so the public overload runs.
    return t.emit(name, kind, [x], t.shape(x), call=calls(target, X, axis), axis=axis)


def _mask(t: Translator, scores: int, visible: int) -> int:
    """The scores, minus infinity where a position is not visible."""
    hidden = t.scalar(-math.inf, t.dtype(scores))
    shape = torch.broadcast_shapes(t.shape(visible), t.shape(scores))
    inputs, call = [visible, scores, hidden], calls(aten.where.self, X, Y, Z)
    return t.emit("mask", "select", inputs, tuple(shape), call=call)


def _einsum(t: Translator, name: str, spec: str, x: int, y: int) -> int:
    return product(t, name, spec, x, y, calls(aten.einsum.default, spec, [X, Y]))


@translates(aten.scaled_dot_product_attention.default)
def attention(
    t: Translator,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    q, k, v = t.tensor(query), t.tensor(key), t.tensor(value)
    factor = 1.0 / math.sqrt(t.shape(q)[-1]) if scale is None else scale
    ranks = {len(t.shape(x)) for x in (q, k, v)}
    # Random bits are drawn for the whole tensor of weights, so dropout needs the weights.
    if dropout > 0 or ranks != {4}:
        return _plain(t, q, k, v, mask, dropout, causal, factor)
    heads, key_heads = t.shape(q)[1], t.shape(k)[1]
    require(t.shape(q)[0] == t.shape(k)[0] and t.shape(k)[:3] == t.shape(v)[:3], "batches that broadcast")
    grouped = enable_gqa and heads % key_heads == 0
    require(heads == key_heads or grouped, f"{heads} query heads for {key_heads} key heads (enable_gqa={enable_gqa})")
    inputs = [q, k, v]
    if mask is not None:
        inputs.append(_bias(t, mask, t.dtype(q)))
    given = Input(3) if mask is not None else None
    options = {"scale": float(factor), "enable_gqa": heads != key_heads}
    call = AtenCall(aten.scaled_dot_product_attention.default, (X, Y, Z, given, 0.0, causal), options)
    (n, _, queries, _), (_, _, keys, size) = t.shape(q), t.shape(v)
    wide = torch.float64 if t.dtype(q) == torch.float64 else torch.float32
    results = [((n, heads, queries, size), t.dtype(q)), ((n, heads, queries), wide)]
    attributes: dict[str, Any] = {
        "scale": float(factor),
        "heads_first": True,
        "before": None,
        "after": 0 if causal else None,
        "diagonal": 0,
        "queries": {"start": 0, "whole": queries},
        "keys": {"start": 0, "whole": keys},
        "dropout": None,
        # ATen's op returns no log-sum-exp, by which results of parts of the keys would be combined.
        "whole_keys": True,
    }
    return t.emit_several("", "attention", inputs, results, call=call, **attributes)[0]


def _bias(t: Translator, mask: Any, dtype: torch.dtype) -> int:
    """A mask as numbers that are added to the scores: minus infinity where a truth value hides a key."""
    given = t.tensor(mask)
    if t.dtype(given) != torch.bool:
        return t.cast(given, dtype)
    zero, hidden = t.scalar(0.0, dtype), t.scalar(-math.inf, dtype)
    call = calls(aten.where.self, X, Y, Z)
    return t.emit("mask", "select", [given, zero, hidden], t.shape(given), call=call)


def _plain(t: Translator, q: int, k: int, v: int, mask: Any, dropout: float, causal: bool, factor: float) -> int:
    """Scores, softmax and weighted values as ops."""
    shape = t.shape(q)
    same = t.shape(k)[:-2] == t.shape(v)[:-2] == shape[:-2]
    require(same and len(shape) <= 6, "grouped queries (enable_gqa) with dropout or without a batch dimension")
    lead = "bhxyz"[: len(shape) - 2] if len(shape) <= 7 else string.ascii_lowercase[: len(shape) - 2]
    # Scaling the query takes less work than scaling the scores of long sequences.
    q = t.emit("scale", "unary", [q], shape, call=calls(aten.mul.Tensor, X, float(factor)), f=affine(factor))
    scores = _einsum(t, "scores", f"{lead}qd,{lead}kd->{lead}qk", q, k)
    if causal:
        visible = torch.ones(shape[-2], t.shape(k)[-2], dtype=torch.bool).tril()
        scores = _mask(t, scores, t.constant("visible", visible))
    if mask is not None:
        given = t.tensor(mask)
        if t.dtype(given) == torch.bool:
            scores = _mask(t, scores, given)
        else:
            scores = binary(t, "mask", "add", scores, given)
    weights = _along(t, "weights", "softmax", scores, len(shape) - 1)
    size, strides = 1, []
    for extent in reversed(t.shape(weights)):
        strides.append(size)
        size *= extent
    weights = dropped(t, "dropout", weights, dropout, tuple(reversed(strides)))
    return _einsum(t, "", f"{lead}qk,{lead}kv->{lead}qv", weights, v)
