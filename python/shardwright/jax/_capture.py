"""Captures a step as a jaxpr and as StableHLO, and relates the equations of the one to the operations of the other.

Each equation is traced in a name scope of its path, `#12.0.3`. JAX writes the scopes into the locations of operations.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ._walk import Path, show, walk

_SCOPE = re.compile(r"#([\d.]+)(?:/|$)")


@dataclass(frozen=True)
class StepCapture:
    """A captured step."""

    function: Callable[..., Any]
    jaxpr: Any
    in_tree: Any
    out_tree: Any
    #: Per argument of the function: whether it is donated.
    donated: tuple[bool, ...]
    #: StableHLO, with locations.
    text: str

    @property
    def avals(self) -> Any:
        """Shapes and types of the arguments."""
        return jax.tree.unflatten(self.in_tree, [_abstract(var.aval) for var in self.jaxpr.jaxpr.invars])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments."""
        return tuple(i for i, given in enumerate(self.donated) if given)

    def check(self, tree: Any) -> None:
        """Raises `TypeError` if arguments have another structure than the captured ones."""
        if tree != self.in_tree:
            raise TypeError(f"planned for arguments of structure {self.in_tree}, called with {tree}")

    def function_through(self, visit: Any) -> Callable[..., Any]:
        """The same function, with every equation evaluated by `visit`."""

        @functools.wraps(self.function)
        def step(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            self.check(tree)
            return jax.tree.unflatten(self.out_tree, walk(self.jaxpr.jaxpr, self.jaxpr.consts, leaves, visit))

        return step


def capture(function: Callable[..., Any], args: tuple[Any, ...], donate_argnums: tuple[int, ...] | None) -> StepCapture:
    """Traces a step. Without `donate_argnums`, a jitted function keeps its own donations."""
    if donate_argnums is None:
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        infos = jitted.lower(*args).args_info[0]
        donated = tuple(
            bool(leaves) and all(leaf.donated for leaf in leaves)
            for leaves in (jax.tree.leaves(info, is_leaf=lambda x: hasattr(x, "donated")) for info in infos)
        )
    else:
        donated = tuple(i in donate_argnums for i in range(len(args)))
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    in_tree, out_tree = jax.tree.structure(args), jax.tree.structure(shapes)
    step = StepCapture(function, jaxpr, in_tree, out_tree, donated, "")
    tagged = jax.jit(step.function_through(_tag), donate_argnums=step.donate_argnums, keep_unused=True)
    text = tagged.lower(*jax.tree.map(_abstract, args)).as_text(debug_info=True)
    return StepCapture(function, jaxpr, in_tree, out_tree, donated, text)


def path_of(name: str | None) -> str | None:
    """The path of the equation that became an operation with this location.

    >>> path_of("mlp/#12.0.3/dot_general")
    '12.0.3'
    """
    found = _SCOPE.findall(name or "")
    return found[-1] if found else None


def _tag(eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]) -> list[Any]:
    scopes = str(eqn.source_info.name_stack)
    with jax.named_scope(f"{scopes}/#{show(path)}" if scopes else f"#{show(path)}"):
        return bind(operands)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    aval: Any = leaf if isinstance(leaf, jax.core.AbstractValue) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
