"""Norms. Their statistics are separate ops, so that they are synchronised where their dimensions are split."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .._graph import Input
from ._table import X, Y, Z, aten, calls, reduced, require, translates

if TYPE_CHECKING:
    from .._translate import Translator


def _statistics(t: Translator, x: int, axes: list[int]) -> tuple[int, int, int]:
    """Mean and variance over dimensions, and the number of elements of each."""
    shape = t.shape(x)
    count = math.prod(shape[d] for d in axes)
    mean = reduced(t, "mean", x, axes, "mean")
    kept = t.shape(mean)
    call = calls("variance", X, Y, axes, count)
    variance = t.emit("variance", "variance", [x, mean], kept, call=call, axes=axes, centered=True, scale=1.0 / count)
    return mean, variance, count


def _normalize(
    t: Translator, x: int, stats: tuple[int, int], axes: list[int], params: list[int], weight: Any, bias: Any, eps: float
) -> int:
    require(bias is None or weight is not None, "a norm with a bias and no weight")
    given = [t.tensor(p, t.dtype(x)) for p in (weight, bias) if p is not None]
    scale, shift = None if weight is None else Input(3), None if bias is None else Input(4)
    return t.emit(
        "",
        "normalize",
        [x, *stats, *given],
        t.shape(x),
        call=calls("normalize", X, Y, Z, scale, shift, axes, params, float(eps)),
        axes=axes,
        params=params,
        centered=True,
        scaled=weight is not None,
        shifted=bias is not None,
        eps=float(eps),
        count=math.prod(t.shape(x)[d] for d in axes),
    )


@translates(aten.layer_norm.default)
def layer_norm(
    t: Translator, x: Any, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, _: bool = False
) -> int:
    x = t.tensor(x)
    rank = len(t.shape(x))
    axes = list(range(rank - len(shape), rank))
    mean, variance, _count = _statistics(t, x, axes)
    return _normalize(t, x, (mean, variance), axes, axes, weight, bias, eps)


@translates(aten.batch_norm.default)
def batch_norm(
    t: Translator,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    _: bool = False,
) -> int:
    x = t.tensor(x)
    axes = [d for d in range(len(t.shape(x))) if d != 1]
    if not training:
        return _normalize(t, x, (t.tensor(mean, t.dtype(x)), t.tensor(variance, t.dtype(x))), axes, [1], weight, bias, eps)
    batch_mean, batch_variance, count = _statistics(t, x, axes)
    if mean is not None:
        # Buffers keep the unbiased variance.
        unbiased = momentum * count / max(count - 1, 1)
        t.blend(mean, batch_mean, 1 - momentum, momentum)
        t.blend(variance, batch_variance, 1 - momentum, unbiased)
    return _normalize(t, x, (batch_mean, batch_variance), axes, [1], weight, bias, eps)
