"""One process plans, all others are told: searches that end by the clock could differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from .. import _native
from .._plan import Plan


class _Told:
    """What the first process said about its plan."""

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
        raise _native.PlanError(f"only the first process, which planned, knows the plan's {name}")


def shared(make: Callable[[], Plan]) -> tuple[Plan, str]:
    """The plan that the first process makes, and its layouts; all processes raise what that one raises."""
    told: list[Any] = [None]
    mine: Plan | None = None
    if distributed.get_rank() == 0:
        try:
            mine = make()
            native = mine._native
            told[0] = {
                "json": mine.to_json(),
                "layouts": native.layouts(),
                "collectives": native.collectives(),
                **{detail: mine.table(detail) for detail in ("verdict", "usual", "all")},
            }
        except Exception as error:  # noqa: BLE001: to be raised everywhere.
            told[0] = error
    distributed.broadcast_object_list(told, src=0)
    if isinstance(told[0], Exception):
        raise told[0]
    found = mine if mine is not None else Plan(_Told(told[0]))  # type: ignore[arg-type]
    return found, told[0]["layouts"]
