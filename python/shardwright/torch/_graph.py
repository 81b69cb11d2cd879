"""The planner's graph of a forward pass: tensors, ops, the ATen call of each op, and the graph's JSON text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

#: Index of a tensor in `Graph.tensors`.
TensorId = int

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}

#: Types of equal size for element types that the planner does not know. Only opaque ops read and make them.
_STAND_INS = {1: "bool", 2: "f16", 4: "i32"}


def type_of(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The planner's notation of a type: `f32[64,10]`. Empty tensors are planned as one element."""
    name = DTYPES.get(dtype) or _STAND_INS.get(dtype.itemsize, "f64")
    return f"{name}[{','.join(str(max(size, 1)) for size in shape)}]"


@dataclass
class Tensor:
    """A tensor. `role` is the planner's: parameter, input or constant for a source, activation for an op's result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str

    @property
    def type(self) -> str:
        """The planner's notation: `f32[64,10]`."""
        return type_of(self.shape, self.dtype)


@dataclass(frozen=True)
class Input:
    """Stands for an op's input in the arguments of its ATen call: `Input(0)` is the first."""

    index: int


@dataclass(frozen=True)
class AtenCall:
    """An ATen overload and its arguments, tensors replaced by `Input`s. Where no overload computes the op, `target` is the
    planner's op kind, a row of `_kernels.SPECIAL`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Whether the result depends on the random generator."""
        return torch.Tag.nondeterministic_seeded in getattr(self.target, "tags", ())


@dataclass
class Op:
    """An op of the planner's graph. The planner reads `kind` and `attributes`; the run calls `call` on local shards."""

    name: str
    kind: str
    inputs: tuple[TensorId, ...]
    outputs: tuple[TensorId, ...]
    attributes: dict[str, Any]
    #: `None` for an op that exists in the plan only.
    call: AtenCall | None
    #: Whether autograd differentiates the local call.
    differentiable: bool = True


class Graph:
    """Tensors and ops in topological order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self._names: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """The name, with a number appended if another tensor or op has it."""
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
        """Adds a tensor that no op produces."""
        self.tensors.append(Tensor(self.unique(name), shape, dtype, role))
        return len(self.tensors) - 1

    def add(
        self,
        name: str,
        kind: str,
        inputs: tuple[TensorId, ...],
        results: list[tuple[tuple[int, ...], torch.dtype]],
        attributes: dict[str, Any],
        call: AtenCall | None,
        differentiable: bool = True,
    ) -> tuple[TensorId, ...]:
        """Adds an op with results of these shapes and element types."""
        name = self.unique(name)
        outputs = []
        for i, (shape, dtype) in enumerate(results):
            output = name if len(results) == 1 else self.unique(f"{name}:{i}")
            self.tensors.append(Tensor(output, shape, dtype, "activation"))
            outputs.append(len(self.tensors) - 1)
        self.ops.append(Op(name, kind, inputs, tuple(outputs), attributes, call, differentiable))
        return tuple(outputs)

    def to_json(self, outputs: list[TensorId]) -> str:
        """The planner's JSON. The loss is the first output."""
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
            # Autograd runs the backward of each local op on the blocks of its forward.
            "op_by_op": True,
        }
        return json.dumps(graph, separators=(",", ":"), allow_nan=False) + "\n"
