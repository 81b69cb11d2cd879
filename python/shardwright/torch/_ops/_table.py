"""The table of translations, and the pieces that several translations share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._graph import AtenCall, Input

if TYPE_CHECKING:
    from .._translate import Translator

aten = torch.ops.aten

#: The first, second and third input of an op.
X, Y, Z = Input(0), Input(1), Input(2)


class Unsupported(Exception):
    """An op, or an option of an op, that has no translation. The message names it."""


#: ATen overload -> its translation, a function of the translator and the overload's arguments.
TABLE: dict[Any, Callable[..., Any]] = {}


def translates(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a translation into `TABLE`."""

    def enter(translation: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(targets, translation))
        return translation

    return enter


def calls(target: Any, *args: Any) -> AtenCall:
    """What a piece of a composite ATen op runs on local shards."""
    return AtenCall(target, args)


def require(condition: bool, problem: str) -> None:
    """Raises `Unsupported` unless the condition holds."""
    if not condition:
        raise Unsupported(problem)


def positive(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim + rank if dim < 0 else dim


_BINARY = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor}


# Pieces of composite ATen ops. Each names its own ATen call, since the node's is that of the whole.


def reduced(t: Translator, name: str, x: int, dims: list[int], f: str = "sum", differentiable: bool = True) -> int:
    """The `sum`, `mean` or `max` over dimensions, which are removed."""
    shape, axes = t.shape(x), sorted(dims)
    kept = tuple(size for d, size in enumerate(shape) if d not in dims)
    scale = 1.0 / math.prod(shape[d] for d in dims) if f == "mean" else 1.0
    target = {"sum": aten.sum.dim_IntList, "mean": aten.mean.dim, "max": aten.amax.default}[f]
    planned = "max" if f == "max" else "sum"
    call = calls(target, X, axes)
    return t.emit(name, "reduce", [x], kept, call=call, differentiable=differentiable, f=planned, axes=axes, scale=scale)


def reshaped(t: Translator, name: str, x: int, shape: tuple[int, ...]) -> int:
    """The same elements in another shape."""
    if t.shape(x) == shape:
        return x
    return t.emit(name, "reshape", [x], shape, call=calls(aten.reshape.default, X, list(shape)), shape=list(shape))


def binary(t: Translator, name: str, f: str, x: int, y: int) -> int:
    """The sum, difference, product or quotient of two tensors, with broadcasting."""
    shape = tuple(torch.broadcast_shapes(t.shape(x), t.shape(y)))
    return t.emit(name, "binary", [x, y], shape, call=calls(_BINARY[f], X, Y), f=f)


def unary(t: Translator, name: str, target: Any, f: str, x: int) -> int:
    """A function of each element."""
    return t.emit(name, "unary", [x], t.shape(x), call=calls(target, X), f=f)


def affine(scale: float, shift: float = 0.0) -> dict[str, Any]:
    """The planner's function `scale * x + shift`."""
    return {"affine": {"scale": float(scale), "shift": float(shift)}}
