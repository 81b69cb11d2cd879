"""The place of a refusal: the line of the user's code that it is about.

Refusals of an equation name the line that it comes from. All others name the definition of the step, or the line of the call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from .._native import PlanError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# `train.py:12 (loss)`, as JAX and `defined_at` write a place.
_PLACE = re.compile(r"\S:\d+(?::\d+)? \(\S")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def names_a_line(text: str) -> bool:
    """
    >>> names_a_line("train.py:12 (loss): samples meet"), names_a_line("program.mlir:12:5: samples meet")
    (True, False)
    """
    return _PLACE.search(text) is not None


def defined_at(function: Callable[..., Any]) -> str:
    """File, line and name of a function."""
    plain: Any = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    code = getattr(plain, "__code__", None)
    if code is None and callable(getattr(plain, "loss", None)):
        # A `TrainStep`.
        return defined_at(plain.loss)
    if code is None:
        code = getattr(getattr(type(plain), "__call__", None), "__code__", None)
    name = getattr(plain, "__name__", type(plain).__name__)
    return name if code is None else f"{code.co_filename}:{code.co_firstlineno} ({name})"


@contextlib.contextmanager
def refusals_at(function: Callable[..., Any]) -> Iterator[None]:
    """Refusals inside that name no line get that of the function's definition."""
    try:
        yield
    except PlanError as error:
        _add_place(error, defined_at(function))
        raise


def placed(entry: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function; its refusals that name no line get that of its caller."""

    @functools.wraps(entry)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return entry(*args, **kwargs)
        except PlanError as error:
            _add_place(error, _callers_line())
            raise

    return call


def _add_place(error: PlanError, place: str) -> None:
    text = str(error)
    if names_a_line(f"{place} ") and not names_a_line(text):
        error.args = (f"{place}: {text}",)


def _callers_line() -> str:
    """The innermost line of a call that is neither this package's nor JAX's."""
    from jax._src import source_info_util

    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if source_info_util.is_user_filename(code.co_filename) and not code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown line"
