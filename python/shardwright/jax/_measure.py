"""Times a sharded step, for `parallelize(..., measure=True)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._native import PlanError
from ._probe import median_seconds


def seconds_of(step: Any, hopeless: float) -> float:
    """Median seconds of a step on zeros, agreed by all processes. A step slower than `hopeless` runs once."""
    return _agreed(_median_seconds(step, hopeless))


def _median_seconds(step: Any, hopeless: float) -> float:
    shapes = step.shapes
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(shapes)):
        raise PlanError("a step with random keys as arguments cannot be measured: create the keys inside, from an integer")
    zeros = jax.tree_util.Partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    fresh = jax.jit(zeros, out_shardings=step.in_shardings)
    kept = fresh()
    # Donated arguments would have to be created again for each run, and their creation would be timed.
    step = step.without_donation()
    return median_seconds(lambda: step(*kept), hopeless=hopeless)


def _agreed(seconds: float) -> float:
    """The first process's measurement, so that all processes choose the same plan."""
    if jax.process_count() == 1:
        return seconds
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
