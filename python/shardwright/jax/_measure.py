"""Runs a step under several plans and says which one is fastest: `parallelize(..., measure=True)`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._native import PlanError
from ._probe import median_seconds


@dataclass(frozen=True)
class Candidate:
    """A way to plan and to run a step."""

    name: str
    machine: str
    solver: str
    #: Whether all values are held to the plan, or arguments and results alone.
    constrain: bool


def candidates(machine: str, count: int, solver: str, constrain: bool) -> Iterator[Candidate]:
    """What is asked for, first; then what people would write by hand: data parallelism, and columns and rows of weights
    in turn on every grid of the devices, XLA filling in the rest.

    >>> [c.name for c in candidates("cpu:4", 4, "auto", True)]
    ['auto', 'auto, arguments alone', 'data', '2x2', '1x4']
    """
    yield Candidate(solver, machine, solver, constrain)
    if constrain:
        yield Candidate(f"{solver}, arguments alone", machine, solver, False)
    if solver != "data":
        yield Candidate("data", machine, "data", False)
    for members in (m for m in range(2, count + 1) if count % m == 0):
        yield Candidate(f"{count // members}x{members}", f"{machine}:{count // members}x{members}", "megatron", False)


def fastest(made: Iterator[tuple[str, Any]]) -> tuple[Any, dict[str, float]]:
    """Of named steps the one that takes least time, and the times of all: medians in seconds. Steps are run on zeros, one
    after the other; those that take more than twice as long as the best so far only once, those close to the best
    twice as often, in case something else kept the machine busy."""
    steps: dict[str, Any] = {}
    times: dict[str, float] = {}
    for name, step in made:
        times[name] = _agreed(_median_seconds(step, 2 * min(times.values(), default=math.inf)))
        steps[name] = step
    if not times:
        raise PlanError("there is nothing to measure")
    close = 1.2 * min(times.values())
    for name in [name for name, seconds in times.items() if seconds <= close]:
        times[name] = min(times[name], _agreed(_median_seconds(steps[name], math.inf)))
    return steps[min(times, key=lambda name: times[name])], times


def _median_seconds(step: Any, hopeless: float) -> float:
    shapes = step.shapes
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(shapes)):
        raise PlanError("steps with random keys as arguments cannot be measured: make them inside, from a number")
    zeros = jax.tree_util.Partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    fresh = jax.jit(zeros, out_shardings=step.in_shardings)
    kept = fresh()
    # What is donated is gone afterwards; making it anew would be timed.
    step = step.without_donation()
    return median_seconds(lambda: step(*kept), hopeless=hopeless)


def _agreed(seconds: float) -> float:
    """What the first of several processes measured, so that all choose the same."""
    if jax.process_count() == 1:
        return seconds
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
