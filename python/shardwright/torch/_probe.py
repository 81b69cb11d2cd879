"""`probe`: what processes and the links between them do under PyTorch, as a machine file to plan with."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from .._machine_file import Measurements, Times
from ._layout import Grid, Layout

# Bytes of the larger side on one process at which collectives are measured, and the most that is gathered.
_MESSAGES = (1 << 14, 1 << 18, 1 << 21, 1 << 24)
_MOST = 1 << 26
# A group's layout before and after, and whether the larger side is what a process has, or that of the whole group.
_KINDS: dict[str, tuple[list[tuple[str, str]], bool]] = {
    "all-reduce": ([("P", "R")], True),
    "reduce-scatter": ([("P", "S0"), ("P", "S1")], True),
    "all-gather": ([("S0", "R"), ("S1", "R")], True),
    "all-to-all": ([("S0", "S1"), ("S1", "S0")], False),
    # DTensor knows no other order of blocks: it gathers them and takes its own.
    "permute": ([("S0", "R")], False),
}


def median_seconds(
    run: Callable[[], Any], times: int = 5, patience: float = 0.3, hopeless: float = math.inf
) -> float:
    """The median time of a call, each time that of the slowest process; one call more warms up. Where that takes long,
    three must do, so that one that something else kept waiting does not count, and one where it takes longer than is of
    interest."""
    run()
    seconds: list[float] = []
    while len(seconds) < times and (len(seconds) < 3 or sum(seconds) < patience):
        distributed.barrier()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # All go by the slowest: they stop together.
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        distributed.all_reduce(took, op=distributed.ReduceOp.MAX)
        seconds.append(float(took))
        if seconds[0] > hopeless:
            break
    return statistics.median(seconds)


def probe(name: str = "probed", device: str = "cpu") -> str:
    """Measures all processes at work together: products, copies in memory, and every kind of collective among groups of
    every size, as DTensor does them. To be called in every process; all get the same text, a machine file of one level:
    let one process write it somewhere and name it as `machine`. Takes some seconds on four processes."""
    bench = _Bench(device)
    backend = distributed.get_backend()
    found = Measurements(
        name=name,
        description=f"{bench.count} processes ({device}, {backend}) as measured under PyTorch {torch.__version__}",
        count=bench.count,
        copies=bench.copies(),
        products=bench.products(),
        start=bench.start(),
        # A core that sends does not compute.
        overlap=device != "cpu",
        collectives=[bench.collective(kind, members) for members in bench.groups for kind in _KINDS],
    )
    text = [found.to_toml()]
    distributed.broadcast_object_list(text, src=0)
    return text[0]


class _Bench:
    """Processes in a row, cut into groups of neighbours."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.count = distributed.get_world_size()
        self.groups = [n for n in range(2, self.count + 1) if self.count % n == 0]

    def collective(self, kind: str, members: int) -> Times:
        """Seconds by size of the message."""
        names = ("group", "member")
        grid = Grid(init_device_mesh(self.device, (self.count // members, members), mesh_dim_names=names))
        sizes = [n for n in _MESSAGES if _KINDS[kind][1] or n * members <= _MOST]
        return Times(kind, members, sizes, [statistics.mean(self._ways(grid, kind, members, n)) for n in sizes])

    def _ways(self, grid: Grid, kind: str, members: int, message: int) -> Iterator[float]:
        ways, of_whole = _KINDS[kind]
        rows = 16 * members
        columns = max(message // 4 // rows // members, 1) * members * (1 if of_whole else members)
        shape = (rows, columns)
        for start, end in ways:
            # Groups do the same: the tensor is theirs.
            source: Layout = ("R", start)
            target: Layout = ("R", end)
            local = torch.full(grid.part(shape, source)[1], 0.5, device=self.device)
            yield median_seconds(lambda: grid.move(local, shape, source, target))

    def copies(self) -> float:
        """Bytes per second, read and written, in each process."""
        x = torch.ones(1 << 22, device=self.device)
        return 2 * 4 * x.numel() / median_seconds(lambda: x.mul_(1.0))

    def products(self) -> float:
        """Operations per second of large products in each process."""
        a, b = torch.ones(1024, 1024, device=self.device), torch.ones(1024, 1024, device=self.device)
        return 2 * 1024**3 / median_seconds(lambda: a @ b)

    def start(self) -> float:
        """Seconds that an operation takes at least."""
        x, more = torch.ones(16, 16, device=self.device), 200

        def chain() -> None:
            for _ in range(more):
                x @ x

        return median_seconds(chain) / more
