"""Batches of weights: which are exchanged together, their collectives, and the memory of their gradients."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._layout import Collective, Layout
from ._tensor import dense

#: Bytes of the batch whose gradients come first.
FIRST = 1 << 20

#: Gradients of at least this many bytes are copied to their batch when they are there. Smaller ones are copied together.
_ALONE = 1 << 16

aten = torch.ops.aten


@dataclass(frozen=True)
class Member:
    """A weight of a batch."""

    weight: Any
    #: The shape of its shard as stored, and as read.
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    #: The dimension that is gathered.
    dim: int


@dataclass(frozen=True)
class Exchange:
    """How a weight is fetched and its gradient reduced: mesh axes of the all-gather (and reduce-scatter) and those of the
    all-reduce."""

    gathered: tuple[int, ...]
    reduced: tuple[int, ...]

    @staticmethod
    def of(stored: Layout, read: Layout, gradient: Layout) -> tuple[Exchange, int] | None:
        """With the gathered dimension; `None` for weights that are exchanged otherwise."""
        gathered, reduced, dims = [], [], set()
        for axis, (s, at, g) in enumerate(zip(stored, read, gradient, strict=True)):
            if s.startswith("S") and (at, g) == ("R", "P"):
                gathered.append(axis)
                dims.add(int(s[1:]))
            elif (s, at, g) == ("R", "R", "P"):
                reduced.append(axis)
            elif not s == at == g:
                return None
        if len(dims) > 1 or any(stored[axis] == f"S{d}" for d in dims for axis in range(len(stored)) if axis not in gathered):
            return None
        return Exchange(tuple(gathered), tuple(reduced)), dims.pop() if dims else 0


@dataclass
class Batch:
    """Weights that are fetched and reduced together."""

    exchange: Exchange
    layout: Layout
    gradient: Layout
    grid: Any
    members: list[Member] = field(default_factory=list)
    bytes: int = 0
    #: Reads in a pass, after which fetched weights are no longer held.
    reads: int = 0
    #: The batches whose all-gathers come after and before this one.
    following: Batch | None = None
    preceding: Batch | None = None
    #: The element type in which weights are read and gradients reduced.
    dtype: torch.dtype | None = None
    #: Whether the memory of reduced gradients is used again in the next step.
    keeps: bool = True
    #: Weights that were fetched in this pass, whether with a gradient, and how many reads are left.
    fetched: tuple[list[torch.Tensor], bool, int] | None = None
    _started: torch.Tensor | None = None
    _buffer: torch.Tensor | None = None

    def place(self, member: Member) -> Any:
        """What identifies a read of a weight, also when weights were batched again."""
        return id(member.weight), self.layout, self.gradient, self.dtype

    def _collective(self, kind: str, axes: tuple[int, ...]) -> Collective:
        return self.grid.collective(kind, axes)

    @property
    def _count(self) -> int:
        return math.prod(self.grid.sizes[axis] for axis in self.exchange.gathered)

    def start(self, weights: Sequence[Any] | None = None) -> None:
        """Starts the all-gather."""
        if self.exchange.gathered and self._started is None:
            with torch.no_grad():
                locals_ = [w._local_tensor.reshape(-1) for w in weights or [m.weight for m in self.members]]
                flat = torch.cat(locals_).to(self.dtype)
                self._started = self._collective("all-gather", self.exchange.gathered).start(flat)

    def drop(self) -> None:
        """Forgets an all-gather that was not used."""
        if self._started is not None:
            torch.ops._c10d_functional.wait_tensor(self._started)
            self._started = None

    def fetch(self, weights: Sequence[Any]) -> list[torch.Tensor]:
        """The local tensors of the weights as they are read."""
        if not self.exchange.gathered:
            return [(w._local_tensor if w.dtype == self.dtype else w._local_tensor.to(self.dtype)).detach() for w in weights]
        self.start(weights)
        assert self._started is not None
        flat = torch.ops._c10d_functional.wait_tensor(self._started).view(self._count, -1)
        self._started = None
        parts = flat.split([math.prod(m.stored) for m in self.members], 1)
        return [
            part.reshape(self._count, *m.stored).movedim(0, m.dim).reshape(m.shape)
            for part, m in zip(parts, self.members, strict=True)
        ]

    def buffer(self) -> list[torch.Tensor]:
        """Memory for the gradients of all weights: that of the step before, unless something still refers to it. The first is all
        of it."""
        flat = self._buffer
        if flat is None or _users(flat) > 1:
            first = self.members[0].weight._local_tensor
            flat = torch.empty(sum(math.prod(m.shape) for m in self.members), dtype=self.dtype, device=first.device)
            self._buffer = flat if self.keeps else None
        parts = flat.split([math.prod(m.shape) for m in self.members])
        # A view of all: what a pass has not yet added to `.grad` is in use too.
        return [flat.view(-1), *(part.view(m.shape) for part, m in zip(parts, self.members, strict=True))]

    def reduce(self, members: Sequence[Member], grads: Sequence[torch.Tensor], slots: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Starts the reduction of gradients. The result holds the shards, one after the other. `slots` has the memory of the batch,
        where some gradients are already."""
        count = self._count
        # Sums of processes are formed in the type of computing, as they are planned.
        grads = [dense(g) for g in grads]
        if not self.exchange.gathered and len(members) == len(self.members) and all(map(operator.is_, members, self.members)):
            flat, *parts = slots or self.buffer()
            given = [(part, g) for part, g in zip(parts, grads, strict=True) if g.data_ptr() != part.data_ptr()]
            if given:
                torch._foreach_copy_([part for part, _ in given], [g for _, g in given])
            return self._collective("all-reduce", self.exchange.reduced).start_on(flat) if self.exchange.reduced else flat
        grads = [g.to(self.dtype) for g in grads]
        if not self.exchange.gathered:
            flat = torch.cat([g.reshape(-1) for g in grads])
            return self._collective("all-reduce", self.exchange.reduced).start_on(flat) if self.exchange.reduced else flat
        blocks = [
            g.reshape(*m.shape[: m.dim], count, -1, *m.shape[m.dim + 1 :]).movedim(m.dim, 0).reshape(count, -1)
            for m, g in zip(members, grads, strict=True)
        ]
        flat = self._collective("reduce-scatter", self.exchange.gathered).start(torch.cat(blocks, 1).reshape(-1))
        if self.exchange.reduced:
            flat = torch.ops._c10d_functional.wait_tensor(flat)
            flat = self._collective("all-reduce", self.exchange.reduced).start_on(flat)
        return flat


class Filling:
    """The memory of a batch while a backward pass makes its gradients. Large ones are copied there one by one, while they are in
    caches, and need no memory of their own until all are there."""

    def __init__(self, owner: Any, batch: Batch) -> None:
        self.owner, self.batch = owner, batch
        self.slots: list[torch.Tensor] | None = None

    def watched(self, fetched: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The weights as calls read them. What they compute to has a place in autograd of its own, so that gradients are seen one by
        one."""
        found = []
        for i, (x, m) in enumerate(zip(fetched, self.batch.members, strict=True)):
            if math.prod(m.shape) * x.element_size() >= _ALONE:
                x = aten._unsafe_view.default(x, x.shape)
                x.register_hook(functools.partial(self.fill, i))
            found.append(x)
        return found

    def fill(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Takes a gradient. `None` leaves it as it is."""
        if torch.is_grad_enabled() or self.owner.postponed or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
            return None
        if self.slots is None:
            self.slots = self.batch.buffer()
        return self.slots[index + 1].copy_(grad)

    def taken(self) -> list[torch.Tensor] | None:
        """The memory, which the pass no longer fills."""
        slots, self.slots = self.slots, None
        return slots


def _users(x: torch.Tensor) -> int:
    """How many tensors use this memory."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1  # type: ignore[no-any-return]


def divided(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Weights in batches of at most so many bytes, by their sizes in the order of their reads. A larger one is a batch of its own."""
    made: list[list[int]] = []
    total = 0
    for i, size in enumerate(sizes):
        if not made or total + size > most:
            made.append([])
            total = 0
        made[-1].append(i)
        total += size
    return made


def divided_for_sums(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The same from the last weight on, whose gradient comes first: the last batch is closed as soon as it is large enough."""
    count, total = 0, 0
    while count < len(sizes) and total < min(FIRST, most):
        count += 1
        total += sizes[-count]
    rest = divided(sizes[: len(sizes) - count][::-1], most)
    last = len(sizes) - count - 1
    return [*([last - i for i in reversed(group)] for group in reversed(rest)), list(range(last + 1, len(sizes)))]


def shards(members: Sequence[Member], flat: torch.Tensor) -> list[torch.Tensor]:
    """The reduced gradients, once they are there."""
    flat = torch.ops._c10d_functional.wait_tensor(flat)
    parts = flat.split([math.prod(m.stored) for m in members])
    return [part.view(m.stored) for part, m in zip(parts, members, strict=True)]
