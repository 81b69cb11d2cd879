"""A sharded step as people read it: one sentence, the plan's verdict, and the shardings with equal ones folded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

_NUMBER = re.compile(r"\d+(?=['\"]?\])")
# The most numbers of folded lines that are listed.
_MOST_LISTED = 8


def ways(sharding: NamedSharding, dim: int | None = None) -> int:
    """The number of blocks of a tensor, or of one of its dimensions."""
    spec = list(sharding.spec)
    dims = spec if dim is None else spec[dim : dim + 1]
    names = [name for axes in dims if axes is not None for name in (axes if isinstance(axes, tuple) else (axes,))]
    return math.prod(sharding.mesh.shape[name] for name in names)


def sentence(
    shapes: Sequence[Any], shardings: Sequence[NamedSharding], roles: Sequence[str], batch_dims: Sequence[int | None]
) -> str:
    """How the step is split, in one sentence: `data parallel over 8; parameters replicated; optimizer state split 8 ways`."""
    leaves = list(zip(shapes, shardings, roles, strict=True))
    batches = zip(shardings, batch_dims, strict=True)
    batch = max((ways(sharding, dim) for sharding, dim in batches if dim is not None), default=1)
    parts = [f"data parallel over {batch}" if batch > 1 else "the batch is not split"]
    for role, title in (("parameter", "parameters"), ("optimizer_state", "optimizer state")):
        sizes = [(shape.size * shape.dtype.itemsize, s) for shape, s, kind in leaves if kind == role]
        whole = sum(size for size, _ in sizes)
        local = sum(size / ways(s) for size, s in sizes)
        if whole:
            degree = whole / local
            parts.append(f"{title} {'replicated' if degree < 1.01 else f'split {_show(degree)} ways'}")
    return "; ".join(parts)


def _show(degree: float) -> str:
    return f"{degree:.0f}" if abs(degree - round(degree)) < 0.05 else f"{degree:.1f}"


def shardings(tree: Any, fold: bool) -> list[str]:
    """One line per sharding; with `fold`, one per group of paths that differ in numbers only and have equal shardings."""
    entries = [
        (jax.tree_util.keystr(path), str(sharding.spec)) for path, sharding in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    if not fold:
        return [f"  {path}: {spec}" for path, spec in entries]
    groups: dict[tuple[str, str], list[str]] = {}
    for path, spec in entries:
        groups.setdefault((_pattern(path), spec), []).append(path)
    patterns = [pattern for pattern, _ in groups]
    lines = []
    for (pattern, spec), paths in groups.items():
        if len(paths) == 1:
            lines.append(f"  {paths[0]}: {spec}")
        elif patterns.count(pattern) == 1:
            lines.append(f"  {pattern} ({len(paths)}): {spec}")
        else:
            listed = [".".join(_NUMBER.findall(path)[1:]) for path in paths]
            more = ", ..." if len(listed) > _MOST_LISTED else ""
            lines.append(f"  {pattern} ({', '.join(listed[:_MOST_LISTED])}{more}): {spec}")
    return lines


def _pattern(path: str) -> str:
    """A path with `*` for numbers, except for the position of the argument.

    >>> _pattern("[0]['blocks'][3]['w_2']")
    "[0]['blocks'][*]['w_*']"
    """
    head, rest = re.match(r"(\[\d+\])?(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
    return (head or "") + _NUMBER.sub("*", rest)


def numbered(title: str, lines: Iterable[str], most: int) -> list[str]:
    """Lines under a title, at most so many."""
    found = list(lines)
    more = [f"  ... and {len(found) - most} more"] if len(found) > most else []
    return [f"{title}:", *(f"  {line}" for line in found[:most]), *more] if found else []
