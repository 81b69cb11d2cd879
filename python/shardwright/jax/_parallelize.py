"""`parallelize`: plans a step and runs it on many devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from .._native import DoesNotFit, PlanError
from .._native import axes as axes_of
from .._native import devices as devices_of
from .._plan import Plan, SearchOptions
from .._trial import candidates, fastest, show_measured
from . import _explain as explanation
from . import _nnx
from ._arguments import Call, CallForm, unfold
from ._capture import Donations
from ._measure import seconds_of
from ._memory import fitted
from ._pins import in_shardings_of
from ._planning import StepPlanner
from ._processes import text_of
from ._refusals import placed
from ._sharded_step import ShardedStep
from ._text_places import stand_in_lines

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

    @placed
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
        """One sentence, the plan and its predicted times, the mesh, the measured times, and the shardings of arguments and
        results. `detail="all"` lists every op and every sharding; otherwise equal ones are folded."""
        step, everything = self._first, detail == "all"
        lines = [
            explanation.sentence(step.step.shapes, step.leaf_shardings, step.roles, step.batch_dims),
            self.plan.table("all" if everything else "verdict").rstrip(),
            f"mesh: {' '.join(f'{n}:{s}' for n, s in self.mesh.shape.items())}",
            *show_measured(self.measured),
        ]
        for title, tree in (("arguments", self.in_shardings), ("results", self.out_shardings)):
            lines += [f"{title}:", *explanation.shardings(tree, fold=not everything)]
        most = 1 << 30 if everything else 8
        stand_ins = stand_in_lines(step.step, step.planned)
        return "\n".join([*lines, *explanation.numbered("planned as calls of which only types are known", stand_ins, most)])

    def __repr__(self) -> str:
        return f"<{getattr(self.function, '__name__', 'step')} parallelized: {self.plan!r}>"


@placed
def parallelize(
    step_fn: Callable[..., Any],
    *example_args: Any,
    machine: str | None = None,
    memory: str | float | None = None,
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
    rules: Mapping[str, str] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    plain_attention: bool = True,
    micro_batches: int | str = 1,
    recompute: str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
    **options: Unpack[SearchOptions],
) -> Parallelized:
    """Plans a training step for a machine, and returns the step, sharded by the plan.

    Args:
        step_fn: a function of pytrees, jitted or not: `params, state, batch -> params, state, loss`. Leaves that are no
            arrays are static. NNX modules may be changed in place.
        example_args: arguments, or their shapes (`jax.ShapeDtypeStruct`).
        machine: the machine to plan for (see `shardwright.plan`); by default that of the devices (`8xh100`,
            `tpu-v5p-8`, `cpu:8`), or `flat:N` where they are unknown.
        memory: the memory limit of one device: `"16GiB"`, or bytes. XLA's compiled program keeps it too, or `DoesNotFit` is
            raised.
        solver: `"auto"`, `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ...
        devices: the devices to run on, in the machine's order; by default all.
        donate_argnums: positions of donated arguments; by default those that `step_fn` donates.
        static_argnums, static_argnames: static arguments, as of `jax.jit`; by default those of a jitted `step_fn`.
        kwargs: example keyword arguments.
        plan: a plan of this step (`shardwright.jax.plan`), or its file. Calls with other shapes are refused then.
        constrain: constrain every planned value. Otherwise only arguments and results, from which XLA propagates.
        measure: runs the planned step, and the baselines beside it: data parallelism, and weights split by columns and
            rows in turn, on every grid of the devices. Returns the fastest; `.measured` has all times.
        plain_attention: plan attention as the products and softmax that XLA runs. `False` plans it as one fused op that
            stores no scores; XLA then propagates shardings between its operands and results.
        micro_batches: passes over equal parts of the batch, whose gradients are added up before one update. Results stay those
            of the whole batch; a step for which they would not is refused. `"auto"` takes the fewest that fit the memory.
        recompute: what the backward pass computes again, for steps of `train_step`: `"full"` (all of a block), `"selective"`
            (all but products with weights), `"elementwise"` (all but products), or a name of `jax.checkpoint_policies`.
        batch_argnums: positions of the arguments that hold the batch, for `micro_batches`; by default those that do not come
            back as results.
        in_shardings: shardings of arguments that the plan keeps, a prefix of the arguments' tree as of `jax.jit`; None where the plan
            may choose. `NamedSharding`s of any mesh of the devices, or `PartitionSpec`s of the machine's axes. By default those
            of a jitted `step_fn`.

    The other options are those of `shardwright.plan` (`costs`, `untied`, `fix`, `roles`, `opaque`, `rules`, `time`, ...). Sharding
    constraints inside `step_fn` are removed: the plan replaces them.
    """
    chosen = list(jax.devices() if devices is None else devices)
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    name = machine or (_default_machine(chosen) if given is None else given.data["request"]["machine"])
    count = devices_of(name)
    if count != len(chosen):
        if devices is not None or count > len(chosen):
            raise PlanError(f"machine {name} has {count} devices, but there are {len(chosen)} to run on")
        chosen = chosen[:count]
    form = CallForm.of(step_fn, static_argnums, static_argnames)
    planner = StepPlanner(
        step_fn,
        form,
        Donations.of(step_fn, donate_argnums),
        roles,
        list(opaque),
        rules,
        plain_attention,
        recompute,
        _positions(batch_argnums),
        in_shardings_of(step_fn, in_shardings, form.static_argnums),
        dict(axes_of(name)),
        chosen,
    )
    times: dict[str, float] = {}

    def plan_call(call: Call) -> ShardedStep:
        *fewer, most = planner.micro_batches(call, micro_batches)
        for number in fewer:
            try:
                return plan_divided(call, number)
            except DoesNotFit:
                continue
        return plan_divided(call, most)

    def plan_divided(call: Call, number: int) -> ShardedStep:
        step = planner.capture(call, number)
        if given is not None:
            return ShardedStep(step, given, text_of(step, given), chosen, constrain)
        requested = fitted(
            lambda limit: ShardedStep(step, *planner.plan(step, name, solver, options, limit), chosen, constrain), memory
        )
        if not measure:
            return requested
        # `fix` constrains the requested plan only, not the baselines.
        free: SearchOptions = {**options, "fix": None}

        def trials() -> Iterator[tuple[str, ShardedStep]]:
            for candidate in candidates(name, count, solver, constrain, propagates=True):
                if (candidate.machine, candidate.solver) == (name, solver):
                    yield candidate.name, requested.enforced(candidate.constrain)
                    continue
                try:
                    plans = functools.partial(planner.plan, step, candidate.machine, candidate.solver, free)
                    trial = fitted(
                        lambda limit: ShardedStep(step, *plans(limit, requested.planned), chosen, candidate.constrain), memory
                    )
                except PlanError:
                    # A baseline may exceed the memory, or its grid may not fit the machine's levels.
                    continue
                yield candidate.name, trial

        best, measured = fastest(trials(), seconds_of)
        if not times:
            times.update(measured)
        return best

    result = Parallelized(planner.form, plan_call(planner.form.call(example_args, dict(kwargs or {}))), plan_call)
    result.measured = times
    return result


@placed
def plan(
    step_fn: Callable[..., Any],
    *example_args: Any,
    machine: str,
    memory: str | float | None = None,
    solver: str = "auto",
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    roles: Mapping[str, object] | Iterable[str] | None = None,
    opaque: Iterable[str] = (),
    rules: Mapping[str, str] | None = None,
    micro_batches: int = 1,
    recompute: str | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
    **options: Unpack[SearchOptions],
) -> Plan:
    """Plans a training step for a machine that need not be there. `parallelize(step_fn, ..., plan=...)` runs it by the plan.

    The arguments are those of `parallelize`; shapes (`jax.ShapeDtypeStruct`) are enough.

    >>> shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    >>> plan(lambda w, x: ((x @ w) ** 2).sum(), *shapes, machine="h100x64").devices
    64
    """
    form = CallForm.of(step_fn, static_argnums, static_argnames)
    donations = Donations.of(step_fn, donate_argnums)
    batch = _positions(batch_argnums)
    planner = StepPlanner(
        step_fn,
        form,
        donations,
        roles,
        list(opaque),
        rules,
        recompute=recompute,
        batch_argnums=batch,
        in_shardings=in_shardings,
        axes=dict(axes_of(machine)),
    )
    step = planner.capture(form.call(example_args, dict(kwargs or {})), micro_batches)
    return planner.plan(step, machine, solver, options, memory)[0]


def _positions(argnums: int | Sequence[int] | None) -> tuple[int, ...] | None:
    return (argnums,) if isinstance(argnums, int) else None if argnums is None else tuple(argnums)


# Names of devices under JAX, and of their machines.
_GPUS = {"H100": "h100", "H200": "h200", "A100": "a100", "V100": "v100", "P100": "p100", "B200": "b200", "MI300X": "mi300x"}


def _default_machine(devices: Sequence[Any]) -> str:
    """The machine of the devices that there are: `8xh100`, `tpu-v5p-8`, `cpu:8`; `flat:N` where nothing is known."""
    kind, count = str(devices[0].device_kind), len(devices)
    names = []
    if devices[0].platform == "cpu":
        return f"cpu:{count}"
    if devices[0].platform == "tpu":
        names.append(f"tpu-{kind.lower().removeprefix('tpu').strip().replace(' lite', 'e')}-{count}")
    names += [f"{count}x{name}" for known, name in _GPUS.items() if known in kind.upper()]
    for name in names:
        try:
            if devices_of(name) == count:
                return name
        except PlanError:
            continue
    return f"flat:{count}"
