"""Steps that are given as a loss and an optimizer, and the recomputation of their forward pass.

A step that has taken its gradient already has lost its forward pass. `train_step` keeps loss and update apart, so that blocks of
the loss can be put under `jax.checkpoint`: the bodies of loops, and runs of equal blocks that are written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._native import PlanError
from ._batch_rules import PRODUCTS
from ._refusals import defined_at
from ._walk import INLINED, bind, parts, scan_counts, scope

# Policies of our own, and their names under JAX. `selective` keeps products with weights, and computes attention scores and
# element-wise functions again; `elementwise` keeps all products.
_POLICIES = {"full": "nothing_saveable", "selective": "dots_with_no_batch_dims_saveable", "elementwise": "dots_saveable"}
_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


class TrainStep:
    """`params, state, *batch -> params, state, loss`. With `has_aux`, the loss also returns further results, which come last."""

    def __init__(self, loss: Callable[..., Any], optimizer: Any, has_aux: bool = False, policy: str | None = None) -> None:
        self.loss, self.optimizer, self.has_aux, self.policy = loss, optimizer, has_aux, policy
        self.__name__ = getattr(loss, "__name__", "loss")

    def __call__(self, params: Any, state: Any, *batch: Any, **named: Any) -> Any:
        loss = self.loss if self.policy is None else checkpointed(self.loss, self.policy)
        value, grads = jax.value_and_grad(loss, has_aux=self.has_aux)(params, *batch, **named)
        rest = value if self.has_aux else (value,)
        if not hasattr(self.optimizer, "update"):
            return *self.optimizer(grads, state, params), *rest
        updates, state = self.optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return params, state, *rest


def train_step(loss: Callable[..., Any], optimizer: Any, *, has_aux: bool = False) -> TrainStep:
    """The training step `params, state, *batch -> params, state, loss` of a loss and an optimizer.

    Args:
        loss: `params, *batch -> loss`, or `loss, aux` with `has_aux`.
        optimizer: an optimizer of optax, or a function `grads, state, params -> params, state`.

    `parallelize(train_step(loss, optimizer), ..., recompute="selective")` recomputes parts of the loss in the backward pass.

    >>> import jax.numpy as jnp
    >>> step = train_step(lambda w, x: jnp.mean((x @ w) ** 2), lambda g, s, w: (w - 0.1 * g, s))
    >>> w, state, loss = step(jnp.ones((4, 2)), None, jnp.ones((8, 4)))
    >>> float(loss)
    16.0
    """
    return TrainStep(loss, optimizer, has_aux)


def recomputing(function: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    """The step with blocks of its loss recomputed by a policy."""
    if policy is None or policy == "off":
        return function
    policy_of(policy)
    if not isinstance(function, TrainStep):
        raise PlanError(
            f"{defined_at(function)}: recompute={policy!r} needs the loss of the step, which has taken its gradient already; give the "
            "step as `shardwright.jax.train_step(loss, optimizer)`, or put `jax.checkpoint` around blocks of its loss"
        )
    return TrainStep(function.loss, function.optimizer, function.has_aux, policy)


def policy_of(name: str) -> Callable[..., Any]:
    """The policy of a name: `full`, `selective`, `elementwise`, or one of `jax.checkpoint_policies`."""
    known = [each for each in dir(jax.checkpoint_policies) if each.endswith(("_saveable", "_dots"))]
    if name not in _POLICIES and name not in known:
        raise PlanError(f"recompute={name!r} is unknown; use one of {', '.join(['off', *_POLICIES, *known])}")
    return getattr(jax.checkpoint_policies, _POLICIES.get(name, name))


def checkpointed(loss: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The loss with its blocks under `jax.checkpoint`. Blocks that are so already stay as they are."""
    policy = policy_of(name)

    @functools.wraps(loss)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(loss, return_shape=True)(*args, **kwargs)
        blocks = _Blocks(jaxpr, policy)
        results = blocks.run(jax.tree.leaves((args, kwargs)))
        if not blocks.found:
            raise PlanError(
                f"{defined_at(loss)}: recompute={name!r} finds neither a loop nor equal blocks in the loss; put `jax.checkpoint` around "
                "the blocks of the model"
            )
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return evaluate


class _Blocks:
    """Evaluates a loss with its blocks under `jax.checkpoint`."""

    def __init__(self, jaxpr: Any, policy: Callable[..., Any]) -> None:
        self.jaxpr, self.policy = jaxpr, policy
        #: Whether there was a block to recompute, or one that the user put under `jax.checkpoint`.
        self.found = False

    def run(self, args: Sequence[Any]) -> list[Any]:
        return self._body(self.jaxpr.jaxpr, self.jaxpr.consts, args)

    def _body(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        at = 0
        ranges = _equal_blocks(jaxpr)
        for start, end in ranges:
            self._equations(jaxpr.eqns[at:start], env)
            self._block(jaxpr, start, end, env)
            at = end
        self._equations(jaxpr.eqns[at:], env)
        return [_read(env, atom) for atom in jaxpr.outvars]

    def _equations(self, eqns: Sequence[Any], env: dict[Any, Any]) -> None:
        for eqn in eqns:
            operands = [_read(env, atom) for atom in eqn.invars]
            with scope(eqn):
                env.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))

    def _equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        self.found = self.found or name in _CHECKPOINTS
        if name in INLINED and INLINED[name] in eqn.params:
            inner, consts = parts(eqn.params[INLINED[name]])
            if _contains(inner, {"scan", *_CHECKPOINTS}):
                return self._body(inner, consts, operands)
        if name == "scan" and _contains(parts(eqn.params["jaxpr"])[0], PRODUCTS):
            self.found = True
            if not _contains(parts(eqn.params["jaxpr"])[0], _CHECKPOINTS):
                return self._scan(eqn, operands)
        return bind(eqn, eqn.params, operands)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params = eqn.params
        body, consts = parts(params["jaxpr"])
        fixed, carried = scan_counts(eqn)

        # Whatever the policy keeps, the loop keeps for every iteration; without common subexpressions nothing else is.
        @functools.partial(jax.checkpoint, policy=self.policy, prevent_cse=False)
        def run(fixed_operands: list[Any], carry: list[Any], slices: list[Any]) -> list[Any]:
            env = dict(zip([*body.constvars, *body.invars], [*consts, *fixed_operands, *carry, *slices], strict=True))
            self._equations(body.eqns, env)
            return [_read(env, atom) for atom in body.outvars]

        def iterate(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = run(operands[:fixed], carry, slices)
            return results[:carried], results[carried:]

        state, stacked = jax.lax.scan(
            iterate,
            operands[fixed : fixed + carried],
            operands[fixed + carried :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*state, *stacked]

    def _block(self, jaxpr: Any, start: int, end: int, env: dict[Any, Any]) -> None:
        eqns = jaxpr.eqns[start:end]
        made = {var for eqn in eqns for var in eqn.outvars}
        reads = [atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, core.Literal) and atom not in made]
        inputs = list(dict.fromkeys(reads))
        later = {atom for eqn in jaxpr.eqns[end:] for atom in eqn.invars if not isinstance(atom, core.Literal)}
        later |= {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
        outputs = [var for eqn in eqns for var in eqn.outvars if var in later]
        self.found = True

        @functools.partial(jax.checkpoint, policy=self.policy)
        def run(*operands: Any) -> list[Any]:
            local = dict(zip(inputs, operands, strict=True))
            self._equations(eqns, local)
            return [local[var] for var in outputs]

        env.update(zip(outputs, run(*(env[var] for var in inputs)), strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def _contains(jaxpr: Any, names: set[str]) -> bool:
    """Whether a body has such an equation, in its calls and loops too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            return True
        for value in eqn.params.values():
            for body in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(parts(body)[0], "eqns") and _contains(parts(body)[0], names):
                    return True
    return False


def _equal_blocks(jaxpr: Any) -> list[tuple[int, int]]:
    """The longest run of equal blocks of equations that have a product each, as ranges. Empty if there is none, or if the user put
    blocks under `jax.checkpoint`."""
    eqns = jaxpr.eqns
    if any(eqn.primitive.name in _CHECKPOINTS for eqn in eqns):
        return []
    known: dict[Any, int] = {}
    marks = np.array([known.setdefault(_mark(eqn), len(known)) for eqn in eqns], dtype=np.int64)
    best: tuple[int, int, int] = (0, 0, 0)
    for period in range(2, len(eqns) // 2 + 1):
        equal = np.concatenate([[False], marks[:-period] == marks[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1]).reshape(-1, 2)
        if not len(edges):
            continue
        start, end = edges[np.argmax(edges[:, 1] - edges[:, 0])]
        covered = int(end - start) // period * period + period
        has_product = any(_is_product(eqn) for eqn in eqns[start : start + period])
        if covered > period and covered > best[0] and has_product:
            best = (covered, period, int(start))
    covered, period, start = best
    if not covered:
        return []

    # Blocks may begin anywhere in the period: where the fewest bytes cross their ends.
    def repeats(s: int) -> bool:
        return s + covered <= len(eqns) and np.array_equal(marks[s : s + covered - period], marks[s + period : s + covered])

    first = min(filter(repeats, range(start, start + period)), key=lambda s: (_crossing(jaxpr, s + period), s))
    return [(s, s + period) for s in range(first, first + covered, period)]


def _mark(eqn: Any) -> Any:
    """What equal equations have in common."""
    types = tuple(str(getattr(atom, "aval", None)) for atom in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name, types


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS or any(
        _contains(parts(body)[0], PRODUCTS) for body in eqn.params.values() if hasattr(parts(body)[0], "eqns")
    )


def _crossing(jaxpr: Any, at: int) -> int:
    """Bytes of the values that are made before an equation and read from it on."""
    made = {var for eqn in jaxpr.eqns[:at] for var in eqn.outvars}
    read = {atom for eqn in jaxpr.eqns[at:] for atom in eqn.invars if not isinstance(atom, core.Literal)}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in made & read)
