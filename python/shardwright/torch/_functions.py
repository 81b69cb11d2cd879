"""Functions of PyTorch that are not computations on shards."""

from __future__ import annotations

from typing import Any

#: Functions that ask about a tensor, or work on its place in autograd: they run as they are.
_PLAIN = {
    "__deepcopy__", "__delete__", "__hash__", "__len__", "__reduce_ex__", "__repr__", "__set__", "__setstate__", "__str__", "_is_view", "_version",
    "backward", "data_ptr", "dim", "element_size", "get_device", "grad", "has_names", "is_complex", "is_conj",
    "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed",
    "is_tensor", "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "retain_grad", "size", "storage_offset", "stride", "untyped_storage", "sym_size", "__dir__", "is_storage",
    "record_stream", "_make_subclass", "_make_wrapper_subclass", "set_", "share_memory_", "is_set_to", "names",
}  # fmt: skip
#: Attributes that are computed.
_COMPUTED = {"T", "mT", "H", "mH", "real", "imag"}
#: Functions of which the result depends on a tensor's shape, type and device only.
SHAPE_ONLY = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_tensor", "result_type", "can_cast", "promote_types", "get_default_dtype",
}  # fmt: skip


#: Whether a function runs as it is; `None` where that depends on its arguments.
_KNOWN: dict[Any, bool | None] = {}


def is_plain(func: Any, args: Any) -> bool:
    """Whether the function runs as it is."""
    try:
        known = _KNOWN[func]
    except KeyError:
        known = _KNOWN[func] = _is_plain(func)
    except TypeError:
        known = _is_plain(func)
    return len(args) == 1 if known is None else known


def _is_plain(func: Any) -> bool | None:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _COMPUTED
    # `type` with an argument converts.
    return None if name == "type" else name in _PLAIN


def writes_first(func: Any, kwargs: Any) -> bool:
    """Whether the function writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return (name.endswith("_") and not name.startswith("_")) or bool(kwargs.get("inplace"))
