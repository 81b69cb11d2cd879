"""Softmax and attention."""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING, Any

import torch

from ._elementwise import dropped, select
from ._matrix import product
from ._table import affine, aten, binary, positive, require, translates

if TYPE_CHECKING:
    from .._translate import Translator


@translates(aten.softmax.int, aten._softmax.default)
def softmax(t: Translator, x: Any, dim: int, *_: Any) -> int:
    return _along(t, "softmax", x, dim)


@translates(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(t: Translator, x: Any, dim: int, *_: Any) -> int:
    return _along(t, "log_softmax", x, dim)


def _along(t: Translator, kind: str, x: Any, dim: int) -> int:
    x = t.tensor(x, t.result_dtype())
    return t.emit("", kind, [x], t.shape(x), axis=positive(dim, len(t.shape(x))))


@translates(aten.scaled_dot_product_attention.default, whole=True)
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
    shape = t.shape(q)
    alike = t.shape(k)[:-2] == t.shape(v)[:-2] == shape[:-2]
    require(alike and len(shape) <= 6, "attention whose queries, keys and values differ in batch or heads (enable_gqa)")
    lead = "bhxyz"[: len(shape) - 2] if len(shape) <= 7 else string.ascii_lowercase[: len(shape) - 2]
    factor = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
    # Scaling the query rather than the scores: far fewer numbers for long sequences.
    q = affine(t, "scale", q, factor)
    scores = product(t, "scores", f"{lead}qd,{lead}kd->{lead}qk", q, k)
    dtype = t.dtype(scores)
    if causal:
        visible = torch.ones(shape[-2], t.shape(k)[-2], dtype=torch.bool).tril()
        scores = select(t, "mask", t.constant("visible", visible), scores, t.scalar(-math.inf, dtype))
    if mask is not None:
        given = t.tensor(mask)
        if t.dtype(given) == torch.bool:
            scores = select(t, "mask", given, scores, t.scalar(-math.inf, dtype))
        else:
            scores = binary(t, "mask", "add", scores, given)
    weights = t.emit("weights", "softmax", [scores], t.shape(scores), axis=len(shape) - 1)
    weights = dropped(t, "dropout", weights, dropout)
    return product(t, "", f"{lead}qk,{lead}kv->{lead}qv", weights, v)
