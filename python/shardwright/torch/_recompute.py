"""Applies the plan's recomputation: blocks run under `torch.utils.checkpoint`.

The plan names the forward ops that are computed again in the backward pass. The modules that hold them are checkpointed: all
of a block's ops, or, where the plan keeps some results, only the named ops. Where several of the plan's ops run as one ATen op,
the first decides: the product of a linear layer, not the addition of its bias.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ._frames import Key


class Recomputation:
    """The modules that are checkpointed, and the ops in them that are computed again."""

    def __init__(self, engine: Any, root: torch.nn.Module, recompute: Mapping[str, Any] | None, calls: Sequence[Any]) -> None:
        self.engine = engine
        self.policy = str(recompute["policy"]) if recompute else "off"
        named = set(recompute["ops"]) if recompute else set()
        #: Ops that are computed again, and all ops of the plan: the call's key, and the op's name in the call.
        self.again: set[tuple[Key | None, str]] = set()
        self.planned: set[tuple[Key | None, str]] = set()
        paths: dict[str, None] = {}
        for call in calls:
            if call.key is None:
                continue
            self.planned |= {(call.key, own) for own in call.names}
            found = {(call.key, own) for own, name in call.names.items() if name in named}
            if found:
                self.again |= found
                paths[_block(call.key[0])] = None
        # A module around blocks, such as the loss around the model, is not computed again as a whole: nothing would be saved.
        blocks = [path for path in paths if path.rpartition(".")[2].isdigit()]
        inside = {path: [other for other in paths if other != path and f"{other}.".startswith(f"{path}." if path else "")] for path in paths}
        paths = {path: None for path in paths if not (inside[path] and (path == "" or any(block in inside[path] for block in blocks)))}
        # Kept results must not be written: modules with in-place ops are computed again as a whole.
        self._writes = any(key[0].startswith(tuple(paths)) for key in engine.planned.safe) if paths else False
        own = dict(root.named_modules())
        # A module inside of a checkpointed one is not checkpointed again.
        self.modules = {
            path: own[path] for path in paths if not any(path.startswith(f"{other}.") for other in paths if other != path) and path in own
        }

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Checkpoints the modules in a forward pass."""
        if not self.modules or not torch.is_grad_enabled():
            yield
            return
        before = {path: module.__dict__.get("forward") for path, module in self.modules.items()}
        for module in self.modules.values():
            module.__dict__["forward"] = self._checkpointed(module, module.forward)
        try:
            yield
        finally:
            for path, module in self.modules.items():
                del module.__dict__["forward"]
                if before[path] is not None:
                    module.__dict__["forward"] = before[path]

    def _checkpointed(self, module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {}
        if self.policy != "full" and not self._writes:
            options["context_fn"] = self._contexts

        def run(*args: Any, **kwargs: Any) -> Any:
            first = [True]

            def once(*args: Any, **kwargs: Any) -> Any:
                if first[0]:
                    first[0] = False
                    return forward(*args, **kwargs)
                # In the backward pass: the calls are found in the plan by the module that makes them.
                self.engine.enter(module)
                try:
                    return forward(*args, **kwargs)
                finally:
                    self.engine.leave(module)

            return checkpoint(once, *args, use_reentrant=False, **options, **kwargs)

        return run

    def _contexts(self) -> tuple[_Kept, _Kept]:
        results: dict[Any, Any] = {}
        return _Kept(self, results, again=False), _Kept(self, results, again=True)

    def keeps(self) -> bool:
        """Whether the results of the op that runs are kept."""
        now = (self.engine.now, self.engine.op)
        return now in self.planned and now not in self.again


class _Kept(TorchDispatchMode):
    """Keeps results of a pass, or, in the pass that computes it again, gives them back. Views, and what is written in place (a
    mask that is drawn), are made again."""

    def __init__(self, owner: Recomputation, results: dict[Any, Any], again: bool) -> None:
        super().__init__()
        self.owner, self.results, self.again = owner, results, again
        self._counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(args))
        if made or func.is_view or func._schema.is_mutable or not self.owner.keeps():
            return func(*args, **(kwargs or {}))
        place = (self.owner.engine.now, self.owner.engine.op, func)
        at = (place, self._counts.get(place, 0))
        self._counts[place] = at[1] + 1
        if self.again and at in self.results:
            return self.results[at]
        result = func(*args, **(kwargs or {}))
        if not self.again:
            self.results[at] = pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result)
        return result


def _block(path: str) -> str:
    """The module that is checkpointed for a call in the module at this path: the outermost one with a number for a name, such
    as `layers.3`; otherwise the module itself."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return path
