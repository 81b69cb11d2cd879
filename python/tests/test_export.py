"""The command line inside the package, and a plan's layouts as a module for JAX."""

import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp


def shardwright(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "shardwright", *args], capture_output=True, text=True)


def test_the_layouts_of_a_plan_place_arrays_as_planned(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    made = shardwright("plan", "mlp:batch=32,hidden=64,layers=2", "--machine", "flat:8", "--solver", "fsdp", "-q", "-o", plan)
    assert made.returncode == 0, made.stderr
    written = shardwright("export", plan, "--to", "jax-module")
    assert written.returncode == 0, written.stderr
    module: dict = {}
    exec(compile(written.stdout, "layouts.py", "exec"), module)
    mesh = module["make_mesh"](jax.devices()[:8])
    assert mesh.shape == module["AXES"]
    weight = jax.device_put(jnp.arange(64.0 * 64).reshape(64, 64), module["sharding"](mesh, module["PARAMETERS"]["fc2.weight"]))
    assert {math.prod(shard.data.shape) for shard in weight.addressable_shards} == {64 * 64 // 8}
    assert module["OPTIMIZER_STATE"] == {} and set(module["INPUTS"]), "SGD keeps no state"


def test_the_command_line_says_what_is_wrong() -> None:
    refused = shardwright("plan", "lama3-8b")
    assert refused.returncode == 2 and "llama3-8b" in refused.stderr
