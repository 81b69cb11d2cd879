"""Runs a forward pass by its plan: each op on the shards of its config, tensors resharded in between.

A node that became several planner ops runs as its own ATen op on shards where those ops exchange nothing with other
processes (attention, layer norm, linear layers): one kernel instead of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from ._graph import AtenCall, Input, Op, TensorId
from ._kernels import Block, Blocks, check_shapes, local_function
from ._layout import DistributedValue, Grid, Layout, dual, is_partial, layout_of, placements
from ._translate import Blend, Free, Group, Source, Translation, evaluate


@dataclass(frozen=True)
class OpLayouts:
    """The layouts of an op's tensors, and those of its inputs' gradients."""

    inputs: list[Layout]
    gradients: list[Layout]
    outputs: list[Layout]

    @staticmethod
    def of(op: Op, form: Mapping[str, Any]) -> OpLayouts:
        """The plan's layouts. A maximum with a gradient is not split: a partial maximum has no gradient."""
        whole: set[int] = set()
        if op.kind == "reduce" and op.attributes["f"] == "max" and op.differentiable:
            whole = {axis for axis, at in enumerate(form["outputs"][0]) if at == "M"}

        def kept(layout: list[str]) -> Layout:
            return tuple("R" if axis in whole else at for axis, at in enumerate(layout))

        inputs = [kept(layout) for layout in form["inputs"]]
        split = [axis for axis in form["split"] if axis not in whole]

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


class Run:
    """A forward pass on a mesh. With `fuse=False` every planner op runs by itself."""

    def __init__(self, step: Translation, layouts: Mapping[str, Any], mesh: Any, fuse: bool = True) -> None:
        self.step, self.grid, self._fuse = step, Grid(mesh), fuse
        whole = ("R",) * len(self.grid.sizes)
        self._whole: Layout = whole
        self._layouts = {op.name: OpLayouts.of(op, layouts[op.name]) for op in step.graph.ops if op.name in layouts}
        self.calls: list[LocalCall] = []
        for group in step.groups:
            self.calls += self._calls(group)
        self._wanted: dict[TensorId, set[Layout]] = {}
        self._last: dict[TensorId, int] = {}
        for at, call in enumerate(self.calls):
            for t, layout in zip(call.inputs, call.layouts, strict=True):
                self._wanted.setdefault(t, set()).add(layout)
                self._last[t] = at
        kept = (r.new if isinstance(r, Blend) else r for r in step.results)
        self._kept = {t for t in kept if type(t) is int}
        self._flatten()

    def _flatten(self) -> None:
        """Makes a sum over several axes one collective: DTensor uses a flattened submesh if there is one."""
        layouts = [at for call in self.calls for at in (*call.gradients, *(at for _, at in call.outputs))]
        names = self.grid.mesh.mesh_dim_names
        summed = {tuple(name for name, at in zip(names, layout, strict=True) if at == "P") for layout in layouts}
        for axes in sorted(summed):
            if len(axes) > 1:
                self.grid.mesh[axes]._flatten()

    # Local calls.

    def _calls(self, group: Group) -> list[LocalCall]:
        ops = [self.step.graph.ops[i] for i in group.ops]
        fused = self._fused(group, ops) if self._fuse and len(ops) > 1 else None
        return [fused] if fused else [self._single(op) for op in ops]

    def _single(self, op: Op) -> LocalCall:
        if op.call is None:
            raise AssertionError(f"`{op.name}` exists in the plan only")
        layouts = self._layouts[op.name]
        outputs = list(zip(op.outputs, layouts.outputs, strict=True))
        return self._local_call(
            op.name, op.call, list(op.inputs), layouts.inputs, layouts.gradients, outputs, op.differentiable
        )

    def _fused(self, group: Group, ops: list[Op]) -> LocalCall | None:
        """The node's own ATen op on shards, or `None` where its planner ops exchange anything between them."""
        made: dict[TensorId, Layout] = {}
        read: dict[TensorId, tuple[Layout, Layout]] = {}
        views: dict[TensorId, TensorId] = {}
        for op in ops:
            layouts = self._layouts[op.name]
            random = op.call is not None and op.call.is_random
            if random or any(map(is_partial, (*layouts.inputs, *layouts.outputs))):
                return None
            for t, layout, gradient in zip(op.inputs, layouts.inputs, layouts.gradients, strict=True):
                if t in views and made[t] == layout:
                    # The gradient of a reshaped argument is the argument's gradient, reshaped.
                    read[views[t]] = (layout, gradient)
                elif t in made and (made[t], dual(layout)) != (layout, gradient):
                    return None
                elif read.setdefault(t, (layout, gradient)) != (layout, gradient):
                    return None
            if op.kind == "reshape" and op.inputs[0] not in made and set(layouts.inputs[0]) == {"R"}:
                views[op.outputs[0]] = op.inputs[0]
            made.update(zip(op.outputs, layouts.outputs, strict=True))
        node, result, arguments = group.node, self.step.values[group.node], group.arguments
        known = set(arguments.values())
        for t, (layout, _) in read.items():
            # A constant that the translation added (a causal mask) is part of the ATen op, which assumes it whole.
            if t not in made and t not in known and set(layout) != {"R"}:
                return None
        if len(arguments) < len(node.all_input_nodes) or not known <= read.keys() or result not in made:
            return None
        inputs = list(dict.fromkeys(arguments[arg] for arg in node.all_input_nodes))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: Input(inputs.index(arguments[arg])))
        layouts_in, gradients = [read[t][0] for t in inputs], [read[t][1] for t in inputs]
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
    ) -> LocalCall:
        tensors = self.step.graph.tensors
        blocks = Blocks(
            [self._block(t, layout) for t, layout in zip(inputs, layouts, strict=True)],
            [self._block(t, layout) for t, layout in outputs],
        )
        check_shapes(call, blocks, [tensors[t].dtype for t in inputs])
        return LocalCall(name, local_function(call, blocks, differentiable), inputs, layouts, gradients, outputs)

    def _block(self, t: TensorId, layout: Layout) -> Block:
        shape = self.step.graph.tensors[t].shape
        return Block(shape, *self.grid.block(shape, layout))

    # One pass.

    def __call__(self, module: torch.nn.Module, leaves: list[Any]) -> list[Any]:
        """The captured graph's results, from the flattened inputs."""
        self.grid.sums.clear()
        free = self._free(module, leaves)
        values: dict[TensorId, DistributedValue] = {}
        for at, call in enumerate(self.calls):
            for t in call.inputs:
                if t not in values:
                    values[t] = self._source(t, module, leaves, free)
                self._settle(t, values[t])
            given = zip(call.inputs, call.layouts, call.gradients, strict=True)
            results = call.function([values[t].read(layout, gradient) for t, layout, gradient in given])
            results = results if isinstance(results, tuple) else (results,)
            # The planner gives pooling a second output, the positions, which the ATen op does not return.
            for (t, layout), local in zip(call.outputs, results, strict=False):
                values[t] = DistributedValue(self.grid, self.step.graph.tensors[t].shape, local, layout)
            for t in call.inputs:
                if self._last[t] == at and t not in self._kept:
                    values.pop(t, None)
        return [self._result(r, values, module, leaves, free) for r in self.step.results]

    def _settle(self, t: TensorId, value: DistributedValue) -> None:
        """Reduces a partial sum once if several readers need it in different layouts."""
        wanted = self._wanted[t]
        if len(wanted) < 2 or not is_partial(value.layout):
            return

        def agreed(axis: int, at: str) -> str:
            if at not in "PM":
                return at
            entries = {layout[axis] for layout in wanted}
            return entries.pop() if len(entries) == 1 else "P" if "P" in entries and at == "P" else "R"

        layout = tuple(agreed(axis, at) for axis, at in enumerate(value.layout))
        if layout != value.layout:
            value.settle(layout)

    def _free(self, module: torch.nn.Module, leaves: list[Any]) -> dict[fx.Node, Any]:
        captured, known = self.step.captured, dict(self.step.known)
        with torch.no_grad():
            for node in self.step.free:
                if node in known:
                    continue
                if node.op != "placeholder":
                    known[node] = evaluate(node, known)
                elif node.name in captured.buffers:
                    known[node] = module.get_buffer(captured.buffers[node.name])
                else:
                    known[node] = _plain(leaves[captured.inputs[node.name]])
        return known

    def _source(
        self, t: TensorId, module: torch.nn.Module, leaves: list[Any], free: Mapping[fx.Node, Any]
    ) -> DistributedValue:
        source: Source = self.step.sources[t]
        shape = self.step.graph.tensors[t].shape
        if source.parameter is not None:
            given: Any = module.get_parameter(source.parameter)
        elif source.input is not None:
            given = leaves[source.input]
        elif source.free is not None:
            given = free[source.free]
            given = source.make(given) if source.make else given
        else:
            given = source.constant
        if tuple(given.shape) != shape:
            name = self.step.graph.tensors[t].name
            raise ValueError(f"`{name}` was planned with shape {list(shape)} and has {list(given.shape)}: plan again")
        if isinstance(given, DTensor):
            at = layout_of(given)
            local = given.to_local(grad_placements=placements(dual(at)))
            return DistributedValue(self.grid, shape, local, at, given if source.parameter is not None else None)
        return DistributedValue(self.grid, shape, given, self._whole)

    def _result(
        self,
        result: Any,
        values: dict[TensorId, DistributedValue],
        module: torch.nn.Module,
        leaves: list[Any],
        free: Mapping[fx.Node, Any],
    ) -> Any:
        if isinstance(result, Free):
            return free[result.node]
        if isinstance(result, Blend):
            with torch.no_grad():
                new = self._result(result.new, values, module, leaves, free)
                return result.keep * free[result.old] + result.take * _plain(new)
        if type(result) is not int:
            return result
        value = values[result] if result in values else self._source(result, module, leaves, free)
        if value.layout != dual(value.layout):
            value.settle(dual(value.layout))
        if value.shape == ():
            return value.local
        return DTensor.from_local(value.local, self.grid.mesh, placements(value.layout), run_check=False)


def _plain(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
