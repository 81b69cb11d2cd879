"""The table of translations, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .._translate import Translator

aten = torch.ops.aten


class Unsupported(Exception):
    """An op, or an option of one, that cannot be translated: says which."""


@dataclass(frozen=True)
class Translation:
    """How an op is translated, and whether it may run as it is on the parts of its tensors, where those suffice."""

    make: Callable[..., Any]
    whole: bool


#: Op -> how it is translated.
TABLE: dict[Any, Translation] = {}


def translates(*targets: Any, whole: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a translation into the table. It is called with the translator and the op's arguments."""

    def enter(make: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            TABLE[target] = Translation(make, whole)
        return make

    return enter


def require(condition: bool, what: str) -> None:
    """Refuses what is not supported."""
    if not condition:
        raise Unsupported(what)


def positive(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim + rank if dim < 0 else dim


def reduced(t: Translator, name: str, x: int, dims: list[int], scale: float = 1.0, f: str = "sum", **extra: Any) -> int:
    """A sum or maximum over dimensions, which are gone then."""
    shape = t.shape(x)
    kept = tuple(size for d, size in enumerate(shape) if d not in dims)
    return t.emit(name, "reduce", [x], kept, f=f, axes=sorted(dims), scale=scale, extra=extra)


def reshaped(t: Translator, name: str, x: int, shape: tuple[int, ...]) -> int:
    """The same elements in another shape."""
    return x if t.shape(x) == shape else t.emit(name, "reshape", [x], shape, shape=list(shape))


def binary(t: Translator, name: str, f: str, x: int, y: int) -> int:
    """A function of two tensors, with broadcasting."""
    shape = tuple(torch.broadcast_shapes(t.shape(x), t.shape(y)))
    return t.emit(name, "binary", [x, y], shape, f=f)


def affine(t: Translator, name: str, x: int, scale: float, shift: float = 0.0) -> int:
    """`scale * x + shift`."""
    return t.emit(name, "unary", [x], t.shape(x), f={"affine": {"scale": float(scale), "shift": float(shift)}})
