"""Shardings that the user gives for arguments, as constraints of the plan.

In the planned program, a call with the type of a constrained argument reads it, and everything else reads the result. The config
of that call is fixed to the axes that split the argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._native import PlanError
from ._arguments import Structure, is_key

#: The name of the call in the planned program.
CALL = "shardwright.pin"
# Per dimension of a leaf: the axes of the machine's mesh that split it, outermost first.
Pin = tuple[tuple[str, ...], ...]


def in_shardings_of(function: Callable[..., Any], given: Any, static_argnums: Sequence[int]) -> Any:
    """Shardings as given, or those of a jitted function, in the positions of all arguments."""
    jitted = getattr(function, "_jit_info", None)
    if given is not None or jitted is None or not jitted.user_specified_in_shardings:
        return given
    leaves = [leaf if isinstance(leaf, (Sharding, PartitionSpec)) else None for leaf in jitted.in_shardings_leaves]
    tree = jax.tree.unflatten(jitted.in_shardings_treedef, leaves)
    if not isinstance(tree, (tuple, list)):
        return tree
    shardings = list(tree)
    for at in sorted(static_argnums):
        shardings.insert(at, None)
    return tuple(shardings)


def pins_of(
    given: Any, structure: Structure, leaves: Sequence[Any], axes: Mapping[str, int], devices: Sequence[Any] | None
) -> tuple[Pin | None, ...]:
    """Per leaf of the arguments: its constraint. `given` is a prefix of the arguments' tree, as `in_shardings` of `jax.jit`."""
    args, kwargs = structure.arguments(range(len(leaves)))
    pins: list[Pin | None] = [None] * len(leaves)
    names = structure.paths()

    def note(sharding: Any, positions: Any) -> None:
        for at in jax.tree.leaves(positions):
            if sharding is not None and not is_key(leaves[at]):
                pins[at] = _pin(sharding, np.shape(leaves[at]), axes, devices, names[at])

    if isinstance(given, (Sharding, PartitionSpec)):
        note(given, args)
        return tuple(pins)
    given = tuple(given)
    # Keyword arguments follow as a dictionary, as in `Parallelized.in_shardings`.
    targets = (*args, kwargs) if kwargs else args
    if len(given) not in (len(args), len(targets)):
        raise PlanError(f"in_shardings has {len(given)} entries, but the step has {len(args)} arguments; use None for free ones")
    for prefix, arg in zip(given, targets, strict=False):
        try:
            jax.tree.map(note, prefix, arg, is_leaf=_is_sharding)
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"in_shardings does not match the arguments: {error}") from None
    return tuple(pins)


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, (Sharding, PartitionSpec))


def _pin(sharding: Any, shape: tuple[int, ...], axes: Mapping[str, int], devices: Sequence[Any] | None, name: str) -> Pin:
    spec = sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)
    if spec is None:
        raise PlanError(f"in_shardings: {name} has {sharding}; use a NamedSharding or a PartitionSpec of the machine's axes")
    parts = _machine_axes(sharding, axes, devices, name) if isinstance(sharding, NamedSharding) else {a: (a,) for a in axes}
    pin = []
    for entry in (*spec, *([None] * (len(shape) - len(spec)))):
        entries = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        unknown = [axis for axis in entries if axis not in parts]
        if unknown:
            raise PlanError(f"in_shardings: {name} is split by {unknown[0]!r}; the machine's axes are {', '.join(axes)}")
        pin.append(tuple(axis for own in entries for axis in parts[own]))
    if len(pin) != len(shape):
        raise PlanError(f"in_shardings: {name} has {len(shape)} dimensions, but its sharding has {len(pin)}")
    order = list(axes)
    for dim, (size, split) in enumerate(zip(shape, pin, strict=True)):
        if size % math.prod(axes[axis] for axis in split):
            raise PlanError(f"in_shardings: dimension {dim} of {name} has {size} elements, which {' x '.join(split)} do not divide")
        if list(split) != sorted(split, key=order.index):
            raise PlanError(f"in_shardings: {name} has blocks in another order than the machine's axes, {', '.join(axes)}")
    return tuple(pin)


def _machine_axes(
    sharding: NamedSharding, axes: Mapping[str, int], devices: Sequence[Any] | None, name: str
) -> dict[str, tuple[str, ...]]:
    """The axes of the machine's mesh that make up each axis of a sharding's mesh."""
    mesh = sharding.mesh
    known = {device: at for at, device in enumerate(devices or ())}
    if not hasattr(mesh, "devices") or set(mesh.devices.flat) != set(known):
        raise PlanError(f"in_shardings: the sharding of {name} is not on the devices of the step")
    places = np.vectorize(known.__getitem__)(mesh.devices)
    strides = [int(np.take(places, 1, k).flat[0]) - int(places.flat[0]) if n > 1 else 0 for k, n in enumerate(places.shape)]
    line = sum(np.arange(n).reshape(-1, *([1] * (places.ndim - k - 1))) * strides[k] for k, n in enumerate(places.shape))
    sizes = list(axes.values())
    inner = {axis: math.prod(sizes[at + 1 :]) for at, axis in enumerate(axes)}
    found = {}
    for own, n, stride in zip(mesh.axis_names, places.shape, strides, strict=True):
        found[own] = tuple(axis for axis in axes if stride <= inner[axis] < stride * n)
        if math.prod(axes[axis] for axis in found[own]) != n or not np.array_equal(places, line):
            shape = ", ".join(f"{axis}: {size}" for axis, size in mesh.shape.items())
            raise PlanError(f"in_shardings: the mesh of {name} ({shape}) is no grouping of the machine's axes, {', '.join(axes)}")
    return found


def pinned(at: int, leaf: Any) -> Any:
    """A leaf after the call that constrains it."""
    with jax.named_scope(f"pin{at}"):
        return jax.ffi.ffi_call(CALL, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))(leaf)


def constraints(pins: Sequence[Pin | None]) -> list[str]:
    """The constraints of the planner, `PATTERN=CONFIG`.

    >>> constraints([None, (("gpu.0", "gpu.1"), ()), ((),)])
    ['pin1/ffi_call=d0@gpu.0+gpu.1', 'pin2/ffi_call=whole']
    """

    def config(pin: Pin) -> str:
        return "·".join(f"d{dim}@{'+'.join(split)}" for dim, split in enumerate(pin) if split) or "whole"

    return [f"pin{at}/ffi_call={config(pin)}" for at, pin in enumerate(pins) if pin is not None]
