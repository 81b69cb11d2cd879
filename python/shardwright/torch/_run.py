"""Runs a forward pass as its plan says: each op on the parts that its config wants, tensors brought there in between.

A node whose ops all follow each other without a word between processes runs as PyTorch's own op on the parts (attention,
layer norm, linear layers): that is one kernel where the planner sees several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from ._graph import Op, TensorId
from ._kernels import KERNELS, Part
from ._layout import Grid, Layout, Value, dual, is_partial, layout_of, placements
from ._translate import Blend, Free, Group, Source, Step, evaluate


@dataclass(frozen=True)
class OpLayouts:
    """How an op's tensors lie, and their gradients."""

    inputs: list[Layout]
    gradients: list[Layout]
    outputs: list[Layout]

    @staticmethod
    def of(op: Op, form: Mapping[str, Any]) -> OpLayouts:
        """As the plan has them. Axes along which a maximum is trained stay whole."""
        whole: set[int] = set()
        if op.kind == "reduce" and op.attributes["f"] == "max" and not op.extra.get("statistic"):
            whole = {axis for axis, at in enumerate(form["outputs"][0]) if at == "M"}

        def kept(layout: list[str]) -> Layout:
            return tuple("R" if axis in whole else at for axis, at in enumerate(layout))

        inputs = [kept(layout) for layout in form["inputs"]]
        split = [axis for axis in form["split"] if axis not in whole]

        def gradient(layout: Layout) -> Layout:
            # Every process has its own share of the gradient of what all of them read.
            return tuple("P" if at == "R" and axis in split else at for axis, at in enumerate(dual(layout)))

        return OpLayouts(inputs, [gradient(layout) for layout in inputs], [kept(layout) for layout in form["outputs"]])


@dataclass(frozen=True)
class Call:
    """What is run: a function of tensors in given layouts."""

    name: str
    function: Callable[[list[torch.Tensor]], Any]
    inputs: list[TensorId]
    layouts: list[Layout]
    gradients: list[Layout]
    outputs: list[tuple[TensorId, Layout]]


class Run:
    """A forward pass on a mesh."""

    def __init__(self, step: Step, layouts: Mapping[str, Any], mesh: Any) -> None:
        self.step, self.grid = step, Grid(mesh)
        whole = ("R",) * len(self.grid.sizes)
        self._whole: Layout = whole
        self._layouts = {op.name: OpLayouts.of(op, layouts[op.name]) for op in step.graph.ops if op.name in layouts}
        self.calls: list[Call] = []
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
        """Lets sums over several axes be one collective: DTensor looks for such a flattened part of the mesh."""
        layouts = [at for call in self.calls for at in (*call.gradients, *(at for _, at in call.outputs))]
        names = self.grid.mesh.mesh_dim_names
        summed = {tuple(name for name, at in zip(names, layout, strict=True) if at == "P") for layout in layouts}
        for axes in sorted(summed):
            if len(axes) > 1:
                self.grid.mesh[axes]._flatten()

    # What is run.

    def _calls(self, group: Group) -> list[Call]:
        ops = [self.step.graph.ops[i] for i in group.ops if not self.step.graph.ops[i].extra.get("planning")]
        joined = self._joined(group, ops) if group.whole and len(ops) > 1 else None
        return [joined] if joined else [self._single(op) for op in ops]

    def _single(self, op: Op) -> Call:
        layouts, tensors = self._layouts[op.name], self.step.graph.tensors
        inputs = [self.grid.part(tensors[t].shape, at) for t, at in zip(op.inputs, layouts.inputs, strict=True)]
        outputs = [self.grid.part(tensors[t].shape, at) for t, at in zip(op.outputs, layouts.outputs, strict=True)]
        part = Part([s for s, _ in inputs], [s for s, _ in outputs], [n for _, n in outputs])
        kernel = KERNELS[op.kind]
        return Call(
            op.name,
            lambda given: kernel(op, part, given),
            list(op.inputs),
            layouts.inputs,
            layouts.gradients,
            list(zip(op.outputs, layouts.outputs, strict=True)),
        )

    def _joined(self, group: Group, ops: list[Op]) -> Call | None:
        """A node as one call of PyTorch's op, where its parts do without each other."""
        made: dict[TensorId, Layout] = {}
        read: dict[TensorId, tuple[Layout, Layout]] = {}
        views: dict[TensorId, TensorId] = {}
        for op in ops:
            layouts = self._layouts[op.name]
            if op.kind == "dropout" or any(map(is_partial, (*layouts.inputs, *layouts.outputs))):
                return None
            if op.kind == "conv" and op.attributes["geometry"]["groups"] > 1:
                return None
            for t, layout, gradient in zip(op.inputs, layouts.inputs, layouts.gradients, strict=True):
                if t in made and made[t] == layout and t in views:
                    # What is only given another shape has the gradient of that.
                    read[views[t]] = (layout, gradient)
                elif t in made and (made[t], dual(layout)) != (layout, gradient):
                    return None
                elif read.setdefault(t, (layout, gradient)) != (layout, gradient):
                    return None
            if op.kind == "reshape" and set(layouts.inputs[0]) == {"R"}:
                views[op.outputs[0]] = op.inputs[0]
            made.update(zip(op.outputs, layouts.outputs, strict=True))
        node, result = group.node, self.step.values[group.node]
        arguments = {arg: of for arg in node.all_input_nodes if (of := self._argument(arg)) is not None}
        known = set(arguments.values())
        for t, (layout, _) in read.items():
            # What the translation brought along itself, a mask of positions say, the op makes for its part alone.
            if t not in made and t not in known and set(layout) != {"R"}:
                return None
        if len(arguments) < len(node.all_input_nodes) or not known <= read.keys() or result not in made:
            return None
        inputs = sorted(known)

        def call(given: list[torch.Tensor]) -> Any:
            local = dict(zip(inputs, given, strict=True))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: local[arguments[arg]])
            return node.target(*args, **kwargs)  # type: ignore[operator]

        return Call(
            ops[0].name, call, inputs, [read[t][0] for t in inputs], [read[t][1] for t in inputs], [(result, made[result])]
        )

    def _argument(self, node: fx.Node) -> TensorId | None:
        """The tensor that a node's value is for planned ops."""
        value = self.step.values[node]
        if type(value) is int:
            return value
        sources = [t for t, s in self.step.sources.items() if s.free is node]
        return sources[0] if len(sources) == 1 else None

    # Running it.

    def __call__(self, module: torch.nn.Module, leaves: list[Any]) -> list[Any]:
        """What the captured graph returns, from the leaves of its inputs; `int`s stand for nothing else."""
        self.grid.sums.clear()
        free = self._free(module, leaves)
        values: dict[TensorId, Value] = {}
        for at, call in enumerate(self.calls):
            for t in call.inputs:
                if t not in values:
                    values[t] = self._source(t, module, leaves, free)
                self._settle(t, values[t])
            given = zip(call.inputs, call.layouts, call.gradients, strict=True)
            results = call.function([values[t].read(layout, gradient) for t, layout, gradient in given])
            results = results if isinstance(results, tuple) else (results,)
            for (t, layout), local in zip(call.outputs, results, strict=True):
                if local is not None:
                    values[t] = Value(self.grid, self.step.graph.tensors[t].shape, local, layout)
            for t in call.inputs:
                if self._last[t] == at and t not in self._kept:
                    values.pop(t, None)
        return [self._result(r, values, module, leaves, free) for r in self.step.results]

    def _settle(self, t: TensorId, value: Value) -> None:
        """Adds up, once, parts of a sum that several readers want in different layouts."""
        wanted = self._wanted[t]
        if len(wanted) < 2 or not is_partial(value.layout):
            return

        def agreed(axis: int, at: str) -> str:
            if at not in "PM":
                return at
            words = {layout[axis] for layout in wanted}
            return words.pop() if len(words) == 1 else "P" if "P" in words and at == "P" else "R"

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
    ) -> Value:
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
            raise ValueError(f"`{name}` was planned with shape {list(shape)}, and has {list(given.shape)}: plan again")
        if isinstance(given, DTensor):
            at = layout_of(given)
            local = given.to_local(grad_placements=placements(dual(at)))
            return Value(self.grid, shape, local, at, given if source.parameter is not None else None)
        return Value(self.grid, shape, given, self._whole)

    def _result(
        self,
        result: Any,
        values: dict[TensorId, Value],
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
