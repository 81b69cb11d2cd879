"""Batches the all-reduces of weight gradients, overlapped with the backward pass.

One all-reduce per weight would wait once per weight. No op reads these gradients before the pass ends, so they are
concatenated, as DistributedDataParallel does. They reach `.grad` when the pass ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

#: Bytes of one batch.
TOGETHER = 25 << 20

#: Process group and element type of a batch.
_Key = tuple[Any, torch.dtype]


@dataclass
class _Batch:
    """Gradients in one all-reduce, concatenated."""

    parts: list[tuple[Any, torch.Tensor]]
    concatenated: torch.Tensor
    work: Any


class Sums:
    """The gradients that a backward pass has collected so far."""

    def __init__(self) -> None:
        #: Whether gradients are batched; otherwise each has its own all-reduce, at once.
        self.together = True
        self._open: dict[_Key, list[tuple[Any, torch.Tensor]]] = {}
        self._sent: list[_Batch] = []
        self._awaited = False

    def clear(self) -> None:
        """Drops the gradients that a failed pass has left."""
        self._open, self._sent, self._awaited = {}, [], False

    def add(self, weight: Any, part: torch.Tensor, group: Any) -> None:
        """Adds this process's summand of a weight's gradient. Call it within a backward pass."""
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
        concatenated = torch.cat([part.reshape(-1) for _, part in parts])
        work = distributed.all_reduce(concatenated, group=key[0], async_op=True)
        self._sent.append(_Batch(parts, concatenated, work))

    def _finish(self) -> None:
        """Sends the remaining gradients, and adds each sum to its weight's `.grad`."""
        for key in list(self._open):
            self._send(key)
        sent = self._sent
        self.clear()
        with torch.no_grad():
            for batch in sent:
                batch.work.wait()
                sums = batch.concatenated.split([part.numel() for _, part in batch.parts])
                for (weight, part), total in zip(batch.parts, sums, strict=True):
                    new = DTensor.from_local(
                        total.view(part.shape), weight.device_mesh, weight.placements, run_check=False
                    )
                    weight.grad = new if weight.grad is None else weight.grad + new
