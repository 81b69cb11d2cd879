"""How equations treat the samples of a batch: one by one, or added up.

A step is traced twice, with the whole batch and with a part of it. Dimensions whose sizes differ run over samples. An equation
whose results have samples must treat them one by one; one whose results have none must add them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Each element depends on the elements at the same place.
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "optimization_barrier", "or",
    "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "to_edtype", "from_edtype", "xor",
}  # fmt: skip
# Elements are moved, and every sample stays a sample.
_VIEWS = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"}
_REDUCTIONS = {f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")} | {"argmax", "argmin"}
_CUMULATIVE = {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"}
_WINDOWS = {
    "reduce_window_sum": "window_dimensions", "reduce_window_max": "window_dimensions", "reduce_window_min":
    "window_dimensions", "reduce_window": "window_dimensions", "select_and_scatter_add": "window_dimensions",
    "select_and_gather_add": "window_dimensions",
}  # fmt: skip
#: Products: loops that contain one are too long to be run twice.
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "pallas_call", "custom_vjp_call"}


def sample_dims(full: Sequence[int], part: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that run over samples.

    >>> sample_dims((64, 8), (16, 8))
    (0,)
    """
    return tuple(d for d, (a, b) in enumerate(zip(full, part, strict=True)) if a != b)


def one_by_one(eqn: Any, dims: Sequence[tuple[int, ...]], out_dims: Sequence[tuple[int, ...]]) -> bool:
    """Whether an equation without a body treats samples one by one. `dims` are the sample dimensions of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if any(len(found) > 1 for found in (*dims, *out_dims)):
        # Samples against samples, as in a contrastive loss.
        return False
    first = dims[0] if dims else ()
    if name in _ELEMENTWISE:
        # Operands of one element have no samples.
        shapes = [len(atom.aval.shape) for atom in eqn.invars]
        return all(not found or found == out_dims[0] for found in dims) and len({n for n in shapes if n}) <= 1
    if name in _VIEWS:
        return True
    if name in _REDUCTIONS:
        return not set(first) & set(params["axes"])
    if name in _CUMULATIVE:
        return params["axis"] not in first
    if name in _WINDOWS:
        return all(params[_WINDOWS[name]][d] == 1 for found in dims for d in found)
    if name == "iota":
        return params["dimension"] not in out_dims[0]
    if name == "sort":
        return params["dimension"] not in first
    if name == "top_k":
        return len(eqn.invars[0].aval.shape) - 1 not in first
    if name == "fft":
        return all(d < len(eqn.invars[0].aval.shape) - len(params["fft_lengths"]) for d in first)
    if name == "rev":
        return not set(first) & set(params["dimensions"])
    if name == "concatenate":
        return all(found == out_dims[0] for found in dims) and params["dimension"] not in first
    if name == "split":
        return params["axis"] not in first
    if name == "slice":
        shape, strides = eqn.invars[0].aval.shape, params["strides"]
        whole = (params["start_indices"][d] == 0 and params["limit_indices"][d] == shape[d] for d in first)
        return all(whole) and all(strides is None or strides[d] == 1 for d in first)
    if name == "pad":
        return all(params["padding_config"][d] == (0, 0, 0) for d in first)
    if name == "dynamic_slice":
        return not any(dims[1:]) and all(params["slice_sizes"][d] == eqn.invars[0].aval.shape[d] for d in first)
    if name == "dynamic_update_slice":
        whole = (eqn.invars[1].aval.shape[d] == eqn.invars[0].aval.shape[d] for d in first)
        return not any(dims[2:]) and dims[0] == dims[1] and all(whole)
    if name == "dot_general":
        return _product_of_samples(params["dimension_numbers"], dims)
    if name == "conv_general_dilated":
        spec = params["dimension_numbers"]
        return dims[0] == (spec.lhs_spec[0],) and not dims[1] and params["batch_group_count"] == 1
    if name == "gather":
        return _gathers_samples(eqn, dims, out_dims)
    if name.startswith("scatter"):
        return _scatters_samples(eqn, dims)
    return False


def added_up(eqn: Any, dims: Sequence[tuple[int, ...]]) -> bool:
    """Whether the results of an equation are sums over samples. Sums and zeros among its operands are added to."""
    name, params = eqn.primitive.name, eqn.params
    if any(len(found) > 1 for found in dims):
        return False
    if name == "reduce_sum":
        return set(dims[0]) <= set(params["axes"])
    if name == "dot_general":
        (left, right), _ = params["dimension_numbers"]
        pairs = list(zip(left, right, strict=True))
        return len(dims[0]) == len(dims[1]) == 1 and (dims[0][0], dims[1][0]) in pairs
    if name == "conv_general_dilated":
        # The gradient of a kernel: samples are the channels of both operands.
        spec = params["dimension_numbers"]
        return dims[0] == (spec.lhs_spec[1],) and dims[1] == (spec.rhs_spec[1],) and params["feature_group_count"] == 1
    if name in ("scatter-add", "scatter_add"):
        # The gradient of a table: rows are added at the places that samples name.
        return not dims[0]
    return False


def _product_of_samples(numbers: Any, dims: Sequence[tuple[int, ...]]) -> bool:
    (left, right), (left_batch, right_batch) = numbers
    if dims[0] and dims[1]:
        return (dims[0][0], dims[1][0]) in list(zip(left_batch, right_batch, strict=True))
    return not set(dims[0]) & {*left, *left_batch} and not set(dims[1]) & {*right, *right_batch}


def _gathers_samples(eqn: Any, dims: Sequence[tuple[int, ...]], out_dims: Sequence[tuple[int, ...]]) -> bool:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not dims[0]:
        # Rows of a table, at the places that samples name.
        return bool(dims[1]) and not set(out_dims[0]) & set(numbers.offset_dims)
    batching = getattr(numbers, "operand_batching_dims", ())
    if dims[1]:
        pairs = zip(batching, getattr(numbers, "start_indices_batching_dims", ()), strict=True)
        return (dims[0][0], dims[1][0]) in list(pairs)
    whole = sizes[dims[0][0]] == eqn.invars[0].aval.shape[dims[0][0]]
    return whole and dims[0][0] not in (*numbers.collapsed_slice_dims, *batching)


def _scatters_samples(eqn: Any, dims: Sequence[tuple[int, ...]]) -> bool:
    numbers = eqn.params["dimension_numbers"]
    batching = getattr(numbers, "operand_batching_dims", ())
    if not dims[0]:
        return False
    if dims[1]:
        pairs = zip(batching, getattr(numbers, "scatter_indices_batching_dims", ()), strict=True)
        return (dims[0][0], dims[1][0]) in list(pairs)
    inserted = (*numbers.inserted_window_dims, *batching)
    if dims[0][0] in inserted or not dims[2]:
        return False
    # The window of every update has all samples.
    window = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in inserted]
    place = numbers.update_window_dims[window.index(dims[0][0])]
    sizes = eqn.invars[0].aval.shape[dims[0][0]], eqn.invars[2].aval.shape[place]
    return dims[2] == (place,) and sizes[0] == sizes[1]
