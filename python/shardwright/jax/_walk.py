"""Evaluates a jaxpr equation by equation, so that something can be said about every value.

Calls are inlined. Loops, branches and checkpoints stay what they are; their bodies are walked too. An equation is named
by its path: its position in the function, then in the call or loop body, and so on: `12.0.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

Path = tuple[int, ...]
# Equation, its path, its operands, and what computes its results from operands.
Visit = Callable[[Any, Path, list[Any], Callable[[list[Any]], list[Any]]], list[Any]]

# Calls whose body means the same when it stands alone, with the parameter that holds it.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# What keeps its body, with the parameters that hold bodies.
_KEPT = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
}


def show(path: Path) -> str:
    """The path as text.

    >>> show((12, 0, 3))
    '12.0.3'
    """
    return ".".join(map(str, path))


def walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], visit: Visit, path: Path = ()) -> list[Any]:
    """Evaluates a jaxpr, each equation through `visit`."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for at, eqn in enumerate(jaxpr.eqns):
        here = (*path, at)
        operands = [read(atom) for atom in eqn.invars]
        body = _INLINED.get(eqn.primitive.name)
        if body is not None and body in eqn.params:
            inner, inner_consts = _parts(eqn.params[body])
            results = walk(inner, inner_consts, operands, visit, here)
        else:
            results = visit(eqn, here, operands, _binding(eqn, visit, here))
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _binding(eqn: Any, visit: Visit, path: Path) -> Callable[[list[Any]], list[Any]]:
    params = dict(eqn.params)
    for number, name in enumerate(_KEPT.get(eqn.primitive.name, ())):
        bodies = params[name]
        several = isinstance(bodies, (tuple, list))
        walked = [
            _walked(body, visit, (*path, number, i)) for i, body in enumerate(bodies if several else [bodies])
        ]
        params[name] = tuple(walked) if several else walked[0]

    def bind(operands: list[Any]) -> list[Any]:
        bound = eqn.primitive.get_bind_params(params)
        # Older versions of JAX hand functions over in front of the operands.
        functions, keywords = bound if isinstance(bound, tuple) else ((), bound)
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*functions, *operands, **keywords)
        return list(results) if eqn.primitive.multiple_results else [results]

    return bind


def _parts(body: Any) -> tuple[Any, Sequence[Any]]:
    return (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())


def _walked(body: Any, visit: Visit, path: Path) -> Any:
    """The body of a loop, branch or checkpoint, traced anew through `visit`."""
    jaxpr, consts = _parts(body)
    operands = [_abstract(var.aval) for var in jaxpr.invars]
    traced = jax.make_jaxpr(lambda *args: walk(jaxpr, consts, args, visit, path))(*operands)
    if hasattr(body, "consts"):
        return traced
    # A checkpoint's body has no room for constants: it stays as it is where it would need some.
    return body if traced.consts else traced.jaxpr


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
