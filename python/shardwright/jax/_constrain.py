"""Holds the values of a step to the shardings that a plan gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._capture import path_of
from ._walk import Path, show

# Per dimension the names of the axes that split it; None where that is left to XLA.
Spec = Sequence[Sequence[str] | None]


class Constrain:
    """Holds every value to its planned sharding: operands to what the operation wants, results to how they lie."""

    def __init__(self, mesh: Mesh, sites: list[dict[str, Any]]) -> None:
        self.mesh = mesh
        # An equation may become several operations: the last one makes its results.
        self.sites = {path: site for site in sites if (path := path_of(site["name"])) is not None}
        # Values with their specs, and what they were brought into already. Holding a value keeps its id its own.
        self.known: dict[int, tuple[Any, Spec]] = {}
        self.moved: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __call__(
        self, eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        if eqn.primitive.name == "sharding_constraint":
            return operands
        site = self.sites.get(show(path))
        if site is None:
            return bind(operands)
        wanted = site["operands"]
        if eqn.primitive.name.startswith("reduce_") and len(wanted) == 2 * len(operands):
            # What they start from comes behind the operands.
            wanted = wanted[: len(operands)]
        if len(wanted) == len(operands):
            operands = [self.operand(x, spec) for x, spec in zip(operands, wanted, strict=True)]
        results = bind(operands)
        if len(site["results"]) == len(results):
            results = [self.result(x, spec) for x, spec in zip(results, site["results"], strict=True)]
        return results

    def operand(self, x: Any, stops: Sequence[Spec] | None) -> Any:
        """The value brought where an operation needs it, by all stops on its way; readers share the way."""
        if not stops or not isinstance(x, jax.core.Tracer):
            return x
        known = self.known.get(id(x))
        if known is not None and known[1] == stops[-1]:
            return x
        for spec in stops:
            key = (id(x), str(spec))
            if key not in self.moved:
                self.moved[key] = (x, self.constrained(x, spec))
            x = self.moved[key][1]
        return x

    def result(self, x: Any, stops: Sequence[Spec] | None) -> Any:
        if not stops or not isinstance(x, jax.core.Tracer):
            return x
        for spec in stops:
            x = self.constrained(x, spec)
        self.known[id(x)] = (x, stops[-1])
        return x

    def constrained(self, x: Any, spec: Spec) -> Any:
        if not self.fits(x, spec):
            return x
        free = PartitionSpec.UNCONSTRAINED
        dims = (free if axes is None else tuple(axes) if axes else None for axes in spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*dims)))

    def fits(self, x: Any, spec: Spec) -> bool:
        if x.ndim == 0 or x.ndim != len(spec) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return False
        parts = (math.prod(self.mesh.shape[axis] for axis in axes or ()) for axes in spec)
        return all(size % n == 0 for size, n in zip(x.shape, parts, strict=True))
