"""Prints the tables of recomputation op by op: against published heuristics, and against an integer program.

usage: bench_recompute.py [--only heuristics|checkmate|milp] [--seconds S] [--program PATH] [--profile release|dev]

Heuristics: the example `recompute_table`, one device. Integer programs, both by HiGHS: one of our own that knows nothing of the
planner's network (checkmate.py, on the tables of the example `keep_tables`, one device), and the network of configs and keep states
itself (`shardwright network --recompute-policy ops`, bench_highs.py). Any optimum that differs from a proved one ends the run with
an error. Without highspy its columns say so.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

SCRIPTS = pathlib.Path(__file__).resolve().parent
CASES = [
    ("mlp:batch=512,input=64,hidden=64,layers=4", "flat:1", [90, 75, 60]),
    ("mlp:batch=512,input=64,hidden=64,layers=3", "flat:2", [90, 75, 60]),
    ("lenet5:batch=256", "flat:1", [95, 85]),
    ("gpt:batch=4,layers=1,hidden=32,heads=4,vocab=64,seq=64", "flat:1", [90, 75]),
]


CHECKMATE = [
    ("mlp:batch=512,input=64,hidden=64,layers=2", [90, 75, 60]),
    ("mlp:batch=128,input=16,hidden=96,layers=4", [90, 80, 70]),
    ("lenet5:batch=64,image=12,width=0.5", [90, 80, 70]),
    ("rnnlm:batch=16,unroll=2,hidden=16,vocab=32", [90, 80]),
    ("gpt:batch=4,layers=1,hidden=32,heads=4,vocab=64,seq=64", [90, 80]),
]


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def milp(program, seconds):
    print("| model | devices | limit | choices | ours | proved | HiGHS |")
    print("|---|---|---|---|---|---|---|")
    has_highs = importlib.util.find_spec("highspy") is not None
    if not has_highs:
        print("highspy is not installed (pip install highspy numpy): the HiGHS column stays empty", file=sys.stderr)
    for model, machine, percents in CASES:
        options = [model, "--machine", machine]
        free = json.loads(run(program, "plan", *options, "--solver", "exact", "--memory", "none", "--json"))
        for percent in percents:
            limit = free["peak_memory_bytes"] * percent // 100
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder, "network.json")
                run(program, "network", *options, "--memory", f"{limit}B", "--recompute-policy", "ops", "-o", file)
                nodes = json.loads(file.read_text())["problem"]["nodes"]["costs"]
                ours = json.loads(run(program, "solve", file, "--time", seconds, "--json"))
                theirs = "-"
                if has_highs:
                    found = json.loads(run(sys.executable, SCRIPTS / "bench_highs.py", file, seconds))
                    theirs = found.get("cost")
                    if ours["proved_optimal"] and found["optimal"] and theirs != ours["cost"]:
                        sys.exit(f"{model} on {machine} at {percent}%: {ours['cost']}, and HiGHS {theirs}")
            print(
                f"| {model} | {free['devices']} | {percent}% | {sum(len(costs) for costs in nodes)} | {ours['cost']} | "
                f"{ours['proved_optimal']} | {theirs} |",
                flush=True,
            )


def checkmate(example, seconds):
    import checkmate as program

    print("| model | limit | ours | proved | local search | integer program | early clones |")
    print("|---|---|---|---|---|---|---|")
    for model, percents in CHECKMATE:
        tables = json.loads(run(*example("keep_tables"), model, *percents))
        more = lambda time: f"+{100 * time / tables['kept']['time'] - 100:.3f}%" if isinstance(time, int) else time or "-"
        for percent, ours, proved, *others in program.compare(tables, seconds):
            print("|", " | ".join([model, f"{percent}%", more(ours), str(proved), *map(more, others)]), "|", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["heuristics", "checkmate", "milp"])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--program", default="target/release/shardwright")
    parser.add_argument("--profile", default="release")
    args = parser.parse_args()

    def example(name):
        cargo = ["cargo", "run", "--profile", args.profile, "--locked", "--quiet", "-p", "shardwright-strategies"]
        return [*cargo, "--example", name, "--"]

    if args.only in (None, "heuristics"):
        subprocess.run([*example("recompute_table"), str(args.seconds)], check=True)
    if args.only in (None, "checkmate"):
        if importlib.util.find_spec("highspy") is None:
            print("highspy is not installed (pip install highspy numpy): no integer program", file=sys.stderr)
        else:
            checkmate(example, args.seconds)
    if args.only in (None, "milp"):
        milp(args.program, args.seconds)


if __name__ == "__main__":
    main()
