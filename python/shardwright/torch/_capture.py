"""A module as `torch.export` sees it: one functional graph of ATen ops, composite ones kept whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._native import PlanError


class _WithLoss(torch.nn.Module):
    """The loss of a module's output; its last argument is what the output is held against."""

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.loss_fn(self.module(*inputs[:-1], **options), inputs[-1])


@dataclass(frozen=True)
class Captured:
    """A captured forward pass. Names of weights and buffers are those of the module."""

    graph: Any
    #: Placeholder -> what it stands for: a weight, a buffer, a constant tensor, or the position of an input.
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: dict[str, int]
    #: What the graph returns first: new values of buffers, by name.
    mutated: list[str]
    in_spec: Any
    out_spec: Any

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs in the graph's order; refuses those of another structure."""
        known = self.in_spec.child(1).context if hasattr(self.in_spec, "child") else list(kwargs)
        if set(known) == set(kwargs):
            kwargs = {name: kwargs[name] for name in known}
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.in_spec:
            raise TypeError(f"planned for inputs of structure {self.in_spec}, called with {spec}")
        return list(leaves)


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any, Any], Any] | None,
) -> Captured:
    """Captures a forward pass, with the loss where one is given."""
    if loss_fn is not None and not args:
        raise PlanError("with a loss_fn, the last of the example inputs is what it compares the output with")
    captured = module if loss_fn is None else _WithLoss(module, loss_fn)
    prefix = "" if loss_fn is None else "module."
    try:
        # Examples that are one tensor would be taken for one input; and nothing may be left in the module's buffers.
        program = torch.export.export(captured, _apart(args), dict(_apart(dict(kwargs))))
        program = program.run_decompositions({})
    except Exception as error:
        raise PlanError(_explain(module, error)) from error
    signature = program.graph_signature

    def own(name: str) -> str:
        return name.removeprefix(prefix)

    held = {**signature.inputs_to_lifted_tensor_constants}
    buffers = dict(signature.inputs_to_buffers)
    users = [spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT" and hasattr(spec.arg, "name")]
    mutated = [own(name) for name in signature.buffers_to_mutate.values()]
    if signature.user_inputs_to_mutate:
        raise PlanError(f"the module writes into its inputs ({', '.join(signature.user_inputs_to_mutate.values())}): copy them first")
    return Captured(
        graph=program.graph,
        parameters={p: own(name) for p, name in signature.inputs_to_parameters.items()},
        buffers={p: own(name) for p, name in buffers.items()},
        constants={p: program.constants[name].detach().clone() for p, name in held.items()},
        inputs={name: i for i, name in enumerate(users)},
        mutated=mutated,
        in_spec=program.call_spec.in_spec,
        out_spec=program.call_spec.out_spec,
    )


def _apart(tree: Any) -> Any:
    """The same values, no two of them one tensor."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else copy.copy(x), tree)


def _explain(module: torch.nn.Module, error: Exception) -> str:
    """What stopped the capture, the line of the module that did, and what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    place = next((line for line in reversed(lines) if line.startswith("File ") and "/torch/" not in line), "")
    at = f"\n  at {place}" if place else ""
    return (
        f"{type(module).__name__} cannot be captured as one graph: {reason}{at}\n"
        "  its forward pass must not branch on the values of tensors: use torch.where or torch.cond, or turn the part "
        "into arguments; `torch.export.export(module, inputs)` shows the whole story"
    )
