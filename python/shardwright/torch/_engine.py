"""Runs the user's own module by a plan.

The module's code runs as it is, on tensors of which each process holds a shard. Each call of a PyTorch function that the
plan knows runs on shards in its planned layouts. Other calls keep their operands' layout if they are element-wise, and run
on whole tensors otherwise, which is always right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .._native import PlanError
from ._follow import PlannedCall, followed, matched
from ._frames import Frames, Key, line_of_user
from ._functions import SHAPE_ONLY, is_plain, writes_first
from ._kernels import LocalShapeError
from ._layout import Grid, Layout, dual, is_partial, layout_of
from ._replaced import current
from ._run import Run
from ._sites import Site
from ._tensor import ShardTensor, gradient_of, linked, rewritten, settled, sort_of, version, whole
from ._transforms import OnWhole, are_active
from ._trace import Call, autocast_state, program_of
from ._translate import Translation, Translator
from ._weights import Read, Weights


@dataclass
class PlannedPass:
    """The calls of the captured pass."""

    calls: dict[Key, PlannedCall] = field(default_factory=dict)
    #: In-place calls that no other view sees.
    safe: set[Key] = field(default_factory=set)
    #: Calls whose results are later written through views: they are whole.
    whole: set[Key] = field(default_factory=set)


#: Arguments that are values, and arguments that hold others.
_VALUES = {int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout}
_LISTS = {list, tuple, torch.Size}
_MOST_ACTIONS = 1 << 16
_DTYPE = torch.Tensor.dtype

_STEPS: dict[Any, Translation] = {}


def translation(signature: Any, program: Any, free: tuple[bool, ...]) -> Translation:
    """The planner's ops of a call."""
    key = (signature, free)
    if key not in _STEPS:
        # Constants of the translation have data, also while a pass without data is recorded.
        with _disable_current_modes():
            _STEPS[key] = Translator(program, free).run()
    return _STEPS[key]


class _Mode(TorchFunctionMode):
    """Sends all function calls of a forward pass to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        engine = self.engine
        if is_plain(func, args) and (engine.weights.dtype is None or getattr(func, "__self__", None) is not _DTYPE):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return engine.call(func, args, kwargs or {}, engine.frames.key(func))


class Engine:
    """Runs calls on the mesh."""

    def __init__(self, root: torch.nn.Module, planned: PlannedPass, mesh: Any, module: torch.nn.Module | None = None) -> None:
        #: The module whose weights the plan names: the root, or the module whose loss the root computes.
        self.module = module if module is not None else root
        self.grid = Grid(mesh)
        self.whole: Layout = ("R",) * len(self.grid.sizes)
        self.planned = planned
        self.weights = Weights(self)
        #: Whether the pass is differentiated.
        self.differentiable = True
        #: The call that runs, and its op while that computes: reshards before and after it are none.
        self.now: Key | None = None
        self.op = ""
        self._plans: dict[Key, Run] = {}
        self.frames = Frames(root, self)
        self.fuse = True
        self._mode: list[Any] = []
        #: Makes the mode of a pass, and the mode of the last pass.
        self.mode: Callable[[Engine], Any] = _Mode
        self.last_mode: Any = None
        self._runs: dict[Any, Run | None] = {}
        #: What calls do, by their place in the pass and the sorts of their arguments.
        self._quick: dict[Any, Callable[[Any], Any]] = {}
        #: What the call at a place did the last time.
        self._sites: dict[Key | None, Site | None] = {}
        self._held: dict[int, tuple[torch.Tensor, int, dict[Any, Any]]] = {}
        #: Functions that ran on whole tensors, and how often.
        self.gathered: dict[str, int] = {}
        self._flatten()

    def _flatten(self) -> None:
        """Makes a sum over several axes one collective: DTensor uses a flattened submesh if there is one."""
        names = self.grid.mesh.mesh_dim_names
        summed = set()
        for call in self.planned.calls.values():
            for form in call.forms.values():
                summed |= {tuple(i for i, at in enumerate(layout) if at == "P") for layout in form["outputs"]}
                summed.add(tuple(form["split"]))
        for axes in sorted(summed):
            if len(axes) > 1:
                self.grid.mesh[tuple(names[i] for i in axes)]._flatten()

    # Invocations of modules.

    def enter(self, module: torch.nn.Module) -> None:
        self.frames.enter(module)
        if len(self.frames.stack) == 1:
            self.differentiable = torch.is_grad_enabled()
            self.last_mode = self.mode(self)
            self.last_mode.__enter__()
            self._mode.append(self.last_mode)
            transforms = OnWhole(self)
            transforms.__enter__()
            self._mode.append(transforms)

    def leave(self, module: torch.nn.Module) -> None:
        self.frames.leave()
        if not self.frames.stack and self._mode:
            while self._mode:
                self._mode.pop().__exit__(None, None, None)
            self._held = {}
            self.weights.end()

    def reads_of_weights(self) -> Iterator[Read]:
        """Every read of a weight in the captured pass."""
        for key, planned in self.planned.calls.items():
            run = self._planned_run(key, planned)
            for call in run.calls:
                if run.conversion(call, planned.weights) is not None:
                    continue
                for t, layout, gradient in zip(call.inputs, call.layouts, call.gradients, strict=True):
                    of, dtype = run.converted.get(t, (t, None))
                    if of in planned.weights:
                        yield planned.weights[of], layout, gradient, dtype

    def _planned_run(self, key: Key, planned: PlannedCall) -> Run:
        if key not in self._plans:
            self._plans[key] = Run(planned.step, planned.forms, self, self.fuse)
        return self._plans[key]

    def reads(self, x: torch.Tensor) -> dict[Any, Any]:
        """The reshards of a tensor that were made so far."""
        now = version(x)
        if now < 0:
            # Writes cannot be noticed.
            return {}
        if isinstance(x, ShardTensor):
            if x._reads.get("version") != now:
                x._reads = {"version": now}
            return x._reads
        if not self.frames.stack:
            return {}
        found = self._held.get(id(x))
        if found is None or found[0] is not x or found[1] != now:
            found = self._held[id(x)] = (x, now, {})
        return found[2]

    # Calls.

    def call(self, func: Any, args: Any, kwargs: Any, key: Key | None) -> Any:
        """Runs a function of PyTorch."""
        site = self._sites.get(key)
        if site is not None and site.func is func and not torch._C._is_any_autocast_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                tensors = site.tensors_of(self, (*args, *kwargs.values()) if kwargs else args, kwargs)
                if tensors is not None:
                    self.now, self.op = key, ""
                    return site.act(tensors)
        if isinstance(func, OpOverload):
            # Below a dispatch mode: autograd has run already.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "backward" and args and isinstance(args[0], torch.Tensor):
            return torch.autograd.backward(*_backward(*args, **kwargs))
        if func is torch.autograd.grad:
            return self._gradients(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if are_active():
                if any(isinstance(x, (ShardTensor, DTensor)) for x in pytree.tree_leaves((args, kwargs))):
                    raise PlanError(
                        f"a function that torch.func transforms (`vmap`, `grad`, ...) reads a split tensor or a weight from around it, at "
                        f"{line_of_user()}: make it an argument of the function (in_dims=None for vmap), which then gets the whole tensor"
                    )
                return func(*args, **kwargs)
            # Calls of a pass were asked before.
            if (key is None or self.weights.dtype is not None) and is_plain(func, args):
                if self.weights.dtype is not None and getattr(func, "__self__", None) is _DTYPE:
                    args = (self.weights.stand_in(args[0]), *args[1:])
                return func(*args, **kwargs)
            self.now, self.op = key, ""
            place = self._place(func, args, kwargs, key)
            if place is not None and (quick := self._quick.get(place[0])) is not None:
                if key is not None and self.weights.dtype is None and not torch._C._is_any_autocast_enabled():
                    if len(self._sites) >= _MOST_ACTIONS:
                        self._sites.clear()
                    self._sites[key] = Site.of(func, quick, args, kwargs)
                return quick(place[1])
            call = Call.of(func, args, kwargs)
            call.tensors = [current(t) if type(t) is torch.nn.Parameter else t for t in call.tensors]
            if self.weights.dtype is not None:
                call.tensors = [self.weights.stand_in(t) for t in call.tensors]
            planned = self.planned.calls.get(key) if key is not None else None
            if planned is None and not any(isinstance(t, (ShardTensor, DTensor)) for t in call.tensors):
                return func(*args, **kwargs)
            for i, t in enumerate(call.tensors):
                if isinstance(t, ShardTensor) and t._engine is not self:
                    call.tensors[i] = whole(t, t._engine)
            return self._call(call, planned, key, writes_first(func, kwargs), place)

    def _gradients(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.autograd.grad`. Gradients of activations are found at their shards."""
        given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        own = [linked(x) if isinstance(x, ShardTensor) else None for x in given]
        at = [x if shard is None else shard for x, shard in zip(given, own, strict=True)]
        with torch._C.DisableTorchFunctionSubclass():
            found = torch.autograd.grad(outputs, at, *args, **kwargs)
        return tuple(
            g if g is None or shard is None else gradient_of(x, g) for g, x, shard in zip(found, given, own, strict=True)
        )

    def _place(self, func: Any, args: Any, kwargs: Any, key: Key | None) -> tuple[Any, list[torch.Tensor]] | None:
        """What the run of a call depends on, and its distinct tensors; `None` for arguments of other kinds."""
        parts: list[Any] = [func, key, autocast_state() if torch._C._is_any_autocast_enabled() else None, *kwargs]
        tensors: list[torch.Tensor] = []
        for arg in (*args, *kwargs.values()):
            if not self._describe(arg, parts, tensors):
                return None
        return tuple(parts), tensors

    def _describe(self, arg: Any, parts: list[Any], tensors: list[torch.Tensor]) -> bool:
        kind = type(arg)
        if isinstance(arg, torch.Tensor):
            if kind is torch.nn.Parameter:
                arg = current(arg)
            if self.weights.dtype is not None:
                arg = self.weights.stand_in(arg)
            for i, other in enumerate(tensors):
                if other is arg:
                    parts.append(("again", i))
                    return True
            tensors.append(arg)
            if kind is ShardTensor:
                parts.append(sort_of(arg))
                return arg._engine is self
            parts += (kind, arg.shape, arg.stride(), arg.dtype, arg.device, arg.requires_grad)
            return arg.layout is torch.strided
        if kind in _VALUES:
            parts += (kind, arg)
            return True
        if kind in _LISTS:
            parts += (kind, len(arg))
            return all(self._describe(item, parts, tensors) for item in arg)
        return False

    def _call(self, call: Call, planned: PlannedCall | None, key: Key | None, writes: bool, place: Any) -> Any:
        name = getattr(call.func, "__name__", str(call.func))
        if name in SHAPE_ONLY:
            # Strides are kept, memory is not needed.
            return call.run([_stand_in(t) if isinstance(t, (ShardTensor, DTensor)) else t for t in call.tensors])
        signature = call.signature()
        program = program_of(call, signature)
        if program is None:
            if writes and isinstance(call.tensors[0], ShardTensor):
                return self._written(call, key)
            return self._whole(call)
        if program.mutated is not None:
            return self._in_place(call, program, key)
        free = planned.free if planned is not None and len(planned.free) == len(call.tensors) else None
        if free is None:
            free = tuple(
                not isinstance(t, (ShardTensor, DTensor)) and not (t.is_floating_point() and t.requires_grad)
                for t in call.tensors
            )
        run = self._run(call, signature, program, free, planned, key)
        if run is None:
            return self._whole(call)
        act = self._action(run, program, planned, key)
        if place is not None:
            if len(self._quick) >= _MOST_ACTIONS:
                self._quick.clear()
            self._quick[place[0]] = act
        return act(call.tensors)

    def _action(self, run: Run, program: Any, planned: PlannedCall | None, key: Key | None) -> Callable[[Any], Any]:
        """What a call does, as a function of its tensors."""
        settle = planned.settle if planned is not None else {}
        unplanned, gathered, shares = planned is None, key in self.planned.whole, any(program.aliases)
        quick = run.quick(settle) if program.spec.is_leaf() and not gathered else None
        if quick is not None and not shares and not (unplanned and run.partial):
            return quick

        def act(tensors: Any) -> Any:
            if shares:
                for t in tensors:
                    if isinstance(t, ShardTensor):
                        t._shares = True
            if quick is not None:
                result = quick(tensors)
                result = settled(result, self) if unplanned else result
                if shares and isinstance(result, ShardTensor):
                    result._shares = True
                return result
            results = run(tensors, settle)
            if unplanned:
                results = [settled(r, self) for r in results]
            if gathered:
                results = [whole(r, self).clone() if isinstance(r, ShardTensor) else r for r in results]
            for r, alias in zip(results, program.aliases, strict=True):
                if alias and isinstance(r, ShardTensor):
                    r._shares = True
            return pytree.tree_unflatten(results, program.spec)

        return act

    def _run(
        self, call: Call, signature: Any, program: Any, free: tuple[bool, ...], planned: PlannedCall | None, key: Key | None
    ) -> Run | None:
        at: Any = key
        if planned is None:
            at = tuple(t._layout if isinstance(t, ShardTensor) else None for t in call.tensors)
        where = (signature, free, at)
        if where in self._runs:
            return self._runs[where]
        step = translation(signature, program, free)
        forms: Mapping[str, Any] | None = None
        if planned is not None:
            forms = matched(step, planned)
        if forms is None and not any(is_replicated for _, is_replicated in step.opaque):
            forms = followed(step, call.tensors, self)
        run = None
        if planned is not None and key is not None and step is planned.step:
            run = self._planned_run(key, planned)
        elif forms is not None:
            try:
                run = Run(step, forms, self, self.fuse)
            except LocalShapeError:
                # Sizes that the plan does not fit.
                pass
        self._runs[where] = run
        return run

    def _whole(self, call: Call) -> Any:
        name = getattr(call.func, "__name__", str(call.func))
        if any(isinstance(t, ShardTensor) and t._layout != self.whole for t in call.tensors):
            self.gathered[name] = self.gathered.get(name, 0) + 1
        given = [whole(t, self) for t in call.tensors]
        before = [version(t) for t in given]
        result = call.run(given)
        for t, g, number in zip(call.tensors, given, before, strict=True):
            if g is not t and version(g) != number:
                self._kept_write(t, g)
        return result

    def _kept_write(self, target: Any, written: torch.Tensor) -> None:
        """What a call has written into the whole of a tensor (an embedding's `max_norm`)."""
        with torch.no_grad():
            at = layout_of(target) if isinstance(target, DTensor) else dual(target._layout)
            block = self.grid.reshard(written.detach(), tuple(target.shape), self.whole, at)
            if isinstance(target, DTensor):
                self.weights.master(target)._local_tensor.copy_(block)
            else:
                target._local, target._layout, target._linked, target._reads, target._sort = block.clone(), at, None, {}, None

    def _check_views(self, call: Call, target: torch.Tensor, key: Key | None) -> None:
        if isinstance(target, ShardTensor) and target._shares and key not in self.planned.safe:
            raise PlanError(
                f"an in-place op ({call.func.__name__}) writes into a view of a split tensor, at {line_of_user()}: "
                "write `x = x + y` instead of `x += y` there"
            )

    def _written(self, call: Call, key: Key | None) -> Any:
        """A write into a part of a tensor: every process writes into the whole, and keeps its shard."""
        target = call.tensors[0]
        self._check_views(call, target, key)
        copied = whole(target, self).clone()
        result = call.run([copied, *(whole(t, self) for t in call.tensors[1:])])
        target.copy_(copied)
        return target if result is copied else result

    def _in_place(self, call: Call, program: Any, key: Key | None) -> Any:
        """An in-place op. It writes into the shard; the other operands take the written tensor's layout."""
        at, node = program.mutated
        target = call.tensors[at]
        self._check_views(call, target, key)
        if isinstance(target, DTensor):
            with implicit_replication():
                return call.run([t if i == at else whole(t, self) for i, t in enumerate(call.tensors)])
        if not isinstance(target, ShardTensor):
            return self._whole(call)
        tags = node.target.tags
        if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not is_partial(target._layout):
            alike = all(isinstance(t, ShardTensor) and t._layout == target._layout and t.shape == target.shape for t in call.tensors)
            shards = [linked(t) for t in call.tensors] if alike else [None]
            if all(shard is not None for shard in shards) and not (shards[at].is_leaf and shards[at].requires_grad):
                call.run(shards)
                return rewritten(target, shards[at])
        return call.run([whole(t, self) if isinstance(t, DTensor) else t for t in call.tensors])


def _stand_in(t: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> Any:
    return (tensor,), gradient, retain_graph, create_graph, None, inputs


def notice(message: str) -> None:
    """Tells the user once."""
    warnings.warn(message, stacklevel=3)
