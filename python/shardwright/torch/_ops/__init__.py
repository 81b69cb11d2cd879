"""Translations of ATen ops to the planner's ops: one table, one file per family of ops."""

from . import _attention, _elementwise, _loss, _matrix, _norm, _shape, _window  # noqa: F401: they fill `TABLE`.
from ._opaque import known, shared_dims
from ._table import TABLE, Unsupported

__all__ = ["TABLE", "Unsupported", "known", "shared_dims"]
