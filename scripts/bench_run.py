"""Measures training steps of real models on this machine's cores, beside JAX's data parallelism on as many host devices.

Needs the `shardwright` binary and python; the columns of JAX stay empty where it is not installed. Results are written
after every measurement, as JSON (--output) and as the table of docs/benchmarks.md, section "Running" (--markdown).
A measurement that would not fit the time that is left (--budget) is left out, and the table says so.

    python3 scripts/bench_run.py --binary target/release/shardwright --budget 280
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Model, the plan that an expert would write, and floating-point operations of a step (products and convolutions).
WORKLOADS = {
    "mlp": ("mlp:batch=256,hidden=4096,layers=4,input=4096,classes=10", "model", 0.103e12),
    "alexnet": ("alexnet:batch=64,dropout=0", "owt", 0.27e12),
    "gpt": ("gpt:batch=16,layers=4,hidden=512,heads=8,vocab=8192,seq=256", "megatron", 0.45e12),
    "vgg16": ("vgg16:batch=64,dropout=0", "owt", 5.9e12),
}
FLOPS_PER_DEVICE = 50e9  # A guess, to tell what fits the time; nothing that is printed depends on it.
STARTUP_SECONDS = {"mlp": 4, "alexnet": 5, "gpt": 3, "vgg16": 12}


def estimate(model, devices, steps, jax):
    step = WORKLOADS[model][2] / (devices * FLOPS_PER_DEVICE)
    return (20 if jax and model == "vgg16" else 6 if jax else 0) + STARTUP_SECONDS[model] + steps * 1.5 * step


def steps_for(model, devices):
    """More steps where they are short; the first of several is not counted."""
    step = WORKLOADS[model][2] / (devices * FLOPS_PER_DEVICE)
    return 5 if step < 1 else 3 if step < 5 else 2


def run_ours(binary, machine, model, devices, solver, timeout):
    spec = WORKLOADS[model][0]
    steps = steps_for(model, devices)
    command = [binary, "run", spec, "--machine", machine, "--solver", solver, "--steps", str(steps)]
    command += ["--no-verify", "--json", "--time", "20"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if run.returncode != 0:
        return {"error": run.stderr.strip()[-300:]}
    answer = json.loads(run.stdout)
    times = answer["device_times"]
    mean = lambda key: statistics.fmean(d[key] for d in times)
    return {
        "step_seconds": answer["measured_step_seconds"],
        "predicted_seconds": answer["predicted_step_seconds"],
        "busy_seconds": mean("busy_seconds"),
        "communication_seconds": mean("communication_seconds"),
        "idle_seconds": mean("idle_seconds"),
    }


def run_jax(model, devices, timeout):
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, __file__, "--jax-cell", model, "--devices", str(devices)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    if run.returncode != 0:
        return {"error": run.stderr.strip()[-300:]}
    return json.loads(run.stdout.splitlines()[-1])


def options_of(spec):
    return {k: v for k, v in (pair.split("=") for pair in spec.split(":")[1].split(","))}


def jax_cell(model, devices):
    """One measurement in a process of its own: the same model, data parallel over the host devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    options = options_of(WORKLOADS[model][0])
    batch = int(options["batch"])
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.standard_normal(shape, dtype=np.float32) * 0.02)
    linear = lambda n, m: (normal(n, m), np.zeros(m, np.float32))
    dense = lambda p, x: x @ p[0] + p[1]

    def cross_entropy(logits, labels):
        rows = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(rows, labels[..., None], -1))

    def conv(p, x, stride, pad):
        y = lax.conv_general_dilated(
            x, p[0], (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return jax.nn.relu(y + p[1][:, None, None])

    def pool(x, size, stride):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, stride, stride), "VALID")

    if model == "mlp":
        hidden, layers = int(options["hidden"]), int(options["layers"])
        params = [linear(hidden, hidden) for _ in range(layers)] + [linear(hidden, 10)]
        data = (normal(batch, hidden), rng.integers(0, 10, batch).astype(np.int32))

        def loss(params, x, labels):
            for p in params[:-1]:
                x = jax.nn.relu(dense(p, x))
            return cross_entropy(dense(params[-1], x), labels)

    elif model in ("alexnet", "vgg16"):
        # Output channels, kernel, stride, padding, then the pool that follows (size, stride).
        plain = lambda n: (n, 3, 1, 1, None)
        if model == "alexnet":
            shapes = [(64, 11, 4, 2, (3, 2)), (192, 5, 1, 2, (3, 2)), plain(384), plain(256), (256, 3, 1, 1, (3, 2))]
            features = 256 * 6 * 6
        else:
            shapes = []
            for channels, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
                shapes += [plain(channels)] * (count - 1) + [(channels, 3, 1, 1, (2, 2))]
            features = 512 * 7 * 7
        convolutions, inputs = [], 3
        for channels, kernel, *_ in shapes:
            convolutions.append((normal(channels, inputs, kernel, kernel), np.zeros(channels, np.float32)))
            inputs = channels
        params = (convolutions, [linear(features, 4096), linear(4096, 4096), linear(4096, 1000)])
        data = (normal(batch, 3, 224, 224), rng.integers(0, 1000, batch).astype(np.int32))

        def loss(params, x, labels):
            for p, (_, _, stride, pad, pooled) in zip(params[0], shapes):
                x = conv(p, x, stride, pad)
                x = pool(x, *pooled) if pooled else x
            x = x.reshape(x.shape[0], -1)
            for p in params[1][:-1]:
                x = jax.nn.relu(dense(p, x))
            return cross_entropy(dense(params[1][-1], x), labels)

    else:
        hidden, heads, seq, vocab = (int(options[k]) for k in ("hidden", "heads", "seq", "vocab"))
        norm = lambda: (np.ones(hidden, np.float32), np.zeros(hidden, np.float32))
        block = lambda: (norm(), [linear(hidden, hidden) for _ in range(4)], norm(), linear(hidden, 4 * hidden), linear(4 * hidden, hidden))
        params = (normal(vocab, hidden), normal(seq, hidden), [block() for _ in range(int(options["layers"]))], norm())
        ids = lambda: rng.integers(0, vocab, (batch, seq)).astype(np.int32)
        data = (ids(), ids())

        def layer_norm(p, x):
            mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
            return (x - mean) * lax.rsqrt(var + 1e-5) * p[0] + p[1]

        def attention(p, x):
            split = lambda y: y.reshape(*y.shape[:2], heads, hidden // heads)
            q, k, v = (split(dense(w, x)) for w in p[:3])
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (hidden // heads) ** -0.5
            mask = jnp.tril(jnp.ones((seq, seq), bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
            return dense(p[3], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

        def loss(params, tokens, labels):
            table, positions, blocks, last = params
            x = table[tokens] + positions
            for first, attend, second, up, down in blocks:
                x = x + attention(attend, layer_norm(first, x))
                x = x + dense(down, jax.nn.gelu(dense(up, layer_norm(second, x))))
            return cross_entropy(layer_norm(last, x) @ table.T, labels)

    mesh = Mesh(np.array(jax.devices()), ("d",))
    everywhere, by_sample = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("d",)))

    def train(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    train = jax.jit(train, donate_argnums=0, out_shardings=(everywhere, everywhere))
    params = jax.device_put(params, everywhere)
    x, y = (jax.device_put(part, by_sample) for part in data)
    times = []
    for _ in range(steps_for(model, devices)):
        start = time.perf_counter()
        params, value = train(params, x, y)
        jax.block_until_ready((params, value))
        times.append(time.perf_counter() - start)
    print(json.dumps({"step_seconds": statistics.median(times[1:] or times), "loss": float(value)}))


def table(results, devices, columns):
    lines = ["| model | devices | " + " | ".join(columns) + " | fastest of ours over JAX |", "|" + "---|" * (len(columns) + 3)]
    for model in WORKLOADS:
        for count in devices:
            row = results.get((model, count), {})
            if not row:
                continue
            cells, seconds = [], {}
            for column in columns:
                cell = row.get(column, {"skipped": True})
                if "step_seconds" in cell:
                    seconds[column] = cell["step_seconds"]
                    predicted = cell.get("predicted_seconds")
                    cells.append(f"{cell['step_seconds'] * 1e3:.0f}" + (f" ({predicted * 1e3:.0f})" if predicted else ""))
                else:
                    cells.append("failed" if "error" in cell else "no time")
            ours = [s for column, s in seconds.items() if column != "jax data"]
            ratio = f"{seconds['jax data'] / min(ours):.2f}" if ours and "jax data" in seconds else ""
            lines.append(f"| {model} | {count} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/shardwright")
    parser.add_argument("--output", default="bench_run.json")
    parser.add_argument("--markdown", default="bench_run.md")
    parser.add_argument("--budget", type=float, default=280, help="seconds in all")
    parser.add_argument("--devices", default=None, help="e.g. 16,8,4,2 or a single number")
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--jax-cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.jax_cell:
        return jax_cell(arguments.jax_cell, int(arguments.devices))
    start = time.monotonic()
    left = lambda: arguments.budget - (time.monotonic() - start)
    cores = len(os.sched_getaffinity(0))
    counts = [int(n) for n in arguments.devices.split(",")] if arguments.devices else [n for n in (16, 8, 4, 2) if n <= max(cores, 2)]
    have_jax = subprocess.run([sys.executable, "-c", "import jax"], capture_output=True).returncode == 0
    columns = ["data", "exact", "expert"] + (["jax data"] if have_jax else [])
    results, machines = {}, {}
    folder = Path(tempfile.mkdtemp())
    report = {"cores": cores, "load": os.getloadavg()[0], "cells": []}
    binary = str(Path(arguments.binary).resolve())
    for devices in counts:
        path = folder / f"cpu{devices}.toml"
        probe = [binary, "machine", "probe", "--workers", str(devices), "-o", str(path)]
        machines[devices] = str(path) if subprocess.run(probe, capture_output=True).returncode == 0 else f"cpu:{devices}"
        for model in arguments.models.split(","):
            for column in columns:
                needs = estimate(model, devices, steps_for(model, devices), column == "jax data")
                # One long measurement must not take the time of all that follow.
                if needs > 0.4 * left():
                    cell = {"skipped": f"about {needs:.0f} s needed, {left():.0f} s left"}
                else:
                    solver = WORKLOADS[model][1] if column == "expert" else column
                    try:
                        if column == "jax data":
                            cell = run_jax(model, devices, max(left(), 5))
                        else:
                            cell = run_ours(binary, machines[devices], model, devices, solver, max(left(), 5))
                    except subprocess.TimeoutExpired:
                        cell = {"skipped": "no time left"}
                results.setdefault((model, devices), {})[column] = cell
                report["cells"].append({"model": WORKLOADS[model][0], "devices": devices, "plan": column, **cell})
                shown = cell.get("step_seconds", cell.get("skipped", cell.get("error")))
                print(f"{model:8} {devices:3} devices  {column:8}  {shown}", flush=True)
                Path(arguments.output).write_text(json.dumps(report, indent=1))
                Path(arguments.markdown).write_text(table(results, counts, columns))
    print(table(results, counts, columns))


if __name__ == "__main__":
    main()
