"""`parallelize`: from a step to the same step on many devices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._native import PlanError
from .._native import devices as devices_of
from .._plan import Plan, plan
from ._capture import Step, capture, path_of
from ._walk import Path, show

# Per dimension the names of the axes that split it; None where that is left to XLA.
Spec = Sequence[Sequence[str] | None]


class Parallelized:
    """A training step that runs on a mesh as its plan says. Call it like the step that it was made from."""

    def __init__(self, step: Step, plan: Plan, devices: Sequence[Any], constrain: bool) -> None:
        self._step = step
        self.plan = plan
        self.mesh = _mesh(plan, devices)
        shardings = json.loads(plan._native.shardings())
        self.sites: list[dict[str, Any]] = shardings["sites"]
        self.in_shardings = jax.tree.unflatten(step.in_tree, [self._sharding(s) for s in shardings["arguments"]])
        self.out_shardings = jax.tree.unflatten(step.out_tree, [self._sharding(s) for s in shardings["results"]])
        visit = _Constrain(self.mesh, self.sites) if constrain else _plain
        self._jitted = jax.jit(
            step.function_through(visit),
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=step.donate_argnums,
        )

    @property
    def function(self) -> Callable[..., Any]:
        """The step that it was made from."""
        return self._step.function

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The arguments whose memory is given away."""
        return self._step.donate_argnums

    def _sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(tuple(axes) if axes else None for axes in spec)))

    def shard(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, each laid out over the devices as the plan wants it."""
        return tuple(jax.device_put(args, self.in_shardings))

    def __call__(self, *args: Any) -> Any:
        """Runs a step. Arguments that lie elsewhere are brought into place first."""
        expected = jax.tree.leaves(self.in_shardings)
        leaves, tree = jax.tree.flatten(args)
        self._step.check(tree)
        if not all(map(_in_place, leaves, expected)):
            args = self.shard(args)
        return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """Lowers the step, as `jax.jit(f).lower` does."""
        return self._jitted.lower(*args)

    def explain(self, detail: str = "usual") -> str:
        """What the plan is, what it is worth, and how arguments and results lie."""
        lines = [self.plan.table(detail), f"mesh: {' '.join(f'{n}:{s}' for n, s in self.mesh.shape.items())}"]
        for title, tree in (("arguments", self.in_shardings), ("results", self.out_shardings)):
            lines.append(f"{title}:")
            for path, sharding in jax.tree_util.tree_flatten_with_path(tree)[0]:
                lines.append(f"  {jax.tree_util.keystr(path)}: {sharding.spec}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{getattr(self._step.function, '__name__', 'step')} parallelized: {self.plan!r}>"


def parallelize(
    step_fn: Callable[..., Any],
    *example_args: Any,
    machine: str | None = None,
    memory: str | int | None = None,
    solver: str = "auto",
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    constrain: bool = True,
    costs: str | None = None,
    untied: bool = False,
    fix: Mapping[str, object] | Iterable[str] | None = None,
    roles: Mapping[str, object] | Iterable[str] | None = None,
    opaque: Iterable[str] = (),
    time: float = 60.0,
    seed: int = 0,
    progress: bool | Callable[[float, float | None, float], None] | None = None,
) -> Parallelized:
    """Plans a training step for a machine and returns the step, sharded as planned.

    Args:
        step_fn: a function of pytrees of arrays, jitted or not: `params, state, batch -> params, state, loss`.
        example_args: arguments, or their shapes (`jax.ShapeDtypeStruct`).
        machine: what to plan for (see `shardwright.plan`); as many CPUs as there are devices, or `flat:N`, by default.
        memory: the most that one device may hold at once: `"16GiB"`, or bytes.
        solver: `"auto"`, `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ...
        devices: the devices to run on, in the machine's order; all of them by default.
        donate_argnums: arguments whose memory may be used again; those that `step_fn` donates by default.
        constrain: whether every planned value is pinned, or only arguments and results, XLA filling in the rest.

    The other options are those of `shardwright.plan`. Sharding constraints inside `step_fn` are left out: the plan
    replaces them.
    """
    chosen = list(jax.devices() if devices is None else devices)
    name = machine or _default_machine(chosen)
    count = devices_of(name)
    if count != len(chosen):
        if devices is not None or count > len(chosen):
            raise PlanError(f"machine {name} has {count} devices, but there are {len(chosen)} to run on")
        chosen = chosen[:count]
    if isinstance(donate_argnums, int):
        donate_argnums = (donate_argnums,)
    step = capture(step_fn, example_args, None if donate_argnums is None else tuple(donate_argnums))
    found = plan(
        step.text,
        machine=name,
        memory=memory,
        solver=solver,
        costs=costs,
        untied=untied,
        fix=fix,
        roles=roles,
        opaque=opaque,
        time=time,
        seed=seed,
        progress=progress,
    )
    return Parallelized(step, found, chosen, constrain)


def _default_machine(devices: Sequence[Any]) -> str:
    return f"{'cpu' if devices[0].platform == 'cpu' else 'flat'}:{len(devices)}"


def _mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    axes = plan.axes or {"device": 1}
    return Mesh(np.asarray(devices).reshape(tuple(axes.values())), tuple(axes))


def _in_place(leaf: Any, sharding: NamedSharding) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _plain(eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]) -> list[Any]:
    return bind(operands)


class _Constrain:
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
        if len(site["operands"]) == len(operands):
            operands = [self.operand(x, spec) for x, spec in zip(operands, site["operands"], strict=True)]
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

    def result(self, x: Any, spec: Spec | None) -> Any:
        if spec is None or not isinstance(x, jax.core.Tracer):
            return x
        x = self.constrained(x, spec)
        self.known[id(x)] = (x, spec)
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
