"""Times a training step, for `parallelize(..., measure=True)`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ._probe import median_seconds


def trained(result: Any) -> torch.Tensor:
    """The scalar that is trained: a module's first result if that is one number, otherwise its mean."""
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
