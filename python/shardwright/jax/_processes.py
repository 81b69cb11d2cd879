"""Decisions of several processes: the first one takes them, and the others follow.

A process that decided alone would wait for the others in a collective that they never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._native import DoesNotFit, PlanError
from .._plan import Plan
from ._capture import PlannedText, StepCapture, lower, stand_in_paths, without_locations
from ._text_places import path_of_line, source_of


def agreed_seconds(seconds: float) -> float:
    """The first process's measurement."""
    return seconds if jax.process_count() == 1 else float(_from_first(np.float64(seconds)))


def planned_once(step: StepCapture, make: Callable[[], tuple[Plan, PlannedText]]) -> tuple[Plan, PlannedText]:
    """The plan of the first process, for all processes. Its errors are raised by all."""
    if jax.process_count() == 1:
        return make()
    mine: tuple[Plan, PlannedText] | None = None
    answer: dict[str, str] = {}
    if jax.process_index() == 0:
        try:
            mine = make()
            answer = {"plan": mine[0].to_json()}
        except PlanError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
    told = json.loads(_text_from_first(json.dumps(answer)))
    if "error" in told:
        raise (DoesNotFit if told["kind"] == "DoesNotFit" else PlanError)(told["error"])
    problem = ""
    if mine is None:
        plan = Plan.from_json(told["plan"])
        try:
            mine = plan, text_of(step, plan)
        except PlanError as error:
            problem = str(error)
    # All processes learn whether one of them has another program.
    problems = _gathered(bool(problem))
    if any(problems):
        others = [str(at) for at, wrong in enumerate(problems) if wrong]
        raise PlanError(problem or f"process {', '.join(others)} traced another program than process 0")
    assert mine is not None
    return mine


def text_of(step: StepCapture, plan: Plan) -> PlannedText:
    """The text of a step that a plan was made for. Raises `PlanError` if the plan is of another step."""
    given = str((plan.data.get("request") or {}).get("text") or "")
    if not given:
        raise PlanError(f"the plan is of the model {plan.model}, not of a JAX step; use `shardwright.jax.plan`")
    planned = lower(step, stand_in_paths(given))
    mine, other = map(_program, (planned.text, given))
    for at, (here, there) in enumerate(zip(mine, other, strict=False)):
        if here != there:
            path = path_of_line(planned.text, _program_lines(planned.text)[at])
            place = "" if path is None else f"{source_of(step, path)}: "
            raise PlanError(
                f"{place}the plan is of another step: it has `{there.strip()[:120]}` where this step has `{here.strip()[:120]}`; "
                "plan again, with the same code, shapes and version of JAX"
            )
    if len(mine) != len(other):
        raise PlanError("the plan is of another step, of another length; plan again")
    # Paths of equations are equal in both; the plan's own text has the operations that its shardings refer to.
    return PlannedText(given, planned.stand_ins)


def _program_lines(text: str) -> list[int]:
    """The positions of the lines of `_program` in the text."""
    return [at for at, line in enumerate(text.splitlines()) if not line.startswith("#loc")]


def _program(text: str) -> list[str]:
    """The lines of a program without locations and without the name of its function."""
    return [re.sub(r"^module @\S+", "module", line) for line in without_locations(text)]


def _from_first(x: Any) -> Any:
    from jax.experimental import multihost_utils

    # 64-bit values would be rounded on their way.
    whole = np.frombuffer(np.asarray(x).tobytes(), np.uint8)
    sent = multihost_utils.broadcast_one_to_all(whole)
    return np.frombuffer(np.asarray(sent).astype(np.uint8).tobytes(), np.asarray(x).dtype)[0]


def _text_from_first(text: str) -> str:
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    size = int(_from_first(np.int64(data.size)))
    padded = np.zeros(size, np.uint8)
    padded[: min(size, data.size)] = data[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)).decode()


def _gathered(flag: bool) -> list[bool]:
    from jax.experimental import multihost_utils

    return [bool(x) for x in np.asarray(multihost_utils.process_allgather(np.int32(flag))).reshape(-1)]
