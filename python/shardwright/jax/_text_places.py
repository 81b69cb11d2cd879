"""Places in the planned text: the equations that its lines come from, and the lines of the user's code."""

from __future__ import annotations

import re
from typing import Any

from ._capture import PlannedText, StepCapture, path_of
from ._walk import equation, has_line, numbers_of, source_line

#: A place in the text, as the planner's errors name it.
TEXT_PLACE = re.compile(r"program\.mlir:(\d+):(\d+): ")
_LOCATION = re.compile(r'loc\((?:#(loc\d*)|"([^"]*)"[^)]*)\)\s*$')


def source_of(step: StepCapture, path: str) -> str:
    """The line of the user's code that an equation comes from, `train.py:12 (loss)`. Bodies of JAX's own functions have none: then
    it is the line of the loop or call around them."""
    numbers = numbers_of(path)
    around = (equation(step.jaxpr, numbers[:length]) for length in range(len(numbers), 0, -1))
    found = [eqn for eqn in around if eqn is not None]
    return source_line(next(filter(has_line, found), found[0]), f"equation {path}") if found else f"equation {path}"


def stand_in_lines(step: StepCapture, planned: PlannedText) -> list[str]:
    """The equations that were planned as calls, with the lines of the user's code."""
    paths = sorted(planned.stand_ins, key=numbers_of)
    return list(dict.fromkeys(source_of(step, path) for path in paths))


def path_of_error(text: str, error: str) -> str | None:
    """The path of the equation that an error of the planner is about."""
    place = TEXT_PLACE.search(error)
    return None if place is None else path_of_line(text, int(place[1]) - 1)


def path_of_line(text: str, line: int) -> str | None:
    """The path of the equation that a line of the text comes from; lines count from zero."""
    lines = text.splitlines()
    at: int | None = line
    # Functions of the text are lowered once for several calls: then the first call is the place.
    for _ in range(8):
        if at is None or at >= len(lines):
            return None
        path = _path_at(text, lines, at)
        if path is not None:
            return path
        at = _first_call(lines, at)
    return None


def _first_call(lines: list[str], at: int) -> int | None:
    """The first line that calls the function around a line."""
    around = (found[1] for line in reversed(lines[: at + 1]) if (found := re.match(r"\s*func\.func .*?@([\w.$-]+)\(", line)))
    name = next(around, None)
    if name is None:
        return None
    return next((i for i, line in enumerate(lines) if re.search(rf"call @{re.escape(name)}\(", line)), None)


def _path_at(text: str, lines: list[str], at: int) -> str | None:
    found = _LOCATION.search(lines[at])
    if found is None or lines[at].rstrip().endswith("{"):
        # The location of an operation with regions follows its last brace.
        indent = len(lines[at]) - len(lines[at].lstrip())
        rest = (line for line in lines[at + 1 :] if line.startswith(" " * indent + "}"))
        found = next((match for line in rest if (match := _LOCATION.search(line))), None)
    if found is None:
        return None
    return path_of(found[2] if found[1] is None else _alias(text, found[1]))


def _alias(text: str, name: str) -> str | None:
    """The name in the location that an alias stands for."""
    for _ in range(8):
        meaning: Any = re.search(rf"^#{name} = loc\((.*)\)$", text, re.MULTILINE)
        if meaning is None:
            return None
        quoted = re.match(r'"([^"]*)"', meaning[1])
        if quoted is not None:
            return str(quoted[1])
        inner = re.match(r"#(loc\d*)", meaning[1])
        if inner is None:
            return None
        name = inner[1]
    return None
