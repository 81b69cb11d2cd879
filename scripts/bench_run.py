"""Measures training steps of real models on this machine's cores, beside JAX's data parallelism on the same number of host devices,
and one thread's VGG-16 beside JAX's and PyTorch's.

Needs the `shardwright` binary and python; columns of JAX and PyTorch stay empty where those are not installed. Ours are
predicted from `machine probe` and `profile` of the plans' own ops, made just before. Results are kept as JSON (--output) and shown as the tables of docs/benchmarks-running.md (--markdown), both written
after every measurement. Existing measurements are not repeated, and those that would exceed the remaining time (--budget)
are skipped, so several calls can fill the tables.

    python3 scripts/bench_run.py --binary target/release/shardwright --budget 500
    python3 scripts/bench_run.py --budget 500          # goes on where the first stopped
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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


def answer_of(command, timeout, cores=()):
    """What a measurement prints as JSON, or why there is none; on these cores, if some are given."""
    if cores:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
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


class Ours:
    """Plans and runs with our own binary; what is measured of the machine is measured once and kept beside the results."""

    def __init__(self, binary, folder, profile_seconds):
        self.binary, self.folder, self.profile_seconds = str(Path(binary).resolve()), folder, profile_seconds

    def call(self, *arguments, timeout=120):
        """Whether a command did what it should."""
        try:
            return subprocess.run([self.binary, *arguments], capture_output=True, timeout=timeout).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def machine(self, devices):
        """What `machine probe` found."""
        path = self.folder / f"cpu{devices}.toml"
        probed = path.exists() or self.call("machine", "probe", "--workers", str(devices), "-o", str(path))
        return str(path) if probed else f"cpu:{devices}"

    def plan(self, model, devices, solver, *more):
        """A plan file; none where planning failed."""
        path = self.folder / f"{model}-{devices}-{solver}.json"
        arguments = ["plan", WORKLOADS[model][0], "--machine", self.machine(devices), "--solver", solver, "--time", "20"]
        return str(path) if self.call(*arguments, "-o", str(path), *more) else None

    def costs(self, model, devices):
        """Times of the ops that the plans' devices run, on as many cores at once; none where that is not wanted."""
        path = self.folder / f"{model}-{devices}-costs.json"
        if self.profile_seconds > 0 and not path.exists():
            plans = [self.plan(model, devices, solver) for solver in ("data", "exact", WORKLOADS[model][1])]
            named = [part for plan in plans if plan for part in ("-m", plan)]
            limit = self.profile_seconds * (3 if model == "vgg16" else 1)
            self.call("profile", *named, "--workers", str(devices), "--time", str(limit), "-o", str(path), timeout=limit + 60)
        return ["--costs", str(path)] if path.exists() else []

    def command(self, model, devices, solver):
        """What runs a model's plan; none where planning failed."""
        plan = self.plan(model, devices, solver, *self.costs(model, devices))
        steps = str(steps_for(model, devices))
        return plan and [self.binary, "run", plan, "--steps", steps, "--no-verify", "--json"]


def shown(cell, with_prediction=True):
    if "step_seconds" not in cell:
        return "failed" if "error" in cell else "–"
    predicted = cell.get("predicted_seconds") if with_prediction else None
    return f"{cell['step_seconds'] * 1e3:.0f}" + (f" ({predicted * 1e3:.0f})" if predicted else "")


def tables(cells):
    """The tables of docs/benchmarks-running.md."""
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
        lines += ["| " + " | ".join(shown(cell, with_prediction=False) for cell in serial.values()) + " |"]
    return "\n".join(lines) + "\n"


class Results:
    """All measurements so far, by model, devices and column; on disk after each."""

    def __init__(self, output, markdown):
        self.output, self.markdown, self.cells = Path(output), Path(markdown), {}
        self.lock = threading.Lock()
        if self.output.exists():
            for cell in json.loads(self.output.read_text())["cells"]:
                self.cells[(cell["model"], cell["devices"], cell["column"])] = cell

    def wants(self, *key):
        return "step_seconds" not in self.cells.get(key, {})

    def put(self, key, cell):
        with self.lock:
            self.write(key, cell)

    def write(self, key, cell):
        self.cells[key] = {"model": key[0], "devices": key[1], "column": key[2], "load": os.getloadavg()[0], **cell}
        print(f"{key[0]:8} {key[1]:3} devices  {key[2]:8}  {cell.get('step_seconds', cell)}", flush=True)
        report = {"cores": len(os.sched_getaffinity(0)), "cells": list(self.cells.values())}
        self.output.write_text(json.dumps(report, indent=1))
        self.markdown.write_text(tables(self.cells))


def measure_at_once(results, jobs, lanes, left):
    """Runs (key, command) jobs, some at once, each on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    free = queue.Queue()
    for lane in range(lanes):
        free.put(cores[lane * len(cores) // lanes : (lane + 1) * len(cores) // lanes])

    def measure(key, command, count):
        mine = free.get()
        try:
            results.put(key, summary(answer_of(command, left(), mine[:count])))
        finally:
            free.put(mine)

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(lambda job: measure(*job), jobs))


def measure_serial(results, binary, left):
    """One thread each: at once where there are cores enough, since they share nothing but memory."""
    ours = [binary, "run", SERIAL, "--machine", "cpu:1", "--solver", "data", "--steps", "3", "--no-verify", "--json"]
    jobs = []
    for column in SERIAL_COLUMNS:
        if results.wants("serial", 1, column) and left() > 40 and (column == "ours" or installed(column)):
            command = ours if column == "ours" else [sys.executable, OTHER, column, SERIAL, "--steps", "3"]
            jobs.append((("serial", 1, column), command, 1))
    measure_at_once(results, jobs, 3 if len(os.sched_getaffinity(0)) >= 8 else 1, left)


def measure_model(results, ours, model, devices, columns, left):
    """All columns of one line of the table. VGG-16 takes minutes on few devices: there, columns are measured at once."""
    lanes = max(len(os.sched_getaffinity(0)) // devices, 1) if model == "vgg16" else 1
    needed, jobs = 0, []
    for column in [column for column in columns if results.wants(model, devices, column)]:
        key = (model, devices, column)
        needs = estimate(model, devices, column)
        needed = needed + needs if lanes == 1 else max(needed, needs)
        if needed > left():
            results.put(key, {"skipped": f"about {needs:.0f} s needed, {left():.0f} s left"})
            continue
        spec, expert, _ = WORKLOADS[model]
        if column == "jax data":
            steps = str(steps_for(model, devices))
            command = [sys.executable, OTHER, "jax", spec, "--devices", str(devices), "--steps", steps]
        else:
            command = ours.command(model, devices, expert if column == "expert" else column)
        if command:
            jobs.append((key, command, devices))
        else:
            results.put(key, {"error": "cannot be planned"})
    measure_at_once(results, jobs, min(lanes, len(columns)), left)


def installed(module):
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/shardwright")
    parser.add_argument("--output", default="bench_run.json")
    parser.add_argument("--markdown", default="bench_run.md")
    parser.add_argument("--budget", type=float, default=500, help="seconds in all")
    parser.add_argument("--profile", type=float, default=12, help="seconds for measuring the ops of a model's plans; 0 to predict without")
    parser.add_argument("--devices", default=None, help="e.g. 16,8,4,2 or a single number")
    parser.add_argument("--models", default="serial," + ",".join(WORKLOADS), help="`serial` is the comparison of one thread")
    arguments = parser.parse_args()
    start = time.monotonic()
    left = lambda: arguments.budget - (time.monotonic() - start)
    cores = len(os.sched_getaffinity(0))
    counts = [int(n) for n in arguments.devices.split(",")] if arguments.devices else [n for n in (16, 8, 4, 2) if n <= max(cores, 2)]
    results = Results(arguments.output, arguments.markdown)
    ours = Ours(arguments.binary, Path(arguments.output).resolve().parent, arguments.profile)
    models = arguments.models.split(",")
    if "serial" in models:
        measure_serial(results, ours.binary, left)
    columns = COLUMNS if installed("jax") else COLUMNS[:3]
    # Quick models first, so that a budget that ends early has missed little.
    for model in [model for model in WORKLOADS if model in models]:
        for devices in counts:
            measure_model(results, ours, model, devices, columns, left)
    print(tables(results.cells))


if __name__ == "__main__":
    main()
