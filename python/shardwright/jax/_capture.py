"""Captures a step as a jaxpr and as StableHLO, and relates the equations of the one to the operations of the other.

Each equation is traced in a name scope of its path, `#12.0.3`. JAX writes the scopes into the locations of operations. The
arguments of the jaxpr are plain arrays: random keys are their numbers, and large constants of closures come first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._native import PlanError
from . import _nnx
from ._arguments import Call, LeafType, Structure, fold, is_key, show_type, unfold
from ._pallas import unread_results
from ._pins import Pin, pinned
from ._references import refuse_references, without_references
from ._refusals import refusals_at
from ._stand_in import PREFIX, PlannedProgram, planned_type
from ._walk import Visit, large_constants, walk

_SCOPE = re.compile(r"#([\d.]+)\)*(?:/|$)")
#: Larger constants of closures are arguments of the program instead of a part of its text.
LARGEST_CONSTANT_BYTES = 1 << 12


@dataclass(frozen=True)
class StepCapture:
    """A step, captured for arguments of one structure and of certain types."""

    function: Callable[..., Any]
    structure: Structure
    #: Per leaf of the arguments.
    types: tuple[LeafType, ...]
    #: Per leaf of the arguments: whether it is donated.
    donated: tuple[bool, ...]
    #: From plain arrays to plain arrays.
    jaxpr: Any
    #: The tree of the results, in which leaves that are no arrays are `Static`.
    out_tree: Any
    #: Per leaf of the results, then per changed leaf of the modules: the random key type, if it is a key.
    out_keys: tuple[Any, ...]
    #: The leaves of the arguments that the step replaces: the state of NNX modules. Their new values follow the results.
    changed: tuple[int, ...]
    #: Large constants of closures.
    constants: tuple[Any, ...]
    #: Per leaf of the arguments: its constraint; empty if there are none.
    pins: tuple[Pin | None, ...] = ()

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of the leaves of the arguments."""
        return [_struct(kind) for kind in self.types]

    @functools.cached_property
    def unread(self) -> frozenset[Any]:
        """Results of Pallas kernels that nothing reads."""
        return unread_results(self.jaxpr.jaxpr)

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """Positions of the donated leaves."""
        return tuple(at for at, given in enumerate(self.donated) if given)

    def evaluate(self, leaves: Sequence[Any], constants: Sequence[Any], visit: Visit) -> list[Any]:
        """The results for these leaves, with every equation evaluated by `visit`. Keys are keys."""
        replaced = {id(old): new for old, new in zip(self.constants, constants, strict=True)}
        results = walk(self.jaxpr.jaxpr, self.jaxpr.consts, list(map(_plain, leaves)), visit, constants=replaced)
        return [_typed(x, key) for x, key in zip(results, self.out_keys, strict=True)]

    def difference(self, types: Sequence[LeafType]) -> str:
        """The first leaf of another type, in words."""
        for path, planned, called in zip(self.structure.paths(), self.types, types, strict=True):
            if planned != called:
                weak = " (weakly typed)" if called[:2] == planned[:2] else ""
                return f"{path} is {show_type(called)}{weak}, planned as {show_type(planned)}"
        return "the types are equal"


@dataclass(frozen=True)
class Donations:
    """The arguments that a step donates, by position and by name."""

    argnums: frozenset[int] = frozenset()
    argnames: frozenset[str] = frozenset()

    @classmethod
    def of(cls, function: Callable[..., Any], argnums: int | Sequence[int] | None) -> Donations:
        """Donations as given, or those of a jitted function."""
        jitted = getattr(function, "_jit_info", None)
        if argnums is None:
            return cls() if jitted is None else cls(frozenset(jitted.donate_argnums), frozenset(jitted.donate_argnames))
        return cls(frozenset({argnums} if isinstance(argnums, int) else argnums))

    def leaves(self, structure: Structure) -> tuple[bool, ...]:
        """Per leaf of a call: whether it is donated."""
        args, kwargs = structure.arguments(range(structure.tree.num_leaves))
        numbers = {number % len(args) for number in self.argnums if -len(args) <= number < len(args)}
        given = [at in numbers for at, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        named = [name in self.argnames for name in sorted(kwargs) for _ in jax.tree.leaves(kwargs[name])]
        return (*given, *named)


def capture(function: Callable[..., Any], call: Call, donated: tuple[bool, ...]) -> StepCapture:
    """Traces a step for a call."""
    structure, types = call.structure, call.types()
    refuse_references(call.leaves, structure.paths())
    flat = _FlatStep(function, structure, types, donated)
    with _meshes(call.leaves) as keeps_shardings:
        leaves = call.leaves if keeps_shardings else [None] * len(types)
        try:
            with refusals_at(function):
                jaxpr = jax.make_jaxpr(flat)(*map(_traced_type, types, leaves))
        except Exception as error:
            _note_place(error, structure)
            raise
    with refusals_at(function):
        jaxpr = without_references(jaxpr)
    constants = tuple(large_constants(jaxpr, LARGEST_CONSTANT_BYTES))
    return StepCapture(
        function, structure, types, donated, jaxpr, flat.out_tree, tuple(flat.out_keys), tuple(flat.changed), constants
    )


def _note_place(error: Exception, structure: Structure) -> None:
    """Adds the line of the user's code to an error of a trace, and the names of the arguments that JAX's message counts."""
    from jax._src import source_info_util

    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(__file__)
    users = [f for f in frames if source_info_util.is_user_filename(f.filename) and not f.filename.startswith(own)]
    notes = [f"{frame.filename}:{frame.lineno} ({frame.name}) cannot be traced" for frame in users[-1:]]
    paths = structure.paths()
    counted = dict.fromkeys(int(at) for at in re.findall(r"\bplain\[(\d+)\]", str(error)))
    notes += [f"plain[{at}] is {paths[at]}" for at in counted if at < len(paths)]
    if notes and hasattr(error, "add_note"):
        error.add_note("; ".join(notes))


def lower(step: StepCapture, replaced: frozenset[str] = frozenset()) -> PlannedText:
    """The text that is planned. Equations at the `replaced` paths have stand-ins."""
    program = PlannedProgram(replaced, step.unread)
    with without_mesh():
        text = _lower(step, program)
    return PlannedText(text, frozenset(program.stand_ins), tuple(program.constraints))


@contextlib.contextmanager
def _meshes(leaves: Sequence[Any]) -> Iterator[bool]:
    """The context of a trace. In explicit mode, shardings belong to the types of arguments, and the trace keeps them."""
    current = jax.sharding.get_abstract_mesh()
    explicit = [mesh for mesh in (current, *map(_mesh_of, leaves)) if mesh is not None and _is_explicit(mesh)]
    if not explicit:
        yield False
    elif not current.empty:
        yield True
    else:
        with jax.sharding.use_abstract_mesh(explicit[0]):
            yield True


def _mesh_of(leaf: Any) -> Any:
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    return getattr(sharding, "mesh", None)


def _is_explicit(mesh: Any) -> bool:
    return not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types


def _traced_type(kind: LeafType, leaf: Any) -> jax.ShapeDtypeStruct:
    plain = _plain_shape(kind)
    mesh = None if leaf is None else _mesh_of(leaf)
    if mesh is None or not _is_explicit(mesh) or _is_key_type(kind[1]):
        return plain
    sharding = jax.sharding.NamedSharding(mesh, jax.typeof(leaf).sharding.spec)
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, weak_type=plain.weak_type, sharding=sharding)


@dataclass(frozen=True)
class PlannedText:
    """A step's StableHLO, with locations. Its arguments are the constants, then the plain leaves."""

    text: str
    #: Paths of the equations with stand-ins.
    stand_ins: frozenset[str]
    #: Constraints on the configs of calls that have specs of their own.
    constraints: tuple[str, ...] = ()


class _FlatStep:
    """The step from plain arrays to plain arrays. A trace leaves the structure of the results behind."""

    def __init__(
        self, function: Callable[..., Any], structure: Structure, types: tuple[LeafType, ...], donated: tuple[bool, ...]
    ) -> None:
        self.function, self.structure, self.types, self.donated = function, structure, types, donated
        self.out_tree: Any = None
        self.out_keys: list[Any] = []
        self.changed: list[int] = []

    def __call__(self, *plain: Any) -> list[Any]:
        leaves = [_typed(x, kind[1] if _is_key_type(kind[1]) else None) for x, kind in zip(plain, self.types, strict=True)]
        args, kwargs = map(unfold, self.structure.arguments(leaves))
        modules = self.structure.modules
        objects: dict[str, Any] = {}
        if modules is not None:
            args, kwargs, objects = modules.merge(args, kwargs)
        result = self.function(*args, **kwargs)
        if _nnx.contains(result):
            raise PlanError("the step returns an NNX module; return its state (`nnx.state(model)`) or change it in place")
        found, self.out_tree = jax.tree.flatten(fold(result))
        if modules is not None:
            found += self._changes(leaves, modules.states_of(objects))
        found = [jnp.asarray(x) if not hasattr(x, "dtype") else x for x in found]
        self.out_keys = [x.dtype if is_key(x) else None for x in found]
        return [_plain(x) for x in found]

    def _changes(self, leaves: list[Any], after: list[Any]) -> list[Any]:
        """The leaves that the step changed, or that are donated and must come back."""
        args, kwargs = self.structure.arguments(range(len(leaves)))
        modules = self.structure.modules
        assert modules is not None
        places = jax.tree.leaves(([args[at] for at in modules.positions], {name: kwargs[name] for name in modules.names}))
        pairs = list(zip(places, after, strict=True))
        for at, x in pairs:
            if jnp.shape(x) != self.types[at][0] or x.dtype != self.types[at][1]:
                path, kind = self.structure.paths()[at], show_type(self.types[at])
                raise PlanError(f"the step changes {path} from {kind} to {x.dtype}{list(jnp.shape(x))}; keep its type")
        changed = [(at, x) for at, x in pairs if x is not leaves[at] or self.donated[at]]
        self.changed = [at for at, _ in changed]
        return [x for _, x in changed]


def _lower(step: StepCapture, program: PlannedProgram) -> str:
    """The StableHLO text of a step. Arguments have the names that the user gave them."""

    def tagged(closure: Any, *args: Any, **kwargs: Any) -> list[Any]:
        replaced = {id(old): new for old, new in zip(step.constants, closure, strict=True)}
        leaves = jax.tree.leaves((args, kwargs))
        for at, pin in enumerate(step.pins):
            if pin is not None:
                leaves[at] = pinned(at, leaves[at])
        return walk(step.jaxpr.jaxpr, step.jaxpr.consts, leaves, program, constants=replaced)

    tagged.__name__ = getattr(step.function, "__name__", "step")
    signature = _signature(step.function)
    if signature is not None:
        tagged.__signature__ = signature  # type: ignore[attr-defined]
    args, kwargs = step.structure.arguments([planned_type(_plain_shape(kind)) for kind in step.types])
    given, given_named = step.structure.arguments(step.donated)
    closure = [planned_type(jax.ShapeDtypeStruct(np.shape(x), x.dtype)) for x in step.constants]
    jitted = jax.jit(
        tagged,
        keep_unused=True,
        donate_argnums=tuple(at + 1 for at, flags in enumerate(given) if any(jax.tree.leaves(flags))),
        donate_argnames=tuple(name for name, flags in given_named.items() if any(jax.tree.leaves(flags))),
    )
    return str(jitted.lower(closure, *args, **kwargs).as_text(debug_info=True))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function after one more parameter, the constants of its closures."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    closure = inspect.Parameter("shardwright_closure", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[closure, *signature.parameters.values()])


_INLINE_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


def without_locations(text: str) -> list[str]:
    """The lines of a program without locations, which name files and lines.

    >>> without_locations('#loc1 = loc("a")\\n%0 = add %a, %b : tensor<f32> loc(#loc1)')
    ['%0 = add %a, %b : tensor<f32>']
    """
    return [_INLINE_LOCATION.sub("", line) for line in text.splitlines() if not line.startswith("#loc")]


def stand_in_paths(text: str) -> frozenset[str]:
    """The paths of the equations that have stand-ins in a text."""
    names = dict(re.findall(r'^#(loc\d*) = loc\("([^"]*)"', text, re.MULTILINE))
    found = re.findall(rf"custom_call @{re.escape(PREFIX)}.*loc\(#(loc\d*)\)\s*$", text, re.MULTILINE)
    paths = (path_of(names.get(alias)) for alias in found)
    return frozenset(path for path in paths if path is not None)


def path_of(name: str | None) -> str | None:
    """The path of the equation that became an operation with this location.

    >>> path_of("mlp/#12.0.3/dot_general"), path_of("transpose(jvp(#36))/dot_general")
    ('12.0.3', '36')
    """
    found = _SCOPE.findall(name or "")
    return found[-1] if found else None


def without_mesh() -> Any:
    """A context in which no mesh of the user's is current: the plan's mesh replaces it."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _is_key_type(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x


def _typed(x: Any, key: Any) -> Any:
    return x if key is None else jax.random.wrap_key_data(x, impl=key._impl.name)


def _struct(kind: LeafType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind[0], kind[1], weak_type=kind[2])


@functools.cache
def _key_shape(dtype: Any) -> tuple[int, ...]:
    return tuple(dtype._impl.key_shape)


def _plain_shape(kind: LeafType) -> jax.ShapeDtypeStruct:
    if _is_key_type(kind[1]):
        return jax.ShapeDtypeStruct((*kind[0], *_key_shape(kind[1])), np.uint32)
    return _struct(kind)
