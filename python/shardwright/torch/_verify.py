"""Compares the collectives that a step issues with the plan's prediction."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ._measure import trained
from ._parallelize import Parallelized

#: PyTorch's name of a collective -> the plan's name.
_KINDS = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


@dataclass(frozen=True)
class Traffic:
    """The number of collectives, and their total bytes: of each, the larger side on one process."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True)
class Verification:
    """Predicted and issued collectives of a step, by kind."""

    predicted: dict[str, Traffic]
    issued: dict[str, Traffic]

    def __str__(self) -> str:
        lines = [f"{'collective':<20} {'predicted':>10} {'issued':>10} {'bytes':>14} {'issued':>14}"]
        for kind in sorted({*self.predicted, *self.issued}):
            p, i = self.predicted.get(kind, Traffic()), self.issued.get(kind, Traffic())
            lines.append(f"{kind:<20} {p.count:>10} {i.count:>10} {p.bytes:>14} {i.bytes:>14}")
        return "\n".join(lines)


class Watch(TorchDispatchMode):
    """Records every collective that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, Traffic]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = _KINDS.get(getattr(func, "_opname", ""))
        if kind is not None and "c10d" in func.namespace:
            larger = max(args[0].numel(), result.numel()) * args[0].element_size()
            self.collectives.append((kind, Traffic(1, larger)))
        return result


def _sum(rows: Iterable[tuple[str, Traffic]]) -> dict[str, Traffic]:
    total: dict[str, Traffic] = {}
    for kind, traffic in rows:
        total[kind] = total.get(kind, Traffic()) + traffic
    return total


def verify_plan(model: Parallelized, *args: Any, **kwargs: Any) -> Verification:
    """Runs a step, forward and backward, and compares its collectives with the plan. `.grad` of all weights is restored.

    Weight gradients are reduced one by one here, as they are predicted, and not in batches."""
    before = [p.grad for p in model.parameters()]
    model._engine.weights.together = False
    try:
        with Watch() as watch:
            trained(model(*args, **kwargs)).backward()
    finally:
        model._engine.weights.together = True
    for p, grad in zip(model.parameters(), before, strict=True):
        p.grad = grad
    planned = json.loads(model.plan._native.collectives())
    return Verification(
        _sum((c["kind"], Traffic(1, c["bytes"])) for c in planned), _sum(watch.collectives)
    )
