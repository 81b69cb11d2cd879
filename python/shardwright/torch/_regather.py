"""Whole weights live for one pass, as plans count them: the backward pass gathers again what the forward pass gathered.

Autograd keeps the weights that ops read. Hooks replace those that were gathered by a note of their batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class _Uses:
    """How often the backward pass will read a batch, and the state of its weights in the forward pass."""

    batch: Any
    count: int
    versions: list[int]


@dataclass(frozen=True)
class _Note:
    """A saved tensor that is a view of a gathered weight."""

    uses: _Uses
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, gathered: Sequence[torch.Tensor]) -> torch.Tensor:
        return gathered[self.index].as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Saved:
    """Any other saved tensor, and its version: autograd compares versions only where there are no hooks."""

    tensor: torch.Tensor
    version: int


class Regather:
    """The gathered weights of a forward pass, and those that a backward pass has gathered so far."""

    def __init__(self) -> None:
        #: Memory of gathered weights. A weak reference keeps the number from being given to other memory.
        self._memory: dict[int, tuple[StorageWeakRef, _Uses, int]] = {}
        self._again: dict[int, tuple[list[torch.Tensor], int]] = {}
        self.active = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves within holds no gathered weight."""
        self._memory, self.active = {}, True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._memory, self.active = {}, False

    def gathered(self, batch: Any, weights: Sequence[torch.Tensor]) -> None:
        """A batch of weights, as gathered."""
        if self.active:
            uses = _Uses(batch, 0, [m.weight._version for m in batch.members])
            for i, w in enumerate(weights):
                storage = w.untyped_storage()
                self._memory[storage._cdata] = (StorageWeakRef(storage), uses, i)

    def _pack(self, x: torch.Tensor) -> _Note | _Saved:
        with torch._C.DisableTorchFunction():
            known = self._memory.get(x.untyped_storage()._cdata) if type(x) is torch.Tensor else None
            if known is None:
                return _Saved(x, x._version)
            _, uses, index = known
            uses.count += 1
            return _Note(uses, index, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def _unpack(self, saved: _Note | _Saved) -> torch.Tensor:
        if isinstance(saved, _Saved):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(saved.tensor.shape)} is at version {saved.tensor._version}; expected version {saved.version} instead"
                )
            return saved.tensor
        batch = saved.uses.batch
        weights, left = self._again.get(id(batch), (None, saved.uses.count))
        if weights is None:
            members = [m.weight for m in batch.members]
            if [w._version for w in members] != saved.uses.versions:
                raise RuntimeError("weights were changed between the forward pass and its backward pass, which gathers them again")
            with torch.no_grad():
                weights = batch.fetch(members)
            if batch.preceding is not None:
                batch.preceding.start()
        if left > 1:
            self._again[id(batch)] = (weights, left - 1)
        else:
            self._again.pop(id(batch), None)
        return saved.tensor(weights)

    def drop(self) -> None:
        """Forgets what a backward pass has gathered."""
        self._again = {}
