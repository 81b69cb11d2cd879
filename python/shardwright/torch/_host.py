"""The host's time per kernel of PyTorch's training steps, op by op: what bounds the steps of small models.

This file needs PyTorch alone, so that computers without the package can run it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

# Blocks of the two models whose difference is measured: what a step costs once drops out of it.
_FEW, _MANY = 2, 10
_STEPS = 20


class _Block(nn.Module):
    """A transformer block with tiny tensors: its kernels take less time than the host needs to launch them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.products = nn.ModuleList(
            nn.Linear(*sizes) for sizes in [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        mix, out, up, down = self.products
        q, k, v = mix(first(x)).unflatten(-1, (3, 2, -1)).unbind(-3)
        y = nn.functional.scaled_dot_product_attention(*(part.transpose(-2, -3) for part in (q, k, v)), is_causal=True)
        x = x + out(y.transpose(-2, -3).flatten(-2))
        return x + down(nn.functional.gelu(up(second(x))))


def _step(blocks: int, width: int = 32) -> Any:
    """A training step with fused Adam."""
    model = nn.Sequential(*(_Block(width) for _ in range(blocks))).cuda().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    x = torch.randn(2, 16, width, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _seconds(step: Any) -> float:
    """Median seconds of a step."""
    for _ in range(5):
        step()
    times = []
    for _ in range(_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _kernels(step: Any) -> int:
    """Kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in profile.key_averages() if event.device_type == device)


def host_launch_seconds() -> float:
    """Seconds of the host per kernel, on this computer and its GPU: the `host_launch` of machine files."""
    few, many = _step(_FEW), _step(_MANY)
    kernels = _kernels(many) - _kernels(few)
    return (_seconds(many) - _seconds(few)) / max(kernels, 1)


if __name__ == "__main__":
    print(f"{host_launch_seconds() * 1e6:.1f} us per kernel")
