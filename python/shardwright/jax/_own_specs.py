"""Calls that state their own shardings: the specs of a `shard_map` as the rule of its stand-in.

A dimension that mesh axes split becomes two: one of as many elements as the axes have devices, and the rest. The first one has the name of the
axes, so that tensors of any sizes share it. A result that lacks axes which split operands is a sum over them (`psum`): the stand-in
makes one summand per device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

# Size and name of a dimension; none: it stays whole.
Dim = tuple[int, str | None]


@dataclass(frozen=True)
class OwnSpecs:
    """The dimensions of a `shard_map`, named by the mesh axes that split them."""

    operands: list[list[Dim]]
    #: Per result: the axes that are summed over, then its dimensions.
    results: list[tuple[list[Dim], list[Dim]]]
    #: The configuration in which the call is split as its specs say, where it runs on all devices.
    degrees: str

    @classmethod
    def of(cls, eqn: Any) -> OwnSpecs:
        """The specs of an equation."""
        mesh = eqn.params["mesh"]
        operands = [_dims(var.aval, spec, mesh) for var, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True)]
        made = [_dims(var.aval, spec, mesh) for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)]
        read = {name: size for dims in operands for size, name in dims if name is not None}
        # Tuples of axes that overlap others cannot be split side by side.
        axes = [axis for name in read for axis in name.split("_x_")]
        names = read if len(axes) == len(set(axes)) else {}
        split: list[Dim] = [(size, name) for name, size in names.items()]
        results = [([dim for dim in split if dim not in dims], dims) for dims in made]
        order = dict.fromkeys(name for summed, dims in results for _, name in (*summed, *dims) if name in names)
        degrees = "·".join(f"d{at}={names[name]}" for at, name in enumerate(order))
        everywhere = mesh.size == jax.device_count()
        return cls(operands, results, degrees if everywhere else "")

    def rule(self) -> str:
        """The rule of the stand-in."""
        made = [[*summed, *dims] for summed, dims in self.results]
        return f"{_text(self.operands)} -> {_text(made)}"


def _dims(aval: Any, spec: Any, mesh: Any) -> list[Dim]:
    entries = [*spec, *([None] * (len(aval.shape) - len(spec)))]
    found: list[Dim] = []
    for size, entry in zip(aval.shape, entries, strict=True):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if ways > 1 and size % ways == 0 and all(axis.isidentifier() for axis in axes):
            found.append((ways, "_x_".join(axes)))
            size //= ways
        found.append((size, None))
    return found


def _text(tensors: list[list[Dim]]) -> str:
    return ", ".join(" ".join("_" if name is None else f"s_{name}" for _, name in dims) or "()" for dims in tensors)
