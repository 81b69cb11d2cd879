"""Replays the plans of the zoo, to hold a refactoring to the plans before it.

    scripts/replay.py run BINARY OUT.jsonl [--jobs N] [--machines NAMES] [--limit SECONDS]
                                                                    plans every model on every machine with every strategy
    scripts/replay.py compare BEFORE.jsonl AFTER.jsonl              lists plans whose costs differ

Walks are limited by proposals, not by time, so that plans do not depend on the machine's speed. A plan whose search came near
the time limit is listed, and not compared.
"""

import argparse
import concurrent.futures
import hashlib
import json
import subprocess
import sys
import time

MODELS = [
    "mlp", "lenet5", "alexnet", "vgg16", "resnet101:depth=50", "inception_v3", "densenet121", "rnntc", "rnnlm", "nmt",
    "transformer:layers=2", "bert:layers=2", "gpt:layers=2", "llama:layers=2", "moe:layers=2", "dlrm",
]
MACHINES = ["flat:4", "k80x8", "p100x16", "h100x64"]
STRATEGIES = [
    "auto", "exact", "optcnn", "pase", "mcmc", "place", "soybean", "soybean-time", "data", "model", "owt", "megatron", "fsdp",
]
PROPOSALS = 300


def plan(binary, limit, model, machine, strategy):
    command = [binary, "plan", model, "--machine", machine, "--solver", strategy, "--json", "--threads", "1",
               "--time", str(limit), "--proposals", str(PROPOSALS)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    row = {"model": model, "machine": machine, "strategy": strategy, "seconds": time.monotonic() - start}
    if done.returncode != 0:
        return {**row, "error": done.stderr.strip().splitlines()[-1][:200]}
    found = json.loads(done.stdout)
    configs = json.dumps([op["axes"] for op in found["ops"]]).encode()
    return {
        **row,
        "objective": found["objective"],
        "lower_bound": found["lower_bound"],
        "step_seconds": found["simulated"]["step_seconds"],
        "peak_memory_bytes": found["peak_memory_bytes"],
        "traffic_bytes": found["traffic_bytes"],
        "baselines": {name: cost["objective"] for name, cost in found["baselines"].items()},
        "in_time": found["search_seconds"] < 0.7 * limit,
        "configs": hashlib.sha256(configs).hexdigest()[:16],
    }


def run(args):
    machines = args.machines.split(",")
    cases = [(model, machine, strategy) for machine in machines for model in MODELS for strategy in STRATEGIES]
    with open(args.out, "w") as out, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda case: plan(args.binary, args.limit, *case), cases):
            out.write(json.dumps(row) + "\n")
            out.flush()


def read(path):
    with open(path) as rows:
        return {(row["model"], row["machine"], row["strategy"]): row for row in map(json.loads, rows)}


def compare(args):
    before, after = read(args.before), read(args.after)
    both = [key for key in before if key in after]
    counts = {"identical": 0, "same cost": 0, "cheaper": 0, "dearer": 0, "error": 0, "out of time": 0}
    for key in both:
        old, new = before[key], after[key]
        if "error" in old or "error" in new:
            # Messages name the free memory, which differs.
            same = "error" in old and "error" in new
            counts["identical" if same else "error"] += 1
            if not same:
                print(*key, "|", old.get("error"), "|", new.get("error"))
            continue
        ratio = new["objective"] / old["objective"]
        step = new["step_seconds"] / old["step_seconds"]
        if not (old.get("in_time", True) and new.get("in_time", True)):
            counts["out of time"] += 1
            print(*key, f"out of time: objective x{ratio:.6f} step x{step:.6f}")
            continue
        if old["configs"] == new["configs"] and abs(ratio - 1) < 1e-7 and abs(step - 1) < 1e-7:
            kind = "identical"
        elif abs(ratio - 1) < 1e-6 and abs(step - 1) < 1e-6:
            kind = "same cost"
        else:
            kind = "cheaper" if min(ratio, step) < 1 - 1e-6 and max(ratio, step) < 1 + 1e-6 else "dearer"
        counts[kind] += 1
        if kind not in ("identical", "same cost"):
            print(*key, f"objective x{ratio:.6f} step x{step:.6f} {kind}; {old['seconds']:.1f} s, {new['seconds']:.1f} s")
        for name, cost in old.get("baselines", {}).items():
            other = new.get("baselines", {}).get(name)
            if other is None or abs(other / cost - 1) > 1e-6:
                print(*key, "baseline", name, cost, other)
    seconds = [sum(rows[key]["seconds"] for key in both) for rows in (before, after)]
    print(f"{len(both)} plans: {counts}; {seconds[0]:.0f} s before, {seconds[1]:.0f} s after")
    sys.exit(1 if counts["dearer"] or counts["error"] else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    replay = commands.add_parser("run")
    replay.add_argument("binary")
    replay.add_argument("out")
    replay.add_argument("--jobs", type=int, default=2)
    replay.add_argument("--machines", default=",".join(MACHINES))
    replay.add_argument("--limit", type=float, default=300)
    replay.set_defaults(then=run)
    held = commands.add_parser("compare")
    held.add_argument("before")
    held.add_argument("after")
    held.set_defaults(then=compare)
    args = parser.parse_args()
    args.then(args)


if __name__ == "__main__":
    main()
