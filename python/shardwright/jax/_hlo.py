"""Reads the collectives out of a compiled HLO module's text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32}
_BITS |= {"u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({_KINDS})(?:-start)?\((.*)$")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ON_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}\}?")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program."""

    kind: str
    #: The mesh axes along which the devices of a group differ, outermost first.
    axes: tuple[str, ...]
    #: Bytes of the larger side on one device.
    bytes: int
    #: Executions per step.
    count: int
    #: XLA's `op_name`, or the planner's tensor.
    source: str = ""
    #: Bytes of one element, where that is known.
    element_bytes: int | None = None


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of a module. `count` includes the trip counts of enclosing loops."""
    counts = _counts(text)
    found: list[Collective] = []
    name = ""
    for line in text.splitlines():
        if (header := _COMPUTATION.match(line)) is not None:
            name = header.group(1)
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        result, kind, rest = match.groups()
        groups, axes = _group(rest, kind, mesh)
        shapes = [_bytes(*shape) for shape in _SHAPE.findall(result)]
        if f" {kind}-start(" in line and kind in ("all-gather", "collective-permute"):
            # An asynchronous collective returns its operands first, then its results.
            shapes = shapes[len(shapes) // 2 :]
        if kind == "all-to-all" and len(shapes) > 1:
            # The tuple has one block per member.
            shapes = [sum(shapes)]
        source = re.search(r'op_name="([^"]*)"', rest)
        for size in shapes:
            larger = size * groups if kind == "reduce-scatter" else size
            found.append(Collective(kind, axes, larger, counts.get(name, 1), source.group(1) if source else ""))
    return found


def _bytes(element: str, dims: str) -> int:
    bits = _BITS.get(element, 8 if element.startswith("f8") else 0)
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


def _counts(text: str) -> dict[str, int]:
    """Executions of each computation per step: the product of the enclosing trip counts."""
    calls: dict[str, list[tuple[str, int]]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if (header := _COMPUTATION.match(line)) is not None:
            name = header.group(1)
            entry = name if line.startswith("ENTRY") else entry
        for body, branches in _CALLED.findall(line):
            trips = _TRIPS.search(line) if "body=" in line else None
            times = int(trips.group(1)) if trips else 1
            for called in [body] if body else [b.strip(" %") for b in branches.split(",")]:
                calls.setdefault(name, []).append((called, times))
    counts: dict[str, int] = {}

    def visit(computation: str, times: int) -> None:
        counts[computation] = counts.get(computation, 0) + times
        for called, trips in calls.get(computation, []):
            visit(called, times * trips)

    visit(entry, 1)
    return counts


def _group(rest: str, kind: str, mesh: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """The size of a replica group, and the mesh axes that it spans."""
    if kind == "collective-permute":
        pairs = _PAIRS.search(rest)
        ends = [int(n) for n in re.findall(r"\d+", pairs.group(1))] if pairs else []
        moved = [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a != b]
        return 2, _axes(moved, mesh)
    if (listed := _LISTED.search(rest)) is not None:
        group = [int(n) for n in listed.group(1).split(",")]
    elif (iota := _IOTA.search(rest)) is not None:
        group = _first_of_iota(*iota.groups())
    elif (on_mesh := _ON_MESH.search(rest)) is not None:
        group = _first_on_mesh(*on_mesh.groups())
    else:
        group = list(range(math.prod(mesh.values())))
    return len(group), _axes([(group[0], other) for other in group[1:]], mesh)


def _first_of_iota(groups: str, size: str, dims: str, order: str | None) -> list[int]:
    """The first group of `[groups,size]<=[dims]T(order)`: devices counted in the transposed order."""
    shape = [int(n) for n in dims.split(",")]
    perm = [int(n) for n in order.split(",")] if order else list(range(len(shape)))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    group = []
    for index in range(int(size)):
        device = 0
        for dim in reversed(perm):
            index, digit = divmod(index, shape[dim])
            device += digit * strides[dim]
        group.append(device)
    return group


def _first_on_mesh(axes: str, dims: str | None, order: str | None, named: str) -> list[int]:
    """The first group of `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}`: devices that differ in the named axes.
    `'y':(2)2` names a sub-axis: size 2, inside the outer 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    devices = np.arange(math.prod(sizes.values()))
    if dims is not None:
        devices = devices.reshape([int(n) for n in dims.split(",")])
        devices = devices.transpose([int(n) for n in order.split(",")] if order else None)
    devices = devices.reshape(list(sizes.values()))
    spans = {name: range(1) for name in sizes}
    for name, major, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", named):
        stride = sizes[name] // (int(major) * int(size)) if size else 1
        spans[name] = range(0, (int(size) if size else sizes[name]) * stride, stride)
    return [int(n) for n in devices[np.ix_(*spans.values())].flat]


def _axes(pairs: list[tuple[int, int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of any pair differ."""
    axes = set()
    for a, b in pairs:
        for name in reversed(list(mesh)):
            a, x = divmod(a, mesh[name])
            b, y = divmod(b, mesh[name])
            if x != y:
                axes.add(name)
    return tuple(name for name in mesh if name in axes)


def predicted(text: str) -> list[Collective]:
    """The collectives that the planner predicts."""
    return [
        Collective(entry["kind"], tuple(entry["axes"]), entry["bytes"], 1, entry["tensor"], entry["element_bytes"])
        for entry in json.loads(text)
    ]
