"""Views, transposes, slices, concatenation and padding, and sums and means."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from .._graph import AtenCall, Input
from ._table import X, aten, calls, positive, reduced, require, reshaped, translates

if TYPE_CHECKING:
    from .._translate import Translator


@translates(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.flatten.using_ints,
)
def reshape(t: Translator, x: Any, *_: Any, **__: Any) -> int:
    x, shape = t.tensor(x), t.result_shape()
    return x if t.shape(x) == shape else t.emit("", "reshape", [x], shape, shape=list(shape))


@translates(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.detach.default,
    aten.detach_.default,
)
def same(t: Translator, x: Any, *_: Any, **__: Any) -> int:
    # The planner has no such op. For a detached tensor it prices a backward pass that does not run.
    x = t.tensor(x)
    return t.emit("", "reshape", [x], t.shape(x), shape=list(t.shape(x)))


@translates(operator.getitem)
def getitem(t: Translator, x: Any, at: int) -> Any:
    return t.value(x)[at]


def transposed(t: Translator, name: str, x: int, order: list[int], call: AtenCall | None = None) -> int:
    """The dimensions in another order."""
    if order == list(range(len(order))):
        return x
    shape = t.shape(x)
    return t.emit(name, "transpose", [x], tuple(shape[d] for d in order), call=call, perm=order)


@translates(aten.permute.default)
def permute(t: Translator, x: Any, order: list[int]) -> int:
    x = t.tensor(x)
    return transposed(t, "", x, [positive(d, len(order)) for d in order])


@translates(aten.transpose.int, aten.swapaxes.default)
def transpose(t: Translator, x: Any, a: int, b: int) -> int:
    x = t.tensor(x)
    order = list(range(len(t.shape(x))))
    order[a], order[b] = order[b], order[a]
    return transposed(t, "", x, order)


@translates(aten.t.default)
def t_(t: Translator, x: Any) -> int:
    x = t.tensor(x)
    return transposed(t, "", x, list(reversed(range(len(t.shape(x))))))


@translates(aten.expand.default)
def expand(t: Translator, x: Any, *_: Any, **__: Any) -> int:
    return _broadcast(t, "", t.tensor(x), t.result_shape())


def _broadcast(t: Translator, name: str, x: int, shape: tuple[int, ...]) -> int:
    """A tensor repeated to a shape, aligned at the last dimension."""
    if t.shape(x) == shape:
        return x
    dims = list(range(len(shape) - len(t.shape(x)), len(shape)))
    call = calls(aten.expand.default, X, list(shape))
    return t.emit(name, "broadcast", [x], shape, call=call, shape=list(shape), dims=dims)


@translates(aten.broadcast_tensors.default)
def broadcast_tensors(t: Translator, parts: list[Any]) -> tuple[int, ...]:
    shapes = t.result_shapes()
    return tuple(_broadcast(t, f"part{i}", t.tensor(part), shapes[i]) for i, part in enumerate(parts))


def _slice(t: Translator, name: str, x: int, dim: int, start: int, limit: int, stride: int = 1) -> int:
    """Every `stride`-th position of one dimension. The planner splits other dimensions only."""
    shape = t.shape(x)
    if (start, limit, stride) == (0, shape[dim], 1):
        return x
    starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
    starts[dim], limits[dim], strides[dim] = start, limit, stride
    size = -(-(limit - start) // stride)
    require(size > 0, "an empty slice")
    result = (*shape[:dim], size, *shape[dim + 1 :])
    call = calls(aten.slice.Tensor, X, dim, start, limit, stride)
    return t.emit(name, "slice", [x], result, call=call, start=starts, limit=limits, stride=strides)


@translates(aten.slice.Tensor)
def slice_(t: Translator, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> int:
    x = t.tensor(x)
    dim = positive(dim, len(t.shape(x)))
    first, last, _ = slice(start, end).indices(t.shape(x)[dim])
    return _slice(t, "", x, dim, first, last, step)


@translates(aten.select.int)
def select(t: Translator, x: Any, dim: int, index: int) -> int:
    x = t.tensor(x)
    dim = positive(dim, len(t.shape(x)))
    index = positive(index, t.shape(x)[dim])
    return reshaped(t, "row", _slice(t, "", x, dim, index, index + 1), t.result_shape())


def _cut(t: Translator, x: int, dim: int, sizes: list[int]) -> tuple[int, ...]:
    parts, start = [], 0
    for i, size in enumerate(sizes):
        parts.append(_slice(t, f"part{i}", x, dim, start, start + size))
        start += size
    return tuple(parts)


@translates(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def split(t: Translator, x: Any, sizes: Any, dim: int = 0) -> tuple[int, ...]:
    x = t.tensor(x)
    dim = positive(dim, len(t.shape(x)))
    return _cut(t, x, dim, [shape[dim] for shape in t.result_shapes()])


@translates(aten.unbind.int)
def unbind(t: Translator, x: Any, dim: int = 0) -> tuple[int, ...]:
    x = t.tensor(x)
    shape = t.shape(x)
    dim = positive(dim, len(shape))
    rows = (*shape[:dim], *shape[dim + 1 :])
    return tuple(reshaped(t, "row", part, rows) for part in _cut(t, x, dim, [1] * shape[dim]))


@translates(aten.cat.default)
def cat(t: Translator, parts: list[Any], dim: int = 0) -> int:
    dtype, shape = t.result_dtype(), t.result_shape()
    # Caches of keys and values begin as empty tensors.
    ids = [t.tensor(part, dtype) for part in parts if part.meta["val"].numel() > 0]
    require(bool(ids), "only empty tensors")
    dim = positive(dim, len(shape))
    call = calls(aten.cat.default, [Input(i) for i in range(len(ids))], dim)
    if len(ids) == 1:
        return t.emit("", "reshape", ids, shape, call=call, shape=list(shape))
    return t.emit("", "concat", ids, shape, call=call, axis=dim)


@translates(aten.stack.default)
def stack(t: Translator, parts: list[Any], dim: int = 0) -> int:
    shape = t.result_shape()
    dim = positive(dim, len(shape))
    rows = (*shape[:dim], 1, *shape[dim + 1 :])
    ids = [reshaped(t, "row", t.tensor(part), rows) for part in parts]
    call = calls(aten.cat.default, [Input(i) for i in range(len(ids))], dim)
    return t.emit("", "concat", ids, shape, call=call, axis=dim)


@translates(aten.constant_pad_nd.default)
def constant_pad(t: Translator, x: Any, pads: list[int], value: float = 0.0) -> int:
    return pad(t, x, pads, "constant", value)


@translates(aten.pad.default)
def pad(t: Translator, x: Any, pads: list[int], mode: str = "constant", value: float | None = None) -> int:
    x = t.tensor(x)
    rank = len(t.shape(x))
    require(mode == "constant" and min(pads, default=0) >= 0, f"padding {mode} by {pads}")
    low, high = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    return t.emit("", "pad", [x], t.result_shape(), low=low, high=high, interior=[0] * rank, value=float(value or 0))


@translates(aten.sum.default, aten.sum.dim_IntList)
def sum_(t: Translator, x: Any, dims: list[int] | None = None, keepdim: bool = False, dtype: Any = None) -> int:
    return _over(t, x, dims, "sum")


@translates(aten.mean.default, aten.mean.dim)
def mean(t: Translator, x: Any, dims: list[int] | None = None, keepdim: bool = False, dtype: Any = None) -> int:
    return _over(t, x, dims, "mean")


def _over(t: Translator, x: Any, dims: list[int] | None, f: str) -> int:
    x = t.tensor(x, t.result_dtype())
    rank = len(t.shape(x))
    over = [positive(d, rank) for d in dims] if dims else list(range(rank))
    return reshaped(t, "keep", reduced(t, "", x, over, f), t.result_shape())
