"""The module and its example as a capture runs them: without data, or copied, in the type of computing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ._frames import is_users
from ._weights import keep_their_type


@contextlib.contextmanager
def without_data(module: torch.nn.Module, args: Any, kwargs: Any, dtype: torch.dtype | None) -> Iterator[Any]:
    """The module and its inputs on tensors without data, in the type of computing. The module itself is not touched."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    names = {}
    given = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
    device = given.device if given is not None and given.device.type != "meta" else torch.device("cpu")

    def data_free(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "meta":
            return mode.from_tensor(x.detach())
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    def computed(x: torch.Tensor) -> torch.Tensor:
        with mode:
            return _in_type(data_free(x), dtype)

    wide = keep_their_type(module)
    for name, p in module.named_parameters():
        fake = torch.nn.Parameter(data_free(p) if id(p) in wide else computed(p), requires_grad=p.requires_grad)
        memo[id(p)] = fake
        names[id(fake)] = (name, p.dtype)
    for b in module.buffers():
        memo[id(b)] = data_free(b)
    copied = copy.deepcopy(module, memo)

    def fake_of(x: Any) -> Any:
        return computed(x) if isinstance(x, torch.Tensor) else copy.copy(x)

    own_args, own_kwargs = pytree.tree_map(fake_of, (tuple(args), dict(kwargs)))
    with mode, torch.random.fork_rng(devices=[]):
        yield copied, own_args, own_kwargs, names


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Restores buffers, attributes of modules and the random generator. Most modules run as a copy; this one may be none."""
    before = [(b, b.detach().clone()) for b in module.buffers()]
    attributes = [(m, dict(m.__dict__)) for m in module.modules()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for m, values in attributes:
                m.__dict__.clear()
                m.__dict__.update(values)
            with torch.no_grad():
                for b, value in before:
                    b.copy_(value)


def _in_type(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def copied_with_values(dtype: torch.dtype | None, module: torch.nn.Module, names: dict[int, tuple[str, torch.dtype]]) -> torch.nn.Module:
    """A copy of the module, so that what its code keeps in attributes stays as it was. The weights are the same memory, or have the
    type of computing. `names` gets the copies too. A module that cannot be copied is returned itself."""
    memo: dict[int, Any] = {}
    wide = keep_their_type(module)
    for p in module.parameters():
        copied = torch.nn.Parameter(_in_type(p.detach(), None if id(p) in wide else dtype), requires_grad=p.requires_grad)
        memo[id(p)], names[id(copied)] = copied, names[id(p)]
    try:
        return copy.deepcopy(module, memo)
    except Exception:
        # Any user's class, and tensors with a gradient among the attributes.
        if dtype is not None:
            raise
        return module


def copies(tree: Any, dtype: torch.dtype | None) -> Any:
    """A copy of each value, in the type of computing: no two leaves share a tensor."""
    return pytree.tree_map(lambda x: _in_type(x.detach().clone(), dtype) if isinstance(x, torch.Tensor) else copy.copy(x), tree)


def explain(module: torch.nn.Module, error: Exception) -> str:
    """The reason that the module does not run on the example, and the line."""
    import traceback

    lines = str(error).strip().splitlines() or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_users(f.filename)] or list(frames)
    at = f"\n  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    return f"{type(module).__name__} does not run on the example inputs: {type(error).__name__}: {lines[0]}{at}"
