"""Pipelines: `parallelize(..., pipeline=2, micro_batches=4)` with the schedules of `torch.distributed.pipelining`.

Every process runs the module's own code for every micro-batch, once per stage that it has. Calls of that stage run on the stage's
devices, by the plan's layouts. Calls of other stages run without data, for shapes only. Tensors that a later stage reads are sent along.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._native import PlanError
from .._plan import Plan
from ._capture import Capture, WithLoss
from ._data import micro_batches_of
from ._engine import Engine
from ._exit import release_at_exit
from ._frames import Key, line_of_user
from ._functions import is_plain
from ._graph import TensorId
from ._layout import Grid, Layout, dual, placements
from ._measure import trained
from ._tensor import make, read

#: PyTorch's classes by the plan's name. Older versions of PyTorch lack some.
_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def _schedule_class(name: str) -> Any:
    return getattr(schedules, _SCHEDULES.get(name, ""), None)


@dataclass(frozen=True)
class Crossing:
    """A tensor that stages send along: the call that makes it and its place in the result, with shape and layout."""

    key: Key
    at: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


class Stages:
    """The stage of every call, and the tensors between stages."""

    def __init__(self, captured: Capture, plan: Plan, forms: Mapping[str, Any], sizes: tuple[int, ...]) -> None:
        pipeline = plan.data["pipeline"]
        stage_of_op = {name: s for s, stage in enumerate(pipeline["stages"]) for name in stage["layers"]}
        self.count = len(pipeline["stages"])
        #: Why the pipeline cannot run.
        self.problems: list[str] = []
        self._tied: set[str] = set()
        self.of: dict[Key, int] = {}
        self.weights: dict[str, int] = {}
        reads: dict[TensorId, int] = {}
        op_of = {t: op for op in captured.graph.ops for t in op.outputs}
        for call in captured.calls:
            if call.key is None or not call.names:
                continue
            # A call is of one stage.
            s = self.of[call.key] = max(stage_of_op.get(name, 0) for name in call.names.values())
            for own in call.step.inputs.values():
                t = call.tensors[own]
                reads[t] = max(reads.get(t, 0), s)
                if t in captured.weights:
                    self._own(captured.graph.tensors[t].name, s)
        #: Per boundary: the tensors that cross it.
        self.crossings: list[list[Crossing]] = [[] for _ in range(self.count - 1)]
        for t, (key, at) in captured.made.items():
            if key not in self.of or t not in op_of:
                continue
            tensor, op = captured.graph.tensors[t], op_of[t]
            layout = _even(dual(tuple(forms[op.name]["outputs"][op.outputs.index(t)])), tensor.shape, sizes)
            stride = torch.empty(tensor.shape, device="meta").stride()
            crossing = Crossing(key, at, tensor.shape, tuple(stride), tensor.dtype, layout)
            for boundary in range(self.of[key], min(reads.get(t, 0), self.count - 1)):
                self.crossings[boundary].append(crossing)
        for s, sent in enumerate(self.crossings):
            if not sent:
                self.problems.append(f"stage {s + 2} reads nothing of stage {s + 1}: plan fewer stages")

    def _own(self, name: str, stage: int) -> None:
        other = self.weights.setdefault(name, stage)
        if other != stage and name not in self._tied:
            self._tied.add(name)
            self.problems.append(f"`{name}` is used in stages {min(other, stage) + 1} and {max(other, stage) + 1}: untie the weight")


def _even(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """The layout without splits that would be uneven."""
    parts: dict[str, int] = {}
    for at, size in zip(layout, sizes, strict=True):
        parts[at] = parts.get(at, 1) * size
    return tuple("R" if at.startswith("S") and shape[int(at[1:])] % parts[at] else at for at in layout)


class _StageMode(TorchFunctionMode):
    """Runs the calls of one stage, and those of others without data."""

    def __init__(self, stages: Stages, own: int, engine: Engine, received: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.stages, self.own, self.engine = stages, own, engine
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        before = stages.crossings[own - 1] if own else []
        self.received = {
            (c.key, c.at): make(local, c.layout, engine, c.shape, c.stride) for c, local in zip(before, received, strict=True)
        }
        self.wanted = {(c.key, c.at): c for c in stages.crossings[own]} if own + 1 < stages.count else {}
        self.made: dict[tuple[Key, int], torch.Tensor] = {k: t for k, t in self.received.items() if k in self.wanted}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_plain(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        key = self.engine.frames.key(func)
        stage = self.stages.of.get(key) if key is not None else None
        missing = any(isinstance(x, FakeTensor) for x in pytree.tree_leaves((args, kwargs)))
        if stage == self.own or (stage is None and not missing):
            if missing:
                name = getattr(func, "__name__", str(func))
                raise PlanError(
                    f"{name} at {line_of_user()} reads a tensor of another stage of the pipeline that the plan does not send: a result that was "
                    "written in place, or that takes another path than in the example; plan without a pipeline"
                )
            result = self.engine.call(func, args, kwargs, key)
            if stage is not None and key is not None:
                self._keep(key, result)
            return result
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), self.fake:
            own, named = pytree.tree_map(self._data_free, (tuple(args), dict(kwargs)))
            result = func(*own, **named)
        if stage is None or key is None or stage > self.own:
            return result
        leaves, spec = pytree.tree_flatten(result)
        return pytree.tree_unflatten([self.received.get((key, i), x) for i, x in enumerate(leaves)], spec)

    def _data_free(self, x: Any) -> Any:
        """A tensor of another stage: it has a shape and a device, but no data."""
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.engine.grid.mesh.device_type)

    def _keep(self, key: Key, result: Any) -> None:
        for i, x in enumerate(pytree.tree_leaves(result)):
            if (key, i) in self.wanted:
                self.made[key, i] = x

    def sent(self) -> tuple[torch.Tensor, ...]:
        """The local tensors for the next stage."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(read(self.made[k], self.engine, c.layout, c.layout).contiguous() for k, c in self.wanted.items())


class _Stage(torch.nn.Module):
    """One stage as the schedules run it: from received tensors to those that are sent, or to the loss."""

    def __init__(self, owner: Pipelined, number: int) -> None:
        super().__init__()
        self.number = number
        object.__setattr__(self, "owner", owner)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.owner._parameters_of(self.number)

    def forward(self, *received: torch.Tensor, index: int) -> Any:
        return self.owner._pass(received, index, self.number)


class Pipelined(torch.nn.Module):
    """A module whose stages run on groups of processes. `.step(...)` runs the passes of a step; the weights of this process's
    stages are its parameters, under the module's names."""

    def __init__(
        self,
        module: torch.nn.Module,
        captured: Capture,
        plan: Plan,
        layouts: Mapping[str, Any],
        mesh: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_original", module)
        object.__setattr__(self, "_root", module if loss_fn is None else WithLoss(module, loss_fn))
        self.plan, self.mesh = plan, mesh
        pipeline = plan.data["pipeline"]
        schedule = _schedule_class(pipeline["schedule"])
        problems = [f"{call} cannot be traced, so its stage is not known" for call in captured.untraced]
        if schedule is None:
            known = ", ".join(name for name in _SCHEDULES if _schedule_class(name))
            problems.append(f"schedule {pipeline['schedule']}: this PyTorch runs modules by {known}")
        names = list(mesh.mesh_dim_names)
        self._axes = tuple(names.index(name) for name in pipeline["axes"])
        inner = [name for name in names if name not in pipeline["axes"]]
        self.stage_mesh = mesh[tuple(inner)]
        grid = Grid(mesh)
        group = grid.group(self._axes)
        rank = distributed.get_rank(group)
        #: This process's stages, from 0.
        self.stages = [number for number, stage in enumerate(pipeline["stages"]) if int(stage["group"]) == rank]
        self._group: Any = group
        self.micro_batches = int(plan.data["micro_batches"])
        forms = {name: self._inner(form) for name, form in layouts["ops"].items()}
        self._stages = Stages(captured, plan, forms, tuple(self.stage_mesh.mesh.shape))
        problems += self._stages.problems
        if problems or schedule is None:
            raise PlanError("\n  ".join(["the module cannot run in this pipeline; plan without one, or mend:", *problems]))
        planned = captured.planned(forms)
        self._engine = Engine(self._root, planned, self.stage_mesh, module)
        stored = {name: self._within(at) for name, at in layouts["stored"].items()}
        self._take_weights(module, stored)
        self._engine.weights.keep_within(plan, self.parameters())
        self._parts: list[Any] = []
        own: Any = [self._pipeline_stage(number) for number in self.stages]
        several = issubclass(schedule, schedules.PipelineScheduleMulti)
        self._schedule: Any = schedule(
            own if several else own[0], self.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False
        )
        release_at_exit(mesh, weakref.WeakMethod(self._release))

    def _release(self) -> None:
        """Drops the references to process groups."""
        self._group = self._schedule = None

    def _within(self, layout: Iterable[str]) -> Layout:
        """A layout without the pipeline's axes. A stage of one process has an axis of one process."""
        kept = tuple(at for axis, at in enumerate(layout) if axis not in self._axes)
        return kept or ("R",)

    def _inner(self, form: Mapping[str, Any]) -> dict[str, Any]:
        position = {axis: i for i, axis in enumerate(a for a in range(self.mesh.ndim) if a not in self._axes)}
        return {
            "inputs": [self._within(at) for at in form["inputs"]],
            "outputs": [self._within(at) for at in form["outputs"]],
            "split": [position[axis] for axis in form["split"] if axis in position],
        }

    def _take_weights(self, module: torch.nn.Module, stored: Mapping[str, Layout]) -> None:
        """Keeps the weights of this process's stages, as DTensors. Those of other stages have no data any more."""
        names = {id(p): name for name, p in module.named_parameters()}
        self._own: dict[str, torch.nn.Parameter] = {}
        done: dict[int, torch.nn.Parameter] = {}
        for part in module.modules():
            for name, old in part._parameters.items():
                if old is None:
                    continue
                if id(old) not in done:
                    path = names[id(old)]
                    if self._stages.weights.get(path, 0) in self.stages:
                        at = placements(stored.get(path, ("R",) * self.stage_mesh.ndim))
                        new = distribute_tensor(old.detach(), self.stage_mesh, at)
                        done[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                        self._own[path] = done[id(old)]
                    else:
                        done[id(old)] = torch.nn.Parameter(old.detach().to("meta"), requires_grad=old.requires_grad)
                part._parameters[name] = done[id(old)]

    def _parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]:
        return (p for name, p in self._own.items() if self._stages.weights.get(name, 0) == stage)

    def _pipeline_stage(self, number: int) -> PipelineStage:
        grid = self._engine.grid

        def examples(crossings: list[Crossing]) -> tuple[torch.Tensor, ...]:
            sizes = [tuple(grid.block(c.shape, c.layout)[1]) for c in crossings]
            return tuple(
                torch.empty(size, dtype=c.dtype, device="meta", requires_grad=c.dtype.is_floating_point)
                for c, size in zip(crossings, sizes, strict=True)
            )

        sent = self._stages.crossings
        given = examples(sent[number - 1]) if number else ()
        last = number + 1 == self._stages.count
        made = (torch.empty((), device="meta", requires_grad=True),) if last else examples(sent[number])
        device = torch.device(self.mesh.device_type)
        return PipelineStage(
            _Stage(self, number), number, self._stages.count, device, input_args=given, output_args=made, group=self._group
        )

    # The module.

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """The weights of this process's stages."""
        for name, p in self._own.items():
            yield (f"{prefix}.{name}" if prefix else name), p

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The weights and buffers of this process's stages."""
        own = self._original.state_dict(*args, **kwargs)
        return {name: value for name, value in own.items() if name in self._own or not value.is_meta}

    def train(self, mode: bool = True) -> Pipelined:
        """As `torch.nn.Module.train`."""
        self._original.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a pipeline interleaves forward and backward passes."""
        raise PlanError("a pipeline runs forward and backward passes together: call `loss = model.step(...)` instead of `model(...)`")

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs all passes of a step. The result is the mean of the micro-batches' losses, on every process; `.grad` of the
        stage's weights has the gradients of that mean."""
        self._parts = micro_batches_of((args, kwargs), self.micro_batches)
        losses: list[torch.Tensor] = []
        weights = self._engine.weights
        weights.begin()
        weights.postponed = True
        try:
            marks = [{"index": i} for i in range(self.micro_batches)]
            last = self._stages.count - 1 in self.stages
            targets = [torch.zeros(()) for _ in marks] if last else None
            self._schedule.step(
                arg_mbs=[() for _ in marks], kwarg_mbs=marks, target_mbs=targets, losses=losses if last else None, return_outputs=False
            )
        finally:
            weights.postponed, self._parts = False, []
        weights.flush()
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.mesh.device_type)
        distributed.all_reduce(total, group=self._group)
        return total

    def _pass(self, received: tuple[torch.Tensor, ...], index: int, stage: int) -> Any:
        """The forward pass of a stage for one micro-batch."""
        args, kwargs = self._parts[index]
        self._engine.mode = lambda engine: _StageMode(self._stages, stage, engine, received)
        result = self._root(*args, **kwargs)
        mode = self._engine.last_mode
        if stage + 1 < self._stages.count:
            return mode.sent()
        with torch._C.DisableTorchFunctionSubclass():
            loss = trained(result)
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            return loss / self.micro_batches

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights of all stages, whole, on every process."""
        own = {n: p.full_tensor().detach().cpu() if isinstance(p, DTensor) else p.detach().cpu() for n, p in self._own.items()}
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(found, own, group=self._group)
        return {name: value for part in found for name, value in part.items()}

    def explain(self, detail: str = "usual") -> str:
        """The plan as text, and this process's stage."""
        own = ", ".join(str(number + 1) for number in self.stages)
        return f"{self.plan.table(detail)}\nthis process: stage {own} of {self._stages.count}, {len(self._own)} weights"
