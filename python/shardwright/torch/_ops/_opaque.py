"""Ops that the planner knows nothing about, but that treat some dimensions separately.

Each row says which dimensions of the op's first tensor argument (and of its results) are such: the op of a block is the
block of the op. Other tensor arguments are read whole, unless the row lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._table import positive

#: Dimensions of each tensor argument and each result that are shared, by node. `None` in a list: not shared.
Dims = list[list[int | None]]
Rule = Callable[[Any, list[Any], list[Any]], Dims]


def _leading(count: int, also: tuple[int, ...] = ()) -> Rule:
    """The first `count` dimensions of the first argument (and of the arguments `also`) and of the results."""

    def rule(node: Any, inputs: list[Any], outputs: list[Any]) -> Dims:
        carries = {node.args[0], *(node.args[i] for i in also if i < len(node.args))}
        given = [_first(value, count if arg in carries else 0) for arg, value in zip(dict.fromkeys(node.all_input_nodes), inputs, strict=True)]
        return given + [_first(value, count) for value in outputs]

    return rule


def _first(value: torch.Tensor, count: int) -> list[int | None]:
    return [d if d < count else None for d in range(value.dim())]


def _but_last(count: int) -> Rule:
    """All dimensions but the last `count`, of all tensors. They must be equal."""

    def rule(node: Any, inputs: list[Any], outputs: list[Any]) -> Dims:
        lead = inputs[0].shape[: inputs[0].dim() - count]
        same = [v.shape[: len(lead)] == lead and v.dim() >= len(lead) for v in (*inputs, *outputs)]
        shared = len(lead) if all(same) else 0
        return [_first(v, shared) for v in (*inputs, *outputs)]

    return rule


def _but(position: int) -> Rule:
    """All dimensions but the one that an argument names, of all tensors."""

    def rule(node: Any, inputs: list[Any], outputs: list[Any]) -> Dims:
        rank = inputs[0].dim()
        named = node.args[position] if position < len(node.args) else -1
        dims = {positive(d, rank) for d in (named if isinstance(named, (list, tuple)) else [named])} if named is not None else set(range(rank))
        shape = inputs[0].shape
        keep = [d for d in range(rank) if d not in dims]
        equal = all(v.dim() == rank and all(v.shape[d] == shape[d] for d in keep) for v in (*inputs, *outputs))
        number = {d: i for i, d in enumerate(keep)} if equal else {}
        return [[number.get(d) for d in range(v.dim())] for v in (*inputs, *outputs)]

    return rule


def _recurrent(node: Any, inputs: list[Any], outputs: list[Any]) -> Dims:
    """The batch of a recurrent network: of its input, its states and its results. Weights are read whole."""
    batch = 0 if node.args[8] else 1
    x, states = node.args[0], node.args[1]
    held = set(states) if isinstance(states, (list, tuple)) else {states}
    dims: Dims = []
    for arg, value in zip(dict.fromkeys(node.all_input_nodes), inputs, strict=True):
        at = batch if arg is x else 1 if arg in held else None
        dims.append([0 if d == at else None for d in range(value.dim())])
    for i, value in enumerate(outputs):
        at = batch if i == 0 else 1
        dims.append([0 if d == at else None for d in range(value.dim())])
    random = node.args[5] > 0 and node.args[6]
    return [[None] * len(d) for d in dims] if random or inputs[0].dim() != 3 else dims


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("group_norm", "instance_norm", "native_group_norm"), _leading(1)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"), _leading(1)),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _leading(1, (1,))),
    **dict.fromkeys(
        (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
            "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
            "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
            "replication_pad3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool1d",
            "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "adaptive_avg_pool3d", "max_pool2d_with_indices", "lp_pool2d",
        ),
        _leading(2),
    ),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col", "col2im"), _leading(1)),
    **dict.fromkeys(
        (
            "inverse", "linalg_inv", "linalg_inv_ex", "linalg_det", "linalg_slogdet", "linalg_cholesky", "linalg_qr",
            "linalg_svd", "linalg_eigh", "linalg_solve", "linalg_matrix_exp", "linalg_pinv", "tril", "triu", "cdist",
        ),
        _but_last(2),
    ),
    **dict.fromkeys(
        (
            "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "flip",
        ),
        _but(1),
    ),
    "topk": _but(2),
    "roll": _but(2),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}  # fmt: skip


def _pointwise(node: Any, inputs: list[Any], outputs: list[Any]) -> Dims:
    """All dimensions of the results, and those of the arguments that are not broadcast."""
    shape = outputs[0].shape
    if any(v.shape != shape for v in outputs):
        return []

    def own(v: torch.Tensor) -> list[int | None]:
        skip = len(shape) - v.dim()
        return [d + skip if v.shape[d] == shape[d + skip] else None for d in range(v.dim())]

    return [own(v) for v in (*inputs, *outputs)]


def _rule(target: Any) -> Rule | None:
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return _pointwise
    return _RULES.get(getattr(target, "_opname", ""))


def known(target: Any) -> bool:
    """Whether the op has a row."""
    return _rule(target) is not None


def shared_dims(node: Any, given: list[Any], outputs: list[Any]) -> Dims:
    """The shared dimensions of an op's tensor arguments and results; empty if nothing is known."""
    rule = _rule(node.target)
    if rule is None or (node.kwargs and rule is not _pointwise):
        return []
    if node.target._opname == "instance_norm" and node.args[3] is not None:
        return []
    try:
        dims = rule(node, [arg.meta["val"] for arg in given], outputs)
    except (IndexError, TypeError, AttributeError):
        return []
    return dims if any(d is not None for t in dims for d in t) else []

