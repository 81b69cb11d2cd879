"""How tensors lie on the mesh, and how they are brought from one layout to another, gradients back.

A layout says for every axis of the mesh `R` (the same everywhere), `S1` (a block of dimension 1), `P` (a part of a sum)
or `M` (of a maximum). The gradient of a tensor lies as the tensor does, but whole where that is a part of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
            given = DTensor.from_local(local.contiguous(), self.mesh, placements(source), run_check=False)
            moved = given.redistribute(placements=placements(target)).to_local()
        # A collective that is not waited for yet has a type of its own.
        return moved.wait() if hasattr(moved, "wait") else moved


@dataclass(frozen=True)
class _Way:
    """The way that a gradient goes back."""

    grid: Grid
    shape: tuple[int, ...]
    source: Layout
    target: Layout


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
        return way.grid.move(grad, way.shape, way.source, way.target), None, None


class Value:
    """A tensor of a run: what this process holds, how it lies, and where it was brought already."""

    def __init__(self, grid: Grid, shape: tuple[int, ...], local: torch.Tensor, layout: Layout) -> None:
        self.grid, self.shape, self.local, self.layout = grid, shape, local, layout
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
                way = _Way(self.grid, self.shape, gradient, dual(self.layout))
                moved = _Moved.apply(self.local, moved, way)
            self._moved[key] = moved
        return self._moved[key]

    def settle(self, layout: Layout) -> None:
        """Brings the tensor into a layout for good."""
        self.local, self.layout = self.read(layout, dual(layout)), layout
        self._data, self._moved = {}, {}
