"""What every op of the planner's graph does with the parts of its tensors that one process holds.

Rules of the graph's ops say that this is right: a split op computes its part from the parts, sums over a split dimension
leave parts of sums. Ops that count positions are told where their part begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ._graph import Op


@dataclass(frozen=True)
class Part:
    """Which part of an op a process computes: first positions and sizes of the tensors that it reads and makes."""

    input_starts: list[list[int]]
    output_starts: list[list[int]]
    output_sizes: list[list[int]]


Kernel = Callable[[Op, Part, list[Tensor]], Any]
KERNELS: dict[str, Kernel] = {}


def _kernel(kind: str) -> Callable[[Kernel], Kernel]:
    def enter(kernel: Kernel) -> Kernel:
        KERNELS[kind] = kernel
        return kernel

    return enter


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
_UNARY_WITH: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "affine": lambda x, by: _affine(x, by["scale"], by["shift"]),
    "leaky_relu": lambda x, slope: functional.leaky_relu(x, slope),
    "power": lambda x, exponent: x.pow(exponent),
}


def _affine(x: Tensor, scale: float, shift: float) -> Tensor:
    y = x if scale == 1 else x * scale
    return y if shift == 0 else y + shift


@_kernel("unary")
def _unary(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    f = op.attributes["f"]
    if isinstance(f, dict):
        ((name, by),) = f.items()
        return _UNARY_WITH[name](inputs[0], by)
    function: Callable[[Tensor], Tensor] = _UNARY.get(f) or getattr(torch, f)
    return function(inputs[0])


_BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
}


@_kernel("binary")
def _binary(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    return _BINARY[op.attributes["f"]](*inputs)


@_kernel("compare")
def _compare(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    y: Tensor = getattr(torch, op.attributes["f"])(*inputs)
    return y


@_kernel("select")
def _select(_: Op, __: Part, inputs: list[Tensor]) -> Tensor:
    return torch.where(*inputs)


@_kernel("cast")
def _cast(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    types = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
    types |= {"i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
    return inputs[0].to(types[op.attributes["dtype"]])


@_kernel("contract")
def _contract(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    x, y = inputs
    operands, result = op.attributes["spec"].split("->")
    a, b = operands.split(",")
    if len(b) == 2 and a[-1] == b[1] and result == a[:-1] + b[0]:
        return functional.linear(x, y)
    if len(b) == 2 and a[-1] == b[0] and result == a[:-1] + b[1]:
        return x @ y
    return torch.einsum(op.attributes["spec"], x, y)


@_kernel("reduce")
def _reduce(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    axes, scale = op.attributes["axes"], op.attributes["scale"]
    if op.attributes["f"] == "max":
        largest = inputs[0].amax(axes) if axes else inputs[0]
        return largest.detach() if op.extra.get("statistic") else largest
    total = inputs[0].sum(axes) if axes else inputs[0]
    return total if scale == 1 else total * scale


@_kernel("reshape")
def _reshape(op: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    y = inputs[0].reshape(part.output_sizes[0])
    return y.detach() if op.extra.get("detach") else y


@_kernel("transpose")
def _transpose(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    return inputs[0].permute(op.attributes["perm"])


@_kernel("broadcast")
def _broadcast(_: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    return inputs[0].expand(part.output_sizes[0])


@_kernel("slice")
def _slice(op: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    y = inputs[0]
    taken = zip(op.attributes["start"], op.attributes["limit"], op.attributes["stride"], strict=True)
    for d, (start, limit, stride) in enumerate(taken):
        # What is split is taken whole.
        if y.shape[d] != part.output_sizes[0][d]:
            index: list[Any] = [slice(None)] * y.dim()
            index[d] = slice(start, limit, stride)
            y = y[tuple(index)]
    return y


@_kernel("pad")
def _pad(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    low, high = op.attributes["low"], op.attributes["high"]
    pads = [n for d in reversed(range(len(low))) for n in (low[d], high[d])]
    return functional.pad(inputs[0], pads, value=op.attributes["value"])


@_kernel("concat")
def _concat(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    return torch.cat(inputs, op.attributes["axis"])


@_kernel("softmax")
def _softmax(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    return inputs[0].softmax(op.attributes["axis"])


@_kernel("log_softmax")
def _log_softmax(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    return inputs[0].log_softmax(op.attributes["axis"])


def _cut(x: Tensor, starts: list[int], sizes: list[int]) -> Tensor:
    for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if x.shape[d] != size:
            x = x.narrow(d, start, size)
    return x


@_kernel("dropout")
def _dropout(op: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    # Every process draws the whole mask, as a single process does, and takes its part: seeds agree, so masks do.
    keep = 1.0 - op.attributes["rate"]
    mask = torch.empty(op.attributes["whole"], dtype=inputs[0].dtype, device=inputs[0].device)
    mask = mask.bernoulli_(keep).div_(keep)
    return inputs[0] * _cut(mask, part.output_starts[0], part.output_sizes[0])


@_kernel("gather")
def _gather(op: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    table, ids = inputs
    padding, held = op.extra.get("padding", -1), table.shape[0]
    if held == op.attributes["extent"]:
        return functional.embedding(ids, table, padding if padding >= 0 else None)
    at = ids - part.input_starts[0][0]
    inside = (at >= 0) & (at < held)
    rows = functional.embedding(at.clamp(0, held - 1), table)
    # What is padding is read and not trained.
    trained = inside & (ids != padding) if padding >= 0 else inside
    rows = torch.where(trained.unsqueeze(-1), rows, rows.detach())
    return rows * inside.unsqueeze(-1).to(rows.dtype)


@_kernel("take_along")
def _take_along(op: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    x, ids = inputs
    axis = op.attributes["axis"]
    at = ids - part.input_starts[0][axis]
    inside = (at >= 0) & (at < x.shape[axis])
    return x.gather(axis, at.clamp(0, x.shape[axis] - 1)) * inside.to(x.dtype)


def _spread(x: Tensor, axes: list[int]) -> Tensor:
    """A statistic with its dimensions back, of size one."""
    for axis in axes:
        x = x.unsqueeze(axis)
    return x


@_kernel("variance")
def _variance(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    x, mean = inputs
    axes = op.attributes["axes"]
    return (x - _spread(mean, axes)).square().sum(axes) * op.attributes["scale"]


@_kernel("normalize")
def _normalize(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    x, mean, variance, *given = inputs
    axes, params = op.attributes["axes"], op.attributes["params"]
    shape = [size if d in params else 1 for d, size in enumerate(x.shape)]
    inverse = _spread((variance + op.attributes["eps"]).rsqrt(), axes)
    y = (x - _spread(mean, axes)) * inverse
    if op.attributes["scaled"]:
        y = y * given[0].reshape(shape)
    return y + given[-1].reshape(shape) if op.attributes["shifted"] else y


def _slides(geometry: dict[str, Any]) -> tuple[Any, Any, Any]:
    return geometry["stride"], [low for low, _ in geometry["pad"]], geometry["dilation"]


@_kernel("conv")
def _conv(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    x, w = inputs
    geometry = op.attributes["geometry"]
    stride, pad, dilation = _slides(geometry)
    # A split of grouped channels is a split of the groups.
    groups = x.shape[1] // w.shape[1] if geometry["groups"] > 1 else 1
    function = [functional.conv1d, functional.conv2d, functional.conv3d][x.dim() - 3]
    y: Tensor = function(x, w, None, stride, pad, dilation, groups)
    return y


@_kernel("max_pool")
def _max_pool(op: Op, _: Part, inputs: list[Tensor]) -> tuple[Tensor, None]:
    geometry = op.attributes["geometry"]
    stride, pad, dilation = _slides(geometry)
    function = [functional.max_pool1d, functional.max_pool2d, functional.max_pool3d][inputs[0].dim() - 3]
    return function(inputs[0], geometry["kernel"], stride, pad, dilation), None


@_kernel("avg_pool")
def _avg_pool(op: Op, _: Part, inputs: list[Tensor]) -> Tensor:
    geometry = op.attributes["geometry"]
    stride, pad, _dilation = _slides(geometry)
    function = [functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d][inputs[0].dim() - 3]
    y: Tensor = function(inputs[0], geometry["kernel"], stride, pad)
    return y


@_kernel("sum_exp")
def _sum_exp(_: Op, __: Part, inputs: list[Tensor]) -> Tensor:
    x, largest = inputs
    # The loss accounts for its gradient.
    return (x.detach() - largest.unsqueeze(-1)).exp_().sum(-1)


class _RowLoss(torch.autograd.Function):
    """`ln(s) + m - logits[label]` of rows whose label is among the classes held here, zero of others."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, m: Tensor, s: Tensor, base: int, ignored: int) -> Tensor:
        at = labels - base
        counts = labels != ignored
        inside = (at >= 0) & (at < logits.shape[-1]) & counts
        at = at.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        ctx.save_for_backward(logits, m, s, at, inside, counts)
        loss = s.log() + m - logits.gather(-1, at).squeeze(-1)
        return torch.where(inside, loss, torch.zeros_like(loss))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, m, s, at, inside, counts = ctx.saved_tensors
        probability = (logits - m.unsqueeze(-1)).exp_().div_(s.unsqueeze(-1))
        probability.scatter_add_(-1, at, -inside.to(logits.dtype).unsqueeze(-1))
        return probability.mul_((grad * counts).unsqueeze(-1)), None, None, None, None, None


@_kernel("cross_entropy")
def _cross_entropy(op: Op, part: Part, inputs: list[Tensor]) -> Tensor:
    logits, labels, m, s = inputs
    base = part.input_starts[0][-1]
    loss: Tensor = _RowLoss.apply(logits, labels, m, s, base, op.extra["ignored"])
    return loss
