"""How tensors lie on the mesh, and how they are brought from one layout to another, gradients back.

A layout says for every axis of the mesh `R` (the same everywhere), `S1` (a block of dimension 1), `P` (a part of a sum)
or `M` (of a maximum). The gradient of a tensor lies as the tensor does, but whole where that is a part of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ._sums import Sums

Layout = tuple[str, ...]


def placements(layout: Layout) -> list[Any]:
    """A layout in DTensor's words."""
    words = {"R": Replicate(), "P": Partial("sum"), "M": Partial("max")}
    return [words[at] if at in words else Shard(int(at[1:])) for at in layout]


def layout_of(tensor: Any) -> Layout:
    """How a DTensor lies."""

    def word(placement: Any) -> str:
        if placement.is_shard():
            return f"S{placement.dim}"
        if placement.is_replicate():
            return "R"
        return "P" if placement.reduce_op == "sum" else "M"

    return tuple(word(placement) for placement in tensor.placements)


def dual(layout: Layout) -> Layout:
    """How the gradient of a tensor lies."""
    return tuple("R" if at in "PM" else at for at in layout)


def is_partial(layout: Layout) -> bool:
    """Whether processes hold parts of sums or maxima."""
    return any(at in "PM" for at in layout)


@dataclass(frozen=True)
class Grid:
    """The mesh, and where this process is on it."""

    mesh: Any
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    #: Gradients of weights on their way.
    sums: Sums = field(default_factory=Sums)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many processes along each axis."""
        return tuple(self.mesh.mesh.shape)

    def part(self, shape: tuple[int, ...], layout: Layout) -> tuple[list[int], list[int]]:
        """First positions and sizes of what this process holds of a tensor."""
        here = self.mesh.get_coordinate()
        starts, sizes = [0] * len(shape), list(shape)
        for at, count, digit in zip(layout, self.sizes, here, strict=True):
            if at.startswith("S"):
                dim = int(at[1:])
                sizes[dim] //= count
                starts[dim] += digit * sizes[dim]
        return starts, sizes

    def move(self, local: torch.Tensor, shape: tuple[int, ...], source: Layout, target: Layout) -> torch.Tensor:
        """Brings a tensor from one layout to another."""
        if source == target:
            return local
        if set(source) == {"R"} and not is_partial(target):
            starts, sizes = self.part(shape, target)
            for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                if size != shape[dim]:
                    local = local.narrow(dim, start, size)
            return local.contiguous()
        with torch.no_grad():
            if (swap := self._swap(source, target)) is not None:
                return self._exchange(local, *swap)
            given = DTensor.from_local(local.contiguous(), self.mesh, placements(source), run_check=False)
            moved = given.redistribute(placements=placements(target)).to_local()
        return moved.wait() if isinstance(moved, AsyncCollectiveTensor) else moved

    def _swap(self, source: Layout, target: Layout) -> tuple[tuple[int, ...], int, int] | None:
        """The axes that split another dimension afterwards, which, and which, where that is all that changes, and blocks
        keep their order: the axes are the innermost ones of both dimensions."""
        axes = tuple(axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
        pairs = {(source[axis], target[axis]) for axis in axes}
        if len(pairs) != 1:
            return None
        before, after = pairs.pop()
        if not (before.startswith("S") and after.startswith("S")):
            return None
        others = [axis for axis, at in enumerate(source) if axis not in axes and at in (before, after)]
        if others and max(others) > min(axes):
            return None
        return axes, int(before[1:]), int(after[1:])

    def _exchange(self, local: torch.Tensor, axes: tuple[int, ...], before: int, after: int) -> torch.Tensor:
        """Everybody sends everybody else a part. DTensor does this along one axis after the other, and without an
        all-to-all on CPUs, where it gathers and cuts."""
        group = self.group(axes)
        count = distributed.get_world_size(group)
        parts = torch.stack(local.chunk(count, after)).contiguous()
        received = all_to_all_single(parts, None, None, group)
        received = received.wait() if isinstance(received, AsyncCollectiveTensor) else received
        return torch.cat(received.unbind(), before)

    def group(self, axes: tuple[int, ...]) -> Any:
        """The processes along these axes, in the order of blocks; all processes ask for the same groups in the same order."""
        if axes not in self._groups:
            names = tuple(self.mesh.mesh_dim_names[axis] for axis in axes)
            part = self.mesh[names]
            self._groups[axes] = (part._flatten() if len(axes) > 1 else part).get_group()
        return self._groups[axes]


@dataclass(frozen=True)
class _Way:
    """The way that a gradient goes back."""

    grid: Grid
    shape: tuple[int, ...]
    source: Layout
    target: Layout
    #: The weight whose gradient it is.
    weight: Any

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes over which parts are added up, where that is all there is to do."""
        changed = [(axis, at) for axis, (at, to) in enumerate(zip(self.source, self.target, strict=True)) if at != to]
        summed = all(at == "P" and self.target[axis] == "R" for axis, at in changed)
        return tuple(axis for axis, _ in changed) if summed else ()


class _Moved(torch.autograd.Function):
    """A tensor in another layout. The layouts of its gradient are not those of the tensor turned around: what is whole
    and read by an op that is split gets parts of a sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, moved: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        way = ctx.way
        if way.weight is not None and way.grid.sums.together and (axes := way.summed):
            way.grid.sums.add(way.weight, grad, way.grid.group(axes))
            return None, None, None
        return way.grid.move(grad, way.shape, way.source, way.target), None, None


class Value:
    """A tensor of a run: what this process holds, how it lies, and where it was brought already."""

    def __init__(
        self, grid: Grid, shape: tuple[int, ...], local: torch.Tensor, layout: Layout, weight: Any = None
    ) -> None:
        self.grid, self.shape, self.local, self.layout, self.weight = grid, shape, local, layout, weight
        self._data: dict[Layout, torch.Tensor] = {}
        self._moved: dict[tuple[Layout, Layout], torch.Tensor] = {}

    def read(self, layout: Layout, gradient: Layout) -> torch.Tensor:
        """The tensor in a layout; its gradient comes back in another. Readers who want the same share the way."""
        needs = self.local.requires_grad and torch.is_grad_enabled()
        if layout == self.layout and (not needs or gradient == dual(layout)):
            return self.local
        key = (layout, gradient if needs else ())
        if key not in self._moved:
            if layout not in self._data:
                self._data[layout] = self.grid.move(self.local.detach(), self.shape, self.layout, layout)
            moved = self._data[layout]
            if needs:
                way = _Way(self.grid, self.shape, gradient, dual(self.layout), self.weight)
                moved = _Moved.apply(self.local, moved, way)
            self._moved[key] = moved
        return self._moved[key]

    def settle(self, layout: Layout) -> None:
        """Brings the tensor into a layout for good."""
        self.local, self.layout = self.read(layout, dual(layout)), layout
        self._data, self._moved = {}, {}
