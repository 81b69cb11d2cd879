"""`parallelize`: plans a module's training and runs it on many processes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .._native import PlanError
from .._native import devices as devices_of
from .._plan import Plan
from .._plan import plan as search
from .._trial import candidates, fastest, show_measured
from ._capture import Capture, WithLoss, capture
from ._data import Batches, global_example, micro_batches_of
from ._engine import Engine
from ._exit import release_at_exit
from ._frames import line_of_user
from ._layout import Grid, layout_of_placements, placements
from ._measure import seconds_of, trained
from ._planning import Options, arguments, check_plan, part_of, priced
from ._pipeline import Pipelined
from ._probe import probe
from ._recompute import Recomputation
from ._replaced import replace
from ._share import shared

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _without_data(weight: torch.Tensor, mesh: Any, wanted: list[Any]) -> Any:
    """A weight on the meta device in its layout. `to_empty` allocates it."""
    at = layout_of_placements(wanted)
    local = torch.empty(Grid(mesh).block(tuple(weight.shape), at)[1], dtype=weight.dtype, device="meta")
    shape, stride = weight.shape, weight.stride()
    return DTensor.from_local(local, mesh, wanted, run_check=False, shape=shape, stride=stride)


#: Attributes of `Parallelized`. All others are the module's.
_OWN = {
    "training", "plan", "_mixed_precision", "_recomputation", "measured", "mesh", "layouts", "_captured", "_engine", "_batch", "_batches", "_parameters",
    "_buffers", "_modules",
}  # fmt: skip


#: Special methods of containers. A planned module has those of its module: Python looks them up in the class.
_CONTAINER = ("__getitem__", "__len__", "__iter__", "__contains__")


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._original, name)(*args)

    return method


class Parallelized(torch.nn.Module):
    """The user's module, run on a mesh by its plan. It shares weights, buffers and submodules with the original module,
    under the same names; the weights are DTensors."""

    def __new__(cls, module: torch.nn.Module, *_: Any, **__: Any) -> Parallelized:
        """A module that is indexed and iterated as the given one."""
        methods = {name: _forwarded(name) for name in _CONTAINER if hasattr(type(module), name)}
        return super().__new__(type("Parallelized", (cls,), methods) if methods else cls)

    def __init__(
        self,
        module: torch.nn.Module,
        captured: Capture,
        plan: Plan,
        layouts: Mapping[str, Any],
        mesh: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        batch: str = "global",
        mixed_precision: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        object.__setattr__(self, "_original", module)
        object.__setattr__(self, "_root", module if loss_fn is None else WithLoss(module, loss_fn, mixed_precision is not None))
        self.training = module.training
        self.plan = plan
        #: Seconds per step of every plan that was tried (`measure=True`). This module runs the fastest.
        self.measured: dict[str, float] = {}
        self.mesh = mesh
        #: The planner's layouts of ops and of stored weights.
        self.layouts = layouts
        self._captured = captured
        object.__setattr__(self, "_loss_fn", loss_fn)
        self._distribute()
        self._engine = Engine(self._root, captured.planned(layouts["ops"] if plan.axes else {}), mesh, module)
        self._engine.weights.dtype = mixed_precision
        self._engine.weights.keep_within(plan, self.parameters())
        self._recomputation = Recomputation(self._engine, self._root, plan.data["recompute"], captured.calls)
        self._batch, self._mixed_precision = batch, mixed_precision
        self._batches = Batches(self._engine, batch, captured.samples)

    def _distribute(self) -> None:
        """Makes the weights DTensors in their stored layouts. Tied weights stay tied."""
        done: dict[int, torch.nn.Parameter] = {}
        names = {id(p): name for name, p in self.named_parameters()}
        for submodule in self.modules():
            for name, old in submodule._parameters.items():
                if old is None or isinstance(old, DTensor):
                    continue
                if id(old) not in done:
                    wanted = self.placements(names[id(old)])
                    new = _without_data(old, self.mesh, wanted) if old.is_meta else distribute_tensor(old.detach(), self.mesh, wanted)
                    done[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    if old.grad is not None:
                        done[id(old)].grad = distribute_tensor(old.grad, self.mesh, wanted)
                    replace(old, done[id(old)])
                submodule._parameters[name] = done[id(old)]

    def placements(self, parameter: str) -> list[Any]:
        """The stored layout of a weight, between steps."""
        stored = self.layouts["stored"].get(parameter)
        return placements(tuple(stored)) if stored else [Replicate()] * self.mesh.ndim

    def train(self, mode: bool = True) -> Parallelized:
        """As `torch.nn.Module.train`."""
        self._original.train(mode)
        self.training = mode
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        _refuse_compiled()
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise PlanError(f"{_TRANSFORMED}, at {line_of_user()}")
        with self._engine.weights.passing(), self._recomputation.applied():
            args, kwargs = self._batches.take(args, kwargs)
            return self._batches.give(self._root(*args, **kwargs))

    def accumulate(self, *args: Any, micro_batches: int | None = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward passes of one step in micro-batches, by default as many as planned. Gradients are added up and
        exchanged once. The loss must be a mean over samples; its mean over micro-batches is the result."""
        count = micro_batches or int(self.plan.data["micro_batches"])
        parts = micro_batches_of((args, kwargs), count)
        total: torch.Tensor | None = None
        for i, (own, named) in enumerate(parts):
            with self.no_sync() if i + 1 < count else contextlib.nullcontext():
                loss = trained(self(*own, **named)) / count
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused, with the reason."""
        raise PlanError(_COMPILED)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within add to the gradients without communication. The next pass outside reduces the sum."""
        self._engine.weights.postponed = True
        try:
            yield
        finally:
            self._engine.weights.postponed = False

    def __setattr__(self, name: str, value: Any) -> None:
        # An attribute of the module is set there: its code reads it.
        if name in _OWN or "_batches" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # The module's own methods and attributes: `config`, `generate`, ...
            return getattr(object.__getattribute__(self, "_original"), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError("a parallelized module cannot be pickled: save its state_dict() by torch.distributed.checkpoint, or its full_state_dict()")

    def __deepcopy__(self, memo: Any) -> Parallelized:
        module = copy.deepcopy(self._original, memo)
        result = Parallelized(module, self._captured, self.plan, self.layouts, self.mesh, self._loss_fn, self._batch, self._mixed_precision)
        result.measured = dict(self.measured)
        memo[id(self)] = result
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `torch.nn.Module.load_state_dict`. Whole tensors are distributed first."""
        own = dict(self.named_parameters(remove_duplicate=False))

        def distributed_state(name: str, given: Any) -> Any:
            plain = isinstance(given, torch.Tensor) and not isinstance(given, DTensor) and name in own
            return distribute_tensor(given, self.mesh, own[name].placements) if plain else given

        return super().load_state_dict({n: distributed_state(n, given) for n, given in state_dict.items()}, strict, assign)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the state dict with every tensor whole, on every process."""

        def copied(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            made = t.full_tensor() if isinstance(t, DTensor) else t
            own = t._local_tensor if isinstance(t, DTensor) else t
            return made.clone() if made.data_ptr() == own.data_ptr() else made

        return {n: copied(t) for n, t in self.state_dict().items()}

    def explain(self, detail: str = "usual") -> str:
        """The plan and its predicted times, the mesh, the measured times, and the placements of all weights."""
        axes = " ".join(f"{name}:{size}" for name, size in self.plan.axes.items())
        lines = [self.plan.table(detail), f"mesh: {axes}", *show_measured(self.measured), "weights:"]
        lines += [f"  {name}: {list(p.placements)}" for name, p in self.named_parameters()]
        return "\n".join(lines)


def parallelize(
    module: torch.nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    machine: str | None = None,
    memory: str | float | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    solver: str = "exact",
    optimizer: str = "sgd",
    measure: bool = False,
    batch: str = "global",
    mixed_precision: torch.dtype | None = None,
    plan: Plan | None = None,
    **options: Unpack[Options],
) -> Any:
    """Plans a module's training for a machine, and returns a module that runs by the plan.

    Call it in every process, after `torch.distributed.init_process_group`. The first process plans for all.

    Args:
        module: any module. Its own code runs.
        example_inputs: the arguments of its forward pass, as a tuple or by name: a batch as `batch` says.
        loss_fn: `loss_fn(output, target)`. The target is then the last input, and the loss is the result. Without it, the
            module's first result is trained if it is one number; otherwise its mean is planned for.
        machine: the machine to plan for (see `shardwright.plan`); by default `cpu:N` or `flat:N` for N processes.
        memory: the memory limit of one device: `"16GiB"`, or bytes.
        example_kwargs: more arguments by name.
        solver: `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ... Plans that pin ops to devices are refused, since DTensor
            cannot express them: those of `"mcmc"` and `"place"`, and of `"auto"` where it returns one of these.
        optimizer: `"sgd"`, `"momentum"` or `"adam"`. The plan includes the memory and time of its state.
        measure: runs the planned step, and the baselines beside it: data parallelism, and weights split by columns and
            rows in turn, on every grid of the processes. Returns the fastest; `.measured` has all times. Without a
            `machine`, the plan is for the processes as `probe` measures them. Each trial copies the module.
        batch: `"global"`: every process passes the whole batch. `"local"`: each passes its own samples, as loaded with a
            DistributedSampler; results are those of these samples, and losses computed from them are averaged.
        mixed_precision: the element type of computing, `torch.bfloat16` for example. Weights, `.grad` and the optimizer's
            state keep their own type; weights are gathered, gradients reduced and inputs converted to this one, and `loss_fn` gets
            32 bits. The plan is of that step.
        plan: a plan that `shardwright.torch.plan` made for this module, instead of a search.

    The other options are those of `shardwright.plan` (`costs`, `untied`, `fix`, `time`, ...).
    """
    if not distributed.is_initialized():
        raise PlanError(
            "torch.distributed is not initialized: start the script with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    world = distributed.get_world_size()
    device = next((p.device.type for p in module.parameters()), "cpu")
    if device == "meta":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    args, kwargs = arguments(example_inputs, example_kwargs)
    whole_args, whole_kwargs = global_example((args, kwargs), batch, world)
    with _machine(machine, device, world, measure) as name:
        count = devices_of(name)
        if count != world:
            raise PlanError(f"machine {name} has {count} devices, but there are {world} processes")
        captured = capture(module, whole_args, whole_kwargs, loss_fn, mixed_precision)
        text = captured.text(part_of(module, (whole_args, whole_kwargs), loss_fn, options, mixed_precision))

        if plan is not None:
            check_plan(plan, captured, type(module).__name__)

        if options.get("pipeline"):
            options.setdefault("recompute", "off")

        def build(module: torch.nn.Module, machine: str, solver: str, options: Options) -> Any:
            """Plans, and distributes the given module in place."""
            result, layouts = shared(
                lambda: plan
                or search(text, machine=machine, memory=memory, solver=solver, optimizer=optimizer, **options)
            )
            # One process has no axes, and a mesh needs one.
            axes = result.axes or {"one": 1}
            if (staged := result.data["pipeline"]) is not None and len(staged["axes"]) == len(axes):
                axes = {**axes, "one": 1}
            mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
            release_at_exit(mesh)
            result.notes += priced(captured, result)
            if result.data["pipeline"] is not None:
                if batch != "global" or mixed_precision is not None or (result.data["recompute"] or {}).get("ops"):
                    raise PlanError('a pipeline runs with batch="global", without mixed_precision and without recomputation')
                own, named = micro_batches_of((args, kwargs), int(result.data["micro_batches"]))[0]
                part = capture(module, own, named, loss_fn)
                if any(op.call is not None and op.call.is_random for op in part.graph.ops):
                    result.notes.append("random bits (dropout) are drawn by each stage for its own ops: they are not those of one process")
                return Pipelined(module, part, result, json.loads(layouts), mesh, loss_fn)
            return Parallelized(module, captured, result, json.loads(layouts), mesh, loss_fn, batch, mixed_precision)

        if not measure:
            return build(module, name, solver, options)
        # `fix` constrains the requested plan only, not the baselines.
        free: Options = {**options, "fix": None}

        def trials() -> Iterator[tuple[str, Parallelized]]:
            for candidate in candidates(name, count, solver, True, propagates=False):
                requested = candidate.machine == name and candidate.solver == solver
                try:
                    search = options if requested else free
                    model = build(copy.deepcopy(module), candidate.machine, candidate.solver, search)
                except PlanError:
                    # A baseline may exceed the memory, or its grid may not fit the machine's levels.
                    if requested:
                        raise
                    continue
                yield candidate.name, model

        copied, times = fastest(trials(), lambda model, hopeless: seconds_of(model, args, kwargs, hopeless))
        best = Parallelized(module, captured, copied.plan, copied.layouts, copied.mesh, loss_fn, batch, mixed_precision)
        best.measured = times
        return best


_COMPILED = (
    "torch.compile of a parallelized module is refused: its calls run by the plan one at a time, so nothing would be compiled; "
    "leave torch.compile out, or compile functions of local tensors inside of the module"
)

_TRANSFORMED = (
    "torch.func transforms (`grad`, `vmap`, `jvp`) of a parallelized module are refused, since they cannot see shards: use "
    "torch.autograd.grad, with create_graph=True for gradients of gradients, or transform the module before"
)


def _refuse_compiled() -> None:
    """Raises if `torch.compile` was asked to compile this module: it would run uncompiled. In a compiled function that calls the
    module, the rest is compiled."""
    frame = sys._getframe(2)
    while frame is not None and ("torch/_dynamo/" in (file := frame.f_code.co_filename) or file.endswith("torch/nn/modules/module.py")):
        if frame.f_code.co_name == "compile_wrapper":
            raise PlanError(_COMPILED)
        frame = frame.f_back  # type: ignore[assignment]


@contextlib.contextmanager
def _machine(name: str | None, device: str, world: int, measure: bool) -> Iterator[str]:
    """The named machine, or one for these processes: measured if `measure`, otherwise a built-in one."""
    if name is not None or not measure:
        yield name or f"{'cpu' if device == 'cpu' else 'flat'}:{world}"
        return
    text = probe(device=device)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "probed.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        yield path
