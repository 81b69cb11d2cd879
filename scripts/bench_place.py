"""Prints the tables of docs/benchmarks-placing.md: placements and scheduling assistants, simulated.

Runs the release build's `plan --solver place --json` and `simulate --json`.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

from bench_planning import PROGRAM, milliseconds, run_json

MODELS = [
    ("nmt:unroll=10,seq=10", 64),
    ("inception_v3", 64),
    ("rnnlm:unroll=10,seq=10", 64),
    ("moe", 8),
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
    print("| model | devices | " + " | ".join(f"{b}, ms" for b in BASELINES) + " | METIS, ms | place, ms | best plain one / place | METIS / place | cut, MB | imbalance | by |")
    print("|---|---|" + "---|" * (len(BASELINES) + 7))
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
                + (f"{metis['step_seconds'] / own['step_seconds']:.2f}x | " if fits(metis) else "– | ")
                + f"{own['cut_bytes'] / 1e6:.1f} | {own['imbalance']:.2f} | {first} |",
                flush=True,
            )


def slowed(program, device, factor):
    """The machine file of four P100s, one of which computes slower by this factor."""
    text = subprocess.run([program, "machines", "p100x16"], check=True, capture_output=True, text=True).stdout
    text = re.sub(r'\[\[level\]\]\nname = "node".*?(?=\[\[level\]\])', "", text, flags=re.S).replace("p100x16", "p100x4-mixed", 1)
    scaled = [f'[[mixed]]\nunits = [{device}]\nname = "slow P100"']
    for key, number, unit in re.findall(r'^(peak\.\w+|memory_bandwidth|launch_overhead) = "([\d.]+) (.*)"', text, flags=re.M):
        value = float(number) * factor if key == "launch_overhead" else float(number) / factor
        scaled.append(f'{key} = "{value} {unit}"')
    return text + "\n" + "\n".join(scaled) + "\n"


def assistants(program, time):
    print("\n| model | plan | slow | static, ms | assisted, ms | loss recovered | within steps alone | by planning anew | layers moved | tasks moved | nothing slow |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path, machine = Path(folder) / "plan.json", Path(folder) / "slow.toml"
        for model, batch in MODELS:
            for solver in ["place", "data"]:
                run_json(program, "plan", model, "--machine", "p100x16:4", "--batch", batch, "--solver", solver, "--time", time, "-o", path)
                even = run_json(program, "simulate", path, "--full", "--assist")
                base = even["step_seconds"]
                calm = even["assisted"]["step_seconds"] / base - 1
                # The device that has most to do: where slowness costs most.
                busy = [device["busy"] for device in even["devices"]]
                slow = busy.index(max(busy))
                for name, factor, options in [("1.5x", 1.5, ["--slow", f"{slow}:1.5"]), ("3x", 3, ["--slow", f"{slow}:3"]), ("noise 20%", None, ["--perturb", 0.2])]:
                    answer = run_json(program, "simulate", path, "--full", "--assist", *options)
                    within = run_json(program, "simulate", path, "--full", "--assist", "--assist-migrations", 0, *options)["assisted"]["step_seconds"]
                    static, helped = answer["step_seconds"], answer["assisted"]["step_seconds"]
                    loss = static - base
                    share = lambda step: f"{(static - step) / loss:.0%}" if loss > 0.005 * base else "–"
                    anew = "–"
                    # What knowing the slow device beforehand would bring: as much as there is to be had.
                    if solver == "place" and factor:
                        machine.write_text(slowed(program, slow, factor))
                        anew = share(run_json(program, "plan", model, "--machine", machine, "--batch", batch, "--solver", "place", "--time", time)["simulated"]["step_seconds"])
                    print(
                        f"| {model} | {solver} | {name} | {milliseconds(static)} (even {milliseconds(base)}) | {milliseconds(helped)} | "
                        f"{share(helped)} | {share(within)} | {anew} | {answer['assisted']['layers']} | {answer['assisted']['moved']} | {calm:+.1%} |",
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
