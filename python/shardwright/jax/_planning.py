"""Plans a captured step. Equations that the planner refuses get stand-ins; other errors name the user's line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._native import DoesNotFit, PlanError
from .._plan import Plan, SearchOptions, _pairs, plan
from ._arguments import Call, CallForm
from ._capture import Donations, PlannedText, StepCapture, capture, lower
from ._micro_batches import batch_leaves, divided
from ._pins import constraints, pins_of
from ._processes import planned_once
from ._recompute import recomputing
from ._references import refuse_ordered_effects
from ._refusals import refusals_at
from ._stand_in import PREFIX
from ._text_places import TEXT_PLACE, path_of_error, source_of

# The most equations of a step that are replaced one after the other.
_MOST_REPLACED = 64
# Limits of the planner that a stand-in does not lift.
_LIMITS = re.compile(r"walks more than|more than \d+ ops|nested more than")
# Rules that the user gives. A stand-in would ignore them.
_USERS_RULES = re.compile(rf"the rule `|rule of `(?!{re.escape(PREFIX)})")


@dataclass(frozen=True)
class StepPlanner:
    """A step, and what its user says about all plans of it."""

    function: Callable[..., Any]
    form: CallForm
    donations: Donations
    roles: Mapping[str, object] | Iterable[str] | None
    opaque: list[str]
    rules: Mapping[str, str] | None
    #: Whether attention is planned as the products and softmax that XLA runs.
    plain_attention: bool = True
    #: The policy by which the loss of a `TrainStep` is recomputed.
    recompute: str | None = None
    #: The arguments that hold the batch; by default those that do not come back as results.
    batch_argnums: tuple[int, ...] | None = None
    #: Shardings of arguments that plans keep, a prefix of the arguments' tree.
    in_shardings: Any = None
    #: The axes of the machine, and the devices in its order, where they are there.
    axes: Mapping[str, int] = field(default_factory=dict)
    devices: Sequence[Any] | None = None

    def capture(self, call: Call, micro_batches: int = 1) -> StepCapture:
        """The step for a call, in micro-batches."""
        function = recomputing(self.function, self.recompute)
        step = capture(function, call, self.donations.leaves(call.structure))
        if math.prod(self.axes.values()) > 1:
            refuse_ordered_effects(step.jaxpr)
        if micro_batches != 1:
            with refusals_at(self.function):
                step = divided(step, function, call, micro_batches, self.batch_argnums)
        if self.in_shardings is None:
            return step
        pins = pins_of(self.in_shardings, call.structure, call.leaves, self.axes, self.devices)
        return replace(step, pins=pins)

    def micro_batches(self, call: Call, wanted: int | str) -> list[int]:
        """Numbers of micro-batches to try, in this order. `auto` are all divisors of the batch."""
        if wanted == "auto":
            step = self.capture(call)
            batch = int(step.types[batch_leaves(step, self.batch_argnums)[0]][0][0])
            return [n for n in range(1, batch + 1) if batch % n == 0]
        if not isinstance(wanted, int) or wanted < 1:
            raise PlanError(f'micro_batches={wanted!r} is no number; use 1, 2, ..., or "auto"')
        return [wanted]

    def plan(
        self,
        step: StepCapture,
        machine: str,
        solver: str,
        options: SearchOptions,
        memory: str | float | None,
        planned: PlannedText | None = None,
    ) -> tuple[Plan, PlannedText]:
        """The plan of a captured step, and its text. Of several processes, the first one plans."""

        def plan_text(planned: PlannedText) -> Plan:
            # Recipes leave no choice: there, calls with specs of their own are planned by their rules alone.
            own = planned.constraints if solver in ("auto", "exact") else ()
            fixed = [*_pairs(options.get("fix")), *constraints(step.pins), *own]
            constrained: SearchOptions = {"engine": default_engine(machine), **options, "fix": fixed}
            return plan(
                planned.text,
                machine=machine,
                memory=memory,
                solver=solver,
                roles=_roles(self.roles, len(step.constants)),
                opaque=self.opaque,
                rules=self.rules,
                plain_attention=self.plain_attention,
                **constrained,
            )

        return planned_once(step, lambda: plan_captured(step, plan_text, planned))


def default_engine(machine: str) -> str | None:
    """XLA's fusions, except on machines of which its table knows nothing: host devices, flat ones, and machine files.

    >>> default_engine("h100x64"), default_engine("cpu:8"), default_engine("mine.toml")
    ('xla', None, None)
    """
    return None if machine.startswith(("cpu", "flat")) or machine.endswith(".toml") else "xla"


def _roles(given: Mapping[str, object] | Iterable[str] | None, constants: int) -> list[str]:
    """Roles as `NAME=ROLE`. The constants of closures come before the arguments that users count."""
    pairs = [f"{name}={role}" for name, role in given.items()] if isinstance(given, Mapping) else list(given or ())
    shifted = [re.sub(r"^arg(\d+)(?==)", lambda found: f"arg{int(found[1]) + constants}", pair) for pair in pairs]
    return [*shifted, *(f"arg{at}=constant" for at in range(constants))]


def plan_captured(
    step: StepCapture, plan_text: Callable[[PlannedText], Plan], planned: PlannedText | None = None
) -> tuple[Plan, PlannedText]:
    """The plan of a step, and the text that was planned. `planned` is a text of the step that the planner has read before."""
    replaced: frozenset[str] = frozenset()
    while True:
        planned = planned or lower(step, replaced)
        try:
            return plan_text(planned), planned
        except DoesNotFit:
            raise
        except PlanError as error:
            path = path_of_error(planned.text, str(error))
            if path is None:
                raise
            if _USERS_RULES.search(str(error)) or path in replaced or len(replaced) >= _MOST_REPLACED or _LIMITS.search(str(error)):
                raise PlanError(TEXT_PLACE.sub(f"{source_of(step, path)}: ", str(error))) from None
            replaced |= {path}
            planned = None
