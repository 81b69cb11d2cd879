"""`plan`: plans a module's training without processes, for any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .._native import PlanError
from .._plan import Plan, SearchOptions
from .._plan import plan as search
from .._progress import show_seconds
from ._capture import Capture, capture
from ._data import global_example, micro_batches_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(SearchOptions, total=False):
    """Options that go to `shardwright.plan`, which documents them."""

    recompute: str | None
    micro_batches: int | str | None
    pipeline: int | None
    schedule: str | None


def plan(
    module: torch.nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    machine: str = "flat:2",
    memory: str | float | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    solver: str = "exact",
    optimizer: str = "sgd",
    batch: str = "global",
    mixed_precision: torch.dtype | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Plans a module's training for a machine. No other process is needed, and weights may be on the meta device.

    Arguments are those of `parallelize`. `Plan.save` writes the plan; `parallelize(..., plan=Plan.load(path))` runs it on
    as many processes as the machine has devices."""
    from .._native import devices as devices_of

    args, kwargs = arguments(example_inputs, example_kwargs)
    args, kwargs = global_example((args, kwargs), batch, devices_of(machine))
    captured = capture(module, args, kwargs, loss_fn, mixed_precision)
    text = captured.text(part_of(module, (args, kwargs), loss_fn, options, mixed_precision))
    found = search(text, machine=machine, memory=memory, solver=solver, optimizer=optimizer, **options)
    found.notes += priced(captured, found)
    return found


def part_of(module: torch.nn.Module, batch: Any, loss_fn: Any, options: Options, dtype: torch.dtype | None) -> Capture | None:
    """The pass on one micro-batch, where a plan may have several; a half or the like, where the planner chooses how many."""
    count = options.get("micro_batches")
    size = next((len(x) for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim() > 0), 0)
    if count == "auto":
        count = next((n for n in range(2, size + 1) if size % n == 0), 1)
    if count is None or int(count) <= 1:
        return None
    args, kwargs = micro_batches_of(batch, int(count))[0]
    return capture(module, args, kwargs, loss_fn, dtype)


def arguments(
    example_inputs: tuple[Any, ...] | Mapping[str, Any], example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position, and arguments by name."""
    if isinstance(example_inputs, Mapping):
        return (), {**example_inputs, **(example_kwargs or {})}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), dict(example_kwargs or {})
    return tuple(example_inputs), dict(example_kwargs or {})


def priced(captured: Capture, plan: Plan) -> list[str]:
    """Warnings of the capture. Ops that run on whole tensors are named with the predicted time of the step that they take."""
    seconds = 0.0
    opaque = {op.name for op in captured.graph.ops if op.kind == "opaque" and "shared" not in op.attributes}
    for layer in plan.data["layers"]:
        if layer["name"] in opaque:
            seconds += layer["compute_seconds"] + layer["comm_seconds"]
    notes = list(captured.warnings)
    if opaque:
        notes.append(f"ops on whole tensors: {len(opaque)}, predicted to take {show_seconds(seconds)} of a step")
    return notes


def check_plan(plan: Plan, captured: Capture, name: str) -> None:
    """Raises if a plan is not one of this module on these inputs."""
    layers = {layer["name"] for layer in plan.data["layers"]}
    ops = {op.name for op in captured.graph.ops}
    missing = sorted(ops - layers)[:3]
    if plan.model != name or missing:
        difference = f"it has no op {', '.join(missing)}" if missing else f"it is of {plan.model}"
        raise PlanError(
            f"the plan is not one of {name} on these example inputs: {difference}; make it with shardwright.torch.plan and "
            "the same module, example and loss_fn"
        )
