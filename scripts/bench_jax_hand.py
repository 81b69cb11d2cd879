#!/usr/bin/env python3
"""Times our plans beside layouts written by hand, on host devices: data parallelism, FSDP and every 2D mesh.

    python scripts/bench_jax_hand.py [--devices 16] [--seconds 500] [--only NAME] [--keep FOLDER] [--rounds 5] [--engines none]

The plan is made without running anything (no `measure=True`), for the machine as `shardwright.jax.probe` and `profile` measure it, or for
the files in FOLDER. By hand: the batch on D devices and weights by columns and rows in turn on M (Megatron), XLA filling in the rest; Nx1 is
data parallelism; `fsdp` has the batch and the first dimension that divides of every weight on all devices. Rounds run all of them in turn;
times are medians in milliseconds. The last column is our time over the best one written by hand. With several engines there is a row per engine that
plans are priced for; `none` prices every op as a kernel of its own. Lines after a row compare the predicted times of recipes with the measured times of
layouts written by hand.
"""

import argparse
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=16)
parser.add_argument("--seconds", type=float, default=500)
parser.add_argument("--only", default="")
parser.add_argument("--keep", help="a folder for what is probed: taken from there the next time")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--time", type=float, default=20, help="seconds of planning")
parser.add_argument("--engines", default="none", help="engines that plans are priced for, `none` for no engine")
parser.add_argument("--meshes", default="", help="only these meshes written by hand: 16x1,4x4")
parser.add_argument("--small", action="store_true", help="smaller steps, to try the script")
ARGS = parser.parse_args()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ARGS.devices} " + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardwright.jax import parallelize, plan, probe, profile  # noqa: E402

START = time.monotonic()
RNG = np.random.default_rng(3)


def normal(*shape):
    return (RNG.normal(size=shape) * 0.02).astype(np.float32)


def ids(below, *shape):
    return RNG.integers(below, size=shape).astype(np.int32)


def adam(loss):
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
        params = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-3), params, m, v)
        return params, {"m": m, "v": v}, value

    return step


def state_of(params):
    return {"m": jax.tree.map(np.zeros_like, params), "v": jax.tree.map(np.zeros_like, params)}


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(x, p, heads, mask):
    n, s, d = x.shape
    h = norm(x)
    q, k, v = ((h @ p[name]).reshape(n, s, heads, d // heads) for name in ("q", "k", "v"))
    scores = jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(d / heads)
    scores = jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -1e9))
    x = x + jnp.einsum("nhst,nthd->nshd", scores, v).reshape(n, s, d) @ p["o"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


ROWS = ("o", "down")


def block_params(d, layers=()):
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    lead = [None] * len(layers)
    specs = {name: P(*lead, "m", None) if name in ROWS else P(*lead, None, "m") for name in shapes}
    return {name: normal(*layers, *shape) for name, shape in shapes.items()}, specs


def transformer(batch, seq, width=512, layers=4, heads=16, vocab=4096, scanned=False):
    mask = np.tri(seq, dtype=bool)
    if scanned:
        blocks, specs = block_params(width, (layers,))
    else:
        pairs = [block_params(width) for _ in range(layers)]
        blocks, specs = [p for p, _ in pairs], [s for _, s in pairs]
    params = {"embed": normal(vocab, width), "blocks": blocks, "head": normal(width, vocab)}

    def loss(params, tokens):
        x = params["embed"][tokens]
        if scanned:
            body = jax.checkpoint(lambda x, p: (block(x, p, heads, mask), None))
            x = lax.scan(body, x, params["blocks"])[0]
        else:
            for p in params["blocks"]:
                x = block(x, p, heads, mask)
        logits = jax.nn.log_softmax(norm(x) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    return adam(loss), params, (ids(vocab, batch, seq),), {"embed": P(), "blocks": specs, "head": P(None, "m")}


def vision_transformer(batch=64, width=256, layers=4, heads=8):
    pairs = [block_params(width) for _ in range(layers)]
    params = {"patch": normal(192, width), "position": normal(64, width), "blocks": [p for p, _ in pairs], "head": normal(width, 128)}

    def loss(params, patches, labels, seed):
        key = jax.random.key(seed[0])
        x = patches @ params["patch"] + params["position"]
        for p in params["blocks"]:
            key, use = jax.random.split(key)
            x = block(x, p, heads, None)
            x = jnp.where(jax.random.bernoulli(use, 0.9, x.shape), x / 0.9, 0)
        logits = jax.nn.log_softmax(x.mean(1) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], -1))

    specs = {"patch": P(None, "m"), "position": P(), "blocks": [s for _, s in pairs], "head": P()}
    return adam(loss), params, (normal(batch, 64, 192), ids(128, batch), np.zeros(1, np.uint32)), specs


def graph_network(nodes=4096, edges=32768, width=128):
    params = {"w1": normal(width, width), "w2": normal(width, width), "w3": normal(width, 32)}

    def loss(params, features, senders, receivers, labels):
        h = features
        for name in ("w1", "w2"):
            h = jax.nn.relu(h @ params[name])
            h = h + jax.ops.segment_sum(h[senders], receivers, h.shape[0])
        logits = jax.nn.log_softmax(h @ params["w3"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], -1))

    batch = normal(nodes, width), ids(nodes, edges), ids(nodes, edges), ids(32, nodes)
    return adam(loss), params, batch, {"w1": P(None, "m"), "w2": P("m", None), "w3": P()}


def mlp(batch, width, layers=4):
    params = [normal(width, width) for _ in range(layers)]

    def loss(params, x, y):
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params[-1] - y) ** 2)

    specs = [P(None, "m") if i % 2 == 0 else P("m", None) for i in range(layers)]
    return adam(loss), params, (normal(batch, width), normal(batch, width)), specs


# The most telling first.
WORKLOADS = {
    "vision transformer, dropout, b64": vision_transformer,
    "mlp h2048 b256": lambda: mlp(256, 2048),
    "graph network": graph_network,
    "mlp h1024 b1024": lambda: mlp(1024, 1024),
    "transformer 4 layers, b4 x 512": lambda: transformer(4, 512),
    "transformer 4 layers, b32 x 128": lambda: transformer(32, 128),
    "transformer scanned, recomputed, b32 x 128": lambda: transformer(32, 128, scanned=True),
}
SMALL = {
    "transformer 2 layers, b8 x 64": lambda: transformer(8, 64, 128, 2, 8, 512),
    "transformer scanned, b8 x 64": lambda: transformer(8, 64, 128, 2, 8, 512, scanned=True),
    "vision transformer, dropout, b16": lambda: vision_transformer(16, 128, 2, 8),
    "graph network": lambda: graph_network(512, 4096, 64),
    "mlp h256 b256": lambda: mlp(256, 256),
}


def by_hand(step, params, batch, specs, data, model):
    """A compiled step and its arguments, with these specs of the weights; the batch is split on the data axis where it divides."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(data, model), ("d", "m"))

    def fits(spec, x):
        sizes = [math.prod(mesh.shape[a] for a in ((e,) if isinstance(e, str) else e or ())) for e in spec]
        return all(n % size == 0 for n, size in zip(np.shape(x), sizes, strict=False))

    def named(spec, x):
        return NamedSharding(mesh, spec if fits(spec, x) else P())

    weights = jax.tree.map(named, specs, params, is_leaf=lambda x: isinstance(x, P))
    shardings = (weights, {"m": weights, "v": weights}, *(named(P("d"), x) for x in batch))
    args = jax.device_put((params, state_of(params), *batch), shardings)
    return jax.jit(step, in_shardings=shardings, out_shardings=(*shardings[:2], None)).lower(*args).compile(), args


def fsdp_specs(params, devices):
    def spec(x):
        dim = next((i for i, n in enumerate(x.shape) if n % devices == 0), None)
        return P() if dim is None else P(*([None] * dim), ("d", "m"))

    return jax.tree.map(spec, params)


def seconds(run, args):
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def row(name, make, machine, costs):
    step, params, batch, specs = make()
    count = ARGS.devices
    replicated = jax.tree.map(lambda _: P(), params)
    layouts = {
        f"{count // model}x{model}": (replicated if model == 1 else specs, count // model, model)
        for model in range(1, count + 1)
        if count % model == 0
    }
    chosen = [mesh for mesh in ARGS.meshes.split(",") if mesh] or list(layouts)
    layouts = {key: layout for key, layout in layouts.items() if key in chosen}
    layouts["fsdp"] = (fsdp_specs(params, count), count, 1)
    args = (params, state_of(params), *batch)
    runs, steps = {}, {}
    with ThreadPoolExecutor() as pool:
        compiled = {key: pool.submit(by_hand, step, params, batch, *layout) for key, layout in layouts.items()}
        start = time.perf_counter()
        for engine in ARGS.engines.split(","):
            steps[engine] = parallelize(step, *args, machine=without(machine, engine), costs=costs, time=ARGS.time)
        planning = (time.perf_counter() - start) / len(steps)
        ours = {engine: pool.submit(lambda fast=fast: (fast.first.compiled(), (fast, fast.shard(args)))[1]) for engine, fast in steps.items()}
        for key, made in (compiled | ours).items():
            try:
                runs[key] = made.result()
            except ValueError as error:
                print(f"{name}: {key} is left out: {error}", file=sys.stderr)
    times = {key: [] for key in runs}
    for at in range(ARGS.rounds + 1):
        for key, (run, own) in runs.items():
            best = min((statistics.median(t) for t in times.values() if t), default=math.inf)
            if at > 1 and times[key] and min(times[key]) > 3 * best and key not in steps:
                continue
            took = seconds(run, own)
            if at > 0:
                times[key].append(took)
    found = {key: statistics.median(t) for key, t in times.items()}
    rows = []
    for engine, fast in steps.items():
        best = min((key for key in found if key not in steps), key=found.get)
        two = min((key for key in found if "x" in key and key[0].isdigit() and not key.endswith("x1")), key=found.get)
        cells = " | ".join(f"{found[key] * 1e3:.1f}" if key in found else "" for key in (f"{count}x1", "fsdp"))
        label = name if len(steps) == 1 else f"{name} ({engine})"
        rows.append(
            f"| {label} | {cells} | {found[two] * 1e3:.1f} ({two}) | {found[engine] * 1e3:.1f} | {fast.plan.step_seconds * 1e3:.1f} | {planning:.0f} | "
            f"{best} | {found[engine] / found[best]:.2f} |"
        )
    shown = ", ".join(f"{key} {seconds * 1e3:.1f}" for key, seconds in sorted(found.items(), key=lambda pair: pair[1]))
    print(f"{name}: measured {shown}", file=sys.stderr)
    for engine in steps:
        predicted = recipes(step, args, without(machine, engine), costs)
        shown = ", ".join(f"{key} {seconds * 1e3:.1f}" for key, seconds in predicted.items())
        print(f"{name}: predicted ({engine}) {shown}, planned {steps[engine].plan.step_seconds * 1e3:.1f}", file=sys.stderr)
    return "\n".join(rows)


def recipes(step, args, machine, costs):
    """Predicted seconds of the recipes that are nearest to the layouts written by hand."""
    solvers = "data", "fsdp", "megatron"
    return {name: plan(step, *args, machine=machine, costs=costs, solver=name).step_seconds for name in solvers}


def without(machine, engine):
    """The machine file for an engine."""
    path = pathlib.Path(machine)
    own = path.with_name(f"{path.stem}-{engine}.toml")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("engine")]
    if engine != "none":
        lines.insert(lines.index("[device]") + 1, f'engine = "{engine}"')
    own.write_text("\n".join([*lines, ""]))
    return str(own)


def main():
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(ARGS.keep or folder)
        kept.mkdir(parents=True, exist_ok=True)
        machine, costs = kept / "machine.toml", kept / "costs.json"
        if not costs.exists():
            machine.write_text(probe())
            costs.write_text(profile())
        print("| step | data | fsdp | best 2D mesh | planned | predicted | planning, s | best by hand | planned / best |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for name, make in (SMALL if ARGS.small else WORKLOADS).items():
            if ARGS.only not in name:
                continue
            if time.monotonic() - START > ARGS.seconds:
                print(f"{name}: no time left", file=sys.stderr)
                continue
            print(row(name, make, str(machine), str(costs)), flush=True)


if __name__ == "__main__":
    main()
