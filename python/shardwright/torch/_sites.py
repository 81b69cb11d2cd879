"""What a call did the last time at its place in the pass. A call with arguments of the same sorts does it again, which is told by a
few comparisons instead of a look-up by everything that it depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._tensor import ShardTensor, sort_of

#: Arguments that are compared by value.
_VALUES = (int, float, bool, str, complex, torch.dtype, torch.device, torch.memory_format, torch.layout)


class Site:
    """A place, the sorts of its arguments, and what to do with its tensors."""

    __slots__ = ("act", "constants", "count", "func", "names", "others", "shards", "tensors", "weights")

    def __init__(self, func: Any, act: Callable[[Sequence[torch.Tensor]], Any], names: tuple[str, ...]) -> None:
        self.func, self.act, self.names, self.count = func, act, names, 0
        #: Positions of the arguments, with what they must be.
        self.constants: list[tuple[int, Any, type]] = []
        self.shards: list[tuple[int, int]] = []
        self.weights: list[tuple[int, Any, bool]] = []
        self.others: list[tuple[int, tuple[Any, ...]]] = []
        self.tensors: list[int] = []

    @staticmethod
    def of(func: Any, act: Callable[[Sequence[torch.Tensor]], Any], args: Any, kwargs: Any) -> Site | None:
        """The site of a call; `None` for arguments that only a look-up can tell apart."""
        site = Site(func, act, tuple(kwargs))
        known: list[Any] = []
        for i, arg in enumerate((*args, *kwargs.values())):
            if isinstance(arg, torch.Tensor):
                if any(arg is other for other in known):
                    return None
                known.append(arg)
                site.tensors.append(i)
                if type(arg) is ShardTensor:
                    site.shards.append((i, sort_of(arg)))
                elif type(arg) is DTensor and arg.is_leaf:
                    site.weights.append((i, arg, arg.requires_grad))
                elif type(arg) is torch.Tensor:
                    site.others.append((i, _facts(arg)))
                else:
                    return None
            elif arg is None or arg is ... or type(arg) in _VALUES or (type(arg) in (tuple, torch.Size) and all(type(x) is int for x in arg)):
                site.constants.append((i, arg, type(arg)))
            else:
                return None
        site.count = len(site.constants) + len(site.tensors)
        return site

    def tensors_of(self, engine: Any, given: Sequence[Any], kwargs: Any) -> list[Any] | None:
        """The call's tensors, if its arguments are of the same sorts."""
        if len(given) != self.count or (kwargs or self.names) and tuple(kwargs) != self.names:
            return None
        for i, value, kind in self.constants:
            arg = given[i]
            if arg is not value and (type(arg) is not kind or arg != value):
                return None
        for i, sort in self.shards:
            arg = given[i]
            if type(arg) is not ShardTensor or arg._engine is not engine:
                return None
            # `sort_of` for tensors that have their number.
            if (arg._sort != sort or arg._version != arg._made) and sort_of(arg) != sort:
                return None
        for i, weight, trained in self.weights:
            arg = given[i]
            if arg is not weight or arg.requires_grad is not trained:
                return None
        for i, facts in self.others:
            arg = given[i]
            if type(arg) is not torch.Tensor or _facts(arg) != facts:
                return None
        tensors = [given[i] for i in self.tensors]
        if len(tensors) > 1 and (tensors[0] is tensors[1] or len(tensors) > 2 and len({id(t) for t in tensors}) != len(tensors)):
            return None
        return tensors


def _facts(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.layout
