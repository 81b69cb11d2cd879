"""Plans the steps of python/tests/foreign_steps.py for eight host devices, runs them, and compares with `jax.jit`.

    python scripts/jax_coverage.py [--quick] [NAME ...]

Prints a row per step: result, seconds of planning, agreement of predicted and compiled collectives, and stand-ins. Status 1 if a
step fails or differs. `--quick` leaves the agreement out, for which each step is compiled twice. Needs flax, equinox and optax.
"""

import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python" / "tests"))

import foreign_libraries  # noqa: F401
import foreign_models  # noqa: F401
import jax
import numpy as np
from foreign_steps import FOREIGN

from shardwright.jax import parallelize, verify_plan


def row(name, quick):
    step, args = FOREIGN[name]()
    want = jax.tree.leaves(_arrays(_reference(step)(*args)))
    start = time.perf_counter()
    fast = parallelize(step, *args, machine="cpu:8", time=10)
    seconds = time.perf_counter() - start
    got = jax.tree.leaves(_arrays(fast(*args)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-4)
    agreement = "" if quick else f"{verify_plan(fast).agreement:.0%}"
    return f"| {name} | equal | {seconds:.1f} | {agreement} | {len(fast.first.planned.stand_ins)} |"


def _reference(step):
    if "equinox" in sys.modules:
        return sys.modules["equinox"].filter_jit(step)
    return jax.jit(step)


def _arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree) if hasattr(x, "shape")]


def main():
    quick = "--quick" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--quick"] or list(FOREIGN)
    failures = 0
    print("| step | result | planning, s | bytes agree | calls of known types only |\n|---|---|---|---|---|")
    for name in names:
        try:
            print(row(name, quick), flush=True)
        except Exception as error:
            failures += 1
            reason = " ".join(str(error).split())[:160]
            print(f"| {name} | {type(error).__name__}: {reason} | | | |", flush=True)
    print(f"\n{len(names) - failures} of {len(names)} steps equal `jax.jit`.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
