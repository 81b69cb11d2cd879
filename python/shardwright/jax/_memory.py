"""Memory limits that XLA's program keeps.

The plan's memory is that of the planner's account. XLA's buffer assignment may need more: the step is compiled, and planned again
with a limit that is lower by the difference.
"""

from __future__ import annotations

from collections.abc import Callable

from .._native import DoesNotFit, PlanError
from ._sharded_step import ShardedStep

# Plans that are made before the limit is refused.
_MOST_PLANS = 7
# Predictions of XLA's memory are rarely off by more than this share.
_NEAR = 0.7


def fitted(planned: Callable[[str | float | None], ShardedStep], memory: str | float | None) -> ShardedStep:
    """The step that `planned` gives for a limit, such that XLA's program keeps the limit `memory`. Without one, the limit is the
    memory of the machine's devices; the step is compiled to check it only where it is predicted to come near."""
    step = planned(memory)
    limit = step.plan.memory_limit_bytes
    if limit is None or (memory is None and step.predicted_bytes() < _NEAR * limit):
        return step
    account, least, problem = limit, 0, ""
    needs: list[int] = []
    plans = 1
    while (used := step.compiled_bytes()) > limit:
        needs.append(used)
        lowered = account - (used - limit)
        found: ShardedStep | None = None
        # Where nothing fits the lower limit, plans between it and the last one may still do.
        while found is None and plans < _MOST_PLANS:
            if lowered <= least:
                lowered = (account + least) // 2
            plans += 1
            try:
                found = planned(f"{lowered}B")
            except PlanError as error:
                least, problem = lowered, f" {error}"
        if found is None:
            return _unlimited(planned, limit, _message(limit, needs) + problem)
        step, account = found, lowered
    return step


def _unlimited(planned: Callable[[str | float | None], ShardedStep], limit: int, message: str) -> ShardedStep:
    """The plan without a limit, if XLA's program keeps it: XLA may need less than the planner's account."""
    step = planned("none")
    if step.predicted_bytes() > limit or step.compiled_bytes() > limit:
        raise DoesNotFit(message)
    return step


def _message(limit: int, needs: list[int]) -> str:
    unit, size = ("MB", 1e6) if limit >= 10**6 else ("kB", 1e3)
    tried = ", ".join(f"{used / size:.1f}" for used in needs)
    return (
        f"no plan was found whose compiled program keeps {limit / size:.1f} {unit} on one device: XLA needs {tried} {unit} with the plans "
        "that were tried. Use more devices, a smaller batch, or recomputation (`jax.checkpoint`)."
    )
