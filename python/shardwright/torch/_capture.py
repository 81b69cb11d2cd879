"""Captures a module with `torch.export`: one functional graph of ATen ops, composite ops not decomposed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._native import PlanError


class _WithLoss(torch.nn.Module):
    """A module followed by its loss. The last argument is the loss's target."""

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.loss_fn(self.module(*inputs[:-1], **options), inputs[-1])


@dataclass(frozen=True)
class Capture:
    """A captured forward pass. Weights and buffers have the module's names."""

    graph: Any
    #: Placeholder name -> weight name, buffer name, constant tensor, or position among the flattened inputs.
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: dict[str, int]
    #: Names of the buffers whose next values are the graph's first results.
    mutated: list[str]
    in_spec: Any
    out_spec: Any

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flattens inputs into the graph's order. Raises `TypeError` if their structure is not the captured one."""
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
) -> Capture:
    """Captures a forward pass, followed by the loss if `loss_fn` is given."""
    if loss_fn is not None and not args:
        raise PlanError("with a loss_fn, the last example input must be its target: there are no example inputs")
    target = module if loss_fn is None else _WithLoss(module, loss_fn)
    prefix = "" if loss_fn is None else "module."
    try:
        # Copies: export would merge inputs that are the same tensor, and could keep references to them in buffers.
        program = torch.export.export(target, _copies(args), dict(_copies(dict(kwargs))))
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
    return Capture(
        graph=program.graph,
        parameters={p: own(name) for p, name in signature.inputs_to_parameters.items()},
        buffers={p: own(name) for p, name in buffers.items()},
        constants={p: program.constants[name].detach().clone() for p, name in held.items()},
        inputs={name: i for i, name in enumerate(users)},
        mutated=mutated,
        in_spec=program.call_spec.in_spec,
        out_spec=program.call_spec.out_spec,
    )


def _copies(tree: Any) -> Any:
    """A copy of each value: no two leaves share a tensor."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else copy.copy(x), tree)


def _explain(module: torch.nn.Module, error: Exception) -> str:
    """The reason that capture failed, the module's line, and the remedy."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    place = next((line for line in reversed(lines) if line.startswith("File ") and "/torch/" not in line), "")
    at = f"\n  at {place}" if place else ""
    return (
        f"{type(module).__name__} cannot be captured as one graph: {reason}{at}\n"
        "  the forward pass must not branch on values of tensors: use torch.where or torch.cond, or pass the value as an "
        "argument; `torch.export.export(module, inputs)` prints the full error"
    )
