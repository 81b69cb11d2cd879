"""Losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._graph import Input
from ._shape import transposed
from ._table import X, Y, Z, affine, aten, binary, calls, reduced, require, reshaped, translates, unary

if TYPE_CHECKING:
    from .._translate import Translator

_MEAN = 1


def _reduce(t: Translator, each: int, reduction: int, count: int | None = None) -> int:
    """Losses of elements, reduced (0: none, 1: mean, 2: sum). `count` is the mean's divisor if not all count."""
    if reduction == 0:
        return each
    mean = reduction == _MEAN and count is None
    total = reduced(t, "", each, list(range(len(t.shape(each)))), "mean" if mean else "sum")
    return binary(t, "mean", "div", total, count) if reduction == _MEAN and count is not None else total


def _label_count(t: Translator, labels: Any, ignored: int, dtype: torch.dtype) -> int:
    """The number of labels that are not ignored."""
    return t.derived("count", labels, (), dtype, lambda given: (given != ignored).sum().to(dtype))


@translates(aten.cross_entropy_loss.default)
def cross_entropy(
    t: Translator,
    logits: Any,
    labels: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignored: int = -100,
    smoothing: float = 0.0,
) -> int:
    x = t.tensor(logits)
    require(weight is None and smoothing == 0, "a cross-entropy with weights or label smoothing")
    require(t.is_free(labels), "a cross-entropy against labels that are computed")
    rank = len(t.shape(x))
    require(rank >= 2, "a cross-entropy of a single sample: add a dimension for the batch")
    order = [0, *range(2, rank), 1]
    x = transposed(t, "classes_last", x, order, calls(aten.permute.default, X, order))
    given = t.tensor(labels)
    require(not t.dtype(given).is_floating_point, "a cross-entropy against probabilities")
    rows, classes = t.shape(given), t.shape(x)[-1]
    # The gradient of the last piece covers those of the maximum and the sum.
    largest = reduced(t, "max", x, [rank - 1], "max", differentiable=False)
    total = t.emit("sum_exp", "sum_exp", [x, largest], rows, call=calls("sum_exp", X, Y), differentiable=False)
    inputs, call = [x, given, largest, total], calls("cross_entropy", X, Y, Z, Input(3), ignored)
    each = t.emit("each", "cross_entropy", inputs, rows, call=call, base=0, classes=classes)
    return _reduce(t, each, reduction, _label_count(t, labels, ignored, t.dtype(x)))


@translates(aten.nll_loss.default, aten.nll_loss_nd.default)
def nll_loss(
    t: Translator, x: Any, labels: Any, weight: Any = None, reduction: int = _MEAN, ignored: int = -100
) -> int:
    x = t.tensor(x)
    require(weight is None and len(t.shape(x)) == 2, "a negative log-likelihood with weights or of images")
    require(t.is_free(labels), "a negative log-likelihood against labels that are computed")
    rows, classes = t.shape(x)
    dtype = t.dtype(x)
    at = t.derived("label", labels, (rows, 1), torch.int64, lambda given: given.clamp(min=0).unsqueeze(1))
    call = calls(aten.gather.default, X, 1, Y)
    taken = t.emit("take", "take_along", [x, at], (rows, 1), call=call, axis=1, base=0, extent=classes)
    sign = t.derived("sign", labels, (rows,), dtype, lambda given: -(given != ignored).to(dtype))
    each = binary(t, "each", "mul", reshaped(t, "row", taken, (rows,)), sign)
    return _reduce(t, each, reduction, _label_count(t, labels, ignored, dtype))


@translates(aten.mse_loss.default)
def mse_loss(t: Translator, x: Any, y: Any, reduction: int = _MEAN) -> int:
    difference = binary(t, "difference", "sub", t.tensor(x, t.result_dtype()), t.tensor(y, t.result_dtype()))
    return _reduce(t, unary(t, "square", aten.square.default, "square", difference), reduction)


@translates(aten.binary_cross_entropy_with_logits.default)
def bce_with_logits(
    t: Translator, x: Any, y: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> int:
    require(weight is None and pos_weight is None, "a binary cross-entropy with weights")
    logits, target = t.tensor(x, t.result_dtype()), t.tensor(y, t.result_dtype())
    # max(x, 0) - x y + log(1 + e^-|x|) does not overflow.
    soft = logits
    for op in (aten.abs, aten.neg, aten.exp, aten.log1p):
        soft = unary(t, op.__name__, op.default, op.__name__, soft)
    product = binary(t, "product", "mul", logits, target)
    each = binary(t, "each", "sub", unary(t, "relu", aten.relu.default, "relu", logits), product)
    return _reduce(t, binary(t, "sum", "add", each, soft), reduction)


@translates(aten.l1_loss.default)
def l1_loss(t: Translator, x: Any, y: Any, reduction: int = _MEAN) -> int:
    difference = binary(t, "difference", "sub", t.tensor(x, t.result_dtype()), t.tensor(y, t.result_dtype()))
    distance = unary(t, "abs", aten.abs.default, "abs", difference)
    each = t.emit("each", "unary", [distance], t.shape(distance), call=calls(aten.alias.default, X), f=affine(1.0))
    return _reduce(t, each, reduction)
