"""The calls of a step: their arguments as arrays, and everything else as structure.

Static arguments and leaves that are no arrays (functions, strings) belong to the structure of a call, as do NNX modules less
their state. Two calls of the same structure and types run the same program.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _nnx

# Shape, element type, and whether the type is weak (a Python number).
LeafType = tuple[tuple[int, ...], Any, bool]


class _Structure:
    """A value as a part of a structure. Values that cannot be hashed are compared only."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(np.all(self.value == other.value))

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


@jax.tree_util.register_pytree_node_class
class Static:
    """A node without leaves: a value that belongs to the structure."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], _Structure]:
        return (), _Structure(self.value)

    @classmethod
    def tree_unflatten(cls, structure: _Structure, _: Any) -> Static:
        return cls(structure.value)


def is_array(leaf: Any) -> bool:
    """Whether JAX takes a leaf as an array."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.generic, bool, int, float, complex)):
        return True
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return hasattr(leaf, "__jax_array__") or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def fold(tree: Any, numbers_are_static: bool = False) -> Any:
    """The tree with every leaf that is no array in a `Static`. Numbers of Python are static in Equinox modules, which keep
    flags in them, and where `numbers_are_static`, as under `eqx.filter_jit`."""
    equinox = sys.modules.get("equinox")

    def folded(node: Any) -> Any:
        if equinox is not None and isinstance(node, equinox.Module) and not numbers_are_static:
            return fold(node, numbers_are_static=True)
        number = numbers_are_static and isinstance(node, (bool, int, float, complex)) and not isinstance(node, np.generic)
        return node if is_array(node) and not number else Static(node)

    def is_leaf(node: Any) -> bool:
        return not numbers_are_static and equinox is not None and isinstance(node, equinox.Module)

    return jax.tree.map(folded, tree, is_leaf=is_leaf)


def unfold(tree: Any) -> Any:
    """The tree with the values of its `Static` nodes."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Static) else leaf, tree, is_leaf=lambda x: isinstance(x, Static)
    )


def leaf_type(leaf: Any) -> LeafType:
    """The type that decides, as under `jax.jit`, whether a call runs a known program."""
    aval: Any = jax.typeof(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def show_type(kind: LeafType) -> str:
    """
    >>> show_type(((8, 4), np.dtype("float32"), False))
    'float32[8,4]'
    """
    return f"{kind[1]}[{','.join(map(str, kind[0]))}]"


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)) if hasattr(leaf, "dtype") else False


@dataclass(frozen=True)
class Structure:
    """The structure of a call: the tree of its arguments, and the NNX modules among them, less their state."""

    tree: Any
    modules: _nnx.Modules | None

    def __hash__(self) -> int:
        return hash(self.tree)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with these leaves. NNX modules are their states."""
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs

    def paths(self) -> list[str]:
        """The path of every leaf, from the position or name of its argument."""
        args, kwargs = self.arguments(range(self.tree.num_leaves))
        entries = [*enumerate(args), *sorted(kwargs.items())]
        return [
            f"{name if isinstance(name, str) else f'argument {name}'}{jax.tree_util.keystr(path)}"
            for name, arg in entries
            for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
        ]


@dataclass(frozen=True)
class Call:
    """A call: its arrays, and its structure."""

    leaves: list[Any]
    structure: Structure
    #: The modules of the call, which the step may change.
    objects: dict[str, Any]

    def types(self) -> tuple[LeafType, ...]:
        return tuple(map(leaf_type, self.leaves))


@dataclass(frozen=True)
class CallForm:
    """How a step is called: its static arguments."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    #: Whether numbers of Python are static, as under `eqx.filter_jit`.
    static_numbers: bool = False

    @classmethod
    def of(
        cls, function: Callable[..., Any], argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
    ) -> CallForm:
        """Static arguments as given, or those of a jitted function. Names and positions of one parameter are equivalent."""
        jitted = getattr(function, "_jit_info", None)
        if argnums is None and argnames is None and jitted is not None:
            argnums, argnames = jitted.static_argnums, jitted.static_argnames
        if argnums is None:
            argnums = getattr(function, "static_argnums", None)
        numbers = set((argnums,) if isinstance(argnums, int) else argnums or ())
        names = set((argnames,) if isinstance(argnames, str) else argnames or ())
        try:
            parameters = [
                parameter.name
                for parameter in inspect.signature(function).parameters.values()
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):
            parameters = []
        numbers = {number % len(parameters) if number < 0 and parameters else number for number in numbers}
        names |= {name for at, name in enumerate(parameters) if at in numbers}
        numbers |= {at for at, name in enumerate(parameters) if name in names}
        filtered = type(function).__module__ == "equinox._jit"
        return cls(tuple(sorted(numbers)), tuple(sorted(names)), filtered)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call with these arguments."""
        fixed_args = tuple(Static(arg) if at in self.static_argnums else arg for at, arg in enumerate(args))
        fixed_kwargs = {name: Static(arg) if name in self.static_argnames else arg for name, arg in kwargs.items()}
        states, named, modules, objects = _nnx.split(fixed_args, fixed_kwargs)
        leaves, tree = jax.tree.flatten((fold(states, self.static_numbers), fold(named, self.static_numbers)))
        return Call(leaves, Structure(tree, modules), objects)
