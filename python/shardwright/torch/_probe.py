"""`probe`: measures processes and their links under PyTorch, and writes a machine file."""

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
from ._host import host_launch_seconds
from ._layout import Grid, Layout

# Message sizes in bytes (the larger side on one process), and the most bytes of a whole tensor.
_MESSAGES = (1 << 14, 1 << 18, 1 << 21, 1 << 24)
_MOST = 1 << 26
# Layouts before and after, and whether the larger side is one process's tensor (otherwise the whole group's).
_KINDS: dict[str, tuple[list[tuple[str, str]], bool]] = {
    "all-reduce": ([("P", "R")], True),
    "reduce-scatter": ([("P", "S0"), ("P", "S1")], True),
    "all-gather": ([("S0", "R"), ("S1", "R")], True),
    "all-to-all": ([("S0", "S1"), ("S1", "S0")], False),
    # DTensor has one block order only: it permutes by a gather and a slice.
    "permute": ([("S0", "R")], False),
}


def median_seconds(
    run: Callable[[], Any], times: int = 5, patience: float = 0.3, hopeless: float = math.inf
) -> float:
    """Median seconds of `times` calls after one warm-up call; a call's time is that of the slowest process.

    After `patience` seconds three calls are enough: one that another program delayed does not change their median. If
    the first call takes longer than `hopeless`, it is the only one."""
    run()
    seconds: list[float] = []
    # NCCL reduces tensors on the device only.
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    while len(seconds) < times and (len(seconds) < 3 or sum(seconds) < patience):
        distributed.barrier()
        _synchronize()
        start = time.perf_counter()
        run()
        _synchronize()
        # All processes use the slowest time, so that they stop together.
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        distributed.all_reduce(took, op=distributed.ReduceOp.MAX)
        seconds.append(float(took))
        if seconds[0] > hopeless:
            break
    return statistics.median(seconds)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def probe(name: str | None = None, device: str = "cpu") -> str:
    """Measures matrix products, memory copies, and every kind of collective among groups of every size, as DTensor runs
    them, on all processes at once. Returns a machine file of one level, the same text on all processes.

    Call it in every process, let one process write the text to a file, and pass the file as `machine`. Four processes
    take some seconds. On GPUs the file also has the rates in TF32 and bf16, the memory and the host's time per kernel; its device has the GPU's name, under
    which `profile` measures costs."""
    bench = _Bench(device)
    backend = distributed.get_backend()
    on_gpu = device == "cuda"
    name = name or (gpu_name() if on_gpu else "probed")
    measured = Measurements(
        name=name,
        description=f"{bench.count} processes ({device}, {backend}) as measured under PyTorch {torch.__version__}",
        count=bench.count,
        copies=bench.copies(),
        products=bench.products(torch.float32, tf32=False),
        narrow={"tf32": bench.products(torch.float32, tf32=True), "bf16": bench.products(torch.bfloat16)} if on_gpu else {},
        memory=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        start=bench.start(),
        host_launch=bench.host_launch() if on_gpu else None,
        # A core that sends does not compute.
        overlap=device != "cpu",
        collectives=[bench.collective(kind, members) for members in bench.groups for kind in _KINDS],
    )
    text = [measured.to_toml()]
    distributed.broadcast_object_list(text, src=0)
    return text[0]


def gpu_name() -> str:
    """The GPU's name as machine and cost files have it: `H200`, not `NVIDIA H200`."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA ")


class _Bench:
    """All processes, in groups of consecutive ranks."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.count = distributed.get_world_size()
        self.groups = [n for n in range(2, self.count + 1) if self.count % n == 0]

    def collective(self, kind: str, members: int) -> Times:
        """Seconds of a collective, by message size."""
        names = ("group", "member")
        grid = Grid(init_device_mesh(self.device, (self.count // members, members), mesh_dim_names=names))
        sizes = [n for n in _MESSAGES if _KINDS[kind][1] or n * members <= _MOST]
        return Times(kind, members, sizes, [statistics.mean(self._times(grid, kind, members, n)) for n in sizes])

    def _times(self, grid: Grid, kind: str, members: int, message: int) -> Iterator[float]:
        reshards, per_process = _KINDS[kind]
        rows = 16 * members
        columns = max(message // 4 // rows // members, 1) * members * (1 if per_process else members)
        shape = (rows, columns)
        for start, end in reshards:
            # Each group reshards a separate tensor.
            source: Layout = ("R", start)
            target: Layout = ("R", end)
            local = torch.full(grid.block(shape, source)[1], 0.5, device=self.device)
            yield median_seconds(lambda: grid.reshard(local, shape, source, target))

    def copies(self) -> float:
        """Memory bandwidth of each process: bytes per second, read and written."""
        # More than a cache holds.
        x = torch.ones(1 << (28 if self.device == "cuda" else 22), device=self.device)
        return 2 * 4 * x.numel() / median_seconds(lambda: x.mul_(1.0))

    def products(self, dtype: torch.dtype = torch.float32, tf32: bool = False) -> float:
        """Floating-point operations per second of large matrix products in each process."""
        size, repeats = (8192, 4) if self.device == "cuda" else (1024, 1)
        # Ones and zeros take less power than numbers.
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")

        def chain() -> None:
            for _ in range(repeats):
                a @ b

        try:
            return 2 * size**3 * repeats / median_seconds(chain)
        finally:
            torch.set_float32_matmul_precision(before)

    def host_launch(self) -> float:
        """Seconds of the slowest process's host per kernel: all of them launch at once."""
        slowest = torch.tensor(host_launch_seconds(), dtype=torch.float64, device=self.device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        return float(slowest)

    def start(self) -> float:
        """Seconds of the smallest operation: the launch overhead."""
        x, more = torch.ones(16, 16, device=self.device), 200

        def chain() -> None:
            for _ in range(more):
                x @ x

        return median_seconds(chain) / more
