"""Plans a JAX training step and runs it by its plan.

>>> import jax, jax.numpy as jnp
>>> from shardwright.jax import parallelize
>>> def step(w, x, y):
...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
...     return w - 0.1 * grad, loss
>>> args = jnp.ones((8, 4)), jnp.ones((16, 8)), jnp.ones((16, 4))
>>> fast = parallelize(step, *args)
>>> w, loss = fast(*args)
>>> bool(jnp.allclose(loss, step(*args)[1]))
True
"""

from ._parallelize import Parallelized, parallelize, plan
from ._pipeline import pipelined
from ._probe import probe, profile
from ._recompute import TrainStep, train_step
from ._verify import Verification, verify_plan

__all__ = ["Parallelized", "TrainStep", "Verification", "parallelize", "pipelined", "plan", "probe", "profile", "train_step", "verify_plan"]
