"""`probe` and `profile`: measure devices and their links under JAX, and write machine and cost files."""

from __future__ import annotations

import datetime
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._machine_file import Measurements, Times

# Message sizes of collectives in bytes: the larger side on one device.
_MESSAGES = (1 << 16, 1 << 20, 1 << 23, 1 << 25)
# Side lengths of the measured matrix products, and limits on their operations and elements.
_SIDES = (32, 128, 512, 2048)
_MOST_OPERATIONS, _MOST_ELEMENTS = 2 * 1024**3, 1 << 22


def median_seconds(
    run: Callable[[], Any],
    times: int = 5,
    patience: float = 4.0,
    hopeless: float = math.inf,
    agree: Callable[[float], float] = float,
) -> float:
    """Median seconds of `times` calls after one warm-up call, results awaited.

    After `patience` seconds two calls are enough. If the first call takes longer than `hopeless`, it is the only one. `agree` gives
    all processes the same seconds, so that all of them make as many calls."""
    jax.block_until_ready(run())
    seconds: list[float] = []
    while len(seconds) < times and (len(seconds) < 2 or sum(seconds) < patience):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(agree(time.perf_counter() - start))
        if seconds[0] > hopeless:
            break
    return statistics.median(seconds)


def probe(devices: Sequence[Any] | None = None, name: str = "probed") -> str:
    """Measures matrix products, memory copies, and every kind of collective among groups of every size, as XLA runs them,
    on all devices at once. Returns a machine file of one level: write it to a file and pass that as `machine`. Sixteen
    devices take half a minute.

    >>> "peak.f32" in probe(jax.devices()[:1])
    True
    """
    bench = _Bench(list(jax.devices() if devices is None else devices))
    return Measurements(
        name=name,
        description=f"{bench.count} devices ({bench.devices[0].device_kind}) as measured under JAX {jax.__version__}",
        count=bench.count,
        copies=bench.copies(),
        products=bench.products(),
        start=bench.start(),
        # Host devices are threads: a thread that moves data does not compute.
        overlap=bench.devices[0].platform != "cpu",
        collectives=[bench.collective(kind, members) for members in bench.groups for kind in _KINDS],
    ).to_toml()


def profile(devices: Sequence[Any] | None = None, name: str = "probed") -> str:
    """Measures matrix products of many shapes on all devices at once. Returns a cost file for `costs`, for the machine of
    `probe`."""
    bench = _Bench(list(jax.devices() if devices is None else devices))
    seconds = {shape: bench.product(*shape) for shape in _shapes()}
    # Times below the call overhead are noise: small products are left to the cost model.
    rows = [[1, *shape, round(time * 1e9)] for shape, time in seconds.items() if time > bench.overhead]
    file = {
        "format": "shardwright-costs",
        "version": 1,
        "device": name,
        "date": datetime.date.today().isoformat(),
        "source": f"JAX {jax.__version__}, {bench.devices[0].device_kind}",
        "method": f"median of 5 on {bench.count} devices at once, less the time of an empty call",
        "tables": [{"class": "gemm", "dtype": "f32", "rows": rows}],
    }
    return json.dumps(file)


def _shapes() -> Iterator[tuple[int, int, int]]:
    for m, n, k in ((m, n, k) for m in _SIDES for n in _SIDES for k in _SIDES):
        if 2 * m * n * k <= _MOST_OPERATIONS and max(m * n, n * k, m * k) <= _MOST_ELEMENTS:
            yield m, n, k


_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "permute")


class _Bench:
    """All devices, in groups of consecutive ones."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices = devices
        self.count = len(devices)
        self.groups = [n for n in range(2, self.count + 1) if self.count % n == 0]
        sharded = self._on(1, ("group",))
        empty = jax.jit(lambda: jnp.zeros(self.count), out_shardings=sharded)()
        nothing = jax.jit(lambda x: x + 1)
        self.overhead = median_seconds(lambda: nothing(empty), 20)

    def _on(self, members: int, *dims: Any) -> NamedSharding:
        mesh = Mesh(np.asarray(self.devices).reshape(self.count // members, members), ("group", "member"))
        return NamedSharding(mesh, PartitionSpec(*dims))

    def _seconds(self, run: Callable[..., Any], *args: Any) -> float:
        """Seconds of a call, less the overhead of an empty call."""
        seconds = median_seconds(functools.partial(run, *args), patience=0.2)
        # A difference far below the overhead is noise.
        return max(seconds - self.overhead, self.overhead / 8)

    def _array(self, shape: tuple[int, ...], sharding: NamedSharding) -> Any:
        return jax.jit(lambda: jnp.full(shape, 0.5, jnp.float32), out_shardings=sharding)()

    def collective(self, kind: str, members: int) -> Times:
        """Seconds of a collective, by message size."""
        return Times(kind, members, _MESSAGES, [statistics.mean(self._times(kind, members, n)) for n in _MESSAGES])

    def _times(self, kind: str, members: int, message: int) -> Iterator[float]:
        """Seconds of the collective as XLA's reshard, along each dimension where they differ."""
        rows, columns = 64 * members, message // 4 // (64 * members)
        on = functools.partial(self._on, members)
        groups = self.count // members
        whole, first, second = on("group"), on("group", "member"), on("group", None, "member")
        if kind in ("all-reduce", "reduce-scatter"):
            # Every member holds one summand.
            terms = self._array((groups, members, rows, columns), first)
            out = whole if kind == "all-reduce" else first
            yield self._seconds(jax.jit(lambda x: x.sum(1), out_shardings=out), terms)
        elif kind == "permute":
            mesh = on().mesh
            around = [(i, (i + 1) % members) for i in range(members)]
            send = jax.shard_map(
                lambda x: jax.lax.ppermute(x, "member", around), mesh=mesh, in_specs=first.spec, out_specs=first.spec
            )
            yield self._seconds(jax.jit(send), self._array((groups, members * rows, columns), first))
        else:
            # The larger side is the whole tensor of an all-gather, and one device's block of an all-to-all.
            shape = (groups, rows, columns) if kind == "all-gather" else (groups, rows * members, columns)
            for start, end in ((first, second), (second, first)):
                end = whole if kind == "all-gather" else end
                yield self._seconds(jax.jit(lambda x: x, out_shardings=end), self._array(shape, start))

    def copies(self) -> float:
        """Memory bandwidth of each device: bytes per second, read and written."""
        size = 1 << 20
        seconds = self._seconds(jax.jit(lambda x: x * 2.0 + 1.0), self._array((self.count * size,), self._on(1, "group")))
        return 2 * 4 * size / seconds

    def product(self, m: int, n: int, k: int) -> float:
        """Seconds of a matrix product on each device."""
        sharding = self._on(1, "group")
        local = jax.shard_map(
            lambda a, b: (a[0] @ b[0])[None], mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec
        )
        a, b = self._array((self.count, m, k), sharding), self._array((self.count, k, n), sharding)
        return self._seconds(jax.jit(local), a, b)

    def products(self) -> float:
        """Floating-point operations per second of large matrix products on each device."""
        return 2 * 1024**3 / self.product(1024, 1024, 1024)

    def start(self) -> float:
        """Seconds of the smallest operation: the launch overhead."""
        sharding = self._on(1, "group")
        small, more = self._array((self.count, 16, 16), sharding), 32

        def chain(length: int) -> Callable[[Any], Any]:
            def local(x: Any) -> Any:
                return functools.reduce(lambda y, _: (y[0] @ x[0])[None], range(length), x)

            return jax.jit(jax.shard_map(local, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec))

        longer = self._seconds(chain(more + 1), small) - self._seconds(chain(1), small)
        return max(longer / more, 1e-7)
