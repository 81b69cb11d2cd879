"""Runs a call by its plan: each op on the shards of its config, tensors resharded in between.

A node that became several planner ops runs as its own ATen op on shards where those ops exchange nothing with other
processes (attention, layer norm, linear layers): one kernel instead of several.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from ._graph import AtenCall, Input, Op, TensorId
from ._kernels import Block, Blocks, check_shapes, local_function
from ._layout import Layout, dual, is_partial
from ._tensor import ShardTensor, made_of, make, read, sort_of, version, whole
from ._translate import Free, Group, Translation, evaluate

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class OpLayouts:
    """The layouts of an op's tensors, and those of its inputs' gradients."""

    inputs: list[Layout]
    gradients: list[Layout]
    outputs: list[Layout]

    @staticmethod
    def of(op: Op, form: Mapping[str, Any], shapes: Callable[[TensorId], tuple[int, ...]], sizes: Sequence[int]) -> OpLayouts:
        """The plan's layouts. A maximum with a gradient is not split: a partial maximum has no gradient. A mesh axis whose
        blocks would be uneven does not split the op."""
        dropped: set[int] = set()
        if op.kind == "reduce" and op.attributes["f"] == "max" and op.differentiable:
            dropped = {axis for axis, at in enumerate(form["outputs"][0]) if at == "M"}
        tensors = [*zip(op.inputs, form["inputs"], strict=True), *zip(op.outputs, form["outputs"], strict=False)]
        for t, layout in tensors:
            shape = shapes(t)
            parts: dict[int, int] = {}
            for axis, at in enumerate(layout):
                if at.startswith("S"):
                    dim = int(at[1:])
                    parts[dim] = parts.get(dim, 1) * sizes[axis]
            uneven = {dim for dim, count in parts.items() if dim >= len(shape) or shape[dim] % count}
            dropped |= {axis for axis, at in enumerate(layout) if at.startswith("S") and int(at[1:]) in uneven}

        def kept(layout: Sequence[str]) -> Layout:
            return tuple("R" if axis in dropped else at for axis, at in enumerate(layout))

        inputs = [kept(layout) for layout in form["inputs"]]
        split = [axis for axis in form["split"] if axis not in dropped]

        def gradient(layout: Layout) -> Layout:
            # The blocks of a split op each contribute a summand to the gradient of a replicated input.
            return tuple("P" if at == "R" and axis in split else at for axis, at in enumerate(dual(layout)))

        return OpLayouts(inputs, [gradient(layout) for layout in inputs], [kept(layout) for layout in form["outputs"]])


@dataclass(frozen=True)
class LocalCall:
    """A function of local shards, with the layouts of its inputs, of their gradients and of its outputs."""

    name: str
    function: Callable[[list[torch.Tensor]], Any]
    inputs: list[TensorId]
    layouts: list[Layout]
    gradients: list[Layout]
    outputs: list[tuple[TensorId, Layout]]
    #: Whether inputs of 16 bits are computed with 32.
    wide: bool = False


class Run:
    """A call on a mesh. With `fuse=False` every planner op runs by itself."""

    def __init__(self, step: Translation, forms: Mapping[str, Any], engine: Any, fuse: bool = True) -> None:
        self.step, self.engine, self._fuse = step, engine, fuse
        self._strides: dict[Any, tuple[int, ...]] = {}
        self._inputs = {node: i for i, node in enumerate(step.program.inputs)}
        sizes = engine.grid.sizes
        shapes = [t.shape for t in step.graph.tensors]
        self._layouts = {op.name: OpLayouts.of(op, forms[op.name], shapes.__getitem__, sizes) for op in step.graph.ops}
        #: Arguments of the call in another element type: the argument, and the type.
        self.converted = {
            op.outputs[0]: (op.inputs[0], step.graph.tensors[op.outputs[0]].dtype)
            for op in step.graph.ops
            if op.kind == "cast" and op.inputs[0] in step.inputs.values()
        }
        self.calls: list[LocalCall] = []
        for group in step.groups:
            self.calls += self._calls(group)
        self.splits = any(set(at) - {"R"} for call in self.calls for at in (*call.layouts, *(at for _, at in call.outputs)))
        #: Whether a result may be a partial sum.
        self.partial = any(is_partial(at) for call in self.calls for _, at in call.outputs)
        #: Layouts that later ops and later calls read.
        self.wanted: dict[TensorId, set[Layout]] = {}
        for call in self.calls:
            for t, layout in zip(call.inputs, call.layouts, strict=True):
                self.wanted.setdefault(t, set()).add(layout)

    # Local calls.

    def _calls(self, group: Group) -> list[LocalCall]:
        ops = [self.step.graph.ops[i] for i in group.ops]
        fused = self._fused(group, ops) if self._fuse and len(ops) > 1 else None
        return [fused] if fused else [self._single(op, len(ops) > 1) for op in ops]

    def _single(self, op: Op, piece: bool) -> LocalCall:
        if op.call is None:
            raise AssertionError(f"`{op.name}` exists in the plan only")
        layouts = self._layouts[op.name]
        outputs = list(zip(op.outputs, layouts.outputs, strict=True))
        return self._local_call(
            op.name, op.call, list(op.inputs), layouts.inputs, layouts.gradients, outputs, op.differentiable, piece
        )

    def _fused(self, group: Group, ops: list[Op]) -> LocalCall | None:
        """The node's own ATen op on shards, or `None` where its planner ops exchange anything between them."""
        made: dict[TensorId, Layout] = {}
        read_: dict[TensorId, tuple[Layout, Layout]] = {}
        views: dict[TensorId, TensorId] = {}
        for op in ops:
            layouts = self._layouts[op.name]
            random = op.call is not None and op.call.is_random
            if random or any(map(is_partial, (*layouts.inputs, *layouts.outputs))):
                return None
            for t, layout, gradient in zip(op.inputs, layouts.inputs, layouts.gradients, strict=True):
                if t in views and made[t] == layout:
                    # The gradient of a reshaped argument is the argument's gradient, reshaped.
                    read_[views[t]] = (layout, gradient)
                elif t in made and (made[t], dual(layout)) != (layout, gradient):
                    return None
                elif read_.setdefault(t, (layout, gradient)) != (layout, gradient):
                    return None
            if op.kind == "reshape" and op.inputs[0] not in made and set(layouts.inputs[0]) == {"R"}:
                views[op.outputs[0]] = op.inputs[0]
            made.update(zip(op.outputs, layouts.outputs, strict=True))
        node, result, arguments = group.node, self.step.values[group.node], group.arguments
        if self.step.updates and any(update.new in made for update in self.step.updates):
            return None
        known = set(arguments.values())
        for t, (layout, _) in read_.items():
            # A constant that the translation added (a causal mask) is part of the ATen op, which assumes it whole.
            if t not in made and t not in known and set(layout) != {"R"}:
                return None
        arguments_of = dict.fromkeys(node.all_input_nodes)
        if len(arguments) < len(arguments_of) or not known <= read_.keys() or result not in made:
            return None
        inputs = list(dict.fromkeys(arguments[arg] for arg in arguments_of))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: Input(inputs.index(arguments[arg])))
        layouts_in, gradients = [read_[t][0] for t in inputs], [read_[t][1] for t in inputs]
        outputs = [(result, made[result])]
        return self._local_call(ops[0].name, AtenCall(node.target, args, kwargs), inputs, layouts_in, gradients, outputs)

    def _local_call(
        self,
        name: str,
        call: AtenCall,
        inputs: list[TensorId],
        layouts: list[Layout],
        gradients: list[Layout],
        outputs: list[tuple[TensorId, Layout]],
        differentiable: bool = True,
        piece: bool = False,
    ) -> LocalCall:
        tensors = self.step.graph.tensors
        blocks = Blocks(
            [self._block(t, layout) for t, layout in zip(inputs, layouts, strict=True)],
            [self._block(t, layout) for t, layout in outputs],
        )
        # Pieces of composite ops (norms, losses) compute with 32 bits, as the composite op does.
        wide = piece and isinstance(call.target, str) and any(tensors[t].dtype in _HALF for t in inputs)
        if any(set(layout) != {"R"} for layout in (*layouts, *(at for _, at in outputs))):
            check_shapes(call, blocks, [tensors[t].dtype for t in inputs])
        return LocalCall(name, local_function(call, blocks, differentiable), inputs, layouts, gradients, outputs, wide)

    def _block(self, t: TensorId, layout: Layout) -> Block:
        shape = self.step.graph.tensors[t].shape
        return Block(shape, *self.engine.grid.block(shape, layout))

    def conversion(self, call: LocalCall, weights: Container[TensorId]) -> torch.dtype | None:
        """The type to which a local call converts a weight, if it does that: the weight is then read in this type."""
        of, dtype = self.converted.get(call.outputs[0][0], (None, None))
        return dtype if of in weights else None

    # One call.

    def __call__(self, tensors: Sequence[torch.Tensor], settle: Mapping[TensorId, set[Layout]]) -> list[Any]:
        """The call's results as flat list, from its tensors. `settle` has the layouts that later calls read."""
        step, engine = self.step, self.engine
        free = self._free(tensors)
        values: dict[TensorId, torch.Tensor] = {t: tensors[i] for i, t in step.inputs.items()}
        graph = step.graph.tensors
        stored = {t for t, x in values.items() if isinstance(x, DTensor)} if self.converted else ()
        for call in self.calls:
            if stored and (dtype := self.conversion(call, stored)) is not None:
                values[call.outputs[0][0]] = engine.weights.stand_in(values[call.inputs[0]], dtype)
                continue
            given = []
            for t, layout, gradient in zip(call.inputs, call.layouts, call.gradients, strict=True):
                if t not in values:
                    values[t] = self._source(t, free, tensors)
                local = read(values[t], engine, layout, gradient)
                given.append(local.float() if call.wide and local.dtype in _HALF else local)
            engine.op = call.name
            results = call.function(given)
            engine.op = ""
            results = results if isinstance(results, (tuple, list)) else (results,)
            # The planner gives pooling a second output, the positions, which the ATen op does not return.
            for (t, layout), local in zip(call.outputs, results, strict=False):
                made = graph[t]
                if call.wide and local.dtype == torch.float32 and made.dtype in _HALF and step.results == [t]:
                    local = local.to(made.dtype)
                wanted = settle.get(t, set()) | self.wanted.get(t, set())
                value = make(local, layout, engine, made.shape, self._stride(t, local))
                if len(wanted) > 1 and is_partial(layout):
                    at = _settled(layout, wanted)
                    if at != layout:
                        value = make(read(value, engine, at, dual(at)), at, engine, made.shape, self._stride(t, local))
                values[t] = value
        with torch.no_grad():
            for update in step.updates:
                new = whole(values[update.new], engine)
                old = free[update.old]
                old.copy_(update.keep * old + update.take * new)
        return [self._result(r, node, values, free, tensors) for r, node in zip(step.results, step.program.results, strict=True)]

    def quick(self, settle: Mapping[TensorId, set[Layout]]) -> Callable[[Sequence[torch.Tensor]], Any] | None:
        """The same as one local call on the call's tensors; `None` where there is more to do."""
        step, engine = self.step, self.engine
        if len(self.calls) != 1 or step.updates or any(node not in self._inputs for node in step.free):
            return None
        (call,), where = self.calls, {t: i for i, t in step.inputs.items()}
        t, layout = call.outputs[0]
        wanted = settle.get(t, set()) | self.wanted.get(t, set())
        reduced = len(wanted) > 1 and is_partial(layout) and _settled(layout, wanted) != layout
        if call.wide or reduced or step.results != [t] or not all(own in where for own in call.inputs):
            return None
        reads = [(where[own], at, g, g == dual(at)) for own, at, g in zip(call.inputs, call.layouts, call.gradients, strict=True)]
        function, name, whole_layout = call.function, call.name, engine.whole
        shape, stride = step.graph.tensors[t].shape, tuple(step.program.results[0].meta["val"].stride())
        sort: list[int | None] = [None]
        weights, back, is_whole = engine.weights, dual(layout), layout == whole_layout

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            given = []
            for i, at, gradient, simple in reads:
                x = tensors[i]
                # `read` for tensors that are there already.
                kind = type(x)
                if kind is ShardTensor:
                    local = x._linked if simple and x._layout == at else None
                    if local is not None and (local.requires_grad != x.requires_grad or version(x) != x._made):
                        local = None
                elif kind is DTensor:
                    local = weights.read(x, at, gradient, x.requires_grad and torch.is_grad_enabled())
                else:
                    local = None
                given.append(read(x, engine, at, gradient) if local is None else local)
            engine.op = name
            local = function(given)
            engine.op = ""
            if type(local) in (tuple, list):
                local = local[0]
            if is_whole:
                return local
            made = made_of(local, layout, engine, shape, stride, back)
            if not made.is_inference():
                if sort[0] is None:
                    sort[0] = sort_of(made)
                made._sort = sort[0]
            return made

        return run

    def _stride(self, t: TensorId, local: torch.Tensor) -> tuple[int, ...]:
        key = (t, local.stride())
        if key not in self._strides:
            self._strides[key] = self._stride_of(t, local)
        return self._strides[key]

    def _stride_of(self, t: TensorId, local: torch.Tensor) -> tuple[int, ...]:
        shape = self.step.graph.tensors[t].shape
        # The order of dimensions in memory is the shard's.
        order = sorted(range(len(shape)), key=lambda d: (-local.stride()[d], d)) if local.dim() == len(shape) else range(len(shape))
        stride, size = [0] * len(shape), 1
        for d in reversed(list(order)):
            stride[d], size = size, size * max(shape[d], 1)
        return tuple(stride)

    def _free(self, tensors: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
        known = _FreeValues(self._inputs, tensors, self.engine)
        with torch.no_grad():
            for node in self.step.free:
                if node not in self._inputs:
                    known[node] = evaluate(node, known)
        return known

    def _source(self, t: TensorId, free: Mapping[fx.Node, Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        source = self.step.sources[t]
        if source.constant is not None:
            return source.constant
        assert source.free is not None and source.make is not None
        given = tensors[self._inputs[source.free]] if source.free in self._inputs else None
        if source.pointwise and isinstance(given, ShardTensor):
            return ShardTensor(source.make(given._local), given._layout, self.engine, tuple(given.shape), given.stride())
        return source.make(free[source.free])

    def _result(self, result: Any, node: Any, values: Mapping[TensorId, Any], free: Mapping[fx.Node, Any], tensors: Any) -> Any:
        if isinstance(node, fx.Node) and node.op == "placeholder":
            return tensors[self.step.program.inputs.index(node)]
        if isinstance(result, Free):
            return free[result.node]
        if type(result) is not int:
            return result
        value = values[result] if result in values else self._source(result, free, tensors)
        stride = tuple(node.meta["val"].stride())
        if getattr(value, "_layout", None) is not None and (tuple(value.stride()) != stride or result in self.step.inputs.values()):
            at = value._layout
            return make(read(value, self.engine, at, dual(at)), at, self.engine, tuple(value.shape), stride)
        return value


class _FreeValues(dict[fx.Node, Any]):
    """Free values. Arguments of the call are gathered when they are needed."""

    def __init__(self, inputs: Mapping[fx.Node, int], tensors: Sequence[torch.Tensor], engine: Any) -> None:
        super().__init__()
        self._inputs, self._tensors, self._engine = inputs, tensors, engine

    def __missing__(self, node: fx.Node) -> Any:
        with torch.no_grad():
            self[node] = whole(self._tensors[self._inputs[node]], self._engine)
        return self[node]


def _settled(layout: Layout, wanted: set[Layout]) -> Layout:
    """A partial sum that readers need in different layouts is reduced once."""

    def agreed(axis: int, at: str) -> str:
        if at not in "PM":
            return at
        entries = {layout[axis] for layout in wanted}
        return entries.pop() if len(entries) == 1 else "P" if "P" in entries and at == "P" else "R"

    return tuple(agreed(axis, at) for axis, at in enumerate(layout))
