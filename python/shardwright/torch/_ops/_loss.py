"""Losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._shape import transposed
from ._table import affine, aten, binary, reduced, require, reshaped, translates

if TYPE_CHECKING:
    from .._translate import Translator

_MEAN = 1


def _joined(t: Translator, each: int, reduction: int, count: int | None = None) -> int:
    """Losses of single elements as `reduction` (none, mean, sum) wants them."""
    shape = t.shape(each)
    if reduction == 0:
        return each
    size = 1
    for n in shape:
        size *= n
    mean = reduction == _MEAN and count is None
    total = reduced(t, "", each, list(range(len(shape))), 1.0 / size if mean else 1.0)
    return binary(t, "mean", "div", total, count) if reduction == _MEAN and count is not None else total


def _labelled(t: Translator, labels: Any, ignored: int, dtype: torch.dtype) -> int:
    """How many labels count."""
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
    x = transposed(t, "classes_last", x, [0, *range(2, rank), 1])
    given = t.tensor(labels)
    require(not t.dtype(given).is_floating_point, "a cross-entropy against probabilities")
    rows, classes = t.shape(given), t.shape(x)[-1]
    largest = reduced(t, "max", x, [rank - 1], f="max", statistic=True)
    total = t.emit("sum_exp", "sum_exp", [x, largest], rows)
    each = t.emit(
        "each", "cross_entropy", [x, given, largest, total], rows, base=0, classes=classes, extra={"ignored": ignored}
    )
    return _joined(t, each, reduction, _labelled(t, labels, ignored, t.dtype(x)))


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
    taken = t.emit("take", "take_along", [x, at], (rows, 1), axis=1, base=0, extent=classes)
    sign = t.derived("sign", labels, (rows,), dtype, lambda given: -(given != ignored).to(dtype))
    each = binary(t, "each", "mul", reshaped(t, "row", taken, (rows,)), sign)
    return _joined(t, each, reduction, _labelled(t, labels, ignored, dtype))


@translates(aten.mse_loss.default)
def mse_loss(t: Translator, x: Any, y: Any, reduction: int = _MEAN) -> int:
    difference = binary(t, "difference", "sub", t.tensor(x), t.tensor(y, t.result_dtype()))
    square = t.emit("square", "unary", [difference], t.shape(difference), f="square")
    return _joined(t, square, reduction)


@translates(aten.binary_cross_entropy_with_logits.default)
def bce_with_logits(
    t: Translator, x: Any, y: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> int:
    require(weight is None and pos_weight is None, "a binary cross-entropy with weights")
    logits, target = t.tensor(x), t.tensor(y, t.result_dtype())
    shape = t.shape(logits)

    def unary(name: str, f: str, of: int) -> int:
        return t.emit(name, "unary", [of], shape, f=f)

    # max(x, 0) - x y + log(1 + e^-|x|), which overflows nowhere.
    least = unary("exp", "exp", unary("neg", "neg", unary("abs", "abs", logits)))
    soft = unary("log1p", "log1p", least)
    product = binary(t, "product", "mul", logits, target)
    each = binary(t, "each", "sub", unary("relu", "relu", logits), product)
    return _joined(t, binary(t, "sum", "add", each, soft), reduction)


@translates(aten.l1_loss.default)
def l1_loss(t: Translator, x: Any, y: Any, reduction: int = _MEAN) -> int:
    difference = binary(t, "difference", "sub", t.tensor(x), t.tensor(y, t.result_dtype()))
    distance = t.emit("abs", "unary", [difference], t.shape(difference), f="abs")
    return _joined(t, affine(t, "each", distance, 1.0), reduction)
