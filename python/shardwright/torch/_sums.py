"""Gradients of weights that are parts of sums are added up many at once, while the backward pass goes on.

A sum of its own for each weight would cost as many waits as there are weights. Nobody looks at these gradients before the
pass has ended, so that they can be put together, as DistributedDataParallel does. They reach `.grad` when the pass ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

#: Bytes that are sent together.
TOGETHER = 25 << 20

#: The processes that add up, and the type of elements.
_Key = tuple[Any, torch.dtype]


@dataclass
class _Sent:
    """Gradients on their way, one behind the other."""

    parts: list[tuple[Any, torch.Tensor]]
    joined: torch.Tensor
    work: Any


class Sums:
    """What a backward pass has collected so far."""

    def __init__(self) -> None:
        #: Whether gradients are put together; else each is added up by itself, at once.
        self.together = True
        self._open: dict[_Key, list[tuple[Any, torch.Tensor]]] = {}
        self._sent: list[_Sent] = []
        self._awaited = False

    def clear(self) -> None:
        """Forgets what a pass that failed has left behind."""
        self._open, self._sent, self._awaited = {}, [], False

    def add(self, weight: Any, part: torch.Tensor, group: Any) -> None:
        """Takes this process's part of a weight's gradient. To be called in a backward pass."""
        if not self._awaited:
            self._awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        key = (group, part.dtype)
        parts = self._open.setdefault(key, [])
        parts.append((weight, part))
        if sum(part.numel() * part.element_size() for _, part in parts) >= TOGETHER:
            self._send(key)

    def _send(self, key: _Key) -> None:
        parts = self._open.pop(key)
        joined = torch.cat([part.reshape(-1) for _, part in parts])
        work = distributed.all_reduce(joined, group=key[0], async_op=True)
        self._sent.append(_Sent(parts, joined, work))

    def _finish(self) -> None:
        """Sends the rest, and hands every weight its gradient."""
        for key in list(self._open):
            self._send(key)
        sent = self._sent
        self.clear()
        with torch.no_grad():
            for batch in sent:
                batch.work.wait()
                sums = batch.joined.split([part.numel() for _, part in batch.parts])
                for (weight, part), total in zip(batch.parts, sums, strict=True):
                    new = DTensor.from_local(
                        total.view(part.shape), weight.device_mesh, weight.placements, run_check=False
                    )
                    weight.grad = new if weight.grad is None else weight.grad + new
