"""How ATen's ops become the planner's: one table, one file per family of ops."""

from . import _attention, _elementwise, _loss, _matrix, _norm, _shape, _window  # noqa: F401: they fill the table.
from ._table import TABLE, Unsupported

__all__ = ["TABLE", "Unsupported"]
