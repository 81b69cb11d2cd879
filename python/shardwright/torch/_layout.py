"""Layouts of tensors on the mesh, and reshards between them, with gradients.

A layout has one entry per mesh axis: `R` (replicated), `S1` (split along dimension 1), `P` (partial sum) or `M` (partial
maximum). A gradient has its tensor's layout, but is replicated where the tensor is partial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Layout = tuple[str, ...]


def placements(layout: Layout) -> list[Any]:
    """A layout as DTensor's placements."""
    unsplit = {"R": Replicate(), "P": Partial("sum"), "M": Partial("max")}
    return [unsplit[at] if at in unsplit else Shard(int(at[1:])) for at in layout]


def layout_of(tensor: Any) -> Layout:
    """A DTensor's layout."""
    return layout_of_placements(tensor.placements)


def layout_of_placements(given: Any) -> Layout:
    """DTensor's placements as a layout."""

    def entry(placement: Any) -> str:
        if placement.is_shard():
            return f"S{placement.dim}"
        if placement.is_replicate():
            return "R"
        return "P" if placement.reduce_op == "sum" else "M"

    return tuple(entry(placement) for placement in given)


def dual(layout: Layout) -> Layout:
    """The layout of a tensor's gradient."""
    return tuple("R" if at in "PM" else at for at in layout)


def is_partial(layout: Layout) -> bool:
    """Whether processes hold partial sums or partial maxima."""
    return any(at in "PM" for at in layout)


_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Collective:
    """A collective among processes, along one dimension of a tensor."""

    kind: str
    group: str
    count: int
    dim: int = 0
    #: Blocks of the dimension that other mesh axes make.
    outer: int = 1
    op: str = "sum"

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Whether all blocks are equal."""
        return self.kind == "all-reduce" or shape[self.dim] % (self.count * self.outer) == 0

    def start(self, local: torch.Tensor) -> torch.Tensor:
        """The result, not ready yet; `all-gather` and `reduce-scatter` along the first dimension."""
        if self.kind == "all-reduce":
            return _c10d.all_reduce(local.contiguous(), self.op, self.group)
        if self.kind == "all-gather":
            return _c10d.all_gather_into_tensor(local.contiguous(), self.count, self.group)
        return _c10d.reduce_scatter_tensor(local.contiguous(), self.op, self.count, self.group)

    def start_on(self, local: torch.Tensor) -> torch.Tensor:
        """An all-reduce in the tensor's own memory, which nothing else reads."""
        return _c10d.all_reduce_(local, self.op, self.group)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if self.kind == "reduce-scatter" and self.dim:
            local = torch.cat(local.chunk(self.count, self.dim))
        result = _c10d.wait_tensor(self.start(local))
        if self.kind == "all-gather" and self.dim:
            return torch.cat(result.chunk(self.count), self.dim)
        return result


@dataclass(frozen=True)
class Grid:
    """The mesh, and this process's position on it."""

    mesh: Any
    _groups: dict[tuple[int, ...], str] = field(default_factory=dict)
    _collectives: dict[tuple[Layout, Layout], Collective | None] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of processes along each axis."""
        return tuple(self.mesh.mesh.shape)

    @cached_property
    def here(self) -> tuple[int, ...]:
        """This process's position along each axis."""
        return tuple(self.mesh.get_coordinate())

    def block(self, shape: tuple[int, ...], layout: Layout) -> tuple[list[int], list[int]]:
        """First positions and sizes of this process's block of a tensor."""
        starts, sizes = [0] * len(shape), list(shape)
        for at, count, digit in zip(layout, self.sizes, self.here, strict=True):
            if at.startswith("S"):
                dim = int(at[1:])
                sizes[dim] //= count
                starts[dim] += digit * sizes[dim]
        return starts, sizes

    def reshard(self, local: torch.Tensor, shape: tuple[int, ...], source: Layout, target: Layout) -> torch.Tensor:
        """Changes a tensor's layout."""
        if source == target:
            return local
        if set(source) == {"R"} and not is_partial(target):
            starts, sizes = self.block(shape, target)
            for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                if size != shape[dim]:
                    local = local.narrow(dim, start, size)
            return local.contiguous()
        with torch.no_grad():
            key = (source, target)
            if key not in self._collectives:
                self._collectives[key] = self._collective(source, target)
            collective = self._collectives[key]
            if collective is not None and collective.divides(shape):
                return collective(local)
            if (swap := self._swap(source, target)) is not None:
                return self._all_to_all(local, *swap)
            given = DTensor.from_local(local.contiguous(), self.mesh, placements(source), run_check=False)
            result = given.redistribute(placements=placements(target)).to_local()
        return result.wait() if isinstance(result, AsyncCollectiveTensor) else result

    def _collective(self, source: Layout, target: Layout) -> Collective | None:
        """One collective that makes the change; `None` where there is none. DTensor's redistribution costs far more time of
        the host than a small collective takes."""
        axes = tuple(axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
        pairs = {(source[axis], target[axis]) for axis in axes}
        if len(pairs) != 1:
            return None
        before, after = pairs.pop()
        if (before, after) in (("P", "R"), ("M", "R")):
            return self.collective("all-reduce", axes, op="sum" if before == "P" else "max")
        split = before if after == "R" else after if before == "P" else ""
        if not split.startswith("S"):
            return None
        # Blocks keep their order: the axes must be the innermost of the dimension.
        others = [axis for axis, at in enumerate(source) if axis not in axes and at == split]
        if others and max(others) > min(axes):
            return None
        outer = math.prod(self.sizes[axis] for axis in others)
        return self.collective("all-gather" if after == "R" else "reduce-scatter", axes, int(split[1:]), outer)

    def collective(self, kind: str, axes: tuple[int, ...], dim: int = 0, outer: int = 1, op: str = "sum") -> Collective:
        """A collective over mesh axes."""
        group = self.group(axes)
        return Collective(kind, group.group_name, distributed.get_world_size(group), dim, outer, op)

    def _swap(self, source: Layout, target: Layout) -> tuple[tuple[int, ...], int, int] | None:
        """Mesh axes that change from one split dimension to another, with both dimensions; `None` for any other change.
        Blocks keep their order: the axes must be the innermost of both dimensions."""
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

    def _all_to_all(self, local: torch.Tensor, axes: tuple[int, ...], before: int, after: int) -> torch.Tensor:
        """One all-to-all over all axes. DTensor goes axis by axis, and on CPUs gathers and slices instead."""
        group = self.group(axes)
        count = distributed.get_world_size(group)
        parts = torch.stack(local.chunk(count, after)).contiguous()
        received = all_to_all_single(parts, None, None, group)
        received = received.wait() if isinstance(received, AsyncCollectiveTensor) else received
        return torch.cat(received.unbind(), before)

    def group(self, axes: tuple[int, ...]) -> Any:
        """The process group along these axes, in block order. All processes create groups in the same order."""
        if axes not in self._groups:
            names = tuple(self.mesh.mesh_dim_names[axis] for axis in axes)
            part = self.mesh[names]
            self._groups[axes] = (part._flatten() if len(axes) > 1 else part).get_group().group_name
        # A name, not the group: see `_exit`.
        return _resolve_process_group(self._groups[axes])
