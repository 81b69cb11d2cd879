"""The first process plans and broadcasts its plan: searches with a time limit could differ between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from .. import _native
from .._plan import Plan


class _BroadcastPlan:
    """The texts of the first process's plan, in place of the native plan."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def to_json(self) -> str:
        return self._texts["json"]

    def table(self, detail: str) -> str:
        return self._texts.get(detail, self._texts["usual"])

    def collectives(self) -> str:
        return self._texts["collectives"]

    def layouts(self) -> str:
        return self._texts["layouts"]

    def __getattr__(self, name: str) -> Any:
        raise _native.PlanError(f"the plan's {name} exists only on the first process (rank 0), which planned")


def shared(make: Callable[[], Plan]) -> tuple[Plan, str]:
    """The first process's plan and its layouts. An error of that process is raised on all."""
    message: list[Any] = [None]
    own: Plan | None = None
    if distributed.get_rank() == 0:
        try:
            own = make()
            native = own._native
            message[0] = {
                "json": own.to_json(),
                "layouts": native.layouts(),
                # The stages of a pipeline are several programs.
                "collectives": native.collectives() if own.data["pipeline"] is None else "[]",
                **{detail: own.table(detail) for detail in ("verdict", "usual", "all")},
            }
        except Exception as error:  # noqa: BLE001: raised on all processes.
            message[0] = error
    distributed.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    plan = own if own is not None else Plan(_BroadcastPlan(message[0]))  # type: ignore[arg-type]
    return plan, message[0]["layouts"]
