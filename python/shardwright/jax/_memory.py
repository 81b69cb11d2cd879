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
# Predictions of XLA's memory are rarely off by more than this share.
_NEAR = 0.7


def fitted(planned: Callable[[str | float | None], ShardedStep], memory: str | float | None) -> ShardedStep:
    """The step that `planned` gives for a limit, such that XLA's program keeps the limit `memory`. Without one, the limit is the
    memory of the machine's devices; the step is compiled to check it only where it is predicted to come near."""
    step = planned(memory)
    limit = step.plan.memory_limit_bytes
    if limit is None or (memory is None and step.predicted_bytes() < _NEAR * limit):
        return step
    lowered = limit
    needs: list[int] = []
    while (used := step.compiled_bytes()) > limit:
        needs.append(used)
        lowered -= used - limit
        if lowered <= 0 or len(needs) == _MOST_PLANS:
            return _unlimited(planned, limit, _message(limit, needs))
        try:
            step = planned(f"{lowered}B")
        except PlanError as error:
            # Only the limit differs from the plan before: nothing fits, or nothing was found that does.
            return _unlimited(planned, limit, f"{_message(limit, needs)} {error}")
    return step


def _unlimited(planned: Callable[[str | float | None], ShardedStep], limit: int, message: str) -> ShardedStep:
    """The plan without a limit, if XLA's program keeps it: XLA may need less than the planner's account."""
    step = planned("none")
    if step.predicted_bytes() > limit or step.compiled_bytes() > limit:
        raise DoesNotFit(message)
    return step


def _message(limit: int, needs: list[int]) -> str:
    tried = ", ".join(f"{used / 1e6:.1f}" for used in needs)
    return (
        f"no plan was found whose compiled program keeps {limit / 1e6:.1f} MB on one device: XLA needs {tried} MB with the plans "
        "that were tried. Use more devices, a smaller batch, or recomputation (`jax.checkpoint`)."
    )
