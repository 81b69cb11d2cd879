"""`verify_plan`: compares predicted collectives and memory with the program that XLA compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from ._capture import StepCapture, path_of
from ._hlo import Collective, collectives, predicted
from ._parallelize import Parallelized
from ._sharded_step import used_bytes
from ._walk import equation, numbers_of

# Kind, axes and bytes: collectives are equal if these are.
Key = tuple[str, tuple[str, ...], int]
_MATCHES = {"equal": "equal", "reduced": "reduce-scatter as all-reduce", "widened": "widened", "permuted": "permuted"}


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
    #: Predicted collectives of 16-bit elements.
    narrow: set[Key] = field(default_factory=set)
    #: Primitives of the equations that were planned as calls of known types.
    calls: frozenset[str] = frozenset()

    @property
    def matches(self) -> dict[str, Counter[Key]]:
        """Predicted collectives that XLA runs, by how the two relate.

        `equal`: kind, axes and bytes are equal. `reduce-scatter as all-reduce`: XLA on CPUs has no reduce-scatter, it slices after
        an all-reduce of the same bytes. `widened`: XLA on CPUs computes and sends 16-bit numbers in 32 bits. `permuted`: a
        permutation of blocks of equal bytes, of which we name all axes of the mesh that change, and XLA pairs of devices."""
        return self._matched()[0]

    def _matched(self) -> tuple[dict[str, Counter[Key]], Counter[Key]]:
        """Predicted collectives that XLA runs, and those of XLA that are left. Bytes of narrow elements may equal those of others
        that are widened: the order with the larger agreement holds."""
        orders = [self._matched_in(["equal", "reduced", "widened", "permuted"])]
        if self.narrow:
            orders.append(self._matched_in(["widened", "equal", "reduced", "permuted"]))
        return max(orders, key=self._agreement)

    def _matched_in(self, order: Sequence[str]) -> tuple[dict[str, Counter[Key]], Counter[Key]]:
        left, spare = Counter(self.predicted), Counter(self.compiled)
        found: dict[str, Counter[Key]] = {}

        def match(name: str, candidates: Callable[[Key], Iterable[Key]]) -> None:
            for key in list(left):
                for other in candidates(key):
                    count = min(left[key], spare[other])
                    if count > 0:
                        left[key] -= count
                        spare[other] -= count
                        found.setdefault(name, Counter())[key] += count

        def reduced(key: Key) -> list[Key]:
            return [("all-reduce", *key[1:])] if key[0] == "reduce-scatter" else []

        def widened(key: Key) -> list[Key]:
            kind, axes, size = key
            if key not in self.narrow:
                return []
            return [(name, axes, 2 * size) for name in ({kind, "all-reduce"} if kind == "reduce-scatter" else {kind})]

        def permuted(key: Key) -> list[Key]:
            return [other for other in spare if key[0] == other[0] == "collective-permute" and key[2] == other[2]]

        rules = {"equal": lambda key: [key], "reduced": reduced, "widened": widened, "permuted": permuted}
        for name in order:
            match(_MATCHES[name], rules[name])
        return found, +spare

    @property
    def agreed(self) -> Counter[Key]:
        """Predicted collectives that XLA runs."""
        return sum(self.matches.values(), Counter())

    @property
    def unpredicted(self) -> Counter[Key]:
        """Collectives of XLA that were not predicted."""
        return self._matched()[1]

    @property
    def differences(self) -> dict[str, tuple[int, int]]:
        """Bytes that differ, predicted and by XLA, by kind.

        `other axes`: collectives of equal kind and bytes along other axes. `calls`: inside or around equations that were planned as calls
        of known types. `sent again`: predicted collectives that XLA runs more often. `other route`: reshards between the same layouts by
        other collectives. `divided otherwise`: an operation that XLA divides in another way than its constraints say."""
        left, spare = self.predicted - self.agreed, self.unpredicted
        found = {name: [0, 0] for name in ("other axes", "calls", "sent again", "other route", "divided otherwise")}
        for kind, axes, size in sorted(spare):
            alike = [key for key in left if key[0] == kind and key[2] == size and left[key] > 0]
            count = spare[kind, axes, size]
            for key in alike:
                both = min(count, left[key])
                found["other axes"] = [total + both * size for total in found["other axes"]]
                left[key] -= both
                count -= both
            found[self._kind_of_unpredicted((kind, axes, size))][1] += count * size
        for (kind, _, size), count in left.items():
            name = "divided otherwise" if kind in ("all-reduce", "reduce-scatter") else "other route"
            found[name][0] += count * size
        return {name: (totals[0], totals[1]) for name, totals in found.items() if any(totals)}

    def _kind_of_unpredicted(self, key: Key) -> str:
        sources = self.sources.get(key, set())
        if any(self.calls.intersection(source.split("/")) for source in sources):
            return "calls"
        if self.predicted[key] > 0:
            return "sent again"
        reshard = key[0] not in ("all-reduce", "reduce-scatter") and all(source.endswith("sharding_constraint") for source in sources)
        return "other route" if reshard else "divided otherwise"

    @property
    def agreement(self) -> float:
        """Bytes both predicted and sent, relative to all bytes predicted or sent. Widened elements count with the bytes of the step's own type."""
        return self._agreement(self._matched())

    def _agreement(self, matched: tuple[dict[str, Counter[Key]], Counter[Key]]) -> float:
        found, spare = matched
        agreed = sum(map(_sum, found.values()))
        every = _sum(self.predicted) + _sum(spare)
        return agreed / every if every else 1.0

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
        lines += [f"{name}: {_sum(keys)} bytes" for name, keys in self.matches.items() if name != "equal"]
        for name, (ours, theirs) in self.differences.items():
            lines.append(f"{name}: {ours} bytes predicted, {theirs} by XLA")
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


def verify_plan(step: Parallelized, *args: Any, propagated: bool = True, **kwargs: Any) -> Verification:
    """Compiles a sharded step and compares its collectives and its memory with the plan's.

    `args` are arguments of the step, or their shapes; without any, those that were planned first. For comparison, the step is
    also compiled with the shardings of its arguments only, from which XLA's propagation (Shardy) derives the others;
    `propagated=False` leaves that out.
    """
    sharded = step.first if not args and not kwargs else step.sharded(*args, **kwargs)
    compiled = sharded.compiled()
    alone = sharded.lower_propagated().compile() if propagated else None
    lists = [
        [_own_bytes(sharded.step, entry) for entry in predicted(sharded.plan._native.collectives())],
        collectives(compiled.as_text() or "", sharded.mesh.shape),
        [] if alone is None else collectives(alone.as_text() or "", sharded.mesh.shape),
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
        propagated_peak_bytes=0 if alone is None else used_bytes(alone),
        sources=sources,
        narrow={(entry.kind, entry.axes, entry.bytes) for entry in lists[0] if entry.element_bytes == 2},
        calls=frozenset(
            eqn.primitive.name
            for path in sharded.planned.stand_ins
            if (eqn := equation(sharded.step.jaxpr, numbers_of(path))) is not None
        ),
    )


def _own_bytes(step: StepCapture, entry: Collective) -> Collective:
    """A predicted collective with the bytes of the step's own type: narrow integers are planned as 32-bit ones."""
    path = path_of(entry.source)
    eqn = None if path is None else equation(step.jaxpr, numbers_of(path))
    if eqn is None or entry.element_bytes != 4 or len(eqn.outvars) != 1:
        return entry
    own = getattr(eqn.outvars[0].aval, "dtype", None)
    if own is None or not jnp.issubdtype(own, jnp.integer) or own.itemsize >= 4:
        return entry
    return replace(entry, bytes=entry.bytes * own.itemsize // 4, element_bytes=own.itemsize)


def _count(entries: Iterable[Collective]) -> Counter[Key]:
    counts: Counter[Key] = Counter()
    for entry in entries:
        counts[entry.kind, entry.axes, entry.bytes] += entry.count
    return counts


def _sum(counts: Counter[Key]) -> int:
    return sum(key[2] * count for key, count in counts.items())
