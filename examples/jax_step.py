"""A JAX training step, planned and run on a mesh: python examples/jax_step.py

The step is an ordinary function. `parallelize` plans it for the available devices (here eight host devices, so that it runs
anywhere) and returns a function with the same arguments that runs by the plan.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from shardwright.jax import parallelize, verify_plan


def loss(params, x, y):
    for weight in params[:-1]:
        x = jax.nn.relu(x @ weight)
    return jnp.mean((x @ params[-1] - y) ** 2)


def train_step(params, x, y):
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return [p - 0.1 * g for p, g in zip(params, gradients)], value


rng = np.random.default_rng(0)
params = [jnp.asarray(rng.normal(size=(256, 256)) / 16, jnp.float32) for _ in range(3)]
x, y = (jnp.asarray(rng.normal(size=(64, 256)), jnp.float32) for _ in range(2))

step = parallelize(train_step, params, x, y, machine="flat:8")
print(step.explain())

# The same numbers as on one device.
alone, ours = params, params
for _ in range(3):
    alone, expected = jax.jit(train_step)(alone, x, y)
    ours, found = step(ours, x, y)
    print(f"loss {float(found):.6f}, on one device {float(expected):.6f}")
    np.testing.assert_allclose(found, expected, rtol=1e-4)

print("shardings of weights:", [weight.sharding.spec for weight in ours])
print(verify_plan(step, params, x, y))
