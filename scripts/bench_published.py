"""Predicts published training steps (`scripts/bench published FILE.csv`) and prints predicted, measured, error.

The file has one measured step per row: model sizes, machine, degrees and seconds per step (columns as in the header check below).
Rows that `plan --as` cannot express are counted by reason. No constant of the program is fitted to these rows.
"""

import argparse
import collections
import csv
import json
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = "source row model layers hidden heads kv_heads ffn seq vocab dtype gpu n_gpus dp tp pp micro_batch global_batch".split()


def machine(gpu: str, devices: int) -> str | None:
    """The machine of a row."""
    names = [("A100", "a100"), ("96GB", "h100-96gb"), ("H100", "h100"), ("GB200", "gb200"), ("B200", "b200"), ("V100", "v100")]
    name = next((known for text, known in names if text in gpu), None)
    return name and f"{devices}x{name}"


def model(row: dict) -> str | None:
    """The model of a row, by its sizes."""
    sizes = f"layers={row['layers']},hidden={row['hidden']},heads={row['heads']},vocab={row['vocab']},seq={row['seq']}"
    if row["model"].startswith("GPT"):
        return f"gpt:{sizes}"
    if "lama" in row["model"]:
        return f"llama:{sizes},kv_heads={row['kv_heads']},ffn={row['ffn']}"
    return None


def degrees(row: dict) -> str | None:
    """The row's plan as `--as` takes it."""
    parts = [f"tp={row['tp']}", f"pp={row['pp']}", f"dp={row['dp']}"]
    if row["cp"] not in ("", "1"):
        parts.append(f"cp={row['cp']}")
    if row["ep"] not in ("", "1"):
        parts.append(f"ep={row['ep']}")
    if row["micro_batch"]:
        parts.append(f"mbs={row['micro_batch']}")
    sharded = row["zero_fsdp"]
    if "FSDP" in sharded:
        parts.append("zero=3")
    elif "ZeRO-1" in sharded or "distributed optimizer" in sharded or "reduce-scatter" in sharded:
        parts.append("zero=1")
    elif sharded not in ("", "none"):
        return None
    recompute = row["recompute"]
    policy = "full" if recompute.startswith("full") else "selective" if recompute.startswith("selective") else "off"
    parts.append(f"recompute={policy}")
    modern = "Megatron-LM@d98e8a64dd" in row["source"] or "torchtitan" in row["source"] or "Bridge" in row["source"]
    if row["tp"] != "1" and (modern or "sequence parallel" in recompute):
        parts.append("sp")
    schedule = row["schedule"].lower()
    if row["pp"] != "1":
        if row["vp"] not in ("", "1"):
            parts.append(f"vp={row['vp']}")
        elif "interleaved" in schedule:
            parts.append("schedule=interleaved")
    return ",".join(parts)


def command(row: dict, program: str) -> list[str] | str:
    """The command that predicts a row, or why there is none."""
    missing = [key for key in ("layers", "hidden", "heads", "dp", "tp", "pp", "global_batch", "seconds_per_step") if not row[key]]
    if missing:
        return f"{', '.join(missing)} not stated"
    if row["experts"]:
        return "experts"
    name, on, plan = model(row), machine(row["gpu"], int(row["n_gpus"])), degrees(row)
    if not (name and on and plan):
        return "no such model, machine or sharding"
    precision = "fp8" if "fp8" in row["dtype"] else "mixed"
    plain = row["model"].startswith("GPT") and "d98e8a64dd" not in row["source"]
    name += ",attention=plain" if plain else ""
    return [program, "plan", name, "--machine", on, "--batch", row["global_batch"], "--precision", precision,
            "--as", plan, "--memory", "none", "--json", "-q"]


def predict(row: dict, program: str) -> dict:
    """A row with its prediction."""
    wanted = command(row, program)
    if isinstance(wanted, str):
        return {**row, "reason": wanted}
    run = subprocess.run(wanted, capture_output=True, text=True)
    if run.returncode != 0:
        reason = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"status {run.returncode}"
        return {**row, "reason": re.sub(r"\d+", "N", reason), "detail": reason}
    plan = json.loads(run.stdout)
    step, measured = plan["simulated"]["step_seconds"], float(row["seconds_per_step"])
    uniform = plan["uniform"]
    return {**row, "step": step, "error": step / measured - 1, "mbs": uniform["mbs"], "chunks": uniform["vp"]}


def source(row: dict) -> str:
    """A short name of a row's source."""
    return row["source"].split(" ")[0].strip('"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the measured steps, as CSV")
    parser.add_argument("--program", default=str(ROOT / "target/release/shardwright"))
    parser.add_argument("--only", default="", help="rows whose source or model contains this text")
    parser.add_argument("--every", type=int, default=1, help="every so manieth row")
    options = parser.parse_args()
    with open(options.file, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or any(column not in rows[0] for column in COLUMNS):
        sys.exit(f"{options.file}: not a table of measured steps; its columns are {', '.join(COLUMNS)}, ...")
    rows = [row for row in rows if options.only in row["source"] + row["model"]][:: options.every]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda row: predict(row, options.program), rows))
    print("| source | row | model | GPUs | plan | measured, s | predicted, s | error |\n|---|---|---|---|---|---|---|---|")
    known = [row for row in rows if "error" in row]
    for row in known:
        plan = f"tp={row['tp']} pp={row['pp']} vp={row['chunks']} dp={row['dp']} mbs={row['mbs']}"
        measured = float(row["seconds_per_step"])
        print(f"| {source(row)} | {row['row']} | {row['model']} | {row['n_gpus']} | {plan} | {measured:.3f} | {row['step']:.3f} | {row['error']:+.1%} |")
    print("\n| source | rows | mean error | median error | mean signed |\n|---|---|---|---|---|")
    groups = collections.defaultdict(list)
    for row in known:
        groups[source(row)].append(row["error"])
        groups["all" if row["pp"] == "1" else "all, p > 1"].append(row["error"])
    for name, errors in groups.items():
        sizes = [abs(error) for error in errors]
        print(f"| {name} | {len(errors)} | {statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | {statistics.mean(errors):+.1%} |")
    reasons = collections.Counter(row["reason"] for row in rows if "reason" in row)
    for reason, count in reasons.most_common():
        print(f"not predicted, {count} rows: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
