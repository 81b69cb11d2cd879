"""Prints the tables of docs/benchmarks-planning.md: predicted steps and search times.

Runs the release build's `shardwright plan --solver exact --json`. Predicted times are the cost model's step times without
overlap, as in the papers that the tables stand beside (`scripts/bench sim` has simulated ones); search times are wall time
of building and solving the problem on this machine, with the processor time of the whole program beside them.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/shardwright"


def run_json(program, *args, timeout=None):
    command = [*map(str, [program, *args]), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr.strip()[-300:]}")
    return json.loads(run.stdout)


def plan(model, machine, batch, program, *more):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = run_json(program, "plan", model, "--machine", machine, "--batch", batch, "--solver", "exact", *more)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer["cpu"] = after.ru_utime - before.ru_utime
    return answer


def without_overlap(of):
    """Seconds of a step in which nothing overlaps."""
    return of["objective"] / 1e12


def milliseconds(seconds):
    return f"{seconds * 1e3:.1f}"


def optcnn(program):
    print("| model | exact, ms (computing + communicating) | data | model | owt | optcnn | sent by exact, GB | by data | by owt |")
    print("|---|---|---|---|---|---|---|---|---|")
    counted = []
    for model in ["alexnet", "vgg16", "inception_v3"]:
        rows = run_json(program, "compare", model, "--machine", "p100x16", "--batch", 512, "--solver", "exact,data,model,owt,optcnn")["rows"]
        row = {r["solver"]: r for r in rows}
        layers = plan(model, "p100x16", 512, program)["layers"]
        total = lambda key: milliseconds(sum(layer[key] for layer in layers))
        step = without_overlap(row["exact"])
        seconds = lambda name: without_overlap(row[name])
        ratio = lambda name: f"{milliseconds(seconds(name))} ({seconds(name) / step:.2f}x)"
        sent = lambda name: f"{row[name]['traffic_bytes'] / 1e9:.2f}"
        print(
            f"| {model} | {milliseconds(step)} ({total('compute_seconds')} + "
            f"{total('comm_seconds')}) | {ratio('data')} | {ratio('model')} | {ratio('owt')} | "
            f"{ratio('optcnn')} | {sent('exact')} | {sent('data')} | {sent('owt')} |",
            flush=True,
        )
        names = ["exact", "optcnn", "data", "model", "owt"]
        counted.append(f"| {model} | " + " | ".join(f"{row[name]['optcnn_bytes'] / 2**30:.2f}" for name in names) + " |")
    print("\nBy OptCNN's counting, GiB:\n\n| model | exact | optcnn | data | model | owt |\n|---|---|---|---|---|---|")
    print("\n".join(counted))


def pase(program):
    print("| machine | model | 4 | 8 | 16 | 32 | 64 |")
    print("|---|---|---|---|---|---|---|")
    for machine in ["1080tix64", "2080tix64"]:
        for model, batch in [("alexnet", 128), ("inception_v3", 128), ("rnnlm", 64), ("transformer", 64)]:
            cells = []
            for devices in [4, 8, 16, 32, 64]:
                p = plan(model, f"{machine}:{devices}", batch, program)
                ratio = without_overlap(p["baselines"]["data"]) / without_overlap(p)
                cells.append(f"{ratio:.2f}" + ("" if p["proved_optimal"] else "?"))
            print(f"| {machine} | {model} | {' | '.join(cells)} |", flush=True)


def search(program):
    """Every family. Where axes are merged: the gap there, what refining gained, and the gap on all axes."""
    print("| model | 4 devices | 16 | 64 | 512 |")
    print("|---|---|---|---|---|")
    models = [family["name"] for family in run_json(program, "models")] + ["gpt:layers=96,hidden=2048,heads=16"]
    for model in models:
        cells = []
        for devices in [4, 16, 64, 512]:
            p = plan(model, f"h100x4096:{devices}", 512, program, "--time", 20)
            cell = f"{p['search_seconds']:.2f} s ({p['cpu']:.2f})"
            coarse = p["space"].get("coarse")
            if coarse:
                gained = 1 - p["objective"] / coarse["objective"]
                cell += f" g {coarse['gap']:.2%}, refined {-gained:.1%}, {p['gap']:.1%}"
            else:
                cell += (" " if p["space"]["prime_axes"] else " g ") + f"{p['gap']:.2%}"
            cells.append(cell)
        print(f"| {model} | {' | '.join(cells)} |", flush=True)


def soybean(program):
    print("| model | batch | data, ms | owt | soybean | soybean-time | exact | sent by data, GB | by soybean | elements, data | soybean |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for model in ["alexnet", "vgg16"]:
        for batch in [128, 256, 512]:
            rows = run_json(program, "compare", model, "--machine", "k80x8", "--batch", batch, "--solver", "data,owt,soybean,soybean-time,exact")["rows"]
            row = {r["solver"]: r for r in rows}
            seconds = lambda name: without_overlap(row[name])
            ratio = lambda name: f"{milliseconds(seconds(name))} ({seconds('data') / seconds(name):.2f}x)"
            sent = lambda name: f"{row[name]['traffic_bytes'] / 1e9:.2f}"
            elements = lambda name: f"{row[name]['soybean_elements'] / 1e6:.1f} M"
            print(
                f"| {model} | {batch} | {milliseconds(seconds('data'))} | {ratio('owt')} | {ratio('soybean')} | "
                f"{ratio('soybean-time')} | {ratio('exact')} | {sent('data')} | {sent('soybean')} | {elements('data')} | "
                f"{elements('soybean')} |",
                flush=True,
            )
    print("\n| model | ops | elements per cut | total | step over data's | search, s |")
    print("|---|---|---|---|---|---|")
    for family in run_json(program, "models"):
        p = run_json(program, "plan", family["name"], "--machine", "k80x8", "--solver", "soybean")
        cuts = ", ".join(str(cut) for cut in p["soybean"]["cuts"])
        ratio = without_overlap(p) / without_overlap(p["baselines"]["data"])
        print(
            f"| {family['name']} | {len(p['ops'])} | {cuts} | {p['soybean']['total_elements']} | {ratio:.2f} | "
            f"{p['search_seconds']:.2f} |",
            flush=True,
        )


def untied(program):
    """Layers that choose together against ops that choose for themselves."""
    print("| model | machine | tied: layers, configs | CPU s | step | untied: ops, configs | CPU s | step |")
    print("|---|---|---|---|---|---|---|---|")
    jobs = [("vgg16", 512, "p100x16")] + [(model, 128, machine) for model in ["gpt", "bert"] for machine in ["p100x16", "h100x64"]]
    for model, batch, machine in jobs:
        cells = []
        for options in [[], ["--untied"]]:
            try:
                p = plan(model, machine, batch, program, "--time", 40, *options)
            except RuntimeError as error:  # Many ops with many configs on a slow machine: the others are still worth their rows.
                print(error, file=sys.stderr)
                cells += ["–", "–", "no plan within 40 s"]
                continue
            proved = "proved" if p["proved_optimal"] else "not proved"
            cells += [f"{p['space']['variables']}, {p['space']['choices']}", f"{p['cpu']:.1f}"]
            cells += [f"{milliseconds(without_overlap(p))} ms, {proved}"]
        print(f"| {model} | {machine} | {' | '.join(cells)} |", flush=True)


GAP_MODELS = [
    ("alexnet", 512, []),
    ("vgg16", 512, []),
    ("resnet101", 512, []),
    ("inception_v3", 512, []),
    ("rnnlm", 512, []),
    ("transformer", 512, []),
    ("bert", 512, []),
    ("gpt:layers=24,hidden=2048,heads=16", 256, []),
    ("llama3-8b", 64, ["--untied"]),
]


def gaps(program):
    """Proved gaps of the sum on prime axes, with the default memory limit and time limit."""
    print("| model | batch | machine | objective, ms | on merged axes | lower bound | gap | bounding, s | search, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, batch, options in GAP_MODELS:
        for machine in ["h100x64", "a100x64", "h100x4096:512"]:
            try:
                p = plan(model, machine, batch, program, *options)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                continue
            coarse = p["space"].get("coarse")
            gap = "–" if p["gap"] is None else f"{p['gap']:.1%}"
            merged = milliseconds(without_overlap(coarse)) if coarse else "–"
            print(
                f"| {' '.join([model, *options])} | {batch} | {machine} | {milliseconds(without_overlap(p))} | {merged} | "
                f"{milliseconds(p['lower_bound'] / 1e12)} | {gap} | {p['stages']['bound_seconds']:.1f} | {p['search_seconds']:.1f} |",
                flush=True,
            )


def print_tables(description, tables):
    """The tables that the command line asks for, one after the other."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", choices=tables)
    parser.add_argument("--program", default=PROGRAM, help="the program to run")
    args = parser.parse_args()
    for name, table in tables.items():
        if args.only in (None, name):
            print(f"\n{name}\n")
            table(args.program)


if __name__ == "__main__":
    print_tables(__doc__, {"optcnn": optcnn, "pase": pase, "soybean": soybean, "search": search, "untied": untied, "gaps": gaps})
