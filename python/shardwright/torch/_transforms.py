"""Transforms of `torch.func` (`vmap`, `grad`, `jacrev`, ...) that a module's own code calls: they run on whole tensors, since they
cannot see shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ._tensor import ShardTensor, whole

#: Where transforms take their arguments.
_ENTRIES = [
    (module, name)
    for module, names in (
        (apis, ("vmap_impl",)),
        (eager_transforms, ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")),
    )
    for name in names
    if hasattr(module, name)
]


def are_active() -> bool:
    """Whether a transform runs."""
    return bool(torch._C._are_functorch_transforms_active())


class OnWhole:
    """Gives transforms whole tensors while a pass runs."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for module, name in _ENTRIES:
            original = getattr(module, name)
            self._before.append((module, name, original))
            setattr(module, name, self._wrapped(original))

    def __exit__(self, *_: object) -> None:
        while self._before:
            setattr(*self._before.pop())

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if are_active():
                # A transform in another one: its tensors are whole already.
                return original(*args, **kwargs)
            args, kwargs = pytree.tree_map(self._whole, (args, kwargs))
            return original(*args, **kwargs)

        return run

    def _whole(self, x: Any) -> Any:
        return whole(x, self.engine) if isinstance(x, (ShardTensor, DTensor)) else x
