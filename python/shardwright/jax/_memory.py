"""Memory limits that XLA's program keeps.

The plan's memory is that of the planner's account. XLA's buffer assignment may need more: the step is compiled, and planned again
with a limit that is lower by the difference.
"""

from __future__ import annotations

from collections.abc import Callable

from .._native import DoesNotFit, PlanError
from ._sharded_step import ShardedStep

# Plans that are compiled before the limit is refused.
_MOST_PLANS = 4


def fitted(planned: Callable[[str | float | None], ShardedStep], memory: str | float | None) -> ShardedStep:
    """The step that `planned` gives for a limit, such that XLA's program keeps the limit `memory`."""
    step = planned(memory)
    limit = step.plan.memory_limit_bytes
    if memory is None or limit is None:
        return step
    lowered = limit
    needs: list[int] = []
    while (used := step.compiled_bytes()) > limit:
        needs.append(used)
        lowered -= used - limit
        if lowered <= 0 or len(needs) == _MOST_PLANS:
            raise DoesNotFit(_message(limit, needs))
        try:
            step = planned(f"{lowered}B")
        except PlanError as error:
            # Only the limit differs from the plan before: nothing fits, or nothing was found that does.
            raise DoesNotFit(f"{_message(limit, needs)} {error}") from None
    return step


def _message(limit: int, needs: list[int]) -> str:
    tried = ", ".join(f"{used / 1e6:.1f}" for used in needs)
    return (
        f"no plan was found whose compiled program keeps {limit / 1e6:.1f} MB on one device: XLA needs {tried} MB with the plans "
        "that were tried. Use more devices, a smaller batch, or recomputation (`jax.checkpoint`)."
    )
