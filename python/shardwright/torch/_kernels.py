"""What an op runs on one process's shards.

An op runs its own ATen overload on local shards: the planner's rule splits it only where each block of the result is the
same function of blocks of the inputs, and sums over a split dimension become partial sums. `SPECIAL` lists every exception:
overloads whose arguments count global sizes or positions, and those whose arithmetic depends on the whole extent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._native import PlanError
from ._graph import AtenCall, Input

aten = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """The block of a tensor that one process holds: the global shape, the block's first positions and its sizes."""

    shape: tuple[int, ...]
    starts: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class Blocks:
    """The blocks of an op's inputs and outputs on one process."""

    inputs: list[Block]
    outputs: list[Block]


#: Runs in place of an overload: takes the overload, the blocks, and the overload's arguments with local shards.
Substitute = Callable[..., Any]


@dataclass(frozen=True)
class Special:
    """A substitute for an overload on shards, and why the overload itself would be wrong there."""

    run: Substitute
    reason: str


class LocalShapeError(RuntimeError):
    """An internal error: an ATen op on local shards does not give the block that the plan expects."""


def local_function(call: AtenCall, blocks: Blocks, differentiable: bool = True) -> Callable[[list[Tensor]], Any]:
    """The function that computes a call's local results from the local shards of its inputs."""
    special, target, kwargs = SPECIAL.get(call.target), call.target, dict(call.kwargs)
    # The overload without the Python around it.
    bare = getattr(target, "_op", target)
    at = [(i, arg.index) for i, arg in enumerate(call.args) if isinstance(arg, Input)]
    named = [(name, arg.index) for name, arg in kwargs.items() if isinstance(arg, Input)]
    nested = any(_holds_input(arg) for arg in (*call.args, *kwargs.values()) if not isinstance(arg, Input))

    def bind(inputs: list[Tensor]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with shards for inputs."""
        if nested:
            return fx.node.map_aggregate((call.args, kwargs), lambda arg: inputs[arg.index] if isinstance(arg, Input) else arg)
        args = list(call.args)
        for i, index in at:
            args[i] = inputs[index]
        return args, {**kwargs, **{name: inputs[index] for name, index in named}} if named else kwargs

    def run(inputs: list[Tensor]) -> Any:
        args, options = bind(inputs)
        return bare(*args, **options)

    def run_special(inputs: list[Tensor]) -> Any:
        args, options = bind(inputs)
        assert special is not None
        return special.run(target, blocks, *args, **options)

    def run_as_given(inputs: list[Tensor]) -> Any:
        return bare(*inputs, *rest, **kwargs)

    rest = call.args[len(at) :]
    in_order = not named and not nested and at == [(i, i) for i in range(len(blocks.inputs))]
    chosen = run_special if special is not None else run_as_given if in_order else run

    def run_without_gradient(inputs: list[Tensor]) -> Any:
        with torch.no_grad():
            return chosen(inputs)

    return chosen if differentiable else run_without_gradient


def _holds_input(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_holds_input, arg))
    if isinstance(arg, dict):
        return any(map(_holds_input, arg.values()))
    return isinstance(arg, Input)


def check_shapes(call: AtenCall, blocks: Blocks, dtypes: list[torch.dtype]) -> None:
    """Runs an overload that `SPECIAL` does not list on tensors without data. Raises where the result is not the block that
    the plan expects: then an argument depends on a global size."""
    if call.target in SPECIAL:
        return
    shards = [torch.empty(b.sizes, dtype=d, device="meta") for b, d in zip(blocks.inputs, dtypes, strict=True)]
    wanted = blocks.outputs[0].sizes
    try:
        with torch.no_grad():
            result = local_function(call, blocks)(shards)
    except NotImplementedError:
        # The overload has no implementation without data.
        return
    except RuntimeError as error:
        raise LocalShapeError(_mismatch(call, blocks, str(error))) from error
    first = result[0] if isinstance(result, (tuple, list)) else result
    if list(first.shape) != wanted:
        raise LocalShapeError(_mismatch(call, blocks, f"the result has shape {list(first.shape)}"))


def _mismatch(call: AtenCall, blocks: Blocks, problem: str) -> str:
    given = ", ".join(str(b.sizes) for b in blocks.inputs)
    return (
        f"internal error: {call.target} on shards {given} must give {blocks.outputs[0].sizes}: {problem}; "
        "an argument depends on a global size, so the op needs a row in `SPECIAL` of shardwright/torch/_kernels.py"
    )


# Arguments that count global sizes.


def _reshape(_: Any, at: Blocks, x: Tensor, *__: Any, **___: Any) -> Tensor:
    return x.reshape(at.outputs[0].sizes)


def _expand(_: Any, at: Blocks, x: Tensor, *__: Any, **___: Any) -> Tensor:
    return x.expand(at.outputs[0].sizes)


def _adaptive_pool(target: Any, at: Blocks, x: Tensor, _: Any) -> Any:
    return target(x, at.outputs[0].sizes[2:])


def _conv(target: Any, _: Blocks, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Bias, stride, padding and dilation are local already.
    return target(x, weight, *args[:4], **{**kwargs, "groups": x.shape[1] // weight.shape[1]})


def _mean(target: Any, at: Blocks, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    y = target(x, *args, **kwargs)
    whole, result = math.prod(at.inputs[0].shape), math.prod(at.outputs[0].shape)
    share = (x.numel() * result) / (y.numel() * whole)
    return y if share == 1 else y * share


# Arguments that count global positions.


def _local_positions(positions: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Global positions as positions in a block, clamped to it, and which of them are inside it."""
    local = positions - start
    inside = (local >= 0) & (local < size)
    return local.clamp(0, size - 1), inside


def _embedding(target: Any, at: Blocks, table: Tensor, ids: Tensor, padding: int = -1, *rest: Any) -> Any:
    rows = table.shape[0]
    if rows == at.inputs[0].shape[0]:
        return target(table, ids, padding, *rest)
    local, inside = _local_positions(ids, at.inputs[0].starts[0], rows)
    y = target(table, local)
    # The padding row is read, but has no gradient.
    trained = inside & (ids != padding) if padding >= 0 else inside
    y = torch.where(trained.unsqueeze(-1), y, y.detach())
    return y * inside.unsqueeze(-1).to(y.dtype)


def _gather(target: Any, at: Blocks, x: Tensor, dim: int, index: Tensor) -> Any:
    local, inside = _local_positions(index, at.inputs[0].starts[dim], x.shape[dim])
    return target(x, dim, local) * inside.to(x.dtype)


def _dropout(_: Any, at: Blocks, x: Tensor, rate: float, strides: tuple[int, ...]) -> Tensor:
    keep, block = 1.0 - rate, at.outputs[0]
    if keep == 0:
        return x * 0
    # Random bits are drawn in the order of memory.
    mask = torch.empty_strided(block.shape, strides, dtype=x.dtype, device=x.device).bernoulli_(keep).div_(keep)
    for dim, (start, size) in enumerate(zip(block.starts, block.sizes, strict=True)):
        mask = mask.narrow(dim, start, size)
    return x * mask


def _attention(
    target: Any,
    at: Blocks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    **options: Any,
) -> Any:
    start, size = at.inputs[0].starts[-2], query.shape[-2]
    if not causal or size == at.inputs[0].shape[-2]:
        return target(query, key, value, mask, dropout, causal, **options)
    # A block of queries starts at a later position than the keys, and sees none behind its end.
    key, value = key[..., : start + size, :], value[..., : start + size, :]
    positions = torch.arange(start, start + size, device=query.device).unsqueeze(-1)
    visible = positions >= torch.arange(key.shape[-2], device=query.device)
    return target(query, key, value, visible, dropout, False, **options)


# Pieces of norms and losses: statistics of the whole extent are inputs.


def _keep_dims(statistic: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        statistic = statistic.unsqueeze(axis)
    return statistic


def _variance(_: Any, __: Blocks, x: Tensor, mean: Tensor, axes: list[int], count: int) -> Tensor:
    return (x - _keep_dims(mean, axes)).square().sum(axes) * (1.0 / count)


def _normalize(
    _: Any,
    __: Blocks,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: list[int],
    params: list[int],
    eps: float,
) -> Tensor:
    shape = [size if d in params else 1 for d, size in enumerate(x.shape)]
    y = (x - _keep_dims(mean, axes)) * _keep_dims((variance + eps).rsqrt(), axes)
    if weight is not None:
        y = y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _sum_exp(_: Any, __: Blocks, x: Tensor, largest: Tensor) -> Tensor:
    return (x - largest.unsqueeze(-1)).exp_().sum(-1)


class _RowLoss(torch.autograd.Function):
    """`ln(s) + m - logits[label]` of rows whose label is in this process's block of classes, zero of other rows. Its
    gradient covers the maximum `m` and the sum `s` too."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, m: Tensor, s: Tensor, start: int, classes: int, ignored: int) -> Tensor:
        ctx.split = logits.shape[-1] != classes
        counts = labels != ignored
        at, inside = _local_positions(labels, start, logits.shape[-1])
        at, inside = at.unsqueeze(-1), inside & counts
        ctx.save_for_backward(logits, m, s, at, inside, counts)
        loss = s.log() + m - logits.gather(-1, at).squeeze(-1)
        return torch.where(inside, loss, torch.zeros_like(loss))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, m, s, at, inside, counts = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradient is differentiated again: the sum takes part.
            if ctx.split:
                raise PlanError("gradients of gradients through a cross-entropy of which the classes are split: plan without its loss_fn")
            probability = logits.softmax(-1).scatter_add(-1, at, -inside.to(logits.dtype).unsqueeze(-1))
            return probability * (grad * counts).unsqueeze(-1), *(None,) * 6
        probability = (logits - m.unsqueeze(-1)).exp_().div_(s.unsqueeze(-1))
        probability.scatter_add_(-1, at, -inside.to(logits.dtype).unsqueeze(-1))
        return probability.mul_((grad * counts).unsqueeze(-1)), *(None,) * 6


def _cross_entropy(
    _: Any, at: Blocks, logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, ignored: int
) -> Any:
    return _RowLoss.apply(logits, labels, largest, total, at.inputs[0].starts[-1], at.inputs[0].shape[-1], ignored)


def _rows(reason: str, run: Substitute, *targets: Any) -> dict[Any, Special]:
    return {target: Special(run, reason) for target in targets}


#: Every op that does not run its own overload on shards. A string is a planner op that no ATen overload computes.
SPECIAL: dict[Any, Special] = {
    **_rows("the size is global", _reshape, aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    **_rows(
        "a block of size 1 of a longer dimension is not squeezed",
        _reshape,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    ),
    **_rows("the size is global", _expand, aten.expand.default),
    **_rows(
        "the output size is global",
        _adaptive_pool,
        aten.adaptive_avg_pool1d.default,
        aten.adaptive_avg_pool2d.default,
        aten.adaptive_avg_pool3d.default,
    ),
    **_rows(
        "`groups` counts all groups of channels, a block holds some of them",
        _conv,
        *(overload for op in (aten.conv1d, aten.conv2d, aten.conv3d) for overload in (op.default, op.padding)),
    ),
    **_rows("the divisor is the global number of elements", _mean, aten.mean.default, aten.mean.dim),
    **_rows("ids are global rows, a split table holds a range of them", _embedding, aten.embedding.default),
    **_rows("the index is global, a block holds a range of positions", _gather, aten.gather.default),
    **_rows(
        "a causal mask depends on the global position of each query",
        _attention,
        aten.scaled_dot_product_attention.default,
    ),
    **_rows("random bits are drawn for the whole tensor, as on one process", _dropout, aten.dropout.default),
    **_rows("the divisor is the global number of elements, and the mean is that of all", _variance, "variance"),
    **_rows("mean and variance are those of all elements, and have gradients", _normalize, "normalize"),
    **_rows("the maximum is that of all classes", _sum_exp, "sum_exp"),
    **_rows("labels are global classes; maximum and sum are those of all classes", _cross_entropy, "cross_entropy"),
}
