"""Weights as they were before `parallelize` made them DTensors. Code that still refers to them means the new ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._native import PlanError

#: The new weight of an old one.
_NEW: Any = WeakIdKeyDictionary()
_REGISTERED: list[Any] = []


def replace(old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Notes that a weight was replaced. Its hooks and attributes move to the new one."""
    new.__dict__.update(old.__dict__)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    _NEW[old] = weakref.ref(new)
    if not _REGISTERED:
        _REGISTERED.append(register_optimizer_step_pre_hook(_check))


def current(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself, or the one that has replaced it."""
    found = _NEW.get(weight)
    return weight if found is None or (new := found()) is None else new


def _check(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    """Raises if an optimizer was made before `parallelize`: it would change weights that no module reads."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if type(p) is torch.nn.Parameter and _NEW and p in _NEW:
                raise PlanError(
                    f"{type(optimizer).__name__} has weights from before parallelize, which the module no longer reads: make the optimizer "
                    "after parallelize, from the parameters of the planned module"
                )
