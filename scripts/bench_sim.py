"""Prints the tables of docs/benchmarks-simulating.md and docs/benchmarks-measured.md: delta against full simulation, results of the
search on the simulated step, and simulated against measured steps.

Needs only the release build (`shardwright`, and for `delta` the example `delta_table`) and python. `measured` probes this
machine, plans, times the plans' kernels on as many cores at once as there are devices, simulates and runs; it stops after
--budget seconds with the results so far.

    python3 scripts/bench_sim.py --only measured --binary target/release/shardwright --budget 480
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_planning import run_json

ROOT = Path(__file__).resolve().parent.parent

# FlexFlow's models; the paper's batch, where every model has 64 samples but AlexNet.
MODELS = {
    "alexnet": ("alexnet", 256),
    "resnet101": ("resnet101", 64),
    "inception_v3": ("inception_v3", 64),
    "rnntc": ("rnntc:unroll=40", 64),
    "rnnlm": ("rnnlm:unroll=40", 64),
    "nmt": ("nmt:unroll=40", 64),
}
DEVICES = [4, 8, 16, 32, 64]

# What is measured: small enough that a step takes tenths of a second on a few cores.
MEASURED = {
    "mlp": "mlp:batch=256,hidden=2048,layers=4,input=2048,classes=10",
    "lenet5": "lenet5:batch=512",
    "alexnet": "alexnet:batch=32,dropout=0",
    "gpt": "gpt:batch=16,layers=2,hidden=256,heads=8,vocab=4096,seq=128",
    "rnnlm": "rnnlm:batch=64,hidden=512,vocab=4096,seq=8,unroll=8",
}
SOLVERS = ["exact", "data", "owt", "model"]
# How often every plan is run.
ROUNDS = 3


def delta(example, at_once):
    """Microseconds per proposal, both ways on the same proposals."""
    print("| model | devices | tasks | full, µs | delta, µs | ratio | first time, µs | timed anew | accepted |")
    print("|---|---|---|---|---|---|---|---|---|")

    def table(spec):
        return subprocess.run([example, "k80x64", spec], capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(at_once) as pool:
        for name, text in zip(MODELS, pool.map(table, [spec for spec, _ in MODELS.values()])):
            rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
            for row in rows:
                print(f"| {name} | {' | '.join(row[1:])} |", flush=True)


def search(program, seconds, at_once):
    """Simulated steps of the search beside data parallelism, the best other recipe and OptCNN's plan."""
    print("| machine | model | data, ms | best other recipe | optcnn | exact | mcmc | over data | over recipe | over optcnn | search, s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")

    def row(job):
        machine, name = job
        spec, batch = MODELS[name]
        step = {}
        options = ["--machine", machine, "--batch", batch, "--time", seconds]
        options += ["--threads", max(os.cpu_count() // at_once, 1)]
        for solver in ["optcnn", "exact", "mcmc"]:
            try:
                plan = run_json(program, "plan", spec, *options, "--solver", solver)
                step[solver] = plan["simulated"]["step_seconds"]
            except RuntimeError:
                # OptCNN's eliminations leave too much of unrolled nets.
                step[solver] = float("nan")
        known = {recipe: cost["step_seconds"] for recipe, cost in plan["baselines"].items()}
        data = known.pop("data")
        best = min(known, key=known.get)
        shown = [f"{data * 1e3:.1f}", f"{known[best] * 1e3:.1f} ({best})"]
        shown += [f"{step[solver] * 1e3:.1f}" for solver in ["optcnn", "exact", "mcmc"]]
        shown += [f"{other / step['mcmc']:.2f}" for other in [data, known[best], step["optcnn"]]]
        return f"| {machine} | {name} | {' | '.join(shown)} | {plan['search_seconds']:.1f} |".replace("nan", "–")

    jobs = [(machine, name) for machine in ["p100x16", "k80x64"] for name in MODELS]
    with ThreadPoolExecutor(at_once) as pool:
        for line in pool.map(row, jobs):
            print(line, flush=True)


def ranks(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for rank, at in enumerate(order):
        found[at] = float(rank)
    return found


def summary(rows, key):
    errors = [abs(row[key] - row["measured"]) / row["measured"] for row in rows]
    correlation = statistics.correlation(ranks([r[key] for r in rows]), ranks([r["measured"] for r in rows]))
    pairs = kept = 0
    for i, a in enumerate(rows):
        for b in rows[:i]:
            same_run = (a["model"], a["devices"]) == (b["model"], b["devices"])
            # Plans whose measured steps differ by more than noise.
            if same_run and max(a["measured"], b["measured"]) > 1.1 * min(a["measured"], b["measured"]):
                pairs += 1
                kept += (a[key] > b[key]) == (a["measured"] > b["measured"])
    within = sum(error < 0.15 for error in errors)
    return (
        f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}, {within} of {len(rows)} under 15%; "
        f"rank correlation {correlation:.3f}; order of {kept} of {pairs} pairs of plans kept"
    )


def plans_for(program, machine, folder, count, failures):
    """Different plans of the measured models, several made at once."""

    def make(job):
        solver, model = job
        path = folder / f"{model}-{count}-{solver}.json"
        options = ["--machine", machine, "--solver", solver, "--time", 6, "--threads", 2, "-o", path]
        try:
            return job, path, run_json(program, "plan", MEASURED[model], *options, timeout=60)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return job, path, str(error)

    found = {}
    jobs = [(solver, model) for solver in SOLVERS for model in MEASURED]
    with ThreadPoolExecutor(max(os.cpu_count() // 2, 1)) as pool:
        for (solver, model), path, plan in pool.map(make, jobs):
            if isinstance(plan, str):
                failures.append(f"{model} {count} {solver}: {plan}")
            elif all(name != model or plan["ops"] != other["ops"] for (name, _), (other, _) in found.items()):
                found[model, solver] = (plan, path)
    return found


def measured(program, budget, devices, output):
    """Plans, times the plans' kernels on as many cores at once, simulates and runs.

    Which core is slow was seen to change from run to run, so every plan is run in several rounds."""
    begin = time.monotonic()
    left = lambda: budget - (time.monotonic() - begin)
    folder = Path(tempfile.mkdtemp())
    rows, failures, notes = [], [], {}
    for at, count in enumerate(devices):
        # Every size has its share of what is left.
        share = left() / (len(devices) - at)
        until = left() - share
        machine, costs = folder / f"m{count}.toml", folder / f"costs{count}.json"
        notes[count] = {"probe": run_json(program, "machine", "probe", "--workers", count, "-o", machine)}
        plans = plans_for(program, machine, folder, count, failures)
        models = [part for _, path in plans.values() for part in ("-m", path)]
        options = ["-o", costs, "--time", share * 0.4, "--workers", count]
        notes[count]["profile"] = run_json(program, "profile", *options, *models)
        steps, times = {key: [] for key in plans}, {key: [] for key in plans}
        for _ in range(ROUNDS):
            for key, (_, path) in plans.items():
                if left() < until + 3:
                    break
                try:
                    ran = run_json(program, "run", path, "--steps", 4, "--no-verify", timeout=max(left(), 1))
                    steps[key].append(ran["step_seconds"][1:])
                    times[key].extend(ran["device_times"])
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failures.append(f"{key} {count}: {error}")
        for (model, solver), (plan, path) in plans.items():
            if not steps[model, solver]:
                continue
            try:
                rates = run_json(program, "simulate", path, "--full", "--links", "core")["step_seconds"]
                # The same plan, with operator times as they were measured.
                text = json.loads(path.read_text())
                text["request"]["costs"] = str(costs)
                path.write_text(json.dumps(text))
                by = {
                    links: run_json(program, "simulate", path, "--full", "--links", links)
                    for links in ["fifo", "shared", "core"]
                }
                # The same, with cores as uneven as `profile` has found them.
                by["uneven"] = run_json(program, "simulate", path, "--full", "--links", "core", "--uneven")
            except RuntimeError as error:
                failures.append(f"{model} {count} {solver}: {error}")
                continue
            rounds = steps[model, solver]
            mean = lambda key: statistics.fmean(d[key] for d in times[model, solver])
            row = {"model": model, "devices": count, "solver": solver, "rounds": rounds}
            medians = [statistics.median(steps) for steps in rounds]
            row |= {"measured": statistics.median(medians), "apart": max(medians) / min(medians) - 1}
            row |= {links: answer["step_seconds"] for links, answer in by.items()}
            parts = {key: statistics.fmean(d[key] for d in by["uneven"]["devices"]) for key in ["busy", "exposed_comm"]}
            row |= {"rates": rates, "computing": parts["busy"], "busy": mean("busy_seconds")}
            row |= {"moving": parts["exposed_comm"], "moved": mean("communication_seconds")}
            row |= {"waiting": by["uneven"]["step_seconds"] - parts["busy"] - parts["exposed_comm"]}
            rows.append(row | {"waited": mean("idle_seconds")})
        if output:
            Path(output).write_text(json.dumps({"rows": rows, "failures": failures, "notes": notes}, indent=1))
        print(f"{count} devices after {time.monotonic() - begin:.0f} s", flush=True)
    print("\n| model | devices | plan | measured, ms | rounds apart | simulated | error | computing: simulated | measured | moving: simulated | measured | waiting: simulated | measured |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda r: (r["model"], r["devices"], r["solver"])):
        ms = lambda key: f"{row[key] * 1e3:.1f}"
        cells = [row["model"], row["devices"], row["solver"], ms("measured"), f"{row['apart']:.0%}", ms("uneven")]
        cells += [f"{row['uneven'] / row['measured'] - 1:+.0%}"]
        cells += [ms(key) for key in ["computing", "busy", "moving", "moved", "waiting", "waited"]]
        print(f"| {' | '.join(map(str, cells))} |")
    if len(rows) > 2:
        apart = [row["apart"] for row in rows if len(row["rounds"]) > 1]
        print(f"\nOne core per device, measured kernels, uneven cores (the table): {summary(rows, 'uneven')}.")
        if apart:
            print(f"Rounds of the same plan differ by {statistics.median(apart):.0%} in the median, {max(apart):.0%} at most.")
        print(f"The same with equal cores: {summary(rows, 'core')}.")
        print(f"Equal cores, and rates of the probe instead of measured kernels: {summary(rows, 'rates')}.")
        print(f"Communication beside computing, fifo links: {summary(rows, 'fifo')}.")
        print(f"The same, shared links: {summary(rows, 'shared')}.")
    for failure in failures:
        print(f"failed: {failure}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["delta", "search", "measured"])
    parser.add_argument("--binary", default=ROOT / "target/release/shardwright")
    parser.add_argument("--example", default=ROOT / "target/release/examples/delta_table")
    parser.add_argument("--budget", type=float, default=480, help="seconds for `measured`")
    parser.add_argument("--devices", default="2,4,8,16", help="sizes for `measured`")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of each search")
    parser.add_argument("--at-once", type=int, default=1, help="how many searches or models at once, on cores of their own")
    parser.add_argument("--output", help="where `measured` writes its numbers as JSON")
    args = parser.parse_args()
    if args.only in (None, "delta"):
        delta(args.example, args.at_once)
    if args.only in (None, "search"):
        search(args.binary, args.seconds, args.at_once)
    if args.only in (None, "measured"):
        measured(args.binary, args.budget, [int(n) for n in args.devices.split(",")], args.output)


if __name__ == "__main__":
    main()
