"""Reduces the gradients of weights: batched, and overlapped with the backward pass.

In the backward pass, the gradient of a replicated weight is a partial sum on each process. One all-reduce per weight would
wait once per weight, so they are concatenated, as DistributedDataParallel does. `.grad` has the sums when the pass ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakIdKeyDictionary

#: Bytes of one batch.
TOGETHER = 25 << 20

#: Mesh axes and element type of a batch.
_Key = tuple[tuple[int, ...], torch.dtype]


@dataclass
class _Batch:
    """Gradients in one all-reduce, concatenated."""

    parts: list[tuple[Any, Any]]
    concatenated: torch.Tensor
    work: Any


class Sums:
    """The gradients that a backward pass has collected so far."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        #: Whether gradients are batched; otherwise each has its own all-reduce, at once.
        self.together = True
        #: Whether partial sums stay partial after a pass, to be added to those of the next pass (`no_sync`).
        self.postponed = False
        self._attached: Any = WeakIdKeyDictionary()
        self._arrived: dict[int, Any] = {}
        self._before: dict[int, Any] = {}
        self._bytes = 0
        self._sent: list[_Batch] = []
        self._awaited = False

    def attach(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """Follows the gradients of weights."""
        for weight in weights:
            if weight.requires_grad and isinstance(weight, DTensor) and weight not in self._attached:
                with torch.enable_grad():
                    accumulate = weight.expand_as(weight).grad_fn.next_functions[0][0]
                # Hooks are held by the weight's graph, which no collector sees through: they hold nothing themselves.
                me, own = weakref.ref(self), weakref.ref(weight)
                accumulate.register_prehook(_before(me, own))
                weight.register_post_accumulate_grad_hook(_after(me))
                self._attached[weight] = accumulate

    def clear(self) -> None:
        """Drops what a failed pass has left."""
        self._sent, self._awaited, self._bytes = [], False, 0
        if not self.postponed:
            self._arrived = {i: w for i, w in self._arrived.items() if w.grad is not None and _axes(w.grad)}

    def _comes(self, weight: Any, grads: Any) -> None:
        """Sets a reduced gradient of earlier passes aside: it cannot be added to a partial sum."""
        if weight is None or grads[0] is None:
            return
        if weight.grad is None:
            if not any(weight is sent for batch in self._sent for sent, _ in batch.parts):
                self._before.pop(id(weight), None)
            return
        if not _axes(weight.grad) and _axes(grads[0]):
            self._before[id(weight)] = weight.grad
            weight.grad = None

    def _came(self, weight: Any) -> None:
        if weight.grad is None or not _axes(weight.grad):
            return
        self._arrived[id(weight)] = weight
        self._bytes += weight.grad._local_tensor.numel() * weight.grad._local_tensor.element_size()
        if not self._awaited:
            self._awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._bytes >= TOGETHER and not self.postponed:
            self._send()

    def _send(self) -> None:
        groups: dict[_Key, list[tuple[Any, Any]]] = {}
        for weight in self._arrived.values():
            grad = weight.grad
            if grad is None or not _axes(grad):
                continue
            groups.setdefault((_axes(grad), grad.dtype), []).append((weight, grad))
            weight.grad = None
        self._arrived, self._bytes = {}, 0
        with torch.no_grad():
            for (axes, _), parts in groups.items():
                concatenated = torch.cat([grad._local_tensor.reshape(-1) for _, grad in parts])
                work = distributed.all_reduce(concatenated, group=self.grid.group(axes), async_op=True)
                self._sent.append(_Batch(parts, concatenated, work))

    def _finish(self) -> None:
        """Sends the remaining gradients, and adds each sum to its weight's `.grad`."""
        self._awaited = False
        if not self.postponed:
            self._send()
        sent, self._sent = self._sent, []
        with torch.no_grad():
            for batch in sent:
                batch.work.wait()
                sums = batch.concatenated.split([grad._local_tensor.numel() for _, grad in batch.parts])
                for (weight, grad), total in zip(batch.parts, sums, strict=True):
                    at = [Replicate() if p.is_partial() else p for p in grad.placements]
                    new = DTensor.from_local(
                        total.view(grad._local_tensor.shape),
                        grad.device_mesh,
                        at,
                        run_check=False,
                        shape=grad.shape,
                        stride=grad.stride(),
                    )
                    earlier = self._before.pop(id(weight), None)
                    new = new if earlier is None else earlier + new
                    weight.grad = new if weight.grad is None else weight.grad + new


def _before(sums: Any, weight: Any) -> Any:
    def hook(grads: Any) -> None:
        if (owner := sums()) is not None:
            owner._comes(weight(), grads)

    return hook


def _after(sums: Any) -> Any:
    def hook(weight: Any) -> None:
        if (owner := sums()) is not None:
            owner._came(weight)

    return hook


def _axes(grad: Any) -> tuple[int, ...]:
    """The mesh axes along which a gradient is a partial sum."""
    return tuple(i for i, p in enumerate(grad.placements) if p.is_partial()) if isinstance(grad, DTensor) else ()
