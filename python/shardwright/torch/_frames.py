"""Where a call happens: the module's path, which of its invocations, and the how-manieth call of the function there.

The same forward pass makes the same calls at capture and at each step, so this identifies a call's place in the plan. A
recomputed module (activation checkpointing) makes its calls again under the same keys.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Protocol

import torch
from torch.nn.modules import module as hooks

#: Module path, invocation of the module, name of the function, number of the call.
Key = tuple[str, int, str, int]


class Frame:
    """An invocation of a module."""

    __slots__ = ("counts", "invocation", "module", "path")

    def __init__(self, path: str, module: torch.nn.Module, invocation: int) -> None:
        self.path, self.module, self.invocation = path, module, invocation
        self.counts: dict[str, int] = {}

    @property
    def kind(self) -> str:
        """The module's class."""
        return f"{type(self.module).__module__}.{type(self.module).__qualname__}"


class Owner(Protocol):
    """Follows the invocations of a module's submodules."""

    def enter(self, module: torch.nn.Module) -> None: ...

    def leave(self, module: torch.nn.Module) -> None: ...


class Frames:
    """The invocations that are under way, and how often each module was invoked in this pass."""

    def __init__(self, root: torch.nn.Module, owner: Owner) -> None:
        self.paths: dict[int, str] = {}
        self.stack: list[Frame] = []
        self._invocations: dict[str, int] = {}
        found = weakref.ref(owner)
        for path, module in root.named_modules():
            self.paths[id(module)] = path
            _OWNERS[id(module)] = (weakref.ref(module, _forget(id(module))), found)
        _register()

    def enter(self, module: torch.nn.Module) -> None:
        path = self.paths[id(module)]
        if not self.stack:
            # A recomputation, or a submodule that is called by itself: as in the first invocation.
            self._invocations = {}
        at = self._invocations.get(path, 0)
        self._invocations[path] = at + 1
        self.stack.append(Frame(path, module, at))

    def leave(self) -> None:
        if self.stack:
            self.stack.pop()

    def key(self, func: Any) -> Key | None:
        """The key of the next call of a function; `None` outside of all modules."""
        if not self.stack:
            return None
        frame, name = self.stack[-1], getattr(func, "__name__", "") or str(func)
        counts = frame.counts
        at = counts.get(name, 0)
        counts[name] = at + 1
        return frame.path, frame.invocation, name, at


#: Modules by identity, with what follows them: this is asked twice in every call of every module.
_OWNERS: dict[int, tuple[weakref.ref[torch.nn.Module], weakref.ref[Any]]] = {}
_REGISTERED: list[Any] = []


def _forget(number: int) -> Any:
    """Forgets a module that is gone, unless another one has its number by now."""

    def forget(gone: Any) -> None:
        if (found := _OWNERS.get(number)) is not None and found[0] is gone:
            del _OWNERS[number]

    return forget


def _owner(module: torch.nn.Module) -> Owner | None:
    found = _OWNERS.get(id(module))
    return found[1]() if found is not None and found[0]() is module else None


def _before(module: torch.nn.Module, _: Any) -> None:
    if (owner := _owner(module)) is not None:
        owner.enter(module)


def _after(module: torch.nn.Module, _: Any, __: Any) -> None:
    if (owner := _owner(module)) is not None:
        owner.leave(module)


def _register() -> None:
    if not _REGISTERED:
        _REGISTERED.append(hooks.register_module_forward_pre_hook(_before))
        _REGISTERED.append(hooks.register_module_forward_hook(_after, always_call=True))


#: Where PyTorch and this package are. A user's own folder may be named `torch` too.
_NOT_THE_USERS = ("<", *(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, os.path.dirname(__file__))))


def is_users(file: str) -> bool:
    """Whether code belongs neither to PyTorch nor to this package."""
    return not file.startswith(_NOT_THE_USERS)


def line_of_user() -> str:
    """The innermost line that belongs neither to PyTorch nor to this package, with its code."""
    import linecache

    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}" + (f": {code}" if code else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""
