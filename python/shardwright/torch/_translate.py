"""From a captured forward pass to the planner's graph.

What is planned is whatever depends on weights or on floating-point inputs. Everything else (token ids, labels, masks,
positions, buffers) is *free*: every process has it whole, computes with it as PyTorch does, and hands it to planned ops
as inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._native import PlanError
from ._capture import Captured
from ._graph import _DTYPES, Graph, TensorId
from ._ops import TABLE, Unsupported

#: Ops that only check what is known at capture.
_CHECKS = ("_assert", "sym_constrain")


@dataclass(frozen=True)
class Free:
    """A value that every process has whole."""

    node: fx.Node


@dataclass(frozen=True)
class Source:
    """Where a tensor that no op makes comes from: a weight, an input, or a function of a free value."""

    parameter: str | None = None
    input: int | None = None
    free: fx.Node | None = None
    constant: torch.Tensor | None = None
    make: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Blend:
    """A buffer's next value, `keep * old + take * new`: cheap enough to be left out of the plan."""

    old: fx.Node
    new: TensorId
    keep: float
    take: float


@dataclass
class Group:
    """The ops that a node became."""

    node: fx.Node
    whole: bool
    ops: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """A forward pass as the planner's graph, and what connects it with the captured one."""

    captured: Captured
    graph: Graph
    groups: list[Group]
    sources: dict[TensorId, Source]
    #: Nodes whose values are free, in order; and what is known of them already.
    free: list[fx.Node]
    known: dict[fx.Node, Any]
    values: dict[fx.Node, Any]
    #: What the graph returns: tensors, free values, next values of buffers, or constants.
    results: list[Any]
    #: The number that is trained; made up for planning alone where the module returns none.
    loss: TensorId | None
    returns_loss: bool

    def text(self) -> str:
        """The planner's text."""
        made = {t for op in self.graph.ops for t in op.outputs}
        rest = {r for r in self.results if isinstance(r, int) and r in made and r != self.loss}
        return self.graph.to_json([*([self.loss] if self.loss is not None else []), *sorted(rest)])


class Translator:
    """What translations see: the graph so far, and the node at hand."""

    def __init__(self, captured: Captured, module: torch.nn.Module, name: str) -> None:
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

    # What translations ask for.

    def value(self, x: Any) -> Any:
        """What a node became: a tensor, a tuple of values, or a free value."""
        return self.values[x] if isinstance(x, fx.Node) else x

    def is_free(self, x: Any) -> bool:
        """Whether every process has it whole."""
        return isinstance(self.value(x), Free)

    def tensor(self, x: Any, dtype: torch.dtype | None = None) -> TensorId:
        """A planned tensor; free values and numbers become sources, of this type if one is given."""
        value = self.value(x)
        if isinstance(value, Free):
            given = value.node.meta["val"]
            kind = dtype or given.dtype
            return self.derived(value.node.name, value.node, tuple(given.shape), kind, lambda v: v.to(kind))
        if isinstance(x, (bool, int, float)):
            return self.scalar(x, dtype or torch.get_default_dtype())
        if type(value) is not int:
            raise Unsupported(f"an argument {x!r}")
        if dtype is not None and self.dtype(value) != dtype:
            return self.emit("cast", "cast", [value], self.shape(value), dtype=self.type_name(dtype), result=dtype)
        return value

    def shape(self, t: TensorId) -> tuple[int, ...]:
        """The shape of a planned tensor."""
        return self.graph.tensors[t].shape

    def dtype(self, t: TensorId) -> torch.dtype:
        """The element type of a planned tensor."""
        return self.graph.tensors[t].dtype

    def type_name(self, dtype: torch.dtype) -> str:
        """What the planner calls an element type."""
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
        """A number."""
        return self.constant("number", torch.tensor(value, dtype=dtype))

    def constant(self, name: str, value: torch.Tensor) -> TensorId:
        """A tensor that is known."""
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
        """A function of a free value."""
        key = (of, name, dtype)
        if key not in self._derived:
            t = self.graph.source(name, shape, dtype, "constant" if of in self.known else "input")
            self.sources[t] = Source(free=of, make=make)
            self._derived[key] = t
        return self._derived[key]

    def blend(self, old: fx.Node, new: TensorId, keep: float, take: float) -> Any:
        """A buffer's next value."""
        if not self.is_free(old):
            raise Unsupported("a norm whose running statistics are no buffers")
        return Blend(old, new, keep, take)

    def emit(
        self,
        name: str,
        kind: str,
        inputs: list[TensorId],
        size: tuple[int, ...],
        /,
        *,
        extra: dict[str, Any] | None = None,
        result: torch.dtype | None = None,
        **attributes: Any,
    ) -> TensorId:
        """Adds an op with one result, whose type is that of its last operand but one, or its only one."""
        dtype = result or self.dtype(inputs[1] if kind == "select" else inputs[0])
        return self.emit_several(name, kind, inputs, [(size, dtype)], extra=extra, **attributes)[0]

    def emit_several(
        self,
        name: str,
        kind: str,
        inputs: list[TensorId],
        results: list[tuple[tuple[int, ...], torch.dtype]],
        /,
        *,
        extra: dict[str, Any] | None = None,
        **attributes: Any,
    ) -> tuple[TensorId, ...]:
        """Adds an op."""
        called = ".".join(part for part in (self._base, name) if part)
        self.groups[-1].ops.append(len(self.graph.ops))
        return self.graph.add(called, kind, tuple(inputs), results, attributes, extra or {})

    # Going through the captured graph.

    def run(self) -> Step:
        """Translates everything, or says what cannot be."""
        trouble: list[str] = []
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
                    trouble.append(_place(node, str(reason)))
                    broken.add(node)
        if trouble:
            raise PlanError(
                f"{len(trouble)} ops of {type(self.module).__name__} cannot be planned:\n  "
                + "\n  ".join(trouble)
                + "\nWrite these lines with ops that can (docs/torch.md lists them), or compute them outside the module "
                "and pass the result as an input."
            )
        return self._finish([self.values[r] if isinstance(r, fx.Node) else r for r in results])

    def _placeholder(self, node: fx.Node) -> None:
        captured, value = self.captured, node.meta.get("val")
        if node.name in captured.parameters:
            parameter = self.module.get_parameter(captured.parameters[node.name])
            # A weight that has several names, a tied one, is one weight.
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
        self._node, self._base = node, self._name(node)
        self.groups.append(Group(node, translation.whole))
        try:
            self.values[node] = translation.make(self, *node.args, **node.kwargs)
        except TypeError as error:
            raise Unsupported(f"{node.target} with these arguments ({error})") from error
        except Unsupported as reason:
            raise Unsupported(f"{node.target}: {reason}") from reason

    def _name(self, node: fx.Node) -> str:
        """The path of the module that a node comes from, and what the node does unless that is all that it does."""
        did = getattr(node.target, "_opname", str(node.target))
        path, kind = _module_of(node)
        if not path:
            return did
        leaf = kind.startswith("torch.nn.modules") or kind.endswith("Conv1D")
        return path if leaf else f"{path}.{did}"

    def _finish(self, results: list[Any]) -> Step:
        returned = results[len(self.captured.mutated) :]
        floats = [
            r for r in returned if type(r) is int and self.dtype(r).is_floating_point and r not in self.sources
        ]
        loss = floats[0] if floats and self.shape(floats[0]) == () else None
        returns_loss = loss is not None
        if loss is None and floats:
            shape = self.shape(floats[0])
            self._base = "loss"
            self.groups.append(Group(next(iter(self.captured.graph.nodes)), False))
            loss = self.emit(
                "",
                "reduce",
                [floats[0]],
                (),
                f="sum",
                axes=list(range(len(shape))),
                scale=1.0 / math.prod(shape),
                extra={"planning": True},
            )
        return Step(
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
    """A node's value, from those of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: known[arg])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _module_of(node: fx.Node) -> tuple[str, str]:
    """Path and type of the innermost module that a node comes from."""
    stack = [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if entry[0]]
    if not stack:
        return "", ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return str(path).removeprefix("module.").removeprefix("module"), kind


def _place(node: fx.Node, reason: str) -> str:
    """An op's trouble with the module and the line that it comes from."""
    path, kind = _module_of(node)
    frames = [part.strip() for part in (node.meta.get("stack_trace") or "").split('File "') if part.strip()]
    own = [frame for frame in frames if "/torch/" not in frame.split('"')[0]] or frames
    at = ""
    if own:
        where, *code = own[-1].splitlines()
        file, _, rest = where.partition('", line ')
        at = f", {file}:{rest.split(',')[0]}" + (f": {code[0].strip()}" if code else "")
    return f"{reason}, in module `{path or '(root)'}`{f' ({kind})' if kind else ''}{at}"
