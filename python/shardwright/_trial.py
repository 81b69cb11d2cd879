"""Measures a plan beside baselines and keeps the fastest: `parallelize(..., measure=True)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ._native import PlanError
from ._progress import show_seconds

Step = TypeVar("Step")


@dataclass(frozen=True)
class Candidate:
    """A plan to measure: its machine, its solver, and how it is enforced."""

    name: str
    machine: str
    solver: str
    #: Whether all values are constrained to the plan, or only arguments and results.
    constrain: bool


def candidates(machine: str, count: int, solver: str, constrain: bool, propagates: bool) -> Iterator[Candidate]:
    """The requested plan, then the baselines that people write by hand: data parallelism, and weights split by columns and
    rows in turn, on every grid of the devices. An engine that propagates shardings gets those of the arguments only.

    >>> [c.name for c in candidates("cpu:4", 4, "auto", True, True)]
    ['auto', 'auto, arguments alone', 'data', '2x2', '1x4']
    >>> [c.name for c in candidates("cpu:4", 4, "exact", True, False)]
    ['exact', 'data', '2x2', '1x4']
    """
    yield Candidate(solver, machine, solver, constrain)
    if constrain and propagates:
        yield Candidate(f"{solver}, arguments alone", machine, solver, False)
    if solver != "data":
        yield Candidate("data", machine, "data", not propagates)
    for members in (m for m in range(2, count + 1) if count % m == 0):
        grid = f"{count // members}x{members}"
        yield Candidate(grid, f"{machine}:{grid}", "megatron", not propagates)


def fastest(
    trials: Iterator[tuple[str, Step]], seconds_of: Callable[[Step, float], float]
) -> tuple[Step, dict[str, float]]:
    """The fastest of named steps, and the times of all: median seconds.

    `seconds_of(step, limit)` may run a step only once if that takes longer than `limit`, twice the best time so far.
    Steps within 20% of the best are timed again, since another program may have delayed them."""
    steps: dict[str, Step] = {}
    times: dict[str, float] = {}
    for name, step in trials:
        times[name] = seconds_of(step, 2 * min(times.values(), default=math.inf))
        steps[name] = step
    if not times:
        raise PlanError("no plan could be measured: none fits the machine and the memory")
    close = 1.2 * min(times.values())
    for name in [name for name, seconds in times.items() if seconds <= close]:
        times[name] = min(times[name], seconds_of(steps[name], math.inf))
    return steps[min(times, key=lambda name: times[name])], times


def show_measured(times: dict[str, float]) -> list[str]:
    """The measured times as lines of text; empty if nothing was measured."""
    ranked = sorted(times.items(), key=lambda item: item[1])
    title = ["measured time per step (the fastest kept):"] if ranked else []
    return [*title, *(f"  {name}: {show_seconds(seconds)}" for name, seconds in ranked)]
