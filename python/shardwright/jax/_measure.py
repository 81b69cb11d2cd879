"""How long a sharded step takes: `parallelize(..., measure=True)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._native import PlanError
from ._probe import median_seconds


def seconds_of(step: Any, hopeless: float) -> float:
    """Median seconds of a step on zeros, as all processes see it; once where it takes longer than is of interest."""
    return _agreed(_median_seconds(step, hopeless))


def _median_seconds(step: Any, hopeless: float) -> float:
    shapes = step.shapes
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(shapes)):
        raise PlanError("steps with random keys as arguments cannot be measured: make them inside, from a number")
    zeros = jax.tree_util.Partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    fresh = jax.jit(zeros, out_shardings=step.in_shardings)
    kept = fresh()
    # What is donated is gone afterwards; making it anew would be timed.
    step = step.without_donation()
    return median_seconds(lambda: step(*kept), hopeless=hopeless)


def _agreed(seconds: float) -> float:
    """What the first of several processes measured, so that all choose the same."""
    if jax.process_count() == 1:
        return seconds
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
