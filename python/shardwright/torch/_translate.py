"""Translates a captured forward pass to the planner's graph.

Values that depend on weights or on floating-point inputs are planned. All others (token ids, labels, masks, positions,
buffers) are *free*: every process holds them whole, computes them as PyTorch does, and passes them to planned ops as
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._native import PlanError
from ._capture import Capture
from ._graph import _DTYPES, AtenCall, Graph, Input, TensorId
from ._ops import TABLE, Unsupported

#: Ops that only assert facts known at capture.
_CHECKS = ("_assert", "sym_constrain")


@dataclass(frozen=True)
class Free:
    """A value that every process holds whole."""

    node: fx.Node


@dataclass(frozen=True)
class Source:
    """The origin of a tensor that no op produces: a weight, an input, a constant, or a function of a free value."""

    parameter: str | None = None
    input: int | None = None
    free: fx.Node | None = None
    constant: torch.Tensor | None = None
    make: Callable[[torch.Tensor], torch.Tensor] | None = None


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
    """A forward pass as the planner's graph, and its correspondence to the captured graph."""

    captured: Capture
    graph: Graph
    groups: list[Group]
    sources: dict[TensorId, Source]
    #: Nodes whose values are free, in order, and the values among them that are constant.
    free: list[fx.Node]
    known: dict[fx.Node, Any]
    values: dict[fx.Node, Any]
    #: The graph's results: tensors, free values, next values of buffers, or constants.
    results: list[Any]
    #: The scalar that is trained. Where the module returns none, a mean added for planning only.
    loss: TensorId | None
    returns_loss: bool

    def text(self) -> str:
        """The planner's JSON."""
        made = {t for op in self.graph.ops for t in op.outputs}
        rest = {r for r in self.results if isinstance(r, int) and r in made and r != self.loss}
        return self.graph.to_json([*([self.loss] if self.loss is not None else []), *sorted(rest)])


class Translator:
    """Translates node by node. Each translation function gets the translator and the node's arguments."""

    def __init__(self, captured: Capture, module: torch.nn.Module, name: str) -> None:
        self.graph = Graph(name)
        self.captured = captured
        self.module = module
        self.values: dict[fx.Node, Any] = {}
        self.sources: dict[TensorId, Source] = {}
        self.groups: list[Group] = []
        self.free: list[fx.Node] = []
        self.known: dict[fx.Node, Any] = {}
        self._derived: dict[Any, TensorId] = {}
        self._own_names = {id(p): name for name, p in module.named_parameters()}
        self._weights: dict[str, TensorId] = {}
        self._node: fx.Node
        self._base = ""
        #: The node's tensor arguments as the ops read them, after casts.
        self._read: dict[fx.Node, TensorId] = {}

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
            t = self.derived(value.node.name, value.node, tuple(given.shape), kind, lambda v: v.to(kind))
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
        if dtype not in _DTYPES:
            raise Unsupported(f"elements of type {dtype}")
        return _DTYPES[dtype]

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

    def scalar(self, value: float, dtype: torch.dtype) -> TensorId:
        """A number as a constant source."""
        return self.constant("number", torch.tensor(value, dtype=dtype))

    def constant(self, name: str, value: torch.Tensor) -> TensorId:
        """A constant source."""
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
    ) -> TensorId:
        """A source that is a function of a free value."""
        key = (of, name, dtype)
        if key not in self._derived:
            t = self.graph.source(name, shape, dtype, "constant" if of in self.known else "input")
            self.sources[t] = Source(free=of, make=make)
            self._derived[key] = t
        return self._derived[key]

    def blend(self, old: fx.Node, new: TensorId, keep: float, take: float) -> Any:
        """A buffer's next value."""
        if not self.is_free(old):
            raise Unsupported("running statistics that are not buffers")
        return Blend(old, new, keep, take)

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
        """The node's own overload and arguments. Every tensor argument must be an input of the op."""

        def input_of(arg: fx.Node) -> Any:
            if self._read.get(arg) not in inputs:
                raise AssertionError(f"{self._node.target}: argument `{arg}` is not an input of the op: pass `call`")
            return Input(inputs.index(self._read[arg]))

        args, kwargs = fx.node.map_arg((self._node.args, self._node.kwargs), input_of)
        return AtenCall(self._node.target, args, kwargs)

    # The walk over the captured graph.

    def run(self) -> Translation:
        """Translates the whole graph. Raises one error that lists every op that cannot be planned."""
        problems: list[str] = []
        broken: set[fx.Node] = set()
        results: list[Any] = []
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                results = list(node.args[0])
            elif any(arg in broken for arg in node.all_input_nodes):
                broken.add(node)
            else:
                try:
                    self._call(node)
                except Unsupported as reason:
                    problems.append(_at(node, str(reason)))
                    broken.add(node)
        if problems:
            raise PlanError(
                f"{len(problems)} ops of {type(self.module).__name__} cannot be planned:\n  "
                + "\n  ".join(problems)
                + "\nReplace them by ops that can be planned (docs/torch.md lists them), or compute them outside the module "
                "and pass the result as an input."
            )
        return self._finish([self.values[r] if isinstance(r, fx.Node) else r for r in results])

    def _placeholder(self, node: fx.Node) -> None:
        captured, value = self.captured, node.meta.get("val")
        if node.name in captured.parameters:
            parameter = self.module.get_parameter(captured.parameters[node.name])
            # A tied weight has several names and is one tensor.
            name = self._own_names[id(parameter)]
            if name not in self._weights:
                role = "parameter" if parameter.requires_grad else "constant"
                t = self.graph.source(name, tuple(parameter.shape), parameter.dtype, role)
                self.sources[t] = Source(parameter=name)
                self._weights[name] = t
            self.values[node] = self._weights[name]
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and node.name in captured.inputs:
            t = self.graph.source(node.name, tuple(value.shape), value.dtype, "input")
            self.sources[t] = Source(input=captured.inputs[node.name])
            self.values[node] = t
        else:
            self.values[node] = Free(node)
            self.free.append(node)
            if node.name in captured.constants:
                self.known[node] = captured.constants[node.name]

    def _call(self, node: fx.Node) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith(_CHECKS):
            return
        made = node.meta.get("val")
        tensors = [v for v in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(v, torch.Tensor)]
        if any(isinstance(size, torch.SymInt) for v in tensors for size in v.shape):
            raise Unsupported(f"{node.target}: a size that depends on data")
        free = all(isinstance(self.values.get(arg), Free) for arg in node.all_input_nodes)
        if free and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            self.values[node] = Free(node)
            self.free.append(node)
            if all(arg in self.known for arg in node.all_input_nodes):
                self.known[node] = evaluate(node, self.known)
            return
        translation = TABLE.get(node.target)
        if translation is None:
            raise Unsupported(str(node.target))
        self._node, self._base, self._read = node, self._name(node), {}
        self.groups.append(Group(node))
        try:
            self.values[node] = translation(self, *node.args, **node.kwargs)
        except TypeError as error:
            raise Unsupported(f"{node.target} with these arguments ({error})") from error
        except Unsupported as reason:
            raise Unsupported(f"{node.target}: {reason}") from reason

    def _name(self, node: fx.Node) -> str:
        """The path of the node's module. Modules that are not PyTorch's layers get the ATen op's name appended."""
        op = getattr(node.target, "_opname", str(node.target))
        path, kind = _module_of(node)
        if not path:
            return op
        leaf = kind.startswith("torch.nn.modules") or kind.endswith("Conv1D")
        return path if leaf else f"{path}.{op}"

    def _finish(self, results: list[Any]) -> Translation:
        returned = results[len(self.captured.mutated) :]
        floats = [
            r for r in returned if type(r) is int and self.dtype(r).is_floating_point and r not in self.sources
        ]
        loss = floats[0] if floats and self.shape(floats[0]) == () else None
        returns_loss = loss is not None
        if loss is None and floats:
            shape = self.shape(floats[0])
            attributes = {"f": "sum", "axes": list(range(len(shape))), "scale": 1.0 / math.prod(shape)}
            result = ((), self.dtype(floats[0]))
            loss = self.graph.add("loss", "reduce", (floats[0],), [result], attributes, None)[0]
        return Translation(
            self.captured,
            self.graph,
            self.groups,
            self.sources,
            self.free,
            self.known,
            self.values,
            results,
            loss,
            returns_loss,
        )


def evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Computes a node's value from the values of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: known[arg])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _module_of(node: fx.Node) -> tuple[str, str]:
    """Path and type of the innermost module of a node."""
    stack = [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if entry[0]]
    if not stack:
        return "", ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return str(path).removeprefix("module.").removeprefix("module"), kind


def _at(node: fx.Node, reason: str) -> str:
    """The reason, with the op's module and source line."""
    path, kind = _module_of(node)
    frames = [part.strip() for part in (node.meta.get("stack_trace") or "").split('File "') if part.strip()]
    own = [frame for frame in frames if "/torch/" not in frame.split('"')[0]] or frames
    at = ""
    if own:
        where, *code = own[-1].splitlines()
        file, _, rest = where.partition('", line ')
        at = f", {file}:{rest.split(',')[0]}" + (f": {code[0].strip()}" if code else "")
    return f"{reason}, in module `{path or '(root)'}`{f' ({kind})' if kind else ''}{at}"
