"""Machine files from measurements: `probe` of `shardwright.jax` and `shardwright.torch`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Share of a device's peak that the planner assumes for large matrix products: data sheets state unreachable peaks.
_SHARE_OF_PEAK = 0.8


@dataclass(frozen=True)
class Times:
    """Seconds of a collective among groups of `members` devices, by bytes of the larger side on one device."""

    collective: str
    members: int
    sizes: Sequence[int]
    seconds: Sequence[float]

    def lines(self) -> list[str]:
        """Lines of a machine file. Times are made monotonic: a larger message never takes less time."""
        rising = [max(self.seconds[: i + 1]) for i in range(len(self.seconds))]
        return [
            "[[measured]]",
            'level = "device"',
            f'collective = "{self.collective}"',
            f"members = {self.members}",
            f"bytes = {json.dumps([f'{size} B' for size in self.sizes])}",
            f"times = {json.dumps([f'{seconds * 1e6:.4g} us' for seconds in rising])}",
        ]


@dataclass(frozen=True)
class Measurements:
    """Speeds of the devices of one level, measured on all devices at once."""

    name: str
    description: str
    count: int
    #: Per device: bytes/s of copies (read and written), flop/s of large matrix products, launch overhead in seconds.
    copies: float
    products: float
    start: float
    #: Whether computation and communication overlap on a device.
    overlap: bool
    collectives: list[Times] = field(default_factory=list)
    #: flop/s of large matrix products in other formats, by the names of machine files.
    narrow: dict[str, float] = field(default_factory=dict)
    #: Bytes of memory of a device, where they are a limit.
    memory: int | None = None
    #: Seconds of PyTorch's host per kernel of a training step, where kernels are launched one by one.
    host_launch: float | None = None

    def to_toml(self) -> str:
        """The machine file."""
        bandwidth, latency = self.copies, 1e-6
        among_all = [t for t in self.collectives if t.collective == "all-reduce" and t.members == self.count]
        for times in among_all:
            # Latency and bandwidth of the cost model, for collectives that were not measured.
            small, big = times.seconds[0], times.seconds[-1]
            latency = small / (2 * math.ceil(math.log2(self.count)))
            bandwidth = 2 * (self.count - 1) / self.count * times.sizes[-1] / max(big - small, 1e-7)
        lines = [
            f'name = "{self.name}"',
            f'description = "{self.description}"',
            "[[level]]",
            'name = "device"',
            f"count = {self.count}",
            f'bandwidth = "{bandwidth / 1e9:.4g} GB/s"',
            f'latency = "{latency * 1e6:.4g} us"',
            'topology = "switch"',
            "[device]",
            f'name = "{self.name}"',
            *(['memory = "4 GiB"', "memory_limit = false"] if self.memory is None else [f'memory = "{self.memory} B"']),
            f'memory_bandwidth = "{self.copies / 1e9:.4g} GB/s"',
            f'peak.f32 = "{self.products / _SHARE_OF_PEAK / 1e9:.4g} GFLOP/s"',
            *(f'peak.{kind} = "{rate / _SHARE_OF_PEAK / 1e9:.4g} GFLOP/s"' for kind, rate in self.narrow.items()),
            f'launch_overhead = "{self.start * 1e6:.4g} us"',
        ]
        if self.host_launch is not None:
            lines.append(f'host_launch = "{self.host_launch * 1e6:.4g} us"')
        if not self.overlap:
            lines.append("overlap = false")
        lines += [line for times in self.collectives for line in times.lines()]
        return "\n".join([*lines, ""])
