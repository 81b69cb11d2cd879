"""`probe`: what the devices and the links between them do under JAX, as a machine file to plan with."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def median_seconds(run: Callable[[], Any], times: int = 5) -> float:
    """The median time of a call whose results are waited for; one call more warms up."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def probe(devices: Sequence[Any] | None = None, name: str = "probed") -> str:
    """Measures all devices at work together: the rate of products, of copies in memory, and of all-reduces. Returns a
    machine file of one level; write it somewhere and name it as `machine`.

    >>> "peak.f32" in probe(jax.devices()[:1])
    True
    """
    chosen = list(jax.devices() if devices is None else devices)
    count = len(chosen)
    mesh = Mesh(np.asarray(chosen), ("all",))
    split = NamedSharding(mesh, PartitionSpec("all"))

    def spread(shape: tuple[int, ...]) -> Any:
        return jax.jit(lambda: jnp.full((count, *shape), 0.5, jnp.float32), out_shardings=split)()

    size, chain = 768, 8
    square = spread((size, size))

    @jax.jit
    def products(x: Any) -> Any:
        y = x
        for _ in range(chain):
            y = jnp.einsum("bij,bjk->bik", x, y) * (1 / size)
        return y

    flops = 2 * size**3 * chain / median_seconds(lambda: products(square))
    elementwise = jax.jit(lambda x: x * 2.0 + 1.0)
    large, empty = spread((8 << 20,)), spread((1,))
    overhead = median_seconds(lambda: elementwise(empty), 20)
    # Read and written once.
    copied = 2 * 4 * (8 << 20) / max(median_seconds(lambda: elementwise(large)) - overhead, 1e-7)
    latency, bandwidth = 1e-6, copied
    if count > 1:
        reduce = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec()
            )
        )
        small, big = spread((256,)), spread((4 << 20,))
        seconds = [max(median_seconds(functools.partial(reduce, x)) - overhead, 1e-7) for x in (small, big)]
        # A small one is all latency, once up and once down a tree; a big one sends almost everything twice.
        latency = seconds[0] / (2 * math.ceil(math.log2(count)))
        bandwidth = 2 * (count - 1) / count * big.nbytes / count / max(seconds[1] - seconds[0], 1e-7)
    return "\n".join(
        [
            f'name = "{name}"',
            f'description = "{count} devices ({chosen[0].device_kind}) as measured under JAX {jax.__version__}"',
            "[[level]]",
            'name = "device"',
            f"count = {count}",
            f'bandwidth = "{bandwidth / 1e9:.4g} GB/s"',
            f'latency = "{latency * 1e6:.4g} us"',
            'topology = "switch"',
            "[device]",
            f'name = "{name}"',
            'memory = "4 GiB"',
            f'memory_bandwidth = "{copied / 1e9:.4g} GB/s"',
            f'peak.f32 = "{flops / 1e9:.4g} GFLOP/s"',
            'launch_overhead = "1 us"',
            "",
        ]
    )
