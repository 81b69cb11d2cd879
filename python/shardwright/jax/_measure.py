"""Times a sharded step, for `parallelize(..., measure=True)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._probe import median_seconds
from ._processes import agreed_seconds
from ._sharded_step import ShardedStep


def seconds_of(step: ShardedStep, hopeless: float) -> float:
    """Median seconds of a step on zeros, agreed by all processes. A step slower than `hopeless` runs once."""
    kept = [_zeros(shape, sharding) for shape, sharding in zip(step.step.shapes, step.leaf_shardings, strict=True)]
    # Donated arguments would have to be created again for each run, and their creation would be timed.
    run = step.without_donation()
    return median_seconds(lambda: run(*kept), hopeless=hopeless, agree=agreed_seconds)


def _zeros(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        impl: Any = shape.dtype
        data = jnp.zeros((*shape.shape, *impl._impl.key_shape), jnp.uint32)
        return jax.device_put(jax.random.wrap_key_data(data, impl=impl._impl.name), sharding)
    return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=sharding)()
