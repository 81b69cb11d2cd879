"""Element-wise ops, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._table import TABLE, X, affine, aten, calls, require, translates

if TYPE_CHECKING:
    from .._translate import Translator

_UNARY = {
    aten.abs.default: "abs",
    aten.ceil.default: "ceil",
    aten.cos.default: "cos",
    aten.erf.default: "erf",
    aten.exp.default: "exp",
    aten.expm1.default: "expm1",
    aten.floor.default: "floor",
    aten.log.default: "log",
    aten.log1p.default: "log1p",
    aten.neg.default: "neg",
    aten.reciprocal.default: "reciprocal",
    aten.relu.default: "relu",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.sin.default: "sin",
    aten.sqrt.default: "sqrt",
    aten.square.default: "square",
    aten.tanh.default: "tanh",
}


def _unary(f: str) -> Callable[..., int]:
    return lambda t, x: t.emit("", "unary", [t.tensor(x)], t.shape(t.tensor(x)), f=f)


TABLE.update({target: _unary(f) for target, f in _UNARY.items()})


@translates(aten.gelu.default)
def gelu(t: Translator, x: Any, approximate: str = "none") -> int:
    f = "gelu_tanh" if approximate == "tanh" else "gelu"
    return t.emit("", "unary", [t.tensor(x)], t.shape(t.tensor(x)), f=f)


@translates(aten.leaky_relu.default)
def leaky_relu(t: Translator, x: Any, slope: float = 0.01) -> int:
    return t.emit("", "unary", [t.tensor(x)], t.shape(t.tensor(x)), f={"leaky_relu": float(slope)})


@translates(aten.pow.Tensor_Scalar)
def power(t: Translator, x: Any, exponent: float) -> int:
    f: Any = "square" if exponent == 2 else {"power": float(exponent)}
    return t.emit("", "unary", [t.tensor(x)], t.shape(t.tensor(x)), f=f)


def _with_number(t: Translator, x: Any, scale: float, shift: float) -> int:
    require(t.result_dtype().is_floating_point, "whole numbers")
    x = t.tensor(x, t.result_dtype())
    return t.emit("", "unary", [x], t.shape(x), f=affine(scale, shift))


def _two(t: Translator, f: str, x: Any, y: Any) -> int:
    dtype = t.result_dtype()
    return t.emit("", "binary", [t.tensor(x, dtype), t.tensor(y, dtype)], t.result_shape(), f=f)


@translates(aten.add.Tensor, aten.add.Scalar)
def add(t: Translator, x: Any, y: Any, alpha: float = 1) -> int:
    if isinstance(y, (int, float)):
        return _with_number(t, x, 1.0, y * alpha)
    require(alpha == 1, f"alpha={alpha}")
    return _two(t, "add", x, y)


@translates(aten.sub.Tensor, aten.sub.Scalar)
def sub(t: Translator, x: Any, y: Any, alpha: float = 1) -> int:
    if isinstance(y, (int, float)):
        return _with_number(t, x, 1.0, -y * alpha)
    require(alpha == 1, f"alpha={alpha}")
    return _two(t, "sub", x, y)


@translates(aten.rsub.Scalar)
def rsub(t: Translator, x: Any, y: float, alpha: float = 1) -> int:
    return _with_number(t, x, -alpha, y)


@translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(t: Translator, x: Any, y: Any) -> int:
    return _with_number(t, x, y, 0.0) if isinstance(y, (int, float)) else _two(t, "mul", x, y)


@translates(aten.div.Tensor, aten.div.Scalar)
def div(t: Translator, x: Any, y: Any) -> int:
    return _with_number(t, x, 1.0 / y, 0.0) if isinstance(y, (int, float)) else _two(t, "div", x, y)


@translates(aten.maximum.default)
def maximum(t: Translator, x: Any, y: Any) -> int:
    return _two(t, "max", x, y)


@translates(aten.minimum.default)
def minimum(t: Translator, x: Any, y: Any) -> int:
    return _two(t, "min", x, y)


_COMPARISONS = {"eq": aten.eq, "ne": aten.ne, "lt": aten.lt, "le": aten.le, "gt": aten.gt, "ge": aten.ge}


def _compare(f: str) -> Callable[..., int]:
    def compare(t: Translator, x: Any, y: Any) -> int:
        x = t.tensor(x)
        y = t.tensor(y, t.dtype(x))
        return t.emit("", "compare", [x, y], t.result_shape(), f=f, result=torch.bool)

    return compare


TABLE.update({op.Tensor: _compare(f) for f, op in _COMPARISONS.items()})
TABLE.update({op.Scalar: _compare(f) for f, op in _COMPARISONS.items()})


def _select(t: Translator, condition: int, x: int, y: int) -> int:
    return t.emit("", "select", [condition, x, y], t.result_shape())


@translates(aten.where.self)
def where(t: Translator, condition: Any, x: Any, y: Any) -> int:
    dtype = t.result_dtype()
    return _select(t, t.tensor(condition), t.tensor(x, dtype), t.tensor(y, dtype))


@translates(aten.where.ScalarOther)
def where_scalar(t: Translator, condition: Any, x: Any, y: float) -> int:
    dtype = t.result_dtype()
    return _select(t, t.tensor(condition), t.tensor(x, dtype), t.scalar(y, dtype))


@translates(aten.masked_fill.Scalar)
def masked_fill(t: Translator, x: Any, mask: Any, value: float) -> int:
    dtype = t.result_dtype()
    return _select(t, t.tensor(mask), t.scalar(value, dtype), t.tensor(x, dtype))


@translates(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device)
def convert(t: Translator, x: Any, *_: Any, **__: Any) -> int:
    return t.tensor(x, t.result_dtype())


@translates(aten.native_dropout.default)
def native_dropout(t: Translator, x: Any, rate: float, train: bool | None = True) -> tuple[Any, ...]:
    return dropout(t, x, rate, train is not False), None


@translates(aten.dropout.default)
def dropout(t: Translator, x: Any, rate: float, train: bool) -> int:
    return dropped(t, "", t.tensor(x), rate if train else 0.0, t.strides())


def dropped(t: Translator, name: str, x: int, rate: float, strides: tuple[int, ...]) -> int:
    """Zeroes elements at random and scales the others. Random bits are drawn in the order of memory."""
    if rate == 0:
        return x
    shape = t.shape(x)
    return t.emit(
        name,
        "dropout",
        [x],
        shape,
        call=calls(aten.dropout.default, X, float(rate), strides),
        rate=float(rate),
        seed=len(t.graph.ops),
        origin=[0] * len(shape),
        whole=list(shape),
    )
