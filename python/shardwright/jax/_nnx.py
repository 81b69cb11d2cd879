"""Flax NNX modules as arguments: their state goes in as arrays, and comes back into the modules after the step.

A step in the style of `nnx.jit` changes the modules that it is given. Inside, it works on copies, merged from arrays.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax

from .._native import PlanError


@dataclass(frozen=True)
class Modules:
    """The modules of a call, less their state: where they are among the arguments, and their common graph."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    graph: Any

    def merge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Arguments with modules in place of their states, and those modules by their place."""
        nnx = sys.modules["flax.nnx"]
        states = {str(at): args[at] for at in self.positions} | {name: kwargs[name] for name in self.names}
        objects = nnx.merge(self.graph, nnx.State(states))
        merged = tuple(objects[str(at)] if at in self.positions else arg for at, arg in enumerate(args))
        named = {name: objects[name] if name in self.names else arg for name, arg in kwargs.items()}
        return merged, named, objects

    def states_of(self, objects: dict[str, Any]) -> list[Any]:
        """The leaves of the modules' states after a step, in the order of the call's leaves."""
        nnx = sys.modules["flax.nnx"]
        graph, state = nnx.split(objects)
        if graph != self.graph:
            raise PlanError(
                "the step changes the structure of an NNX module (it adds or removes variables, or sets an attribute); "
                "create all variables before the step, for example by one call outside"
            )
        return jax.tree.leaves(
            ([_part(state, str(at)) for at in self.positions], {name: _part(state, name) for name in self.names})
        )


def is_module(node: Any) -> bool:
    """Whether a node is an NNX object that a step can change."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (isinstance(node, nnx.Variable) or _is_graph_node(nnx, node))


def _is_graph_node(nnx: Any, node: Any) -> bool:
    # Lists and dictionaries count as nodes too, but are plain pytrees here.
    return bool(nnx.graph.is_graph_node(node)) and not isinstance(node, (tuple, list, dict, nnx.State))


def contains(tree: Any) -> bool:
    """Whether a tree contains NNX objects. The variables of an `nnx.State` are plain arrays, as under `jax.jit`."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.State) or is_module(node))
    return any(is_module(node) for node in nodes if not isinstance(node, nnx.State))


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Modules | None, dict[str, Any]]:
    """Arguments with states in place of modules; the modules' common graph; and the modules by their place."""
    positions = tuple(at for at, arg in enumerate(args) if contains(arg))
    names = tuple(name for name, arg in kwargs.items() if contains(arg))
    if not positions and not names:
        return args, kwargs, None, {}
    nnx = sys.modules["flax.nnx"]
    objects = {str(at): args[at] for at in positions} | {name: kwargs[name] for name in names}
    graph, state = nnx.split(objects)
    states = tuple(_part(state, str(at)) if at in positions else arg for at, arg in enumerate(args))
    named = {name: _part(state, name) if name in names else arg for name, arg in kwargs.items()}
    return states, named, Modules(positions, names, graph), objects


def _part(state: Any, place: str) -> Any:
    # A module whose variables all belong to another one has no state.
    return state[place] if place in state else {}


def update(modules: Modules, objects: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes states back into modules. The arguments hold states in place of modules."""
    nnx = sys.modules["flax.nnx"]
    states = {str(at): args[at] for at in modules.positions} | {name: kwargs[name] for name in modules.names}
    nnx.update(objects, nnx.State(states))
