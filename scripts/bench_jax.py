#!/usr/bin/env python3
"""Times training steps under JAX on host devices: data parallelism, every 2D mesh, and our plan.

    python scripts/bench_jax.py [--devices 16] [--seconds 500] [--only mlp] [--keep FOLDER]

Prints one Markdown row per workload as soon as it is measured, times in milliseconds. A 2D mesh DxM has the batch on D and
the weights on M, columns and rows in turn (as in Megatron), XLA filling in the rest; 16x1 is data, 1x16 parameter
parallelism. `planned` is our plan, made for the machine as `shardwright.jax.probe` and `profile` measure it first, or for the
files given; `kept` is the plan that `parallelize(..., measure=True)` returns, timed again. Times are medians of up to five
steps after one that is not counted, all in one process; steps that take more than twice as long as the best are run twice.
"""

import argparse
import math
import os
import pathlib
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=16)
parser.add_argument("--seconds", type=float, default=500)
parser.add_argument("--only", default="")
parser.add_argument("--machine")
parser.add_argument("--costs")
parser.add_argument("--keep", help="a folder for what is probed: taken from there the next time")
parser.add_argument("--meshes", default="", help="only these of the meshes written by hand, the first of them being data: 16x1,4x4")
parser.add_argument("--quick", action="store_true", help="do not count whose bytes agree: two compilations less")
ARGS = parser.parse_args()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ARGS.devices} " + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardwright.jax import parallelize, probe, profile, verify_plan  # noqa: E402
from shardwright.jax._probe import median_seconds  # noqa: E402

START = time.monotonic()


def sgd(loss):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return step


def zeros(*shape, dtype=np.float32):
    return np.full(shape, 0.01, dtype)


def mlp(batch, hidden, layers=4):
    def loss(params, x, y):
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params[-1] - y) ** 2)

    params = [zeros(hidden, hidden) for _ in range(layers)]
    specs = [P(None, "m") if i % 2 == 0 else P("m", None) for i in range(layers)]
    return sgd(loss), (params, zeros(batch, hidden), zeros(batch, hidden)), (specs, P("d"), P("d"))


def convs(channels, pools, image, classes, dense, batch):
    def loss(params, x, y):
        for w, pool in zip(params["conv"], pools, strict=True):
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x)
            if pool:
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        for w in params["dense"][:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params["dense"][-1] - y) ** 2)

    sizes = [3, *channels]
    side = image >> sum(pools)
    widths = [side * side * channels[-1], dense, dense, classes]
    params = {
        "conv": [zeros(3, 3, i, o) for i, o in zip(sizes, sizes[1:])],
        "dense": [zeros(i, o) for i, o in zip(widths, widths[1:])],
    }
    specs = {
        "conv": [P() for _ in channels],
        "dense": [P(None, "m") if i % 2 == 0 else P("m", None) for i in range(len(widths) - 1)],
    }
    return sgd(loss), (params, zeros(batch, image, image, 3), zeros(batch, classes)), (specs, P("d"), P("d"))


def alexnet(batch=64):
    return convs([64, 192, 384, 256, 256], [1, 1, 0, 0, 1], 32, 1024, 4096, batch)


def vgg16(batch=32):
    channels = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    return convs(channels, [0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1], 32, 1024, 4096, batch)


def gpt(batch=16, seq=128, width=512, heads=16, layers=2, vocab=8192):
    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(params, tokens):
        x = params["embed"][tokens]
        for p in params["blocks"]:
            n, s, d = x.shape
            h = norm(x)
            q, k, v = ((h @ p[name]).reshape(n, s, heads, d // heads) for name in ("q", "k", "v"))
            scores = jax.nn.softmax(jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(d / heads))
            x = x + jnp.einsum("nhst,nthd->nshd", scores, v).reshape(n, s, d) @ p["o"]
            x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(norm(x) @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    d = width
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    rows = {name: P("m", None) if name in ("o", "down") else P(None, "m") for name in shapes}
    params = {"embed": zeros(vocab, d), "blocks": [{k: zeros(*s) for k, s in shapes.items()} for _ in range(layers)]}
    specs = {"embed": P(), "blocks": [rows] * layers}
    return sgd(loss), (params, zeros(batch, seq, dtype=np.int32).astype(np.int32)), (specs, P("d"))


# The most telling first.
WORKLOADS = {
    "mlp h2048 b512": lambda: mlp(512, 2048),
    "mlp h1024 b256": lambda: mlp(256, 1024),
    "mlp h1024 b4096": lambda: mlp(4096, 1024),
    "mlp h2048 b4096": lambda: mlp(4096, 2048),
    "mlp h4096 b512": lambda: mlp(512, 4096),
    "gpt 2x512 b16x128": gpt,
    "alexnet 32x32 b64": alexnet,
    "vgg16 32x32 b16": lambda: vgg16(16),
    "mlp h4096 b2048": lambda: mlp(2048, 4096),
    "mlp h4096 b4096": lambda: mlp(4096, 4096),
    "mlp h4096 b256": lambda: mlp(256, 4096),
    "mlp h2048 b2048": lambda: mlp(2048, 2048),
}


def timed(jitted, args, hopeless):
    compiled = jitted.lower(*args).compile()
    return median_seconds(lambda: compiled(*args), hopeless=hopeless)


def on_mesh(step, args, specs, data, model, hopeless):
    mesh = Mesh(np.asarray(jax.devices()).reshape(data, model), ("d", "m"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    placed = jax.device_put(args, shardings)
    return timed(jax.jit(step, in_shardings=shardings, out_shardings=(shardings[0], None)), placed, hopeless)


def row(name, meshes, machine, costs):
    step, args, specs = WORKLOADS[name]()
    others = []
    for data, model in meshes:
        others.append(on_mesh(step, args, specs, data, model, 2 * min(others, default=math.inf)))
    fast = parallelize(step, *args, machine=machine, costs=costs, time=20, measure=True)
    chosen = min(fast.measured, key=fast.measured.get)
    seconds = timed(fast, fast.shard(args), math.inf)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    planned = parallelize(step, *shapes, machine=machine, costs=costs, time=20)
    agree = "" if ARGS.quick else f"{verify_plan(planned, *shapes).agreement:.0%}"
    cells = " | ".join(f"{s * 1e3:.1f}" for s in others)
    return (
        f"| {name} | {cells} | {fast.measured['auto'] * 1e3:.1f} | {planned.plan.step_seconds * 1e3:.1f} | {agree} | "
        f"{chosen} | {seconds * 1e3:.1f} | {others[0] / seconds:.2f} | {min(others) / seconds:.2f} |"
    )


def main():
    count = ARGS.devices
    with tempfile.TemporaryDirectory() as folder:
        machine, costs = ARGS.machine, ARGS.costs
        if machine is None:
            kept = pathlib.Path(ARGS.keep or folder)
            machine, costs = str(kept / "machine.toml"), str(kept / "costs.json")
            if not (kept / "costs.json").exists():
                pathlib.Path(machine).write_text(probe())
                pathlib.Path(costs).write_text(profile())
        meshes = [(count // m, m) for m in range(1, count + 1) if count % m == 0]
        if ARGS.meshes:
            meshes = [mesh for mesh in meshes if f"{mesh[0]}x{mesh[1]}" in ARGS.meshes.split(",")]
        grids = " | ".join(f"{d}x{m}" for d, m in meshes)
        print(f"| step | {grids} | planned | predicted | bytes agree | kept | its time | data / it | best other / it |")
        print(f"|---|{'---|' * (len(meshes) + 7)}", flush=True)
        for name in WORKLOADS:
            if ARGS.only not in name:
                continue
            if time.monotonic() - START > ARGS.seconds:
                print(f"{name}: no time left", file=sys.stderr)
                continue
            print(row(name, meshes, machine, costs), flush=True)


if __name__ == "__main__":
    main()
