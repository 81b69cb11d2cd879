"""Pallas kernels, split along their grids.

A kernel runs once per cell of a grid, and index maps say which block of each tensor a cell sees. A dimension of the grid can be split
where cells along it work on blocks of their own: index maps place blocks along one dimension of each tensor, and nothing else depends on
the number of a cell. Each device then runs the same kernel on a part of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ._walk import bind, parts

# Kernels that fill their scratch memory anew for every head, and do not say so: splash attention's gradients.
_INDEPENDENT = ("splash_mha_", "splash_mqa_")
#: Per dimension of a tensor: the dimension of the grid that runs over it, if any.
Names = tuple[int | None, ...]


@dataclass(frozen=True)
class KernelRule:
    """The dimensions of a kernel's grid that can be split, and the dimensions of operands and results that they run over."""

    #: Per dimension: the number of its parts. A split must divide it.
    parts: dict[int, int]
    operands: tuple[Names, ...]
    #: None for a result that nobody reads: a kernel's scratch memory.
    results: tuple[Names | None, ...]

    def dims(self, shape: Sequence[int], names: Names) -> list[tuple[int, int | None]]:
        """The sizes and names of a shape in which each dimension with a name runs over its parts. What a part has follows it."""
        found: list[tuple[int, int | None]] = []
        for size, name in zip(shape, names, strict=True):
            if name is None or size == self.parts[name]:
                found.append((size, name))
            else:
                found += [(self.parts[name], name), (size // self.parts[name], None)]
        return found

    def text(self, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> str:
        """The rule as users write it, for tensors of these shapes."""

        def shown(shape: Sequence[int], names: Names) -> str:
            return " ".join("_" if name is None else f"g{name}" for _, name in self.dims(shape, names)) or "()"

        before = map(shown, operands, self.operands)
        after = (shown(shape, names) for shape, names in zip(results, self.results, strict=True) if names is not None)
        return f"{', '.join(before)} -> {', '.join(after)}"

    def axes(self, spec: Sequence[Sequence[str] | None], shape: Sequence[int], names: Names) -> dict[int, tuple[str, ...]]:
        """The mesh axes that split each dimension of the grid, by the sharding of a tensor with these `dims`."""
        found = zip(self.dims(shape, names), spec, strict=True)
        return {name: tuple(axes or ()) for (_, name), axes in found if name is not None}


def kernel_name(eqn: Any) -> str:
    """The name of a kernel: as the call states it, or that of its function."""
    function = getattr(parts(eqn.params["jaxpr"])[0].debug_info, "func_name", None) or ""
    return str(eqn.params.get("name") or function.split(" ")[0])


def kernel_rule(eqn: Any, unread: Set[Any]) -> KernelRule:
    """The rule of a `pallas_call`. A dimension of which the analysis knows too little stays whole."""
    operands, results = (tuple((None,) * len(atom.aval.shape) for atom in atoms) for atoms in (eqn.invars, eqn.outvars))
    rule = KernelRule({}, operands, results)
    grid = eqn.params["grid_mapping"].grid
    if eqn.params.get("mesh") is not None or eqn.effects or not all(isinstance(size, int) for size in grid):
        return rule
    for dim, size in enumerate(grid):
        if size > 1:
            rule = _with_dim(eqn, rule, dim, unread)
    return rule


def _with_dim(eqn: Any, rule: KernelRule, dim: int, unread: Set[Any]) -> KernelRule:
    """The rule with one more dimension of the grid, if it can be split."""
    grid, kernel = eqn.params["grid_mapping"], parts(eqn.params["jaxpr"])[0]
    # `vmap` adds dimensions to the grid of which the kernel does not know.
    own = None if dim in grid.vmapped_dims else dim - sum(at < dim for at in grid.vmapped_dims)
    if own is not None and _uses_number(kernel, own):
        return rule
    placed = [_placed(mapping, dim, grid.grid[dim]) for mapping in grid.block_mappings]
    if None in placed:
        return rule
    tables: list[tuple[int, int] | tuple[()]] = [()] * grid.num_index_operands
    places = [*tables, *(place or () for place in placed)]
    count = len(eqn.invars)
    scratch = [not place and var in unread for place, var in zip(places[count:], eqn.outvars, strict=True)]
    if any(not place and not free for place, free in zip(places[count:], scratch, strict=True)):
        return rule
    if own is not None and (grid.scratch_avals or any(scratch)) and not _is_parallel(eqn, own):
        return rule
    ways = {place[1] for place in places if place}
    fewest = min(ways, default=1)
    if fewest < 2 or any(way % fewest for way in ways):
        return rule
    names: list[Names | None] = []
    for at, (known, place) in enumerate(zip((*rule.operands, *rule.results), places, strict=True)):
        if at >= count and scratch[at - count]:
            names.append(None)
        elif place and known is not None:
            if known[place[0]] is not None:
                return rule
            names.append((*known[: place[0]], dim, *known[place[0] + 1 :]))
        else:
            names.append(known)
    if any(names[source] != names[count + target] for source, target in eqn.params.get("input_output_aliases") or ()):
        return rule
    return KernelRule({**rule.parts, dim: fewest}, tuple(found or () for found in names[:count]), tuple(names[count:]))


def _is_parallel(eqn: Any, own: int) -> bool:
    """Whether the cells of a kernel along a dimension share no scratch memory."""
    if kernel_name(eqn).startswith(_INDEPENDENT):
        return True
    said = getattr(eqn.params.get("compiler_params"), "dimension_semantics", None)
    if said is None or own >= len(said):
        return False
    return str(getattr(said[own], "value", said[own])).lower() == "parallel"


def _uses_number(jaxpr: Any, axis: int) -> bool:
    """Whether a kernel uses the number of its cell, or the number of cells, along a dimension of its grid."""
    numbers = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs") and eqn.params["axis"] == axis:
            numbers.update(eqn.outvars)
        if any(atom in numbers for atom in eqn.invars if not isinstance(atom, core.Literal)):
            return True
        if any(_uses_number(body, axis) for body in _bodies(eqn)):
            return True
    return any(atom in numbers for atom in jaxpr.outvars if not isinstance(atom, core.Literal))


def unread_results(jaxpr: Any) -> frozenset[Any]:
    """The results of the Pallas kernels in a function, and in the bodies in it, that nothing reads."""
    found: set[Any] = set()
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, core.Literal)}
    read.update(atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.update(var for var in eqn.outvars if var not in read)
        else:
            found.update(*map(unread_results, _bodies(eqn)))
    return frozenset(found)


def _bodies(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            body = item.jaxpr if hasattr(item, "jaxpr") else item
            if hasattr(body, "eqns"):
                yield body


def _placed(mapping: Any, dim: int, cells: int) -> tuple[int, int] | tuple[()] | None:
    """The dimension of a tensor that its blocks run over along a dimension of the grid, and the number of parts that both can be
    split into. Empty if its blocks do not depend on the cell; None if they depend on it in another way."""
    jaxpr = mapping.index_map_jaxpr.jaxpr
    number = jaxpr.invars[dim]
    # How many cells share a block: heads of queries that share one of keys.
    sharing = {number: 1}
    dependent = {number}
    for eqn in jaxpr.eqns:
        read = [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]
        if dependent.isdisjoint(read):
            continue
        dependent.update(eqn.outvars)
        if eqn.primitive.name == "div" and read == [number] and eqn.invars[0] is number:
            sharing[eqn.outvars[0]] = int(eqn.invars[1].val)
    found: tuple[int, int] | tuple[()] = ()
    for at, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, core.Literal) or atom not in dependent:
            continue
        block, shared = _block_size(mapping.block_shape[at]), sharing.get(atom, 0)
        if found or block is None or shared < 1 or cells % shared:
            return None
        if mapping.array_aval.shape[at] != block * (cells // shared):
            return None
        found = (at, cells // shared)
    return found


def _block_size(entry: Any) -> int | None:
    """The size of blocks along a dimension; None where index maps count elements and not blocks."""
    kind = type(entry).__name__
    if entry is None or kind == "Squeezed":
        return 1
    size = entry if isinstance(entry, int) else getattr(entry, "block_size", None)
    return size if kind in ("int", "Blocked") and isinstance(size, int) else None


def run_split(eqn: Any, rule: KernelRule, mesh: Mesh, axes: Mapping[int, Sequence[str]], operands: list[Any]) -> list[Any]:
    """The results of a kernel that runs on all devices, each on its part of the grid. `axes` split the dimensions of the grid."""
    counts = {dim: math.prod(mesh.shape[axis] for axis in axes.get(dim, ())) for dim in rule.parts}
    if any(ways % counts[dim] for dim, ways in rule.parts.items()):
        axes, counts = {}, dict.fromkeys(rule.parts, 1)

    def spec(names: Names | None) -> PartitionSpec:
        split = (tuple(axes.get(name, ())) if name is not None else () for name in names or ())
        return PartitionSpec(*(found or None for found in split))

    local = _local_params(eqn, rule, counts)
    sharded = jax.shard_map(
        lambda *xs: bind(eqn, local, list(xs)),
        mesh=mesh,
        in_specs=tuple(map(spec, rule.operands)),
        out_specs=list(map(spec, rule.results)),
        check_vma=False,
    )
    return list(sharded(*operands))


def _local_params(eqn: Any, rule: KernelRule, counts: Mapping[int, int]) -> dict[str, Any]:
    """The parameters of a kernel that works on one of so many parts per dimension."""
    grid = eqn.params["grid_mapping"]

    def part(aval: Any, names: Names | None) -> Any:
        split = names or (None,) * len(aval.shape)
        return aval.update(shape=tuple(n if name is None else n // counts[name] for n, name in zip(aval.shape, split, strict=True)))

    names = (*rule.operands[grid.num_index_operands :], *rule.results)
    mappings = zip(grid.block_mappings, names, strict=True)
    local = replace(
        grid,
        grid=tuple(size // counts.get(dim, 1) for dim, size in enumerate(grid.grid)),
        block_mappings=tuple(mapping.replace(array_aval=part(mapping.array_aval, found)) for mapping, found in mappings),
    )
    outs = tuple(part(aval, found) for aval, found in zip(eqn.params["out_avals"], rule.results, strict=True))
    params = {**eqn.params, "grid_mapping": local, "out_avals": outs}
    if (cost := eqn.params.get("cost_estimate")) is not None:
        ways = math.prod(counts.values())
        share = {name: getattr(cost, name) // ways for name in ("flops", "transcendentals", "bytes_accessed")}
        params["cost_estimate"] = replace(cost, **share)
    return params
