"""Layouts of a call: those of the plan, or, for a call that the plan does not know, those of its operands.

The plan is for the captured sizes. A call with other sizes takes the same layouts if the op is of the same form: equal
ranks, and the same dimensions of size 1. Element-wise ops can always keep a layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._graph import Op, TensorId
from ._layout import Layout, dual, is_partial
from ._tensor import ShardTensor
from ._translate import Translation

#: Ops on each row of the last dimension (or of `axis`).
_ROWWISE = {"softmax", "log_softmax", "sum_exp", "cross_entropy"}
_ELEMENTWISE = {"unary", "binary", "compare", "select", "cast", "dropout"}


@dataclass(frozen=True)
class PlannedCall:
    """A call of the captured pass: the layouts of its ops by name, and of its results as later calls read them."""

    step: Translation
    free: tuple[bool, ...]
    forms: dict[str, Any]
    settle: dict[TensorId, set[Layout]]
    #: The call's weights, by name.
    weights: dict[TensorId, str]


def matched(step: Translation, planned: PlannedCall) -> Mapping[str, Any] | None:
    """The planned layouts of a call's ops, by name; `None` where they do not fit. The call may lack arguments that the
    captured one had (a mask), and convert element types that the captured one did not (autocast)."""
    if step is planned.step:
        return planned.forms
    ops = {op.name: op for op in planned.step.graph.ops}
    forms = {}
    conversions = [op for op in step.graph.ops if op.kind == "cast" and op.name not in planned.forms]
    for op in step.graph.ops:
        if op in conversions:
            continue
        form, like = planned.forms.get(op.name), ops.get(op.name)
        if form is None or like is None or op.kind != like.kind:
            return None
        shapes = [step.graph.tensors[t].shape for t in (*op.inputs, *op.outputs)]
        before = [planned.step.graph.tensors[t].shape for t in (*like.inputs[: len(op.inputs)], *like.outputs)]
        if len(shapes) == len(before) and all(_alike(a, b) for a, b in zip(shapes, before, strict=True)):
            form = {**form, "inputs": form["inputs"][: len(op.inputs)]}
            if op.kind == "reshape" and not _keeps_blocks(form, *shapes):
                return None
        elif op.kind in _ELEMENTWISE and not is_partial(tuple(form["outputs"][0])) and len(shapes[-1]) == len(before[-1]):
            form = _elementwise(op, step, tuple(form["outputs"][0]))
        else:
            return None
        forms[op.name] = form
    for op in conversions:
        layouts = [
            tuple(at)
            for reader in step.graph.ops
            if reader.name in forms
            for t, at in zip(reader.inputs, forms[reader.name]["inputs"], strict=True)
            if t == op.outputs[0]
        ]
        if not layouts or is_partial(layouts[0]):
            return None
        forms[op.name] = _elementwise(op, step, layouts[0])
    return forms


def _alike(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and all((x == 1) == (y == 1) for x, y in zip(a, b, strict=True))


def _keeps_blocks(form: Mapping[str, Any], before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether equal blocks of a reshape's input and result hold the same elements."""
    for a, b in zip(form["inputs"][0], form["outputs"][0], strict=True):
        if a.startswith("S") != b.startswith("S"):
            return False
        if a.startswith("S") and math.prod(before[: int(a[1:])]) != math.prod(after[: int(b[1:])]):
            return False
    return True


def _elementwise(op: Op, step: Translation, at: Layout) -> dict[str, Any]:
    shape = step.graph.tensors[op.outputs[0]].shape
    inputs = [_aligned(step.graph.tensors[t].shape, shape, at) for t in op.inputs]
    split = [axis for axis, a in enumerate(at) if a.startswith("S")]
    return {"inputs": inputs, "outputs": [at] * len(op.outputs), "split": split}


def followed(step: Translation, tensors: Sequence[torch.Tensor], engine: Any) -> dict[str, Any] | None:
    """Layouts of the call's ops, or `None` where it has to run on whole tensors."""
    layouts: dict[int, Layout] = {t: _layout(tensors[i], engine) for i, t in step.inputs.items()}
    forms: dict[str, Any] = {}
    if all(set(at) <= {"R"} for at in layouts.values()):
        return None
    for op in step.graph.ops:
        shape = step.graph.tensors[op.outputs[0]].shape
        if op.kind in _ELEMENTWISE:
            lead = next((t for t in op.inputs if step.graph.tensors[t].shape == shape and set(layouts.get(t, ())) - {"R"}), None)
            if lead is None and any(set(layouts.get(t, ())) - {"R"} for t in op.inputs):
                return None
            at = dual(layouts[lead]) if lead is not None else engine.whole
            inputs = [_aligned(step.graph.tensors[t].shape, shape, at) for t in op.inputs]
        elif op.kind == "transpose":
            inputs = [layouts[op.inputs[0]]]
            order = op.attributes["perm"]
            at = tuple(f"S{order.index(int(a[1:]))}" if a.startswith("S") else a for a in inputs[0])
        elif op.kind == "reshape":
            inputs = [layouts[op.inputs[0]]]
            kept = _kept(step.graph.tensors[op.inputs[0]].shape, shape)
            if any(a.startswith("S") and int(a[1:]) >= kept for a in inputs[0]):
                return None
            inputs = [dual(inputs[0])]
            at = inputs[0]
        elif op.kind == "reduce":
            inputs, axes = [dual(layouts[op.inputs[0]])], op.attributes["axes"]
            if op.attributes["f"] != "sum" and any(a.startswith("S") and int(a[1:]) in axes for a in inputs[0]):
                return None
            at = tuple(_reduced(a, axes) for a in inputs[0])
        elif op.kind in _ROWWISE:
            lead_at = dual(layouts[op.inputs[0]])
            rank = len(step.graph.tensors[op.inputs[0]].shape)
            axis = op.attributes.get("axis", rank - 1)
            if any(a == f"S{axis}" for a in lead_at) or (axis != rank - 1 and len(op.inputs) > 1):
                return None
            # Labels and statistics have one element per row.
            inputs, at = [lead_at] * len(op.inputs), lead_at
        else:
            return None
        split = [axis for axis, a in enumerate(inputs[0]) if a.startswith("S")]
        if op.kind in _ELEMENTWISE:
            split = [axis for axis, a in enumerate(at) if a.startswith("S")]
        forms[op.name] = {"inputs": inputs, "outputs": [at] * len(op.outputs), "split": split}
        for t in op.outputs:
            layouts[t] = at
    return forms


def _reduced(at: str, axes: Sequence[int]) -> str:
    """A layout entry after a sum over dimensions, which are removed."""
    if not at.startswith("S"):
        return at
    dim = int(at[1:])
    return "P" if dim in axes else f"S{dim - sum(a < dim for a in axes)}"


def _layout(t: torch.Tensor, engine: Any) -> Layout:
    return dual(t._layout) if isinstance(t, ShardTensor) else engine.whole


def _kept(before: Sequence[int], after: Sequence[int]) -> int:
    """How many leading dimensions a reshape leaves as they are."""
    count = 0
    while count < min(len(before), len(after)) and before[count] == after[count]:
        count += 1
    return count


def _aligned(own: Sequence[int], shape: Sequence[int], layout: Layout) -> Layout:
    skip = len(shape) - len(own)

    def entry(at: str) -> str:
        dim = int(at[1:]) - skip if at.startswith("S") else -1
        return f"S{dim}" if dim >= 0 and own[dim] == shape[dim + skip] else "R"

    return tuple(entry(at) for at in layout)
