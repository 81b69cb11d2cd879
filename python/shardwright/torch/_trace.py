"""The ATen ops of one call of a PyTorch function.

A call is traced once per signature: the function, the shapes, strides and element types of its tensors, and the values of
all other arguments. Composite ops are not decomposed: linear layers, convolutions, norms, attention and losses stay single
nodes.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

#: Programs larger than this are not planned op by op (a recurrent network unrolled in time).
MOST_NODES = 400


@dataclass(frozen=True)
class Program:
    """The ops of a call. `inputs` are its tensors in order; `results` are the leaves of its result."""

    name: str
    inputs: list[fx.Node]
    nodes: list[fx.Node]
    results: list[Any]
    spec: Any
    #: Results that share memory with an input.
    aliases: list[bool]
    #: Position of the tensor that the call writes into, and the node of its next value.
    mutated: tuple[int, fx.Node] | None = None


@dataclass
class Call:
    """A call's function and flattened arguments. A tensor that is passed twice is one tensor."""

    func: Any
    leaves: list[Any]
    spec: Any
    #: The distinct tensors, and for each leaf its tensor's position (or -1).
    tensors: list[torch.Tensor]
    at: list[int]

    @staticmethod
    def of(func: Any, args: Any, kwargs: Any) -> Call:
        leaves: list[Any] = [*args, *kwargs.values()]
        # Most calls have no nested arguments.
        spec: Any = (len(args), *kwargs)
        if any(isinstance(leaf, (list, tuple, dict)) and not isinstance(leaf, torch.Size) for leaf in leaves):
            leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors: list[torch.Tensor] = []
        known: dict[int, int] = {}
        at = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                at.append(-1)
                continue
            if id(leaf) not in known:
                known[id(leaf)] = len(tensors)
                tensors.append(leaf)
            at.append(known[id(leaf)])
        return Call(func, leaves, spec, tensors, at)

    def run(self, tensors: Sequence[Any]) -> Any:
        """Calls the function with other tensors."""
        leaves = [leaf if i < 0 else tensors[i] for leaf, i in zip(self.leaves, self.at, strict=True)]
        if isinstance(self.spec, tuple):
            count, *names = self.spec
            return self.func(*leaves[:count], **dict(zip(names, leaves[count:], strict=True)))
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    def signature(self) -> int | None:
        """A number for what the ops of the call depend on; `None` if that cannot be told."""
        parts: list[Any] = [self.func, self.spec, autocast_state(), tuple(self.at)]
        for t in self.tensors:
            if t.layout is not torch.strided:
                return None
            parts.append((tuple(t.shape), t.stride(), t.dtype, t.device))
        for leaf, i in zip(self.leaves, self.at, strict=True):
            if isinstance(leaf, slice):
                parts.append(("slice", leaf.start, leaf.stop, leaf.step))
            elif i < 0:
                parts.append((type(leaf), leaf))
        try:
            return _NUMBERS.setdefault(tuple(parts), len(_NUMBERS))
        except TypeError:
            return None


def autocast_state() -> Any:
    """Devices for which autocast is on, and their types."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )


_NUMBERS: dict[Any, int] = {}
_PROGRAMS: dict[int, Program | None] = {}


def program_of(call: Call, signature: int | None) -> Program | None:
    """The call's ops; `None` if it cannot be traced (its result depends on values of tensors)."""
    if signature is None:
        return None
    if signature not in _PROGRAMS:
        try:
            _PROGRAMS[signature] = _program(call)
        except Exception:  # noqa: BLE001: any function of PyTorch, called as the user calls it.
            _PROGRAMS[signature] = None
    return _PROGRAMS[signature]


def _program(call: Call) -> Program | None:
    found: list[Any] = [None]

    def run(*tensors: Any) -> Any:
        leaves, found[0] = pytree.tree_flatten(call.run(tensors))
        return leaves

    graph = trace(run, call.tensors, pre_dispatch=True)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if autocast_state() and not any(_writes(node.target) for node in graph.nodes):
        convert_as_autocast(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    results = list(next(node for node in graph.nodes if node.op == "output").args[0])
    if len(nodes) > MOST_NODES or any(node.op == "get_attr" for node in graph.nodes):
        return None
    mutated = None
    written = [node for node in nodes if _writes(node.target)]
    if written:
        (node,) = nodes
        functional = _functional(node.target)
        if functional is None or node.args[0] not in inputs:
            return None
        mutated = (inputs.index(node.args[0]), node)
        node.target = functional
    aliases = {node: node.op == "placeholder" for node in graph.nodes}
    for node in nodes:
        if getattr(node.target, "is_view", False) or str(node.target) in _MAY_ALIAS:
            aliases[node] = aliases.get(node.args[0], False)
        elif node.target is operator.getitem:
            aliases[node] = aliases[node.args[0]]
    name = getattr(call.func, "__name__", str(call.func))
    shared = [isinstance(r, fx.Node) and aliases[r] for r in results]
    return Program(name, inputs, nodes, results, found[0], shared, mutated)


def trace(run: Callable[..., Any], like: Sequence[torch.Tensor], pre_dispatch: bool) -> fx.Graph:
    """Traces a function on tensors without data."""
    with _disable_current_modes():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]
        made = make_fx(run, tracing_mode="real", pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True)(*fakes)
    return made.graph


def convert_as_autocast(graph: fx.Graph) -> None:
    """Adds the conversions of operands that autocast makes inside of ops: their results have other types than without it."""
    off = [torch.autocast(kind, enabled=False) for kind, _ in autocast_state()]
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        made = node.meta.get("val")
        result = made[0] if isinstance(made, (tuple, list)) and made else made
        operands = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor) and a.meta["val"].is_floating_point()]
        if not operands or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            continue
        own = {a.meta["val"].dtype for a in operands}
        if len(own) == 1 and _type_without(node, {}, off) == result.dtype:
            continue
        wide = max((*own, torch.float32), key=lambda dtype: dtype.itemsize)
        for dtype in (result.dtype, wide):
            typed = {a: dtype for a in operands if a.meta["val"].dtype != dtype}
            if _type_without(node, typed, off) == result.dtype:
                break
        else:
            continue
        for operand in typed:
            with graph.inserting_before(node):
                cast = graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
            cast.meta["val"] = operand.meta["val"].to(dtype)
            node.replace_input_with(operand, cast)


def _type_without(node: fx.Node, typed: Mapping[fx.Node, torch.dtype], off: Sequence[Any]) -> torch.dtype | None:
    """The element type of a node's result without autocast, with operands of these types; `None` where the op refuses them."""

    def value(arg: fx.Node) -> Any:
        held = arg.meta["val"]
        return held.to(typed[arg]) if arg in typed else held

    with contextlib.ExitStack() as stack:
        for mode in off:
            stack.enter_context(mode)
        try:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # noqa: BLE001: any op, on types that it may not take.
            return None
    first = found[0] if isinstance(found, (tuple, list)) else found
    return first.dtype if isinstance(first, torch.Tensor) else None


#: Ops that return a view where they can.
_MAY_ALIAS = ("aten.reshape.default", "aten.flatten.using_ints")


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _functional(target: Any) -> Any:
    """The overload that returns what an in-place overload writes."""
    name = target._opname
    if not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None) if packet is not None else None
