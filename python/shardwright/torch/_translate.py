"""Translates the ATen ops of a call to the planner's ops.

Tensors that depend on weights or on floating-point inputs are planned. All others (token ids, labels, masks, positions,
buffers) are *free*: every process holds them whole, and planned ops read them as inputs.

An op without a translation is decomposed, if PyTorch knows how and all of its parts have translations. Otherwise it is
opaque: replicated, or split along the dimensions that `_ops/_opaque.py` states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions

from ._graph import DTYPES, AtenCall, Graph, Input, TensorId, type_of
from ._ops import TABLE, Unsupported, known, shared_dims
from ._trace import Program, trace

#: Ops that only assert facts known at capture.
_CHECKS = ("_assert", "sym_constrain")
#: A decomposition into more ops than this is not used.
_MOST_PARTS = 60


@dataclass(frozen=True)
class Free:
    """A value that every process holds whole."""

    node: fx.Node


@dataclass(frozen=True)
class Source:
    """The origin of a tensor that no op produces: an argument of the call, a constant, or a function of a free value."""

    input: int | None = None
    free: fx.Node | None = None
    constant: torch.Tensor | None = None
    make: Callable[[torch.Tensor], torch.Tensor] | None = None
    #: Whether the function is of each element.
    pointwise: bool = False


@dataclass(frozen=True)
class Blend:
    """A buffer's next value, `keep * old + take * new`. It is cheap, so the plan leaves it out."""

    old: fx.Node
    new: TensorId
    keep: float
    take: float


@dataclass
class Group:
    """The planner's ops of one node."""

    node: fx.Node
    ops: list[int] = field(default_factory=list)
    #: The node's tensor arguments in the planner's graph, before casts.
    arguments: dict[fx.Node, TensorId] = field(default_factory=dict)


@dataclass(frozen=True)
class Translation:
    """A call as the planner's graph, and its correspondence to the call's ops."""

    program: Program
    graph: Graph
    groups: list[Group]
    sources: dict[TensorId, Source]
    #: Planned inputs of the program, by position.
    inputs: dict[int, TensorId]
    #: Nodes whose values are free, in order.
    free: list[fx.Node]
    values: dict[fx.Node, Any]
    #: The call's results: tensors, free values or constants.
    results: list[Any]
    #: Next values of buffers.
    updates: list[Blend]
    #: Ops that are opaque, and whether they are replicated.
    opaque: list[tuple[str, bool]]


class Translator:
    """Translates node by node. Each translation function gets the translator and the node's arguments."""

    def __init__(self, program: Program, free: tuple[bool, ...]) -> None:
        self.program = program
        self.graph = Graph(program.name)
        self.values: dict[fx.Node, Any] = {}
        self.sources: dict[TensorId, Source] = {}
        self.inputs: dict[int, TensorId] = {}
        self.groups: list[Group] = []
        self.free: list[fx.Node] = []
        self.updates: list[Blend] = []
        self.opaque: list[tuple[str, bool]] = []
        self._derived: dict[Any, TensorId] = {}
        self._node: fx.Node
        self._base = ""
        #: The node's tensor arguments as the ops read them, after casts.
        self._read: dict[fx.Node, TensorId] = {}
        for i, (node, is_free) in enumerate(zip(program.inputs, free, strict=True)):
            value = node.meta["val"]
            if is_free:
                self.values[node] = Free(node)
                self.free.append(node)
                continue
            t = self.graph.source(f"input{i}", tuple(value.shape), value.dtype, "input")
            self.sources[t] = Source(input=i)
            self.inputs[i] = self.values[node] = t

    # Used by translations.

    def value(self, x: Any) -> Any:
        """A node's value: a tensor, a tuple of values, or a free value."""
        return self.values[x] if isinstance(x, fx.Node) else x

    def is_free(self, x: Any) -> bool:
        """Whether every process holds the value whole."""
        return isinstance(self.value(x), Free)

    def tensor(self, x: Any, dtype: torch.dtype | None = None) -> TensorId:
        """An argument as a planned tensor, cast to `dtype` if given. Free values and numbers become sources."""
        value = self.value(x)
        if isinstance(value, Free):
            given = value.node.meta["val"]
            kind = dtype or given.dtype
            t = self.derived(value.node.name, value.node, tuple(given.shape), kind, lambda v: v.to(kind), True)
            self.groups[-1].arguments[x] = self._read[x] = t
            return t
        if isinstance(x, (bool, int, float)):
            return self.scalar(x, dtype or torch.get_default_dtype())
        if type(value) is not int:
            raise Unsupported(f"an argument {x!r}")
        self.groups[-1].arguments[x] = value
        self._read[x] = self.cast(value, dtype or self.dtype(value))
        return self._read[x]

    def cast(self, x: TensorId, dtype: torch.dtype) -> TensorId:
        """A planned tensor with another element type."""
        if self.dtype(x) == dtype:
            return x
        name, call = self.type_name(dtype), AtenCall(torch.ops.aten.to.dtype, (Input(0), dtype))
        return self.emit("cast", "cast", [x], self.shape(x), call=call, dtype=name, result=dtype)

    def shape(self, t: TensorId) -> tuple[int, ...]:
        """The shape of a planned tensor."""
        return self.graph.tensors[t].shape

    def dtype(self, t: TensorId) -> torch.dtype:
        """The element type of a planned tensor."""
        return self.graph.tensors[t].dtype

    def type_name(self, dtype: torch.dtype) -> str:
        """The planner's name of an element type."""
        if dtype not in DTYPES:
            raise Unsupported(f"elements of type {dtype}")
        return DTYPES[dtype]

    def result_dtype(self) -> torch.dtype:
        """The element type of the node's result."""
        dtype = self._node.meta["val"].dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def result_shape(self) -> tuple[int, ...]:
        """The shape of the node's result."""
        return tuple(self._node.meta["val"].shape)

    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the node's results."""
        return [tuple(v.shape) for v in self._node.meta["val"]]

    def strides(self) -> tuple[int, ...]:
        """The strides of the node's result."""
        return tuple(self._node.meta["val"].stride())

    def scalar(self, value: float, dtype: torch.dtype) -> TensorId:
        """A number as a constant source."""
        return self.constant("number", torch.tensor(value, dtype=dtype))

    def constant(self, name: str, value: torch.Tensor) -> TensorId:
        """A constant source."""
        value = value.to(self._node.meta["val"].device if isinstance(self._node.meta["val"], torch.Tensor) else "cpu")
        t = self.graph.source(f"{self._base}.{name}", tuple(value.shape), value.dtype, "constant")
        self.sources[t] = Source(constant=value)
        return t

    def derived(
        self,
        name: str,
        of: fx.Node,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[torch.Tensor], torch.Tensor],
        pointwise: bool = False,
    ) -> TensorId:
        """A source that is a function of a free value."""
        key = (of, name, dtype)
        if key not in self._derived:
            t = self.graph.source(name, shape, dtype, "input")
            self.sources[t] = Source(free=of, make=make, pointwise=pointwise)
            self._derived[key] = t
        return self._derived[key]

    def blend(self, old: fx.Node, new: TensorId, keep: float, take: float) -> None:
        """Sets a buffer's next value."""
        if not self.is_free(old):
            raise Unsupported("running statistics that are not buffers")
        self.updates.append(Blend(old, new, keep, take))

    def emit(
        self,
        name: str,
        kind: str,
        inputs: list[TensorId],
        size: tuple[int, ...],
        /,
        *,
        call: AtenCall | None = None,
        differentiable: bool = True,
        result: torch.dtype | None = None,
        **attributes: Any,
    ) -> TensorId:
        """Adds an op with one result. Its element type is `result`, or that of the first data operand.

        The op runs `call` on local shards; by default the node's own ATen overload with the node's arguments."""
        dtype = result or self.dtype(inputs[1] if kind == "select" else inputs[0])
        results = [(size, dtype)]
        return self.emit_several(name, kind, inputs, results, call=call, differentiable=differentiable, **attributes)[0]

    def emit_several(
        self,
        name: str,
        kind: str,
        inputs: list[TensorId],
        results: list[tuple[tuple[int, ...], torch.dtype]],
        /,
        *,
        call: AtenCall | None = None,
        differentiable: bool = True,
        **attributes: Any,
    ) -> tuple[TensorId, ...]:
        """Adds an op with several results; see `emit`."""
        called = ".".join(part for part in (self._base, name) if part)
        call = call or self._own_call(inputs)
        self.groups[-1].ops.append(len(self.graph.ops))
        return self.graph.add(called, kind, tuple(inputs), results, attributes, call, differentiable)

    def _own_call(self, inputs: list[TensorId]) -> AtenCall:
        """The node's own overload and arguments. Every tensor argument must be an input of the op. A tensor that is passed
        twice is two inputs, which may have different layouts."""
        taken: dict[TensorId, int] = {}

        def input_of(arg: fx.Node) -> Any:
            t = self._read.get(arg)
            if t not in inputs:
                raise AssertionError(f"{self._node.target}: argument `{arg}` is not an input of the op: pass `call`")
            after = taken.get(t, -1) + 1
            taken[t] = inputs.index(t, after) if t in inputs[after:] else taken[t]
            return Input(taken[t])

        args, kwargs = fx.node.map_arg((self._node.args, self._node.kwargs), input_of)
        return AtenCall(self._node.target, args, kwargs)

    # The walk over the call's ops.

    def run(self) -> Translation:
        """Translates all ops."""
        for node in self.program.nodes:
            self._call(node)
        results = [self.values[r] if isinstance(r, fx.Node) else r for r in self.program.results]
        return Translation(
            self.program,
            self.graph,
            self.groups,
            self.sources,
            self.inputs,
            self.free,
            self.values,
            results,
            self.updates,
            self.opaque,
        )

    def _call(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith(_CHECKS):
            return
        free = all(isinstance(self.values.get(arg), Free) for arg in node.all_input_nodes)
        if free and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            self.values[node] = Free(node)
            self.free.append(node)
            return
        before = self._mark()
        if node.target in TABLE and (node.target is torch.ops.aten.cat.default or not _empty(node)):
            try:
                self._translate(node, TABLE[node.target])
                return
            except (Unsupported, TypeError):
                self._reset(before)
        try:
            if known(node.target) or _empty(node):
                raise Unsupported("an opaque op that can be split")
            self._decompose(node)
        except Exception:  # noqa: BLE001: decompositions are PyTorch's, of any op.
            self._reset(before)
            self._translate(node, _opaque)

    def _translate(self, node: fx.Node, translation: Callable[..., Any]) -> None:
        self._node, self._read = node, {}
        self._base = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
        self.groups.append(Group(node))
        if translation is _opaque:
            self.values[node] = _opaque(self, node)
        else:
            self.values[node] = translation(self, *node.args, **node.kwargs)
        self._check(node.meta.get("val"), self.values[node])

    def _check(self, made: Any, value: Any) -> None:
        """Refuses a translation whose results have other types than the op's."""
        if isinstance(made, (tuple, list)) and isinstance(value, tuple):
            for m, v in zip(made, value, strict=False):
                self._check(m, v)
        elif type(value) is int and isinstance(made, torch.Tensor):
            tensor = self.graph.tensors[value]
            # Under autocast, results have other floating-point types.
            same = tensor.dtype == made.dtype or (tensor.dtype.is_floating_point and made.dtype.is_floating_point)
            if tensor.shape != tuple(made.shape) or not same:
                raise Unsupported("a result of another type")
            if value not in self.sources:
                tensor.dtype = made.dtype

    def _decompose(self, node: fx.Node) -> None:
        """Translates an op as PyTorch decomposes it."""
        target = node.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise Unsupported("random bits")
        table = _decompositions()
        composite = target._can_decompose()
        if target not in table and not composite:
            raise Unsupported("no decomposition")
        args = list(dict.fromkeys(node.all_input_nodes))
        if not all(isinstance(arg.meta["val"], torch.Tensor) for arg in args):
            raise Unsupported("lists")

        def run(*tensors: Any) -> Any:
            given = dict(zip(args, tensors, strict=True))
            own, named = fx.node.map_arg((node.args, node.kwargs), lambda arg: given[arg])
            return table[target](*own, **named) if target in table else target.decompose(*own, **named)

        graph = trace(run, [arg.meta["val"] for arg in args], pre_dispatch=True)
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        parts = [n for n in graph.nodes if n.op == "call_function"]
        if len(parts) > _MOST_PARTS or any(n.op == "get_attr" for n in graph.nodes):
            raise Unsupported("a long decomposition")
        for n, arg in zip(inputs, args, strict=True):
            value = self.values[arg]
            if isinstance(value, Free):
                # The part reads the argument itself.
                n.replace_all_uses_with(arg)
            else:
                self.values[n] = value
        opaque = len(self.opaque)
        for part in parts:
            schema = getattr(part.target, "_schema", None)
            if part.target is target or (schema is not None and schema.is_mutable):
                raise Unsupported("a decomposition into itself")
            self._call(part)
        if len(self.opaque) > opaque:
            raise Unsupported("parts without a translation")
        result = next(n for n in graph.nodes if n.op == "output").args[0]
        self.values[node] = _value_of(self, result)

    def _mark(self) -> Any:
        graph = self.graph
        return (
            len(graph.tensors), len(graph.ops), dict(graph._names), len(self.groups), dict(self.sources),
            len(self.free), len(self.updates), len(self.opaque), dict(self._derived),
        )  # fmt: skip

    def _reset(self, mark: Any) -> None:
        graph = self.graph
        tensors, ops, graph._names, groups, self.sources, free, updates, opaque, self._derived = mark
        del graph.tensors[tensors:], graph.ops[ops:], self.groups[groups:]
        del self.free[free:], self.updates[updates:], self.opaque[opaque:]


def _empty(node: fx.Node) -> bool:
    """Whether the op reads or makes a tensor without elements."""
    values = [arg.meta.get("val") for arg in (*node.all_input_nodes, node)]
    return any(isinstance(v, torch.Tensor) and v.numel() == 0 for v in values)


def _value_of(t: Translator, result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(_value_of(t, r) for r in result)
    return t.values[result] if isinstance(result, fx.Node) else result


_TABLES: list[Any] = []


def _decompositions() -> Any:
    if not _TABLES:
        _TABLES.append(core_aten_decompositions())
    return _TABLES[0]


def _opaque(t: Translator, node: fx.Node) -> Any:
    """An op of which the planner knows the types, and the dimensions that it treats separately."""
    made = node.meta.get("val")
    flat = [made] if isinstance(made, torch.Tensor) else list(made) if isinstance(made, (tuple, list)) else []
    outputs = [v for v in flat if isinstance(v, torch.Tensor)]
    given = list(dict.fromkeys(node.all_input_nodes))
    inputs = [t.tensor(arg) for arg in given]
    if not outputs or len(outputs) != len(flat):
        raise Unsupported(f"{node.target}: its results are not tensors")
    shared = shared_dims(node, given, outputs)
    t.opaque.append((str(node.target), not shared))
    results = [(tuple(v.shape), v.dtype) for v in outputs]
    made_types = [type_of(shape, dtype) for shape, dtype in results]
    ids = t.emit_several("", "opaque", inputs, results, makes=made_types)
    t.graph.ops[-1].attributes.update({"call": str(node.target), **({"shared": shared} if shared else {})})
    return ids[0] if isinstance(made, torch.Tensor) else ids


def evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Computes a node's value from the values of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: known[arg])
    return node.target(*args, **kwargs)  # type: ignore[operator]
