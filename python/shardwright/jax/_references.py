"""Effects of a step. References (`jax.new_ref`) inside of it become values, as `jax.jit` itself lowers them; effects that several devices cannot
have are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._native import PlanError
from ._walk import source_line

_MADE = {"new_ref", "ref", "mutable_array", "freeze", "run_state"}
_USED = {"get", "swap", "addupdate"}


def without_references(jaxpr: Any) -> Any:
    """The step's jaxpr without references. Those of its surroundings are refused: their changes would be lost."""
    outside = any(is_reference(x) for x in jaxpr.consts)
    if not outside and all(eqn.primitive.name not in _MADE for eqn in _equations(jaxpr.jaxpr)):
        return jaxpr
    if outside:
        use = next((eqn for eqn in _equations(jaxpr.jaxpr) if eqn.primitive.name in _USED), None)
        place = "" if use is None else f"{source_line(use)}: "
        raise PlanError(
            f"{place}the step uses a reference (`jax.new_ref`) that was made outside of it; pass its value as an argument and return "
            "the new one"
        )
    from jax._src.state.discharge import discharge_state

    return discharge_state(jaxpr)


def refuse_references(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Refuses references among the arguments."""
    for path, leaf in zip(paths, leaves, strict=True):
        if is_reference(leaf):
            raise PlanError(f"{path} is a reference (`jax.new_ref`); pass its value (`jax.freeze(ref)`) and return the new one")


def refuse_ordered_effects(jaxpr: Any) -> None:
    """Refuses ordered callbacks and prints: XLA orders effects on one device only."""
    for eqn in _equations(jaxpr.jaxpr):
        if any("Ordered" in type(effect).__name__ for effect in eqn.effects) and not _bodies(eqn):
            raise PlanError(
                f"{source_line(eqn)}: ordered effects are possible on one device only; leave `ordered=True` out, or keep the call "
                "out of the step"
            )


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a reference."""
    kind = getattr(jax, "Ref", None)
    return kind is not None and isinstance(leaf, kind)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of the bodies in it, without those of kernels, whose references are theirs."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "pallas_call":
            continue
        for body in _bodies(eqn):
            yield from _equations(body)


def _bodies(eqn: Any) -> list[Any]:
    values = [body for value in eqn.params.values() for body in (value if isinstance(value, (tuple, list)) else (value,))]
    inner = [getattr(body, "jaxpr", body) for body in values]
    return [body for body in inner if hasattr(body, "eqns")]
