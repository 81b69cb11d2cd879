"""The program that the planner reads: the step, with stand-ins for equations that it cannot read.

A stand-in is a call with the types of the equation and a rule: the dimensions that the equation treats block by block. The
program that runs has the equation itself. Types that the planner lacks have stand-ins too: a complex number is two real ones,
and an empty dimension has size one.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._own_specs import OwnSpecs
from ._pallas import KernelRule, kernel_name, kernel_rule
from ._walk import KEPT, Path, abstract, show

# Per element, or per leading dimensions: the equation works on each block separately.
_ELEMENTWISE = {
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cosh", "sinh", "digamma", "lgamma",
    "polygamma", "regularized_incomplete_beta", "igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "zeta", "nextafter",
    "reduce_precision", "population_count", "clz", "real", "imag", "complex", "conj",
}  # fmt: skip
# Number of trailing dimensions that stay whole.
_BATCHED = {
    "cholesky": 2, "cholesky_update": 2, "eig": 2, "eigh": 2, "hessenberg": 2, "householder_product": 2, "lu": 2,
    "lu_pivots_to_permutation": 1, "geqrf": 2, "geqp3": 2, "ormqr": 2, "qr": 2, "schur": 2, "svd": 2, "symmetric_product": 2,
    "triangular_solve": 2, "tridiagonal": 2, "tridiagonal_solve": 1, "fft": 3,
}  # fmt: skip
# Planned around: the step's own specs, callbacks, kernels.
_REPLICATED = {
    "shard_map", "xla_pmap", "pmap", "pallas_call", "pure_callback", "io_callback", "debug_callback", "debug_print", "custom_partitioning",
    "custom_partitioning_call", "ragged_dot_general", "approx_top_k", "custom_linear_solve",
}  # fmt: skip
#: The prefix of the names of stand-ins.
PREFIX = "shardwright."


class PlannedProgram:
    """Evaluates a step for the planner: every equation in a name scope of its path, or its stand-in."""

    #: Loops are planned as loops, also where `unroll` writes their bodies out.
    rolls_loops = True

    def __init__(self, replaced: frozenset[str], unread: frozenset[Any]) -> None:
        #: Paths of equations that the planner refused.
        self.replaced = replaced
        #: Results of Pallas kernels that nothing reads.
        self.unread = unread
        #: Paths of all stand-ins.
        self.stand_ins: set[str] = set()
        #: Constraints on the configs of calls that have specs of their own, `PATTERN=CONFIG`.
        self.constraints: list[str] = []

    def __call__(
        self, eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        if eqn.primitive.name == "pallas_call" and not any(_is_foreign(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            self.stand_ins.add(show(path))
            return _kernel_stand_in(eqn, kernel_rule(eqn, self.unread), show(path), operands)
        with jax.named_scope(f"#{show(path)}"):
            if not self.needs_stand_in(eqn, path):
                return bind(operands)
            name = eqn.primitive.name
            if name == "concatenate" and show(path) not in self.replaced:
                return [_concatenate(eqn, operands)]
            self.stand_ins.add(show(path))
            if name == "shard_map":
                return self.own_specs(eqn, operands)
            return _stand_in(eqn, operands)

    def own_specs(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The stand-in of a `shard_map`, which is split as its specs say where it runs on all devices."""
        if any(_is_foreign(atom.aval) or _is_key(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            return _stand_in(eqn, operands)
        specs = OwnSpecs.of(eqn)
        scope = f"own{len(self.constraints)}specs"
        if specs.degrees:
            self.constraints.append(f"*{scope}/*={specs.degrees}")
        results = []
        for at, (x, var, (summed, _)) in enumerate(
            zip(_own_stand_in(eqn, specs, operands, scope), eqn.outvars, specs.results, strict=True)
        ):
            add = jnp.sum if jnp.issubdtype(x.dtype, jnp.number) else jnp.max
            sum_scope = f"{scope}sum{at}"
            if summed and specs.degrees:
                ways = "·".join(f"d{dim}={size}" for dim, (size, _) in enumerate(summed))
                self.constraints.append(f"*{sum_scope}/reduce*={ways}")
            with jax.named_scope(sum_scope):
                total = add(x, tuple(range(len(summed)))) if summed else x
            results.append(total.reshape(var.aval.shape).astype(var.aval.dtype))
        return results

    def abstract(self, aval: Any) -> jax.ShapeDtypeStruct:
        """The type that stands for a type."""
        return planned_type(aval)

    def needs_stand_in(self, eqn: Any, path: Path) -> bool:
        """Whether the planner cannot read an equation."""
        name = eqn.primitive.name
        if show(path) in self.replaced or name in _ELEMENTWISE or name in _BATCHED or name in _REPLICATED:
            return True
        if name in KEPT:
            return name == "scan" and eqn.params["length"] == 0
        return any(_is_foreign(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def planned_type(aval: Any) -> jax.ShapeDtypeStruct:
    """The type that stands for a type in the planner's program.

    >>> planned_type(jax.ShapeDtypeStruct((0, 3), jnp.complex64))
    ShapeDtypeStruct(shape=(1, 3, 2), dtype=float32)
    """
    if not _is_foreign(aval):
        return abstract(aval)
    shape = tuple(max(size, 1) for size in aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return jax.ShapeDtypeStruct((*shape, 2), jnp.finfo(aval.dtype).dtype)
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _is_foreign(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return False
    return 0 in aval.shape or bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _planned_value(x: Any) -> Any:
    """A constant as the value that stands for it."""
    if isinstance(x, jax.core.Tracer) or not _is_foreign(jax.typeof(x)):
        return x
    kind = planned_type(jax.typeof(x))
    return jnp.zeros(kind.shape, kind.dtype)


def _concatenate(eqn: Any, operands: list[Any]) -> Any:
    """A concatenation without its empty operands."""
    if _is_foreign(eqn.outvars[0].aval):
        return _stand_in(eqn, operands)[0]
    full = [x for x, atom in zip(operands, eqn.invars, strict=True) if not _is_foreign(atom.aval)]
    return jax.lax.concatenate(full, eqn.params["dimension"])


def _stand_in(eqn: Any, operands: list[Any]) -> list[Any]:
    results = [var.aval for var in eqn.outvars]
    if not results:
        return []
    inputs = [jax.random.key_data(x) if _is_key(x) else jnp.asarray(_planned_value(x)) for x in operands]
    kinds = [_plain_type(aval) for aval in results]
    call = jax.ffi.ffi_call(PREFIX + eqn.primitive.name, kinds)
    made = call(*inputs, rule=_rule(eqn, [x.shape for x in inputs], [kind.shape for kind in kinds]))
    return [_keyed(x, aval) for x, aval in zip(made, results, strict=True)]


def _own_stand_in(eqn: Any, specs: OwnSpecs, operands: list[Any], scope: str) -> list[Any]:
    """A call with the specs of a `shard_map`, whose results are summands. Dimensions that are split are reshaped to parts."""
    if not eqn.outvars:
        return []
    inputs = [jnp.asarray(x).reshape([size for size, _ in dims]) for x, dims in zip(operands, specs.operands, strict=True)]
    kinds = [
        jax.ShapeDtypeStruct([size for size, _ in (*summed, *dims)], var.aval.dtype)
        for var, (summed, dims) in zip(eqn.outvars, specs.results, strict=True)
    ]
    with jax.named_scope(scope):
        return list(jax.ffi.ffi_call(PREFIX + eqn.primitive.name, kinds)(*inputs, rule=specs.rule()))


def _kernel_stand_in(eqn: Any, rule: KernelRule, path: str, operands: list[Any]) -> list[Any]:
    """A call with the rule of a Pallas kernel. Dimensions that can be split are reshaped to parts around it."""
    # No equation has this path: operations around the call are nobody's.
    around = f"#{path}.0"

    def shape(aval: Any, names: Any) -> list[int]:
        return [size for size, _ in rule.dims(aval.shape, names)]

    with jax.named_scope(around):
        read = zip(operands, eqn.invars, rule.operands, strict=True)
        inputs = [jnp.asarray(x).reshape(shape(atom.aval, names)) for x, atom, names in read]
    made = [(var.aval, names) for var, names in zip(eqn.outvars, rule.results, strict=True)]
    kinds = [jax.ShapeDtypeStruct(shape(aval, names), aval.dtype) for aval, names in made if names is not None]
    text = rule.text(*([atom.aval.shape for atom in atoms] for atoms in (eqn.invars, eqn.outvars)))
    with jax.named_scope(f"#{path}"):
        results = iter(jax.ffi.ffi_call(PREFIX + "pallas_call", kinds)(*inputs, rule=text, kernel=kernel_name(eqn)))
    with jax.named_scope(around):
        return [
            jnp.zeros(aval.shape, aval.dtype) if names is None else next(results).reshape(aval.shape) for aval, names in made
        ]


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def _plain_type(aval: Any) -> jax.ShapeDtypeStruct:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.ShapeDtypeStruct((*aval.shape, *aval.dtype._impl.key_shape), np.uint32)
    return planned_type(aval)


def _keyed(x: Any, aval: Any) -> Any:
    return jax.random.wrap_key_data(x, impl=aval.dtype._impl.name) if _is_key(aval) else x


def _rule(eqn: Any, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> str:
    """The rule of a stand-in: shared dimensions have the same letter, `_` stays whole.

    Leading dimensions are shared as far as all tensors of more than one element agree."""
    name = eqn.primitive.name
    tensors = [shape for shape in (*inputs, *outputs) if shape]
    if name in _REPLICATED or not tensors or not all(outputs):
        shared = 0
    elif name in _BATCHED:
        shared = min(map(len, tensors)) - _BATCHED[name]
        if name == "fft":
            # Complex numbers have one more dimension than real ones.
            shared = min(len(var.aval.shape) for var in (*eqn.invars, *eqn.outvars)) - len(eqn.params["fft_lengths"])
        elif name in ("eigh", "eig", "svd", "geqrf", "lu", "geqp3"):
            shared = len(eqn.invars[0].aval.shape) - 2
    elif name in _ELEMENTWISE or _is_elementwise(eqn):
        shared = max(len(var.aval.shape) for var in eqn.outvars)
    else:
        shared = 0
    ranks = [len(shape) for shape in tensors]
    common = 0
    while common < min([shared, *ranks]) and len({shape[common] for shape in tensors}) == 1:
        common += 1
    letters = string.ascii_lowercase[:common]

    def dims(shape: tuple[int, ...]) -> str:
        return " ".join([*letters[: len(shape)], *("_" for _ in shape[common:])]) if shape else "()"

    return f"{', '.join(map(dims, inputs))} -> {', '.join(map(dims, outputs))}"


_POINTWISE = {
    "add", "sub", "mul", "div", "neg", "exp", "log", "abs", "sign", "sqrt", "rsqrt", "pow", "integer_pow", "select_n", "eq", "ne",
    "convert_element_type", "copy", "copy_p", "square", "tanh", "one_minus_square", "sin", "cos", "real", "imag", "conj", "complex", "mul_add",
}  # fmt: skip


def _is_elementwise(eqn: Any) -> bool:
    return eqn.primitive.name in _POINTWISE
