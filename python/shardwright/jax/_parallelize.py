"""`parallelize`: plans a step and runs it on many devices."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._native import PlanError
from .._native import devices as devices_of
from .._plan import Plan, SearchOptions, plan
from .._trial import candidates, fastest, show_measured
from ._capture import StepCapture, capture
from ._constrain import Constraints, Spec
from ._measure import seconds_of
from ._walk import Path

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Parallelized:
    """A training step that runs on a mesh by its plan. It is called like the original step."""

    def __init__(self, step: StepCapture, plan: Plan, devices: Sequence[Any], constrain: bool) -> None:
        self._step = step
        self.plan = plan
        #: Seconds per step of every plan that was tried (`measure=True`). This one is the fastest.
        self.measured: dict[str, float] = {}
        self.mesh = _mesh(plan, devices)
        shardings = json.loads(plan._native.shardings())
        self.sites: list[dict[str, Any]] = shardings["sites"]
        self.in_shardings = jax.tree.unflatten(step.in_tree, [self._sharding(s) for s in shardings["arguments"]])
        self.out_shardings = jax.tree.unflatten(step.out_tree, [self._sharding(s) for s in shardings["results"]])
        self._constrain = constrain
        self._jitted = self._jit(step.donate_argnums)

    def _jit(self, donate_argnums: tuple[int, ...]) -> Any:
        return jax.jit(
            self._step.function_through(Constraints(self.mesh, self.sites) if self._constrain else _plain),
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=donate_argnums,
        )

    def without_donation(self) -> Callable[..., Any]:
        """The sharded step without donation. Its arguments must have the planned shardings."""
        return self._jit(()) if self.donate_argnums else self._jitted

    @property
    def function(self) -> Callable[..., Any]:
        """The original step."""
        return self._step.function

    @property
    def shapes(self) -> Any:
        """Shapes and types of the arguments."""
        return self._step.avals

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments."""
        return self._step.donate_argnums

    def _sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(tuple(axes) if axes else None for axes in spec)))

    def shard(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments in the planned shardings."""
        return tuple(jax.device_put(args, self.in_shardings))

    def __call__(self, *args: Any) -> Any:
        """Runs a step. Arguments in other shardings are resharded first."""
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
        """The plan and its predicted times, the mesh, the measured times, and the shardings of arguments and results."""
        lines = [self.plan.table(detail), f"mesh: {' '.join(f'{n}:{s}' for n, s in self.mesh.shape.items())}"]
        lines += show_measured(self.measured)
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
    measure: bool = False,
    roles: Mapping[str, object] | Iterable[str] | None = None,
    opaque: Iterable[str] = (),
    **options: Unpack[SearchOptions],
) -> Parallelized:
    """Plans a training step for a machine, and returns the step, sharded by the plan.

    Args:
        step_fn: a function of pytrees of arrays, jitted or not: `params, state, batch -> params, state, loss`.
        example_args: arguments, or their shapes (`jax.ShapeDtypeStruct`).
        machine: the machine to plan for (see `shardwright.plan`); by default `cpu:N` or `flat:N` for N devices.
        memory: the memory limit of one device: `"16GiB"`, or bytes.
        solver: `"auto"`, `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ...
        devices: the devices to run on, in the machine's order; by default all.
        donate_argnums: positions of donated arguments; by default those that `step_fn` donates.
        constrain: constrain every planned value. Otherwise only arguments and results, from which XLA propagates.
        measure: runs the planned step, and the baselines beside it: data parallelism, and weights split by columns and
            rows in turn, on every grid of the devices. Returns the fastest; `.measured` has all times.

    The other options are those of `shardwright.plan` (`costs`, `untied`, `fix`, `roles`, `opaque`, `time`, ...). Sharding
    constraints inside `step_fn` are removed: the plan replaces them.
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
    plan_step = functools.partial(plan, step.text, memory=memory, roles=roles, opaque=opaque)
    requested = plan_step(machine=name, solver=solver, **options)
    if not measure:
        return Parallelized(step, requested, chosen, constrain)
    # `fix` constrains the requested plan only, not the baselines.
    free: SearchOptions = {**options, "fix": None}

    def trials() -> Iterator[tuple[str, Parallelized]]:
        for candidate in candidates(name, count, solver, constrain, propagates=True):
            is_requested = (candidate.machine, candidate.solver) == (name, solver)
            try:
                if is_requested:
                    trial = requested
                else:
                    trial = plan_step(machine=candidate.machine, solver=candidate.solver, **free)
            except PlanError:
                # A baseline may exceed the memory, or its grid may not fit the machine's levels.
                continue
            yield candidate.name, Parallelized(step, trial, chosen, candidate.constrain)

    best, times = fastest(trials(), seconds_of)
    best.measured = times
    return best


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
