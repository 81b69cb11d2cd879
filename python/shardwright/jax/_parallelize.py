"""`parallelize`: plans a step and runs it on many devices."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from .._native import PlanError
from .._native import devices as devices_of
from .._plan import Plan, SearchOptions, plan
from .._trial import candidates, fastest, show_measured
from . import _nnx
from ._arguments import Call, CallForm, unfold
from ._capture import Donations, capture
from ._measure import seconds_of
from ._sharded_step import ShardedStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Parallelized:
    """A training step that runs on a mesh by its plan. It is called like the original step.

    Calls with arguments of another structure or other types are planned on their own, as `jax.jit` traces them again. The
    properties are those of the arguments that were planned first."""

    def __init__(self, form: CallForm, first: ShardedStep, plan_again: Callable[[Call], ShardedStep]) -> None:
        self._form = form
        self._first = first
        self._plan_again = plan_again
        self._steps: dict[Any, ShardedStep] = {(first.step.structure, first.step.types): first}
        #: Seconds per step of every plan that was tried (`measure=True`). This one is the fastest.
        self.measured: dict[str, float] = {}

    @property
    def first(self) -> ShardedStep:
        """The step for the arguments that were planned first."""
        return self._first

    @property
    def steps(self) -> list[ShardedStep]:
        """The planned steps, one per structure and types of the arguments."""
        return list(self._steps.values())

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._first.plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan's axes, outermost level first."""
        return self._first.mesh

    @property
    def in_shardings(self) -> Any:
        """Shardings of the arguments; those of keyword arguments come last, as a dictionary."""
        return self._first.in_shardings

    @property
    def out_shardings(self) -> Any:
        """Shardings of the results."""
        return self._first.out_shardings

    @property
    def function(self) -> Callable[..., Any]:
        """The original step."""
        return self._first.step.function

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, ShardedStep]:
        call = self._form.call(args, kwargs)
        key = call.structure, call.types()
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._plan_again(call)
        return call, step

    def shard(self, args: tuple[Any, ...], **kwargs: Any) -> Any:
        """The arguments in the planned shardings; NNX modules keep their identity. Keyword arguments come last, as a
        dictionary, where there are any."""
        call, step = self._call(tuple(args), kwargs)
        placed, named = map(unfold, call.structure.arguments(step.place(call.leaves)))
        if call.structure.modules is not None:
            _nnx.update(call.structure.modules, call.objects, placed, named)
            placed = tuple(args[at] if at in call.structure.modules.positions else x for at, x in enumerate(placed))
            named = {name: kwargs[name] if name in call.structure.modules.names else x for name, x in named.items()}
        return (*placed, named) if kwargs else placed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step. Arguments in other shardings are resharded first."""
        call, step = self._call(args, kwargs)
        return step.run(call)

    def sharded(self, *args: Any, **kwargs: Any) -> ShardedStep:
        """The step for arguments of this structure and these types."""
        return self._call(args, kwargs)[1]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step, as `jax.jit(f).lower` does."""
        return self.sharded(*args, **kwargs).lower()

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
        return f"<{getattr(self.function, '__name__', 'step')} parallelized: {self.plan!r}>"


def parallelize(
    step_fn: Callable[..., Any],
    *example_args: Any,
    machine: str | None = None,
    memory: str | int | None = None,
    solver: str = "auto",
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    constrain: bool = True,
    measure: bool = False,
    roles: Mapping[str, object] | Iterable[str] | None = None,
    opaque: Iterable[str] = (),
    **options: Unpack[SearchOptions],
) -> Parallelized:
    """Plans a training step for a machine, and returns the step, sharded by the plan.

    Args:
        step_fn: a function of pytrees, jitted or not: `params, state, batch -> params, state, loss`. Leaves that are no
            arrays are static. NNX modules may be changed in place.
        example_args: arguments, or their shapes (`jax.ShapeDtypeStruct`).
        machine: the machine to plan for (see `shardwright.plan`); by default `cpu:N` or `flat:N` for N devices.
        memory: the memory limit of one device: `"16GiB"`, or bytes.
        solver: `"auto"`, `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ...
        devices: the devices to run on, in the machine's order; by default all.
        donate_argnums: positions of donated arguments; by default those that `step_fn` donates.
        static_argnums, static_argnames: static arguments, as of `jax.jit`; by default those of a jitted `step_fn`.
        kwargs: example keyword arguments.
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
    form = CallForm.of(step_fn, static_argnums, static_argnames)
    named = dict(kwargs or {})
    donations = Donations.of(step_fn, donate_argnums)
    times: dict[str, float] = {}

    def plan_call(call: Call) -> ShardedStep:
        step = capture(step_fn, call, donations.leaves(call.structure))
        plan_step = functools.partial(
            plan, step.text, memory=memory, roles=_roles(roles, len(step.constants)), opaque=opaque
        )
        requested = plan_step(machine=name, solver=solver, **options)
        if not measure:
            return ShardedStep(step, requested, chosen, constrain)
        # `fix` constrains the requested plan only, not the baselines.
        free: SearchOptions = {**options, "fix": None}

        def trials() -> Iterator[tuple[str, ShardedStep]]:
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
                yield candidate.name, ShardedStep(step, trial, chosen, candidate.constrain)

        best, measured = fastest(trials(), seconds_of)
        if not times:
            times.update(measured)
        return best

    result = Parallelized(form, plan_call(form.call(example_args, named)), plan_call)
    result.measured = times
    return result


def _roles(given: Mapping[str, object] | Iterable[str] | None, constants: int) -> list[str]:
    """Roles as `NAME=ROLE`. The constants of closures come before the arguments that users count."""
    pairs = [f"{name}={role}" for name, role in given.items()] if isinstance(given, Mapping) else list(given or ())
    shifted = [re.sub(r"^arg(\d+)(?==)", lambda found: f"arg{int(found[1]) + constants}", pair) for pair in pairs]
    return [*shifted, *(f"arg{at}=constant" for at in range(constants))]


def _default_machine(devices: Sequence[Any]) -> str:
    return f"{'cpu' if devices[0].platform == 'cpu' else 'flat'}:{len(devices)}"
