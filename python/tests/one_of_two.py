"""One of two processes with four devices each: runs sharded steps and compares them with one device.

    python one_of_two.py RANK PORT [forever]

With `forever` the first step repeats until it fails.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np

jax.config.update("jax_cpu_collectives_implementation", "gloo")
# When a process is lost, the other waits for its heartbeat before it ends: 10 s here, 100 s by default.
jax.distributed.initialize(
    f"localhost:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]), heartbeat_timeout_seconds=10
)

import steps
from jax.experimental import multihost_utils

from shardwright.jax import parallelize

assert jax.device_count() == 8 and jax.local_device_count() == 4
for name, solver, measure in [("mlp", "exact", False), ("mlp", "fsdp", False), ("moe", "data", False), ("mlp", "auto", True)]:
    step, args = steps.CASES[name]()
    args = jax.tree.map(np.asarray, args)
    want = jax.jit(step)(*args)
    fast = parallelize(step, *args, machine="cpu:8", solver=solver, measure=measure)
    got = fast(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        whole = multihost_utils.process_allgather(a, tiled=True)
        np.testing.assert_allclose(whole, b, rtol=2e-3, atol=2e-5)
    print(name, solver, "agree", flush=True)
    while sys.argv[3:] == ["forever"]:
        jax.block_until_ready(fast(*args))
