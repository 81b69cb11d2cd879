"""Prints the tables of docs/scale.md and draws its plots: planning cost by number of ops and devices.

Runs the release build's `shardwright plan --json`, one size after the other, and reports the stages that it times itself, the
processor time of the whole program and its peak memory. The exponent of a stage is computed from two neighbouring
sizes: 1 is linear, 2 is quadratic.
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/shardwright"
STAGES = ["build", "solve", "refine", "describe", "polish"]


def series_parallel(ops, path, width=256, batch=256):
    """A forward pass of about `ops` ops: chains and branches that are added up again, at random, seeded."""
    rng = random.Random(ops)
    graph = {"format": "shardwright-graph", "version": 1, "name": f"series-parallel-{ops}", "tensors": [], "ops": []}
    kind = f"f32[{batch},{width}]"

    def tensor(name, type_, role, **more):
        graph["tensors"].append({"name": name, "type": type_, "role": role, **more})
        return len(graph["tensors"]) - 1

    def op(attributes, inputs):
        name = f"{attributes['kind']}{len(graph['ops'])}"
        out = tensor(name, kind, "activation")
        layer = len(graph["ops"])
        graph["ops"].append(
            {"name": name, "op": attributes, "inputs": inputs, "outputs": [out], "layer": layer, "phase": "forward"}
        )
        return out

    def grow(x, budget):
        """Replaces an edge by a series or by two branches, until the ops are spent."""
        while budget > 0:
            choice = rng.random()
            if budget >= 4 and choice < 0.3:
                inside = rng.randint(2, budget - 1) if budget < 64 else rng.randint(2, 32)
                left = rng.randint(1, inside - 1)
                x = op({"kind": "binary", "f": "add"}, [grow(x, left), grow(x, inside - left)])
                budget -= inside + 1
            elif choice < 0.7:
                weight = tensor(f"w{len(graph['ops'])}", f"f32[{width},{width}]", "parameter", init={"normal": 0.1})
                x = op({"kind": "contract", "spec": "mk,kn->mn"}, [x, weight])
                budget -= 1
            else:
                x = op({"kind": "unary", "f": "relu"}, [x])
                budget -= 1
        return x

    graph["outputs"] = [grow(tensor("x", kind, "input", init={"normal": 1.0}), ops)]
    graph |= {"layers": list(range(len(graph["ops"]))), "gradients": [], "carries": []}
    path.write_text(json.dumps(graph))
    return path


def measure(model, machine, *more):
    """One plan: its stages in seconds, processor time as the system tells it, and peak memory as the program does: the system counts what
    this one held when it started the other."""
    command = [PROGRAM, "plan", model, "--machine", machine, "--json", *map(str, more)]
    with tempfile.TemporaryFile() as out:
        run = subprocess.Popen(command, stdout=out)
        _, status, used = os.wait4(run.pid, 0)
        if status != 0:
            raise SystemExit(f"{' '.join(map(str, command))}: status {status}")
        out.seek(0)
        plan = json.load(out)
    row = {stage: plan["stages"][f"{stage}_seconds"] for stage in STAGES}
    row["ops"], row["devices"] = len(plan["ops"]), plan["devices"]
    row["total"] = plan["search_seconds"]
    row["cpu"] = used.ru_utime + used.ru_stime
    row["memory"] = plan["planning_memory_bytes"] / 1e6
    return row


def exponent(rows, key, of):
    """How steep the last doubling or so is; none where times are too short to say."""
    (a, b) = rows[-2:]
    if min(a[key], b[key]) < 0.02 or a[of] == b[of]:
        return "–"
    return f"{math.log(b[key] / a[key]) / math.log(b[of] / a[of]):.2f}"


def table(title, rows, of):
    print(f"\n### {title}\n")
    print(f"| {of} | " + " | ".join(f"{s}, s" for s in STAGES) + " | whole, s | processor, s | memory, MB |")
    print("|---" * (len(STAGES) + 4) + "|")
    for row in rows:
        stages = " | ".join(f"{row[s]:.2f}" for s in STAGES)
        print(f"| {row[of]} | {stages} | {row['total']:.2f} | {row['cpu']:.2f} | {row['memory']:.0f} |")
    if len({row[of] for row in rows}) > 1:
        steep = " | ".join(exponent(rows, s, of) for s in [*STAGES, "total", "cpu", "memory"])
        print(f"| exponent | {steep} |", flush=True)


COLOURS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#9498a0"]


def plot(path, title, curves, of, key, unit):
    """A small SVG, both axes logarithmic: one curve for each name."""
    points = [(row[of], max(row[key], 1e-3)) for rows in curves.values() for row in rows]
    left, top, width, height = 60, 30, 420, 250
    bounds = [(math.floor(math.log10(min(c))), math.ceil(math.log10(max(c)))) for c in zip(*points)]
    (x0, x1), (y0, y1) = [(low, max(high, low + 1)) for low, high in bounds]
    across = lambda v: left + width * (math.log10(v) - x0) / (x1 - x0)
    up = lambda v: top + height * (1 - (math.log10(max(v, 1e-3)) - y0) / (y1 - y0))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 330" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="330" fill="white"/>',
        f'<text x="{left}" y="18" font-size="14">{title}</text>',
    ]
    for e in range(x0, x1 + 1):
        x = across(10**e)
        out.append(f'<path d="M{x:.1f} {top}V{top + height}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{10**e:g}</text>')
    for e in range(y0, y1 + 1):
        y = up(10.0**e)
        out.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**e:g}</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 34}" text-anchor="middle">{of}</text>')
    out.append(f'<text x="14" y="{top + height / 2}" transform="rotate(-90 14 {top + height / 2})" text-anchor="middle">{unit}</text>')
    ends = []
    for (name, rows), colour in zip(curves.items(), COLOURS):
        line = " ".join(f"{across(r[of]):.1f},{up(r[key]):.1f}" for r in rows)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        ends.append((up(rows[-1][key]) + 4, across(rows[-1][of]) + 6, name, colour))
    # Names from top to bottom, each below the one before.
    above = -math.inf
    for y, x, name, colour in sorted(ends):
        above = max(y, above + 13)
        out.append(f'<text x="{x:.1f}" y="{above:.1f}" fill="{colour}">{name}</text>')
    out.append("</svg>")
    path.write_text("\n".join(out) + "\n")


def against_ops(largest, seconds):
    """The same kinds of model, ten times as large each time."""
    curves = {"GPT": [], "MLP": [], "series-parallel": []}
    sizes = [n for n in [100, 1000, 10_000, 100_000] if n <= largest]
    with tempfile.TemporaryDirectory() as folder:
        for ops in sizes:
            limits = ["--time", seconds]
            gpt = f"gpt:layers={min(1000, max(1, round(ops / 83)))}"
            curves["GPT"].append(measure(gpt, "h100x64", "--batch", 64, *limits))
            mlp = f"mlp:layers={max(1, round(ops / 9))}"
            curves["MLP"].append(measure(mlp, "h100x64", "--batch", 64, *limits))
            graph = series_parallel(ops, Path(folder) / f"sp{ops}.json")
            curves["series-parallel"].append(measure(graph, "h100x64", *limits))
    for name, rows in curves.items():
        table(f"{name} on 64 H100", rows, "ops")
    return curves


def against_devices(most, seconds):
    """One model on more and more devices."""
    rows = []
    for devices in [2, 8, 32, 128, 512, 2048, 4096]:
        if devices <= most:
            rows.append(measure("gpt:layers=24,hidden=2048,heads=16", f"h100x4096:{devices}", "--batch", 4096, "--time", seconds))
    table("GPT of 24 layers, batch 4096", rows, "devices")
    return {"GPT, 24 layers": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["ops", "devices", "large"])
    parser.add_argument("--ops", type=int, default=100_000, help="the largest graphs")
    parser.add_argument("--devices", type=int, default=4096, help="the largest machine")
    parser.add_argument("--time", type=float, default=60, help="seconds for the search of each plan")
    parser.add_argument("--plots", type=Path, help="draw the plots into this folder")
    args = parser.parse_args()
    cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
    load = os.getloadavg()[0]
    print(f"{cpu}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} before, {datetime.date.today()}.")
    if args.only in (None, "ops"):
        curves = against_ops(args.ops, args.time)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plot(args.plots / "scale-ops.svg", "Planning for 64 devices", curves, "ops", "cpu", "processor seconds")
            plot(args.plots / "scale-memory.svg", "Memory of planning", curves, "ops", "memory", "MB")
    if args.only in (None, "devices"):
        curves = against_devices(args.devices, args.time)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plot(args.plots / "scale-devices.svg", "Planning a GPT of 24 layers", curves, "devices", "cpu", "processor seconds")
    if args.only in (None, "large"):
        rows = [measure(f"gpt:layers=128{size}", "h100x4096", "--batch", 4096) for size in ["", ",hidden=12288,heads=96"]]
        table("GPT of 128 layers on 4096 H100, 768 and 12288 wide", rows, "ops")


if __name__ == "__main__":
    main()
