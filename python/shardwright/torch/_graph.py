"""The planner's graph of a forward pass, built up op by op, and its text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from .._native import PlanError

#: A tensor of the graph, by position.
TensorId = int

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}


@dataclass
class Tensor:
    """A tensor: `role` is that of the planner's graph; sources have one of their own, all others are activations."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str

    @property
    def type(self) -> str:
        """As the planner writes it: `f32[64,10]`."""
        if self.dtype not in _DTYPES:
            raise PlanError(f"`{self.name}` has elements of type {self.dtype}, which cannot be planned")
        return f"{_DTYPES[self.dtype]}[{','.join(map(str, self.shape))}]"


@dataclass
class Op:
    """An op: `attributes` are what the planner knows, `extra` what only the run needs."""

    name: str
    kind: str
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    attributes: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


class Graph:
    """Tensors and ops, each op after those whose results it reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self._names: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """The name, with a number appended where it is taken."""
        if name not in self._names:
            self._names[name] = 0
            return name
        while True:
            self._names[name] += 1
            numbered = f"{name}.{self._names[name]}"
            if numbered not in self._names:
                self._names[numbered] = 0
                return numbered

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, role: str) -> TensorId:
        """A tensor that no op makes."""
        self.tensors.append(Tensor(self.unique(name), shape, dtype, role))
        return len(self.tensors) - 1

    def add(
        self,
        name: str,
        kind: str,
        inputs: tuple[TensorId, ...],
        results: list[tuple[tuple[int, ...], torch.dtype]],
        attributes: dict[str, Any],
        extra: dict[str, Any],
    ) -> tuple[TensorId, ...]:
        """An op with results of these shapes and types."""
        name = self.unique(name)
        outputs = []
        for i, (shape, dtype) in enumerate(results):
            called = name if len(results) == 1 else self.unique(f"{name}:{i}")
            self.tensors.append(Tensor(called, shape, dtype, "activation"))
            outputs.append(len(self.tensors) - 1)
        self.ops.append(Op(name, kind, inputs, tuple(outputs), attributes, extra))
        return tuple(outputs)

    def to_json(self, outputs: list[TensorId]) -> str:
        """The text that the planner reads; the loss comes first among the outputs."""
        used = {t for op in self.ops for t in (*op.inputs, *op.outputs)} | set(outputs)
        number = {t: i for i, t in enumerate(sorted(used))}
        tensors = []
        for t in sorted(used):
            tensor = self.tensors[t]
            form: dict[str, Any] = {"name": tensor.name, "type": tensor.type, "role": tensor.role}
            if tensor.role != "activation":
                form["init"] = {"normal": 1.0} if tensor.dtype.is_floating_point else {"below": 1}
            tensors.append(form)
        ops = [
            {
                "name": op.name,
                "op": {"kind": op.kind, **op.attributes},
                "inputs": [number[t] for t in op.inputs],
                "outputs": [number[t] for t in op.outputs],
                "layer": i,
                "phase": "forward",
            }
            for i, op in enumerate(self.ops)
        ]
        graph = {
            "format": "shardwright-graph",
            "version": 1,
            "name": self.name,
            "tensors": tensors,
            "ops": ops,
            "layers": list(range(len(ops))),
            "outputs": [number[t] for t in outputs],
            "gradients": [],
            "carries": [],
            # Each op computes from its blocks alone, and autograd goes back through every op.
            "op_by_op": True,
        }
        return json.dumps(graph, separators=(",", ":"), allow_nan=False) + "\n"
