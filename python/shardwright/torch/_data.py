"""Batches: whole on every process (`batch="global"`), or each process's own samples (`batch="local"`).

Local batches become shards of the global batch, without communication: the samples of the first process come first.
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree as pytree

from .._native import PlanError
from ._layout import Layout
from ._tensor import ShardTensor, beside_weights, make, read, whole

_WHAT_TO_DO = (
    'pass the whole batch on every process, or say batch="local" where each process loads its own samples '
    "(DistributedSampler)"
)


class Batches:
    """Checks batches, and turns local ones into shards."""

    def __init__(self, engine: Any, kind: str, samples: int = 0) -> None:
        if kind not in ("global", "local"):
            raise PlanError(f'batch="{kind}": "global" (every process passes the whole batch) or "local" (its own samples)')
        self.engine, self.local = engine, kind == "local"
        self._checked = False
        self._size = 0
        #: Samples of the example, and sizes of batches that were told of.
        self._planned = samples
        self._uneven: set[int] = set()

    @property
    def _layout(self) -> Layout:
        return ("S0",) * len(self.engine.grid.sizes)

    def take(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs as the module gets them."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if (dtype := self.engine.weights.dtype) is not None:
            leaves = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        if self.local:
            leaves = self._shards(leaves, tensors)
        elif not self._checked:
            self._check(tensors)
        self._checked = True
        self._notice(tensors)
        return pytree.tree_unflatten(leaves, spec)

    def _notice(self, tensors: list[torch.Tensor]) -> None:
        """Tells once of each batch size that the mesh does not divide."""
        world, size = distributed.get_world_size(), len(tensors[0]) if tensors else 0
        if not size or size % world == 0 or size in self._uneven or self._planned % world:
            return
        self._uneven.add(size)
        warnings.warn(
            f"a batch of {size} samples cannot be divided among {world} processes: ops that would have uneven blocks run whole on "
            "every process, which is slower; drop_last=True avoids such batches",
            stacklevel=4,
        )

    def _check(self, tensors: list[torch.Tensor]) -> None:
        """Raises if the processes' first batches differ."""
        mine = torch.tensor([_checksum([t for t in tensors if not isinstance(t, ShardTensor)])], dtype=torch.int64)
        if len(set(self._all(mine))) > 1:
            raise PlanError(f"the processes passed different inputs: {_WHAT_TO_DO}")

    def _all(self, mine: torch.Tensor) -> list[Any]:
        mine = mine.to(self.engine.grid.mesh.device_type)
        found = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, mine)
        return [tuple(f.tolist()) for f in found]

    def _shards(self, leaves: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
        if not tensors:
            return leaves
        world, size = distributed.get_world_size(), len(tensors[0])
        # Sizes are compared in every step: the last batch of one process may be smaller.
        sizes = [s[0] for s in self._all(torch.tensor([size]))]
        self._size = sum(sizes)
        if len(set(sizes)) > 1 and self._size not in self._uneven:
            self._uneven.add(self._size)
            warnings.warn(
                f"the processes have batches of different sizes, {min(sizes)} to {max(sizes)} samples: they are gathered, every process "
                "gets the results of all; drop_last=True avoids such batches",
                stacklevel=5,
            )
        batched = {id(t) for t in tensors if t.shape[0] == size and not isinstance(t, ShardTensor)}
        return [
            (self._shard(leaf, size * world) if len(set(sizes)) == 1 else _gathered(leaf, sizes)) if id(leaf) in batched else leaf
            for leaf in leaves
        ]

    def _shard(self, local: torch.Tensor, size: int) -> torch.Tensor:
        shape = (size, *local.shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        return make(local.contiguous(), self._layout, self.engine, shape, tuple(stride))

    def give(self, result: Any) -> Any:
        """The results as the user gets them: of local batches, those of this process's samples."""
        return pytree.tree_map(self._own if self.local else self._settled, result)

    def _settled(self, x: Any) -> Any:
        """Single numbers are plain tensors."""
        if not isinstance(x, ShardTensor):
            return beside_weights(x, self.engine)
        with torch._C.DisableTorchFunctionSubclass():
            return beside_weights(whole(x, self.engine), self.engine) if x.dim() == 0 else x

    def _own(self, x: Any) -> Any:
        world = distributed.get_world_size()
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[0] != self._size or self._size % world:
                return self._settled(x)
            local = read(x, self.engine, self._layout, self._layout)
            if not local.requires_grad:
                return local
            # The mean of the processes' losses is trained, as DistributedDataParallel does it.
            local = local.view_as(local)
            local.register_hook(lambda grad: grad / world)
            return local


def _gathered(local: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The whole batch, where processes have different numbers of samples."""
    most = max(sizes)
    padded = local.new_zeros((most, *local.shape[1:]))
    padded[: len(local)] = local.detach()
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded.contiguous())
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _checksum(tensors: list[torch.Tensor]) -> int:
    """A number that differs for different tensors."""
    total = 0
    for t in tensors:
        data = t.detach().cpu().contiguous()
        total = zlib.crc32(f"{tuple(data.shape)}{data.dtype}".encode(), total)
        total = zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"", total)
    return total


def micro_batches_of(batch: Any, count: int) -> list[Any]:
    """The batch in equal parts, by samples."""
    leaves, spec = pytree.tree_flatten(batch)
    size = next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0), 0)
    if count < 1 or size % count:
        allowed = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise PlanError(f"{count} micro-batches do not divide {size} samples: {allowed} do" if size else "the step has no batch to divide")
    parts = [x.chunk(count) if isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == size else (x,) * count for x in leaves]
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]


def global_example(example: Any, kind: str, world: int) -> Any:
    """The example of the whole batch."""
    if kind != "local":
        return example
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    size = len(leaves[0]) if leaves else 0

    def whole(x: Any) -> Any:
        batched = isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == size
        return torch.cat([x.detach()] * world) if batched else x

    return pytree.tree_map(whole, example)
