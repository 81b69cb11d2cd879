"""Divides a captured step into micro-batches: a loop over parts of the batch adds gradients up, and the update runs once.

The step is traced with the whole batch and with a part of it, which tells which values have samples (`_sample_flow`). Equations on
samples go into a `scan` over the parts. They keep the numbers of the whole batch (a mean divides by its size), so that the results of
the parts add up to those of the step. Everything else stays outside. Random bits and numbers of samples are computed for the whole
batch and divided like it. A sum that samples read again (the number of tokens that count) gets a loop of its own before, if that
needs no products.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._native import PlanError
from ._arguments import Call
from ._batch_rules import PRODUCTS
from ._capture import LARGEST_CONSTANT_BYTES, StepCapture, capture
from ._sample_flow import Kind, Refused, SampleFlow, dims_of, is_zero, refuse, same_bodies
from ._walk import INLINED, KEPT, bind, has_line, large_constants, parts, scope


@dataclass(frozen=True)
class _Equation:
    """An equation of the step with the whole batch and with a part of it, between values by number."""

    full: Any
    part: Any
    operands: tuple[Any, ...]
    results: tuple[int, ...]


@dataclass
class _Flow:
    """The equations of a step, calls inlined, and what is known of its values."""

    equations: list[_Equation] = dataclasses.field(default_factory=list)
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    dims: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def value(self, full: Any, part: Any) -> int:
        """The number of a new value."""
        self.dims.append(dims_of(full, part))
        return len(self.dims) - 1

    def inline(self, full: Any, part: Any, operands: Sequence[Any], caller: Any = None) -> list[Any]:
        """Appends the equations of a body; returns the numbers (or literals) of its results."""
        (whole, consts), (partial, _) = parts(full), parts(part)
        same_bodies(whole, partial)
        known: dict[Any, Any] = dict(zip(whole.invars, operands, strict=True))
        for a, b, x in zip(whole.constvars, partial.constvars, consts, strict=True):
            known[a] = self.value(a, b)
            self.constants[known[a]] = x

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else known[atom]

        for a, b in zip(whole.eqns, partial.eqns, strict=True):
            ins = tuple(map(read, a.invars))
            if caller is not None and not has_line(a):
                a = a.replace(source_info=caller.source_info)
            body = INLINED.get(a.primitive.name)
            if body is not None and body in a.params:
                outs = self.inline(a.params[body], b.params[body], ins, a)
            else:
                outs = [self.value(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]
                self.equations.append(_Equation(a, _with_numbers_of(a, b), ins, tuple(outs)))
            known.update(zip(a.outvars, outs, strict=True))
        return [read(atom) for atom in whole.outvars]


def _with_numbers_of(full: Any, part: Any) -> Any:
    """An equation of a part of the batch with the literals of the whole one, in its bodies too."""
    params = dict(part.params)
    for name in KEPT.get(part.primitive.name, ()) or tuple(filter(None, [INLINED.get(part.primitive.name)])):
        if isinstance(params[name], (tuple, list)):
            params[name] = tuple(map(_body_with_numbers_of, full.params[name], params[name]))
        else:
            params[name] = _body_with_numbers_of(full.params[name], params[name])
    pairs = zip(full.invars, part.invars, strict=True)
    atoms = [a if isinstance(a, core.Literal) and isinstance(b, core.Literal) else b for a, b in pairs]
    return part.replace(invars=atoms, params=params)


def _body_with_numbers_of(full: Any, part: Any) -> Any:
    (whole, consts), (partial, part_consts) = parts(full), parts(part)
    same_bodies(whole, partial)
    body = partial.replace(eqns=[_with_numbers_of(a, b) for a, b in zip(whole.eqns, partial.eqns, strict=True)])
    if not hasattr(part, "consts"):
        return body
    kept = [a if np.shape(a) == np.shape(b) else b for a, b in zip(consts, part_consts, strict=True)]
    return core.ClosedJaxpr(body, kept)


# Values outside the loops.
_HOISTED = "hoisted"


class _Schedule:
    """Which equations run in which loop over micro-batches, and which outside."""

    def __init__(self, flow: _Flow, batch: int, inputs: Iterable[int], results: Sequence[Any]) -> None:
        self.flow, self.batch, self.results = flow, batch, results
        self.kinds: dict[int, Any] = dict.fromkeys(inputs, Kind.SAMPLES)
        self.levels: dict[int, int] = {}
        #: Results of loops: values without samples that equations on samples give, and whether they are sums.
        self.given: dict[int, bool] = {}
        #: Those of them that are no sums: every part gives the same value, which its loop can read too.
        self.repeated: set[int] = set()
        self.producers: dict[int, int] = {}
        self.looped: set[int] = set()
        samples = SampleFlow(batch)
        for at, eqn in enumerate(flow.equations):
            self.producers.update(dict.fromkeys(eqn.results, at))
            self._place(at, eqn, samples)
        if not self.looped:
            raise Refused("nothing in the step depends on the batch: it cannot be divided into micro-batches")
        self.last = max(self.level_of(self.flow.equations[at].operands, inside=True) for at in self.looped)

    def kind(self, operand: Any) -> Any:
        if isinstance(operand, core.Literal):
            return Kind.ZERO if is_zero(operand) else Kind.FIXED
        return self.kinds.get(operand, _HOISTED if self.flow.dims[operand] else Kind.FIXED)

    def level_of(self, operands: Iterable[Any], inside: bool) -> int:
        """The number of loops that must end before these values are known, inside a loop or outside."""
        values = [x for x in operands if not isinstance(x, core.Literal)]
        return max((self.levels.get(x, 0) + (x in self.repeated and not inside) for x in values), default=0)

    def _place(self, at: int, eqn: _Equation, samples: SampleFlow) -> None:
        kinds = [self.kind(x) for x in eqn.operands]
        level = self.level_of(eqn.operands, inside=Kind.SAMPLES in kinds)
        if Kind.SAMPLES in kinds:
            found = samples.results(eqn.full, eqn.part, [Kind.SAMPLES if kind is _HOISTED else kind for kind in kinds])
            self.looped.add(at)
            for x, kind in zip(eqn.results, found, strict=True):
                self.levels[x] = level
                self.kinds[x] = kind
                if kind is Kind.SUM:
                    self.levels[x], self.kinds[x] = level + 1, Kind.FIXED
                elif kind is Kind.UNIFORM:
                    self.kinds[x] = Kind.SAMPLES
                elif kind is not Kind.SAMPLES:
                    self.repeated.add(x)
                if not self.flow.dims[x]:
                    self.given[x] = kind is Kind.SUM
            return
        outside: list[Any] = [_HOISTED if self.flow.dims[x] else Kind.FIXED for x in eqn.results]
        if _HOISTED not in kinds:
            # Numbers and random bits of samples are not the same for all of them.
            with contextlib.suppress(Refused):
                outside = list(samples.results(eqn.full, eqn.part, kinds))
        self.levels.update(dict.fromkeys(eqn.results, level))
        self.kinds.update(zip(eqn.results, outside, strict=True))

    def outside(self, targets: Iterable[Any]) -> set[int]:
        """The equations outside the loops that give these values."""
        found: set[int] = set()
        open_values = [x for x in targets if not isinstance(x, core.Literal)]
        while open_values:
            at = self.producers.get(open_values.pop())
            if at is not None and at not in found and at not in self.looped:
                found.add(at)
                open_values += self.values_of(at)
        return found

    def values_of(self, at: int) -> list[int]:
        """The values that an equation reads."""
        return [x for x in self.flow.equations[at].operands if not isinstance(x, core.Literal)]

    def uniform(self, value: int) -> bool:
        return self.kinds.get(value) is Kind.UNIFORM

    def early(self) -> list[set[int]]:
        """Per loop before the last one: the sums that later equations on samples read."""
        sums: list[set[int]] = [set() for _ in range(self.last)]
        for at in self.looped:
            eqn = self.flow.equations[at]
            level = self.level_of(eqn.operands, inside=True)
            read = {x for i in self.outside(eqn.operands) for x in self.values_of(i)}
            read |= set(self.values_of(at)) - self.repeated
            for x in read & self.given.keys():
                ended = self.levels[x] + (x in self.repeated)
                if ended <= level:
                    sums[ended - 1].add(x)
        for found in sums:
            loop = self.loop_of(found)
            product = next((at for at in sorted(loop) if self.flow.equations[at].full.primitive.name in PRODUCTS), None)
            if product is not None:
                first = self.flow.equations[self.producers[min(found)]].full
                reason = "samples read a statistic of the whole batch, which needs a pass over it (batch normalisation)"
                raise refuse(first, reason)
        return sums

    def loop_of(self, targets: Iterable[int]) -> set[int]:
        """The equations of the loop that gives these values, with those on uniform values that it needs."""
        found = {self.producers[x] for x in targets}
        open_equations = list(found)
        while open_equations:
            for x in self.values_of(open_equations.pop()):
                at = None if self.given.get(x) else self.producers.get(x)
                if at is not None and at not in found and (at in self.looped or self.uniform(x)):
                    found.add(at)
                    open_equations.append(at)
        return found


def divided(
    step: StepCapture, function: Callable[..., Any], call: Call, count: int, batch_argnums: Sequence[int] | None
) -> StepCapture:
    """The step in so many micro-batches."""
    leaves = batch_leaves(step, batch_argnums)
    batch = int(step.types[leaves[0]][0][0])
    if batch % count:
        divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        raise PlanError(f"micro_batches={count} does not divide the batch of {batch}; use one of {divisors}")
    smaller = list(call.leaves)
    for at in leaves:
        shape, dtype, weak = step.types[at]
        smaller[at] = jax.ShapeDtypeStruct((batch // count, *shape[1:]), dtype, weak_type=weak)
    try:
        part = capture(function, dataclasses.replace(call, leaves=smaller), step.donated)
    except Exception as error:
        places = "; ".join(getattr(error, "__notes__", []))
        raise PlanError(
            f"the step cannot be traced with {batch // count} of {batch} samples: {error}{' ' + places if places else ''}"
        ) from error
    flow = _Flow()
    inputs = [flow.value(a, b) for a, b in zip(step.jaxpr.jaxpr.invars, part.jaxpr.jaxpr.invars, strict=True)]
    results = flow.inline(step.jaxpr, part.jaxpr, inputs)
    schedule = _Schedule(flow, batch, [inputs[at] for at in leaves], results)
    evaluate = _evaluation(schedule, inputs, count)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) for x in step.jaxpr.in_avals]
    jaxpr = jax.make_jaxpr(evaluate)(*types)
    return dataclasses.replace(step, jaxpr=jaxpr, constants=tuple(large_constants(jaxpr, LARGEST_CONSTANT_BYTES)))


def _evaluation(schedule: _Schedule, inputs: Sequence[int], count: int) -> Callable[..., list[Any]]:
    """The step of plain arrays, with loops over micro-batches."""
    flow, early = schedule.flow, schedule.early()
    wanted = {x for x in schedule.results if not isinstance(x, core.Literal)}
    late = schedule.given.keys() - set().union(*early)
    outside = schedule.outside([*wanted, *_read_outside(schedule)])
    late = late & (wanted | {x for at in outside for x in schedule.values_of(at)})
    stacked = sorted(x for x in wanted if schedule.kinds.get(x) is Kind.SAMPLES and x not in inputs)
    loops = [(sorted(found), []) for found in early] + [(sorted(late), stacked)]

    def evaluate(*args: Any) -> list[Any]:
        env: dict[int, Any] = {**flow.constants, **dict(zip(inputs, args, strict=True))}
        done: set[int] = set()

        def catch_up() -> None:
            for at in sorted(outside - done):
                eqn = flow.equations[at]
                if all(isinstance(x, core.Literal) or x in env for x in eqn.operands):
                    env.update(zip(eqn.results, _run(eqn.full, _read(env, eqn.operands)), strict=True))
                    done.add(at)

        for given, rows in loops:
            catch_up()
            env.update(_run_loop(schedule, env, given, rows, count))
        catch_up()
        return [x.val if isinstance(x, core.Literal) else env[x] for x in schedule.results]

    return evaluate


def _read_outside(schedule: _Schedule) -> set[int]:
    """Values that loops read, and that are computed outside. Uniform values are computed inside, from such values."""
    found: set[int] = set()
    seen: set[int] = set()
    open_values = [x for at in schedule.looped for x in schedule.values_of(at)]
    while open_values:
        x = open_values.pop()
        if x in seen or schedule.kind(x) is Kind.SAMPLES:
            continue
        seen.add(x)
        if schedule.uniform(x):
            open_values += schedule.values_of(schedule.producers[x])
        else:
            found.add(x)
    return found


def _run_loop(
    schedule: _Schedule, env: dict[int, Any], given: Sequence[int], rows: Sequence[int], count: int
) -> dict[int, Any]:
    """A loop over the micro-batches: sums, values of the last part, and values of all samples."""
    if not given and not rows:
        return {}
    flow = schedule.flow
    equations = sorted(schedule.loop_of([*given, *rows]))
    made = {x for at in equations for x in flow.equations[at].results}
    read = {x for at in equations for x in schedule.values_of(at)} - made
    sliced = sorted(x for x in read if flow.dims[x])
    fixed = {x: env[x] for x in sorted(read - set(sliced))}
    for x in (*sliced, *rows):
        if len(flow.dims[x]) != 1 or (x in env and env[x].shape[flow.dims[x][0]] != schedule.batch):
            raise Refused(
                "a value that is computed for the whole batch merges samples with another dimension: the step cannot be "
                "divided into micro-batches"
            )

    def body(total: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        local = {**fixed, **dict(zip(sliced, slices, strict=True))}
        for at in equations:
            eqn = flow.equations[at]
            local.update(zip(eqn.results, _run(eqn.part, _read(local, eqn.operands)), strict=True))
        pairs = zip(total, given, strict=True)
        sums = [t + local[x].astype(t.dtype) if schedule.given[x] else local[x] for t, x in pairs]
        return sums, [local[x] for x in rows]

    cut = [_cut(env[x], flow.dims[x][0], count) for x in sliced]
    makers = [flow.equations[schedule.producers[x]] for x in given]
    avals = [eqn.full.outvars[eqn.results.index(x)].aval for eqn, x in zip(makers, given, strict=True)]
    types = [_sum_type(aval.dtype) if schedule.given[x] else aval.dtype for aval, x in zip(avals, given, strict=True)]
    start = [jnp.zeros(aval.shape, kind) for aval, kind in zip(avals, types, strict=True)]
    with jax.named_scope("micro_batches"):
        totals, stacks = jax.lax.scan(body, start, cut, length=count)
    found = {x: total.astype(aval.dtype) for x, total, aval in zip(given, totals, avals, strict=True)}
    found |= {x: _joined(stack, flow.dims[x][0]) for x, stack in zip(rows, stacks, strict=True)}
    return found


def _sum_type(dtype: Any) -> Any:
    """Sums of 16-bit numbers are kept in 32 bits."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _cut(x: Any, dim: int, count: int) -> Any:
    """Parts of a batch, along a new first dimension. Neighbouring samples go to different parts: a batch that is split over
    devices is cut without moving samples."""
    shape = x.shape
    return jnp.moveaxis(x.reshape(*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :]), dim + 1, 0)


def _joined(x: Any, dim: int) -> Any:
    """The batch of which these are the parts."""
    parted = jnp.moveaxis(x, 0, dim + 1)
    return parted.reshape(*parted.shape[:dim], parted.shape[dim] * parted.shape[dim + 1], *parted.shape[dim + 2 :])


def _read(env: dict[int, Any], operands: Sequence[Any]) -> list[Any]:
    return [x.val if isinstance(x, core.Literal) else env[x] for x in operands]


def _run(eqn: Any, operands: list[Any]) -> list[Any]:
    with scope(eqn):
        return bind(eqn, eqn.params, operands)


def batch_leaves(step: StepCapture, argnums: Sequence[int] | None) -> list[int]:
    """The leaves of the arguments that hold the batch: those of arguments that do not come back as results."""
    args, kwargs = step.structure.arguments(range(len(step.types)))
    modules = step.structure.modules
    if argnums is not None:
        chosen = [args[at] for at in argnums]
    else:
        state = _states(step)
        kept = () if modules is None else modules.positions
        chosen = [arg for at, arg in enumerate(args) if at not in kept and _form(step, arg) not in state]
        chosen += [kwargs[name] for name in sorted(kwargs) if modules is None or name not in modules.names]
    leaves = [at for arg in chosen for at in jax.tree.leaves(arg) if _may_be_batch(step.types[at])]
    sizes = {step.types[at][0][0] for at in leaves}
    if len(sizes) != 1:
        paths = step.structure.paths()
        found = ", ".join(f"{paths[at]}: {step.types[at][0]}" for at in leaves[:6]) or "no array"
        raise PlanError(
            f"which arguments are the batch is not known ({found}); name them, such as batch_argnums=({len(args) - 1},): "
            "their first dimensions are the samples, and are equal"
        )
    return leaves


def _may_be_batch(kind: Any) -> bool:
    shape, dtype, _ = kind
    # Random keys are no samples, whether they are typed or numbers.
    key = jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and shape in ((2,), (4,)))
    return bool(shape) and not key


def _form(step: StepCapture, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(step.types[at][:2] for at in leaves)


def _states(step: StepCapture) -> list[Any]:
    """The forms of the results that may be the next values of arguments."""
    kinds = []
    for aval, key in zip(step.jaxpr.out_avals, step.out_keys, strict=True):
        rank = len(aval.shape) - (0 if key is None else len(key._impl.key_shape))
        kinds.append((tuple(aval.shape[:rank]), aval.dtype if key is None else key))
    tree = jax.tree.unflatten(step.out_tree, range(step.out_tree.num_leaves))
    found = []
    for part in [tree, *(tree if isinstance(tree, (tuple, list)) else ())]:
        leaves, structure = jax.tree.flatten(part)
        found.append((structure, tuple(kinds[at] for at in leaves)))
    return [form for form in found if form[1]]
