"""Plans the foreign steps of python/tests for eight host devices, runs them, and compares with `jax.jit`.

    python scripts/jax_coverage.py [--write] [NAME ...]

Prints a row per step: result, seconds of planning, megabytes that a device sends, agreement of predicted and compiled
collectives, and calls of which only types are known. A second table says what differs in the steps that agree to less than 95%. Status 1 if a step fails or differs. `--write` puts the table into
docs/jax-coverage.md. Needs flax, equinox, optax, dm-haiku and chex.
"""

import copy
import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "python" / "tests"))

import foreign_calls  # noqa: E402, F401
import foreign_habits  # noqa: E402, F401
import foreign_libraries  # noqa: E402, F401
import foreign_models  # noqa: E402, F401
import foreign_others  # noqa: E402, F401
import foreign_programs  # noqa: E402, F401
import foreign_recent  # noqa: E402, F401
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from foreign_steps import FOREIGN  # noqa: E402

from shardwright.jax import parallelize, verify_plan  # noqa: E402

PAGE = ROOT / "docs" / "jax-coverage.md"
START, END = "<!-- begin: scripts/jax_coverage.py -->", "<!-- end -->"
# 16-bit steps: their sums are rounded in another order.
LOOSE = {"llama_bf16_accumulated", "dynamic_loss_scale", "half_precision_policy"}


def row(name, totals):
    step, args = FOREIGN[name]()
    changed_in_place = any(is_module(arg) for arg in args)
    # Donated arguments are gone after a call.
    other = copy.deepcopy(args) if changed_in_place or hasattr(step, "_jit_info") else args
    start = time.perf_counter()
    fast = parallelize(step, *args, machine="cpu:8", time=10)
    seconds = time.perf_counter() - start
    found = verify_plan(fast, propagated=False)
    got, want = fast(*args), reference(step)(*other)
    if changed_in_place:
        got, want = (got, args), (want, other)
    tolerance = {"rtol": 3e-2, "atol": 2e-3} if name in LOOSE else {"rtol": 5e-3, "atol": 1e-4}
    for a, b in zip(arrays(got), arrays(want), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)
    sent = sum(key[2] * count for key, count in found.compiled.items())
    totals["agreed"] += sum(key[2] * count for key, count in found.agreed.items())
    totals["every"] += sum(key[2] * count for key, count in (found.predicted + found.unpredicted).items())
    totals["at least 95%"] += found.agreement >= 0.95
    if found.agreement < 0.95:
        rows = [difference(name, kind, found, *both) for kind, both in found.differences.items()]
        totals["differences"] += rows
        print("\n".join(rows), file=sys.stderr, flush=True)
    calls = len(fast.first.planned.stand_ins)
    return f"| {name} | equal | {seconds:.1f} | {sent / 1e6:.3f} | {found.agreement:.0%} | {calls or ''} |"


def difference(name, kind, found, predicted, sent):
    """A row of the second table: bytes of one kind of difference, and the operations of XLA that send most of them."""
    keys = [key for key in found.unpredicted if kind != "other axes" and found._kind_of_unpredicted(key) == kind]
    keys.sort(key=lambda key: (-key[2] * found.unpredicted[key], key))
    largest = [f"{key[0]} by `{'/'.join(sorted(found.sources[key])[0].split('/')[1:])[-70:]}`" for key in keys[:2]]
    return f"| {name} | {kind} | {predicted} | {sent} | {'; '.join(largest)} |"


def is_module(arg):
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(arg, nnx.Module)


def reference(step):
    """The step under the `jit` of its library."""
    if type(step).__module__.startswith(("equinox", "flax")) or hasattr(step, "_jit_info"):
        return step
    name = getattr(step, "__qualname__", "")
    if "nnx" in name and "functional" not in name:
        return sys.modules["flax.nnx"].jit(step)
    if "equinox" in name:
        return sys.modules["equinox"].filter_jit(step)
    return jax.jit(step)


def arrays(tree):
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None:
        tree = jax.tree.map(lambda x: nnx.state(x) if is_module(x) else x, tree, is_leaf=is_module)
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def main():
    names = [name for name in sys.argv[1:] if name != "--write"] or list(FOREIGN)
    totals = {"agreed": 0, "every": 0, "at least 95%": 0, "differences": []}
    lines = ["| step | result | planning, s | MB sent | bytes agree | calls |", "|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    failures = 0
    for name in names:
        try:
            lines.append(row(name, totals))
        except Exception as error:
            failures += 1
            reason = " ".join(str(error).split())[:200].replace("|", "\\|")
            lines.append(f"| {name} | {type(error).__name__}: {reason} | | | | |")
        print(lines[-1], flush=True)
    worked = len(names) - failures
    lines += [
        "",
        f"{worked} of {len(names)} steps are planned, run, and equal `jax.jit`. Of all bytes that were predicted or sent, "
        f"{totals['agreed'] / max(totals['every'], 1):.0%} were both; {totals['at least 95%']} of {worked} steps agree to at "
        "least 95%.",
    ]
    if totals["differences"]:
        head = ["| step | difference | bytes predicted | bytes by XLA | largest |", "|---|---|---|---|---|"]
        lines += ["", "What differs in the others:", "", *head, *totals["differences"]]
        print("\n".join(["", *head, *totals["differences"]]))
    print("\n".join(lines[-2:]))
    if "--write" in sys.argv:
        text = PAGE.read_text()
        before, after = text.split(START)[0], text.split(END)[1]
        PAGE.write_text(before + "\n".join([START, *lines, END]) + after)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
