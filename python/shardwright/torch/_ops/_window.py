"""Convolution and pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._table import X, Y, aten, binary, calls, reduced, require, reshaped, translates

if TYPE_CHECKING:
    from .._translate import Translator


def _each(given: Any, rank: int) -> list[int]:
    values = [given] if isinstance(given, int) else list(given)
    return values * rank if len(values) == 1 else values


@translates(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def conv(
    t: Translator,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> int:
    x, weight = t.tensor(x), t.tensor(weight)
    rank = len(t.shape(weight)) - 2
    require(len(t.shape(x)) == rank + 2, "a convolution of a single sample: add a dimension for the batch")
    geometry = {
        "stride": _each(stride, rank),
        "pad": [[p, p] for p in _each(padding, rank)],
        "dilation": _each(dilation, rank),
        "groups": groups,
    }
    overload = (aten.conv1d, aten.conv2d, aten.conv3d)[rank - 1].default
    call = calls(overload, X, Y, None, geometry["stride"], _each(padding, rank), geometry["dilation"], groups)
    y = t.emit("", "conv", [x, weight], t.result_shape(), call=call, geometry=geometry)
    if bias is None:
        return y
    shift = t.tensor(bias)
    shift = reshaped(t, "bias", shift, (*t.shape(shift), *(1,) * rank))
    return binary(t, "add_bias", "add", y, shift)


@translates(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def conv_padded(
    t: Translator,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> int:
    kernel = t.shape(t.tensor(weight))[2:]
    dilations = _each(dilation, len(kernel))
    pads = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)] if padding == "same" else [0] * len(kernel)
    require(all(p % 2 == 0 for p in pads), "padding='same' of an even kernel")
    return int(conv(t, x, weight, bias, stride, [p // 2 for p in pads], dilation, groups))


def _geometry(rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    kernels = _each(kernel, rank)
    return {
        "kernel": kernels,
        "stride": _each(stride, rank) if stride else kernels,
        "pad": [[p, p] for p in _each(padding, rank)],
        "dilation": _each(dilation, rank),
    }


@translates(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
def max_pool(
    t: Translator, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> int:
    x = t.tensor(x)
    shape = t.result_shape()
    require(not ceil_mode, "pooling with ceil_mode")
    geometry = _geometry(len(shape) - 2, kernel, stride, padding, dilation)
    results = [(shape, t.dtype(x)), (shape, torch.int32)]
    return t.emit_several("", "max_pool", [x], results, geometry=geometry)[0]


@translates(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    t: Translator,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> int:
    x = t.tensor(x)
    shape = t.result_shape()
    plain = not ceil_mode and divisor_override is None and (count_include_pad or not any(_each(padding, 1)))
    require(plain, "average pooling with ceil_mode, divisor_override, or padding without count_include_pad")
    return t.emit("", "avg_pool", [x], shape, geometry=_geometry(len(shape) - 2, kernel, stride, padding, 1))


@translates(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
def adaptive_avg_pool(t: Translator, x: Any, _: Any) -> int:
    x = t.tensor(x)
    before, after = t.shape(x), t.result_shape()
    rank = len(before) - 2
    if all(size == 1 for size in after[2:]):
        return reshaped(t, "keep", reduced(t, "", x, list(range(2, rank + 2)), "mean"), after)
    even = all(a % b == 0 for a, b in zip(before[2:], after[2:], strict=True))
    require(even, f"adaptive pooling from {list(before[2:])} to {list(after[2:])}")
    kernel = [a // b for a, b in zip(before[2:], after[2:], strict=True)]
    return t.emit("", "avg_pool", [x], after, geometry=_geometry(rank, kernel, (), 0, 1))
