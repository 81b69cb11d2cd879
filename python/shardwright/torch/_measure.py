"""How long a training step takes: `parallelize(..., measure=True)`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ._probe import median_seconds


def trained(result: Any) -> torch.Tensor:
    """What is trained of a module's results: the first, where that is one number, else its mean."""
    first = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return first if first.dim() == 0 else first.mean()


def seconds_of(model: torch.nn.Module, args: Any, kwargs: Any, hopeless: float) -> float:
    """Median seconds of a pass forwards and backwards, as all processes see it; once where it takes longer than is of
    interest. Random numbers are drawn as if nothing had been run."""

    def step() -> None:
        trained(model(*args, **kwargs)).backward()
        model.zero_grad()

    with torch.random.fork_rng():
        return median_seconds(step, patience=4.0, hopeless=hopeless)
