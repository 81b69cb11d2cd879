"""Measures training steps of real models on this machine's cores, beside JAX's data parallelism on as many host devices,
and one thread's VGG-16 beside JAX's and PyTorch's.

Needs the `shardwright` binary and python; columns of JAX and PyTorch stay empty where those are not installed. Results
are kept as JSON (--output) and shown as the tables of docs/benchmarks.md, section "Running" (--markdown), both written
after every measurement. A measurement that the file has is not made again, and one that would not fit the time that is
left (--budget) is left out: so the tables can be filled by several calls.

    python3 scripts/bench_run.py --binary target/release/shardwright --budget 500
    python3 scripts/bench_run.py --budget 500          # goes on where the first stopped
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Model, the plan that an expert would write, and floating-point operations of a step (products and convolutions).
WORKLOADS = {
    "mlp": ("mlp:batch=256,hidden=4096,layers=4,input=4096,classes=10", "model", 0.103e12),
    "alexnet": ("alexnet:batch=64,dropout=0", "owt", 0.27e12),
    "gpt": ("gpt:batch=16,layers=4,hidden=512,heads=8,vocab=8192,seq=256", "megatron", 0.45e12),
    "vgg16": ("vgg16:batch=64,dropout=0", "owt", 5.9e12),
}
COLUMNS = ["data", "exact", "expert", "jax data"]
SERIAL = "vgg16:batch=16,dropout=0"
SERIAL_COLUMNS = ["ours", "jax", "torch"]
FLOPS_PER_DEVICE = 70e9  # A guess, to tell what fits the time; nothing that is printed depends on it.
OTHER = str(Path(__file__).with_name("bench_other.py"))


def step_guess(model, devices):
    return WORKLOADS[model][2] / (devices * FLOPS_PER_DEVICE)


def steps_for(model, devices):
    """More steps where they are short; the first of several is not counted."""
    guess = step_guess(model, devices)
    return 7 if guess < 0.3 else 5 if guess < 1 else 3 if guess < 12 else 2


def estimate(model, devices, column):
    """Seconds that a measurement will take, about: starting up, then the steps."""
    startup = {"mlp": 4, "alexnet": 5, "gpt": 4, "vgg16": 10}[model]
    slower = 2.2 if column == "jax data" else 1.1
    return startup + (6 if column == "jax data" else 0) + steps_for(model, devices) * slower * step_guess(model, devices)


def answer_of(command, timeout, pinned=None):
    """What a measurement prints as JSON, or why there is none. `pinned` is the one core that it may use."""
    if pinned is not None:
        command = ["taskset", "-c", str(pinned), *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(timeout, 5))
    except subprocess.TimeoutExpired:
        return {"skipped": "no time left"}
    if done.returncode != 0:
        return {"error": done.stderr.strip()[-300:]}
    text = done.stdout.strip()
    return json.loads(text if text.startswith("{\n") else text.splitlines()[-1])


def summary(answer):
    """The part of `run --json` that the table needs."""
    if "measured_step_seconds" not in answer:
        return answer
    mean = lambda key: statistics.fmean(d[key] for d in answer["device_times"])
    return {
        "step_seconds": answer["measured_step_seconds"],
        "all_steps": answer["step_seconds"],
        "predicted_seconds": answer["predicted_step_seconds"],
        "busy_seconds": mean("busy_seconds"),
        "communication_seconds": mean("communication_seconds"),
        "idle_seconds": mean("idle_seconds"),
    }


def run_ours(binary, spec, machine, solver, steps, timeout, pinned=None):
    command = [binary, "run", spec, "--machine", machine, "--solver", solver, "--steps", str(steps)]
    return summary(answer_of(command + ["--no-verify", "--json", "--time", "20"], timeout, pinned))


def run_other(engine, spec, devices, steps, timeout, pinned=None):
    command = [sys.executable, OTHER, engine, spec, "--devices", str(devices), "--steps", str(steps)]
    return answer_of(command, timeout, pinned)


def shown(cell):
    if "step_seconds" not in cell:
        return "failed" if "error" in cell else "–"
    predicted = cell.get("predicted_seconds")
    return f"{cell['step_seconds'] * 1e3:.0f}" + (f" ({predicted * 1e3:.0f})" if predicted else "")


def tables(cells):
    """The tables of docs/benchmarks.md."""
    seconds = {key: cell["step_seconds"] for key, cell in cells.items() if "step_seconds" in cell}
    lines = ["| model | devices | data | exact | expert | JAX, data parallel | JAX over the fastest of ours |", "|---|---|---|---|---|---|---|"]
    errors = []
    for model, devices in sorted({key[:2] for key in cells if key[0] in WORKLOADS}, key=lambda k: (list(WORKLOADS).index(k[0]), -k[1])):
        row = [cells.get((model, devices, column), {}) for column in COLUMNS]
        ours = [seconds[(model, devices, c)] for c in COLUMNS[:3] if (model, devices, c) in seconds]
        theirs = seconds.get((model, devices, "jax data"))
        ratio = f"{theirs / min(ours):.2f}" if ours and theirs else ""
        lines.append(f"| {model} | {devices} | " + " | ".join(map(shown, row)) + f" | {ratio} |")
        errors += [abs(c["predicted_seconds"] / c["step_seconds"] - 1) for c in row[:3] if "step_seconds" in c]
    if errors:
        lines += ["", f"Predictions are off by {statistics.median(errors):.0%} in the median and {max(errors):.0%} at worst."]
    serial = {column: cells.get(("serial", 1, column), {}) for column in SERIAL_COLUMNS}
    if any(serial.values()):
        lines += ["", f"{SERIAL}, one thread, ms per step:", "", "| ours | JAX | PyTorch |", "|---|---|---|"]
        lines += ["| " + " | ".join(shown(cell) for cell in serial.values()) + " |"]
    return "\n".join(lines) + "\n"


class Results:
    """All measurements so far, by model, devices and column; on disk after each."""

    def __init__(self, output, markdown):
        self.output, self.markdown, self.cells = Path(output), Path(markdown), {}
        if self.output.exists():
            for cell in json.loads(self.output.read_text())["cells"]:
                self.cells[(cell["model"], cell["devices"], cell["column"])] = cell

    def wants(self, *key):
        return "step_seconds" not in self.cells.get(key, {})

    def put(self, key, cell):
        self.cells[key] = {"model": key[0], "devices": key[1], "column": key[2], "load": os.getloadavg()[0], **cell}
        print(f"{key[0]:8} {key[1]:3} devices  {key[2]:8}  {cell.get('step_seconds', cell)}", flush=True)
        report = {"cores": len(os.sched_getaffinity(0)), "cells": list(self.cells.values())}
        self.output.write_text(json.dumps(report, indent=1))
        self.markdown.write_text(tables(self.cells))


def measure_serial(results, binary, left):
    """One thread each, on a core of its own; at once where there are cores enough, since none shares anything but memory."""
    cores = sorted(os.sched_getaffinity(0))
    started = []
    for i, column in enumerate(SERIAL_COLUMNS):
        if column == "torch" and subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
            continue
        if not results.wants("serial", 1, column) or left() < 40:
            continue
        core = cores[i * len(cores) // len(SERIAL_COLUMNS)] if len(cores) >= 8 else cores[-1]
        if column == "ours":
            command = [binary, "run", SERIAL, "--machine", "cpu:1", "--solver", "data", "--steps", "3", "--no-verify", "--json"]
        else:
            command = [sys.executable, OTHER, column, SERIAL, "--steps", "3"]
        ask = lambda command=command, core=core: summary(answer_of(command, left(), core))
        started.append((column, ask))
    if len(cores) >= 8:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor() as pool:
            answers = [(column, pool.submit(ask)) for column, ask in started]
            started = [(column, answer.result) for column, answer in answers]
    for column, ask in started:
        results.put(("serial", 1, column), ask())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/shardwright")
    parser.add_argument("--output", default="bench_run.json")
    parser.add_argument("--markdown", default="bench_run.md")
    parser.add_argument("--budget", type=float, default=500, help="seconds in all")
    parser.add_argument("--devices", default=None, help="e.g. 16,8,4,2 or a single number")
    parser.add_argument("--models", default="serial," + ",".join(WORKLOADS), help="`serial` is the comparison of one thread")
    arguments = parser.parse_args()
    start = time.monotonic()
    left = lambda: arguments.budget - (time.monotonic() - start)
    cores = len(os.sched_getaffinity(0))
    counts = [int(n) for n in arguments.devices.split(",")] if arguments.devices else [n for n in (16, 8, 4, 2) if n <= max(cores, 2)]
    binary = str(Path(arguments.binary).resolve())
    results = Results(arguments.output, arguments.markdown)
    models = arguments.models.split(",")
    if "serial" in models:
        measure_serial(results, binary, left)
    have_jax = subprocess.run([sys.executable, "-c", "import jax"], capture_output=True).returncode == 0
    columns = COLUMNS if have_jax else COLUMNS[:3]
    # Quick models first, so that a budget that ends early has missed little.
    for model in [model for model in WORKLOADS if model in models]:
        spec, expert, _ = WORKLOADS[model]
        for devices in counts:
            for column in [column for column in columns if results.wants(model, devices, column)]:
                needs = estimate(model, devices, column)
                if needs > left():
                    results.put((model, devices, column), {"skipped": f"about {needs:.0f} s needed, {left():.0f} s left"})
                    continue
                steps = steps_for(model, devices)
                if column == "jax data":
                    cell = run_other("jax", spec, devices, steps, left())
                else:
                    machine = machine_file(binary, devices, Path(arguments.output).parent)
                    cell = run_ours(binary, spec, machine, expert if column == "expert" else column, steps, left())
                results.put((model, devices, column), cell)
    print(tables(results.cells))


def machine_file(binary, devices, folder):
    """What `machine probe` found, measured once."""
    path = folder / f"cpu{devices}.toml"
    if not path.exists():
        probe = [binary, "machine", "probe", "--workers", str(devices), "-o", str(path)]
        if subprocess.run(probe, capture_output=True).returncode != 0:
            return f"cpu:{devices}"
    return str(path)


if __name__ == "__main__":
    main()
