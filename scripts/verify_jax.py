#!/usr/bin/env python3
"""Compares XLA's collectives and memory with our plans' for every step of python/tests/steps.py: the table of docs/jax.md.

    python scripts/verify_jax.py [--details]

Steps are compiled for eight host devices and not run.
"""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "python/tests"))

import jax  # noqa: E402
import steps  # noqa: E402

from shardwright.jax import parallelize, verify_plan  # noqa: E402

CASES = {
    "mlp": lambda: steps.mlp(2048, 2048),
    "cnn": lambda: steps.cnn(256),
    "gpt": lambda: steps.gpt(32, 128, 256, 8, 1, 4096),
    "scanned": lambda: steps.scanned(32, 128, 256, 8, 3),
    "moe": lambda: steps.moe(2048, 256, 512, 8),
}


def megabytes(counts):
    return sum(key[2] * count for key, count in counts.items()) / 1e6


totals = [0.0, 0.0, 0.0]
counts = [0, 0]
print("| step | plan | collectives predicted | by XLA | MB predicted | by XLA | agree | inputs alone | peak MB predicted | by XLA |")
print("|---|---|---|---|---|---|---|---|---|---|")
for name, make in CASES.items():
    step, args = make()
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    for solver in ("exact", "data", "megatron", "fsdp"):
        fast = parallelize(step, *args, machine="cpu:8", solver=solver, time=20)
        v = verify_plan(fast, *args)
        sizes = [megabytes(v.predicted), megabytes(v.compiled), megabytes(v.agreed)]
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        counts = [a + b for a, b in zip(counts, (v.compiled.total(), v.agreed.total()), strict=True)]
        print(
            f"| {name} | `{solver}` | {v.predicted.total()} | {v.compiled.total()} | {sizes[0]:.2f} | {sizes[1]:.2f} | "
            f"{v.agreement:.1%} | {megabytes(v.propagated):.2f} | {v.predicted_peak_bytes / 1e6:.1f} | "
            f"{v.compiled_peak_bytes / 1e6:.1f} |",
            flush=True,
        )
        if "--details" in sys.argv:
            print(v.table(), flush=True)
print(f"\nof {totals[1]:.1f} MB that XLA sends, {totals[2] / totals[1]:.1%} were predicted; of {totals[0]:.1f} MB predicted, {totals[2] / totals[0]:.1%} are sent; of {counts[0]} collectives that XLA does, {counts[1] / counts[0]:.1%} were predicted")
