"""Peak memory of steps beside the plan's prediction. `memory.py RANK WORLD PORT FOLDER` runs the cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from processes import run_cases
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.torch import ShardTensor, parallelize


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of memory that tensors hold, after every op. Memory inside of kernels is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(self, x: Any) -> None:
        """Adds a tensor's memory."""
        x = x._local if isinstance(x, ShardTensor) else x._local_tensor if isinstance(x, DTensor) else x
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            storage = x.untyped_storage()
            known = self._held.get(storage._cdata)
            if known is None or known[0].expired():
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            self.see(x)
        self._held = {k: held for k, held in self._held.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return result


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, s, c = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(n, s, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, s, c))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def blocks() -> Any:
    width = 256
    x = torch.randn(8, 32, width)
    return nn.Sequential(*(Block(width) for _ in range(4))), (x, torch.randn_like(x)), functional.mse_loss


def layers() -> Any:
    width = 512
    stack = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*stack), (torch.randn(256, width), torch.randn(256, width)), functional.mse_loss


def measured(build: Callable[[], Any], solver: str, spare: bool = False, **options: Any) -> dict[str, Any]:
    """The second step's forward and backward passes, with Adam's state. `spare`: there is memory to spare."""
    module, inputs, loss_fn = build()
    planned: dict[str, Any] = {"solver": solver, "optimizer": "adam", "progress": False, **options}
    # With the memory that the plan needs, and no more: nothing is kept from step to step.
    most = 0 if spare else parallelize(copy.deepcopy(module), inputs, loss_fn, **planned).plan.peak_memory_bytes
    model = parallelize(module, inputs, loss_fn, **planned, **({} if spare else {"memory": most}))
    update = torch.optim.Adam(model.parameters())

    def passes() -> None:
        model.accumulate(*inputs) if "micro_batches" in options else model(*inputs).backward()

    passes()
    update.step()
    update.zero_grad()
    live = LiveBytes()
    kept = [batch._buffer for batch in model._engine.weights.batches]
    for x in pytree.tree_leaves([kept, list(model.parameters()), [list(s.values()) for s in update.state.values()], inputs]):
        live.see(x)
    with live:
        passes()
    gradients = sum(p.to_local().nbytes for p in model.parameters())
    return {"predicted": model.plan.data["peak_memory_bytes"], "measured": live.peak, "gradients": gradients}


NARROW = {"mixed_precision": torch.bfloat16, "recompute": "off"}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "blocks data": lambda: measured(blocks, "data", recompute="off"),
    "blocks fsdp": lambda: measured(blocks, "fsdp", recompute="off"),
    "blocks data, recomputed": lambda: measured(blocks, "data", recompute="full"),
    "blocks fsdp, recomputed": lambda: measured(blocks, "fsdp", recompute="full"),
    "blocks data, micro-batches": lambda: measured(blocks, "data", recompute="off", micro_batches=4),
    "blocks data, 16 bits": lambda: measured(blocks, "data", **NARROW),
    "blocks fsdp, 16 bits": lambda: measured(blocks, "fsdp", **NARROW),
    "layers data": lambda: measured(layers, "data", recompute="off"),
    "blocks data, memory to spare": lambda: measured(blocks, "data", spare=True, recompute="off"),
    "layers megatron": lambda: measured(layers, "megatron", recompute="off"),
}

if __name__ == "__main__":
    run_cases(CASES)
