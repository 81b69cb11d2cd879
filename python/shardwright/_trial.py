"""What is run beside a plan where plans are measured, and which one is kept: `parallelize(..., measure=True)`."""

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
    """A way to plan and to run a step."""

    name: str
    machine: str
    solver: str
    #: Whether all values are held to the plan, or arguments and results alone.
    constrain: bool


def candidates(machine: str, count: int, solver: str, constrain: bool, propagates: bool) -> Iterator[Candidate]:
    """What is asked for, first; then what people would write by hand: data parallelism, and columns and rows of weights
    in turn on every grid of the devices. An engine that propagates shardings is told those of the arguments alone.

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
    made: Iterator[tuple[str, Step]], seconds_of: Callable[[Step, float], float]
) -> tuple[Step, dict[str, float]]:
    """Of named steps the one that takes least time, and the times of all: medians in seconds. Those that take more than
    twice as long as the best so far need be run only once, those close to the best are run again, in case something else
    kept the machine busy."""
    steps: dict[str, Step] = {}
    times: dict[str, float] = {}
    for name, step in made:
        times[name] = seconds_of(step, 2 * min(times.values(), default=math.inf))
        steps[name] = step
    if not times:
        raise PlanError("there is nothing to measure")
    close = 1.2 * min(times.values())
    for name in [name for name, seconds in times.items() if seconds <= close]:
        times[name] = min(times[name], seconds_of(steps[name], math.inf))
    return steps[min(times, key=lambda name: times[name])], times


def show_measured(times: dict[str, float]) -> list[str]:
    """Lines that say what was measured; none where nothing was."""
    ranked = sorted(times.items(), key=lambda item: item[1])
    title = ["measured, seconds per step, the fastest kept:"] if ranked else []
    return [*title, *(f"  {name}: {show_seconds(seconds)}" for name, seconds in ranked)]
