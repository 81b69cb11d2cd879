"""`verify_plan`: compares predicted collectives and memory with the program that XLA compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ._hlo import Collective, collectives, predicted
from ._parallelize import Parallelized
from ._sharded_step import used_bytes

# Kind, axes and bytes: collectives are equal if these are.
Key = tuple[str, tuple[str, ...], int]


@dataclass
class Verification:
    """Predicted and compiled collectives and memory of a sharded step."""

    predicted: Counter[Key]
    compiled: Counter[Key]
    #: Collectives that XLA compiles from the shardings of the arguments alone.
    propagated: Counter[Key]
    #: Predicted memory of XLA's program. It exceeds the plan's own peak, a lower bound of what the step needs.
    predicted_peak_bytes: int
    compiled_peak_bytes: int
    propagated_peak_bytes: int
    #: Origins of collectives: tensors of predicted ones, operations of compiled ones.
    sources: dict[Key, set[str]] = field(default_factory=dict)

    @property
    def agreed(self) -> Counter[Key]:
        """Collectives both predicted and compiled. An all-reduce counts for a predicted reduce-scatter of the same bytes:
        XLA on CPUs has no reduce-scatter."""
        agreed = self.predicted & self.compiled
        left, spare = self.predicted - agreed, self.compiled - agreed
        for (kind, axes, size), count in left.items():
            if kind == "reduce-scatter":
                agreed[kind, axes, size] += min(count, spare["all-reduce", axes, size])
        return +agreed

    @property
    def agreement(self) -> float:
        """Bytes both predicted and sent, relative to all bytes predicted or sent."""
        sums = [_sum(self.predicted), _sum(self.compiled), _sum(self.agreed)]
        return sums[2] / max(sums[0] + sums[1] - sums[2], 1) if sums[0] or sums[1] else 1.0

    @property
    def share_predicted(self) -> float:
        """The share of XLA's collectives that were predicted to the byte."""
        return self.agreed.total() / max(self.compiled.total(), 1) if self.compiled else 1.0

    def table(self) -> str:
        """Collectives and memory: predicted, compiled, and propagated by Shardy from the arguments alone."""
        lines = [f"{'collective':<16} {'axes':<28} {'bytes':>12} {'predicted':>9} {'XLA':>6} {'inputs alone':>12}"]
        keys = {*self.predicted, *self.compiled}
        for key in sorted(keys, key=lambda key: (-key[2] * max(self.predicted[key], self.compiled[key]), key)):
            kind, axes, size = key
            counts = f"{self.predicted[key]:>9} {self.compiled[key]:>6} {self.propagated[key]:>12}"
            note = "" if self.predicted[key] == self.compiled[key] else "  " + ", ".join(sorted(self.sources[key])[:2])
            lines.append(f"{kind:<16} {' '.join(axes):<28} {size:>12} {counts}{note}")
        other = sum(count for key, count in self.propagated.items() if key not in keys)
        if other:
            lines.append(f"{'others':<16} {'':<28} {'':>12} {'':>9} {'':>6} {other:>12}")
        lines.append(
            f"bytes of messages: {_sum(self.predicted)} predicted, {_sum(self.compiled)} by XLA, "
            f"{_sum(self.propagated)} from inputs alone; {self.agreement:.1%} agree"
        )
        lines.append(
            f"peak memory: {self.predicted_peak_bytes} predicted, {self.compiled_peak_bytes} by XLA, "
            f"{self.propagated_peak_bytes} from inputs alone"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def verify_plan(step: Parallelized, *args: Any, **kwargs: Any) -> Verification:
    """Compiles a sharded step and compares its collectives and its memory with the plan's.

    `args` are arguments of the step, or their shapes; without any, those that were planned first. For comparison, the step is also compiled with the shardings of its
    arguments only, from which XLA's propagation (Shardy) derives the others.
    """
    sharded = step.first if not args and not kwargs else step.sharded(*args, **kwargs)
    compiled = sharded.lower().compile()
    propagated = sharded.lower_propagated().compile()
    lists = [
        predicted(sharded.plan._native.collectives()),
        collectives(compiled.as_text() or "", sharded.mesh.shape),
        collectives(propagated.as_text() or "", sharded.mesh.shape),
    ]
    sources: dict[Key, set[str]] = {}
    for entry in (entry for entries in lists for entry in entries):
        sources.setdefault((entry.kind, entry.axes, entry.bytes), set()).add(entry.source)
    return Verification(
        predicted=_count(lists[0]),
        compiled=_count(lists[1]),
        propagated=_count(lists[2]),
        predicted_peak_bytes=sharded.predicted_bytes(),
        compiled_peak_bytes=used_bytes(compiled),
        propagated_peak_bytes=used_bytes(propagated),
        sources=sources,
    )


def _count(entries: Iterable[Collective]) -> Counter[Key]:
    counts: Counter[Key] = Counter()
    for entry in entries:
        counts[entry.kind, entry.axes, entry.bytes] += entry.count
    return counts


def _sum(counts: Counter[Key]) -> int:
    return sum(key[2] * count for key, count in counts.items())
