"""Times a training step, for `parallelize(..., measure=True)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ._probe import median_seconds


def is_losses(result: Any) -> bool:
    """Whether a result is a mapping of losses, none of which is the total (detectors of torchvision): their sum is trained."""
    if not isinstance(result, Mapping) or "loss" in result or len(result) < 2:
        return False
    return all(isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point() for x in result.values())


def trained(result: Any) -> torch.Tensor:
    """The scalar that is trained: a module's first result if that is one number, otherwise its mean."""
    if is_losses(result):
        return torch.stack(list(result.values())).sum()
    first = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return first if first.dim() == 0 else first.mean()


def seconds_of(model: torch.nn.Module, args: Any, kwargs: Any, hopeless: float) -> float:
    """Median seconds of a forward and backward pass, over all processes. A pass slower than `hopeless` runs once.

    The random generator's state is restored."""

    def step() -> None:
        trained(model(*args, **kwargs)).backward()
        model.zero_grad()

    with torch.random.fork_rng():
        return median_seconds(step, patience=4.0, hopeless=hopeless)
