"""Evaluates a jaxpr equation by equation, so that every value can get a constraint.

Calls are inlined. Loops, branches, checkpoints and functions with derivative rules are kept, and their bodies are walked too. The path of an equation is its
position in the function, then in the call or loop body, and so on: `12.0.3`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

Path = tuple[int, ...]
# Takes an equation, its path, its operands, and the function from operands to results.
Visit = Callable[[Any, Path, list[Any], Callable[[list[Any]], list[Any]]], list[Any]]

#: Calls that can be inlined, and the parameter that holds the body.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
}
# Statements about layouts: the plan replaces them.
_LAYOUTS = {"sharding_constraint", "reshard", "mesh_cast", "reshard_p"}
#: Primitives that keep their bodies, and the parameters that hold them.
KEPT = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
}


def show(path: Path) -> str:
    """The path as text.

    >>> show((12, 0, 3))
    '12.0.3'
    """
    return ".".join(map(str, path))


def numbers_of(text: str) -> Path:
    """The path of a text.

    >>> numbers_of("12.0.3")
    (12, 0, 3)
    """
    return tuple(map(int, text.split(".")))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The number of constant operands of a scan, and the number of carried ones.

    >>> loop = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, y: (c * w + y, c), x[0], x))(jnp.ones(3), jnp.ones((4, 3)))
    >>> [scan_counts(eqn) for eqn in loop.eqns if eqn.primitive.name == "scan"]
    [(1, 1)]
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # JAX 0.11 and later keep the operands' structure instead.
    consts, carry, _ = eqn.params["ft_in"].update(range(len(eqn.invars))).unpack()
    return len(list(consts)), len(list(carry))


def walk(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    visit: Visit,
    path: Path = (),
    constants: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Evaluates a jaxpr, each equation by `visit`. Constants are replaced by those of `constants`, by their ids."""
    replaced = constants or {}
    env: dict[Any, Any] = {var: replaced.get(id(x), x) for var, x in zip(jaxpr.constvars, consts, strict=True)}
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    # Equal equations are evaluated once, as the planner reads them: XLA would not merge their collectives.
    known: dict[Any, list[Any]] = {}
    for at, eqn in enumerate(jaxpr.eqns):
        here = (*path, at)
        operands = [read(atom) for atom in eqn.invars]
        body = INLINED.get(eqn.primitive.name)
        key = _equal_to(eqn, operands)
        if key is not None and key in known:
            env.update(zip(eqn.outvars, known[key], strict=True))
            continue
        with scope(eqn):
            if eqn.primitive.name in _LAYOUTS:
                results = operands
            elif body is not None and body in eqn.params:
                inner, inner_consts = parts(eqn.params[body])
                results = walk(inner, inner_consts, operands, visit, here, replaced)
            else:
                results = visit(eqn, here, operands, _binding(eqn, visit, here))
        if key is not None:
            known[key] = results
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equal_to(eqn: Any, operands: list[Any]) -> Any:
    """A key that equations of one function with equal results share; None for those that are evaluated each by itself. `env`
    holds the operands, so that their ids stay theirs."""
    if eqn.effects or eqn.primitive.name in INLINED or eqn.primitive.name in KEPT:
        return None
    literals = [
        (np.asarray(atom.val).tobytes(), atom.aval) if isinstance(atom, core.Literal) else id(x)
        for atom, x in zip(eqn.invars, operands, strict=True)
    ]
    key = (eqn.primitive, tuple(literals), tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def equation(jaxpr: Any, path: Path) -> Any:
    """The equation at a path; None if there is none."""
    body, _ = parts(jaxpr)
    if not path or path[0] >= len(body.eqns):
        return None
    eqn, rest = body.eqns[path[0]], path[1:]
    if not rest:
        return eqn
    inner = INLINED.get(eqn.primitive.name)
    if inner is not None and inner in eqn.params:
        return equation(eqn.params[inner], rest)
    if len(rest) < 2:
        return None
    bodies = eqn.params[KEPT[eqn.primitive.name][rest[0]]]
    return equation(bodies[rest[1]] if isinstance(bodies, (tuple, list)) else bodies, rest[2:])


def has_line(eqn: Any) -> bool:
    """Whether a line of the user's code is known. Bodies of JAX's own functions have none."""
    return not source_line(eqn).startswith(":")


def source_line(eqn: Any, default: str = "") -> str:
    """The line of the user's code that an equation comes from, `train.py:12 (loss): mlp/dot_general`."""
    try:
        from jax._src import source_info_util

        place = source_info_util.summarize(eqn.source_info)
    except ImportError:
        place = default or "unknown line"
    scopes = str(eqn.source_info.name_stack)
    return f"{place}: {scopes + '/' if scopes else ''}{eqn.primitive.name}"


def scope(eqn: Any) -> Any:
    """The context of an equation: its name scope and the line of the user's code, as JAX's own evaluation has them."""
    try:
        from jax._src import source_info_util as source
    except ImportError:
        scopes = str(eqn.source_info.name_stack)
        return jax.named_scope(scopes) if scopes else contextlib.nullcontext()
    names = source.current_name_stack() + eqn.source_info.name_stack
    return source.user_context(eqn.source_info.traceback, name_stack=names)


def large_constants(jaxpr: Any, least_bytes: int) -> list[Any]:
    """The constants of a jaxpr and of the calls in it that have at least so many bytes, each once."""
    found: dict[int, Any] = {}
    body, consts = parts(jaxpr)
    for x in consts:
        if getattr(x, "nbytes", 0) >= least_bytes and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            found[id(x)] = x
    for eqn in body.eqns:
        inner = INLINED.get(eqn.primitive.name)
        if inner is not None and inner in eqn.params:
            found |= {id(x): x for x in large_constants(eqn.params[inner], least_bytes)}
    return list(found.values())


def _binding(eqn: Any, visit: Visit, path: Path) -> Callable[[list[Any]], list[Any]]:
    """The function from the operands of an equation to its results. Bodies are traced again when it is called."""

    def bound(operands: list[Any]) -> list[Any]:
        params = dict(eqn.params)
        for name in ("out_sharding", "sharding"):
            # Shardings of the step's own mesh, which the plan's replaces.
            if isinstance(params.get(name), (NamedSharding, PartitionSpec)):
                params[name] = None
        if "unroll" in params and getattr(visit, "rolls_loops", False):
            params["unroll"] = 1
        for number, name in enumerate(KEPT.get(eqn.primitive.name, ())):
            bodies = params[name]
            several = isinstance(bodies, (tuple, list))
            bodies_walked = [
                _retrace(body, visit, (*path, number, i)) for i, body in enumerate(bodies if several else [bodies])
            ]
            params[name] = tuple(bodies_walked) if several else bodies_walked[0]
        return bind(eqn, params, operands)

    return bound


def bind(eqn: Any, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    """The results of an equation's primitive with these parameters."""
    bound = eqn.primitive.get_bind_params(params)
    # Older versions of JAX pass functions before the operands.
    functions, keywords = bound if isinstance(bound, tuple) else ((), bound)
    with _context(eqn):
        results = eqn.primitive.bind(*functions, *operands, **keywords)
    return list(results) if eqn.primitive.multiple_results else [results]


def _context(eqn: Any) -> Any:
    # The context of an equation names the mesh of its trace. Only calls with a mesh of their own need it.
    return eqn.ctx.manager if eqn.ctx.cur_abstract_mesh.empty else contextlib.nullcontext()


def parts(body: Any) -> tuple[Any, Sequence[Any]]:
    """A body and its constants."""
    return (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())


def _retrace(body: Any, visit: Visit, path: Path) -> Any:
    """The body of a loop, branch or checkpoint, traced again with `visit`."""
    jaxpr, consts = parts(body)
    types = getattr(visit, "abstract", abstract)
    operands = [types(var.aval) for var in jaxpr.invars]

    def walked(*args: Any) -> list[Any]:
        enter, leave = getattr(visit, "enter_body", None), getattr(visit, "leave_body", None)
        results = walk(jaxpr, consts, args if enter is None else enter(path, args), visit, path)
        if leave is not None:
            leave(path, results)
        return results

    traced = jax.make_jaxpr(walked)(*operands)
    if hasattr(body, "consts"):
        return traced
    # A checkpoint's body cannot hold constants: a body that would need some stays as it is.
    return body if traced.consts else traced.jaxpr


def abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of an abstract value, without its sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
