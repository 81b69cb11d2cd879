"""What samples of the batch reach: every value of a step that was traced with the whole batch and with a part of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._native import PlanError
from ._batch_rules import added_up, one_by_one, sample_dims
from ._walk import INLINED, KEPT, parts, scan_counts, source_line


class Kind(enum.Enum):
    """How a value depends on the samples of a batch."""

    #: Not at all.
    FIXED = 0
    #: Not at all, and zero.
    ZERO = 1
    #: It has a dimension of samples, and is the same for all of them.
    UNIFORM = 2
    #: It has a dimension of samples, and each has its own.
    SAMPLES = 3
    #: A sum over samples.
    SUM = 4


# Functions of sums that are sums again, if the other operands are fixed.
_LINEAR = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "dynamic_slice", "expand_dims", "neg",
    "optimization_barrier", "reduce_sum", "reshape", "slice", "split", "squeeze", "transpose", "name",
}  # fmt: skip
_ADDITIONS = {"add", "add_any", "sub", "concatenate", "dynamic_update_slice", "scatter-add", "scatter_add", "select_n"}


class Refused(PlanError):
    """A step that cannot be divided into micro-batches."""


def refuse(eqn: Any, reason: str) -> Refused:
    return Refused(f"{source_line(eqn)}: {reason}; the step cannot be divided into micro-batches there")


def same_form(full: Any, part: Any) -> None:
    """Refuses equations that differ in more than the sizes of the batch."""
    if full.primitive is not part.primitive or len(full.outvars) != len(part.outvars) or len(full.invars) != len(part.invars):
        raise refuse(full, "the step computes something else with a smaller batch")
    loops = full.primitive.name == "scan" and scan_counts(full) != scan_counts(part)
    if loops or any(full.params.get(name) != part.params.get(name) for name in ("length", "reverse")):
        raise refuse(full, "a loop runs over the samples of the batch")


def same_bodies(full: Any, part: Any) -> None:
    """Refuses bodies with other equations."""
    for a, b in zip(full.eqns, part.eqns, strict=False):
        same_form(a, b)
    more, fewer = sorted((full.eqns, part.eqns), key=len, reverse=True)
    if len(more) != len(fewer):
        raise refuse(more[len(fewer)], "the step computes something else with a smaller batch")


def dims_of(full: Any, part: Any) -> tuple[int, ...]:
    """The dimensions of a value that run over samples."""
    a, b = getattr(full.aval, "shape", ()), getattr(part.aval, "shape", ())
    return sample_dims(a, b) if len(a) == len(b) else (-1,)


def is_zero(atom: Any) -> bool:
    """Whether a literal is zero."""
    return isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 and not isinstance(atom.val, (bool, np.bool_)) and atom.val == 0


class SampleFlow:
    """Follows samples through equations. `batch` is the size of the whole batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def results(self, full: Any, part: Any, kinds: Sequence[Kind]) -> list[Kind]:
        """The kinds of an equation's results. Raises `Refused` where samples meet each other."""
        same_form(full, part)
        bodies = KEPT.get(full.primitive.name)
        if full.primitive.name in INLINED:
            bodies = (INLINED[full.primitive.name],)
        if bodies is not None and any(kind in (Kind.SAMPLES, Kind.SUM, Kind.UNIFORM) for kind in kinds):
            return self._of_bodies(full, part, bodies, list(kinds))
        return self._plain(full, part, kinds)

    def _plain(self, full: Any, part: Any, kinds: Sequence[Kind]) -> list[Kind]:
        dims = [dims_of(a, b) for a, b in zip(full.invars, part.invars, strict=True)]
        out_dims = [dims_of(a, b) for a, b in zip(full.outvars, part.outvars, strict=True)]
        name = full.primitive.name
        if any((-1,) == found for found in out_dims):
            raise refuse(full, "the rank of a value depends on the size of the batch")
        if Kind.SUM in kinds:
            if self._is_linear(full, kinds):
                return [Kind.SUM for _ in out_dims]
            raise refuse(full, "a sum over the batch is no longer a sum")
        if Kind.SAMPLES in kinds:
            if all(out_dims) and self._keeps_samples(full, part, dims, out_dims):
                return [Kind.SAMPLES for _ in out_dims]
            starts_at_zero = name not in ("scatter-add", "scatter_add") or kinds[0] is Kind.ZERO
            if not any(out_dims) and starts_at_zero and added_up(full, dims):
                return [Kind.SUM for _ in out_dims]
            raise refuse(full, "samples of the batch meet each other")
        if any(out_dims):
            if self._keeps_samples(full, part, dims, out_dims):
                return [Kind.UNIFORM for _ in out_dims]
            raise refuse(full, "each sample gets a number or random bits of its own inside a loop or call")
        zero = name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape") and kinds[:1] == [Kind.ZERO]
        return [Kind.ZERO if zero else Kind.FIXED for _ in out_dims]

    def _keeps_samples(self, full: Any, part: Any, dims: Any, out_dims: Any) -> bool:
        if not one_by_one(full, dims, out_dims):
            return False
        return full.primitive.name != "reshape" or not dims[0] or self._reshapes_samples(full, dims[0][0], out_dims[0])

    def _reshapes_samples(self, eqn: Any, dim: int, out_dims: Sequence[int]) -> bool:
        """Whether no index of the result's batch dimension holds elements of several samples."""
        shape, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        out = out_dims[0] if out_dims else -1
        if out < 0 or result[out] % self.batch or shape[dim] % self.batch:
            return False
        # Samples come first in their dimension: a dimension is merged with those behind it.
        within = math.prod(shape[dim + 1 :]) * (shape[dim] // self.batch)
        before = math.prod(shape[:dim]), math.prod(result[:out])
        return within % math.prod(result[out + 1 :]) == 0 and before[0] == before[1]

    @staticmethod
    def _is_linear(eqn: Any, kinds: Sequence[Kind]) -> bool:
        name = eqn.primitive.name
        sums = [kind is Kind.SUM for kind in kinds]
        if name in _LINEAR:
            return sums[0] and not any(sums[1:]) and not _rounds(eqn)
        if name in _ADDITIONS:
            numbers = {"dynamic_update_slice": 2, "select_n": len(kinds)}.get(name, len(kinds))
            first = 1 if name == "select_n" else 0
            if name.startswith("scatter"):
                # Rows at the places that samples name, or sums at fixed places.
                of_samples = kinds[0] is Kind.SUM and kinds[2] is Kind.SAMPLES
                return of_samples or (kinds[0] in (Kind.SUM, Kind.ZERO) and kinds[1] is Kind.FIXED)
            fixed = {kind for at, kind in enumerate(kinds) if not first <= at < numbers}
            added = all(kind in (Kind.SUM, Kind.ZERO) for kind in kinds[first:numbers])
            return added and not {Kind.SUM, Kind.SAMPLES} & fixed
        if name == "mul" or name == "dot_general":
            return sum(sums) == 1 and all(kind in (Kind.SUM, Kind.FIXED, Kind.ZERO) for kind in kinds)
        return name == "div" and sums[0] and kinds[1] is Kind.FIXED

    def body(self, full: Any, part: Any, kinds: Sequence[Kind]) -> list[Kind]:
        """The kinds of the results of a body, for operands of these kinds."""
        (whole, _), (partial, _) = parts(full), parts(part)
        same_bodies(whole, partial)
        known: dict[Any, Kind] = dict(zip(whole.invars, kinds, strict=True))
        for a, b in zip(whole.constvars, partial.constvars, strict=True):
            known[a] = Kind.SAMPLES if dims_of(a, b) else Kind.FIXED

        def kind(atom: Any) -> Kind:
            if isinstance(atom, core.Literal):
                return Kind.ZERO if is_zero(atom) else Kind.FIXED
            return known[atom]

        for a, b in zip(whole.eqns, partial.eqns, strict=True):
            known.update(zip(a.outvars, self.results(a, b, [kind(atom) for atom in a.invars]), strict=True))
        return [kind(atom) for atom in whole.outvars]

    def _of_bodies(self, full: Any, part: Any, names: Sequence[str], kinds: list[Kind]) -> list[Kind]:
        name = full.primitive.name
        if name == "scan":
            consts, carried = scan_counts(full)
            return self._loop(full, part, "jaxpr", kinds[:consts], kinds[consts : consts + carried], kinds[consts + carried :])
        if name == "while":
            tests, consts = full.params["cond_nconsts"], full.params["body_nconsts"]
            state = kinds[tests + consts :]
            found = self._loop(full, part, "body_jaxpr", kinds[tests : tests + consts], state, [])
            tested = self.body(full.params["cond_jaxpr"], part.params["cond_jaxpr"], [*kinds[:tests], *found])
            if tested[0] not in (Kind.FIXED, Kind.ZERO):
                raise refuse(full, "the end of a loop depends on samples")
            return found
        if name == "cond":
            if kinds[0] not in (Kind.FIXED, Kind.ZERO):
                raise refuse(full, "a branch depends on samples")
            branches = zip(full.params["branches"], part.params["branches"], strict=True)
            each = [self.body(a, b, kinds[1:]) for a, b in branches]
            return [_joined(full, several) for several in zip(*each, strict=True)]
        return self.body(full.params[names[0]], part.params[names[0]], kinds)

    def _loop(
        self, full: Any, part: Any, name: str, consts: list[Kind], carry: list[Kind], slices: list[Kind]
    ) -> list[Kind]:
        # Kinds only rise, so that this ends.
        for _ in range(8):
            found = self.body(full.params[name], part.params[name], [*consts, *carry, *slices])
            joined = [_joined(full, pair) for pair in zip(carry, found, strict=False)]
            if joined == carry:
                return [*carry, *found[len(carry) :]]
            carry = joined
        raise refuse(full, "a loop mixes samples and sums")


def _rounds(eqn: Any) -> bool:
    """Whether an equation rounds to whole numbers or truth values: rounded parts do not add up to the rounded sum."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return new == bool or (jnp.issubdtype(old, jnp.inexact) and not jnp.issubdtype(new, jnp.inexact))


def _joined(eqn: Any, kinds: Sequence[Kind]) -> Kind:
    """The kind of a value that is one of several."""
    found = set(kinds)
    if len(found) == 1:
        return found.pop()
    if found <= {Kind.ZERO, Kind.FIXED}:
        return Kind.FIXED
    if found <= {Kind.ZERO, Kind.SUM}:
        return Kind.SUM
    if found <= {Kind.UNIFORM, Kind.SAMPLES}:
        return Kind.SAMPLES
    raise refuse(eqn, "a loop or branch adds a sum over the batch to another value")
