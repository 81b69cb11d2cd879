"""Prints the tables of docs/benchmarks.md, section "Whole layers on devices": placements and scheduling assistants, simulated.

Runs the release build's `plan --solver place --json` and `simulate --json`.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from bench_planning import PROGRAM, milliseconds, run_json

MODELS = [
    ("nmt:unroll=10,seq=10", 64),
    ("inception_v3", 64),
    ("rnnlm:unroll=10,seq=10", 64),
    ("moe", 64),
    ("dlrm", 2048),
]
# Of a P100.
MEMORY = 16 * 2**30
BASELINES = ["single", "round-robin", "chunks"]


def metis_steps(model, batch, counts):
    """METIS's placements, which come from an example of the simulator: the program itself does without METIS."""
    spec = f"{model}{',' if ':' in model else ':'}batch={batch}"
    example = PROGRAM.parent / "examples" / "metis_steps"
    answer = subprocess.run([example, spec, *(f"p100x16:{n}" for n in counts)], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


def placements(program, counts, time):
    print("| model | devices | " + " | ".join(f"{b}, ms" for b in BASELINES) + " | METIS, ms | place, ms | over the best plain one | cut, MB | imbalance | by |")
    print("|---|---|" + "---|" * (len(BASELINES) + 6))
    for model, batch in MODELS:
        for devices, metis in zip(counts, metis_steps(model, batch, counts)):
            p = run_json(program, "plan", model, "--machine", f"p100x16:{devices}", "--batch", batch, "--solver", "place", "--time", time)
            rows = {row["name"]: row for row in p["placements"]}
            own = rows["place"]
            # What does not fit into a device is no competitor, unless nothing fits.
            fits = lambda row: row["peak_memory_bytes"] <= max(MEMORY, own["peak_memory_bytes"])
            steps = {name: rows[name]["step_seconds"] for name in BASELINES if fits(rows[name])}
            rivals = [row for row in p["placements"][1:] if fits(row)]
            assert all(own["step_seconds"] <= row["step_seconds"] for row in rivals)
            first = min(rivals, key=lambda row: row["step_seconds"])["name"] if rivals else "–"
            best = f"{min(steps.values()) / own['step_seconds']:.2f}x" if steps else "–"
            shown = lambda name: milliseconds(steps[name]) if name in steps else "does not fit"
            print(
                f"| {model} | {devices} | "
                + " | ".join(map(shown, BASELINES))
                + f" | {milliseconds(metis['step_seconds']) if fits(metis) else 'does not fit'}"
                + f" | {milliseconds(own['step_seconds'])} | {best} | "
                f"{own['cut_bytes'] / 1e6:.1f} | {own['imbalance']:.2f} | {first} |",
                flush=True,
            )


def assistants(program, time):
    print("\n| model | plan | slow | static, ms | assisted, ms | loss recovered | tasks moved | nothing slow |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for model, batch in MODELS:
            for solver in ["place", "data"]:
                run_json(program, "plan", model, "--machine", "p100x16:4", "--batch", batch, "--solver", solver, "--time", time, "-o", path)
                even = run_json(program, "simulate", path, "--full", "--assist")
                base = even["step_seconds"]
                calm = even["assisted"]["step_seconds"] / base - 1
                for name, options in [("1.5x", ["--slow", "1:1.5"]), ("3x", ["--slow", "1:3"]), ("noise 20%", ["--perturb", 0.2])]:
                    answer = run_json(program, "simulate", path, "--full", "--assist", *options)
                    static, helped = answer["step_seconds"], answer["assisted"]["step_seconds"]
                    loss = static - base
                    recovered = f"{(static - helped) / loss:.0%}" if loss > 0.005 * base else "–"
                    print(
                        f"| {model} | {solver} | {name} | {milliseconds(static)} (even {milliseconds(base)}) | {milliseconds(helped)} | "
                        f"{recovered} | {answer['assisted']['moved']} | {calm:+.1%} |",
                        flush=True,
                    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default=PROGRAM, help="the program to run")
    parser.add_argument("--devices", default="2,4,8,16", help="device counts")
    parser.add_argument("--time", default=10, help="seconds for each search")
    args = parser.parse_args()
    placements(args.program, [int(count) for count in args.devices.split(",")], args.time)
    assistants(args.program, args.time)


if __name__ == "__main__":
    main()
