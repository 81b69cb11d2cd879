"""Writes the table of docs/models.md, section "What to expect": models on their usual machines.

Runs the release build's `shardwright plan MODEL --machine M --batch B --seq S --json` with default options, and puts the answer next to
published measurements (`../shared/published/steps.csv`, or the file that SHARDWRIGHT_PUBLISHED names) of the same model on as many
of the same devices. Without that file the column stays empty. Plans are predictions; published steps may have other batches, precisions
and recomputation, which the table names.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/shardwright"
PUBLISHED = Path(os.environ.get("SHARDWRIGHT_PUBLISHED", ROOT.parent / "shared/published/steps.csv"))
PAGE = ROOT / "docs/models.md"
MARK = ("<!-- models: written by scripts/bench models --write -->", "<!-- models: end -->")

# Model, machine, batch, tokens per sample, further options; and the published row: (words of its model's name, GPUs, words of its source and row).
CASES = [
    ("llama3-8b", "8xh100-96gb", 16, 8192, [], ("Llama-3.1-8B", 8, "table 1 FSDP+compile")),
    ("llama3-8b", "8xh100-96gb", 16, 8192, ["--precision", "fp8"], ("Llama-3.1-8B", 8, "table 1 FSDP+compile+fp8")),
    ("llama3-8b", "8xh100", 8, 8192, [], None),
    ("llama3-8b", "64xh100", 64, 8192, [], None),
    ("llama3-70b", "64xh100", 128, 8192, ["--precision", "fp8"], ("LLAMA3_70B", 64, "25.11 H100")),
    ("llama3-405b", "1024xh100", 512, 8192, ["--precision", "fp8"], ("LLAMA3.1_405B", 1024, "25.11 H100")),
    ("mixtral-8x7b", "64xh100", 64, 4096, [], None),
    ("qwen2.5-72b", "128xh100", 128, 4096, [], None),
    ("deepseek-v3", "2048xh100", 2048, 4096, [], None),
    ("gpt3-175b", "1024xa100", 1536, 2048, [], None),
    ("gpt:layers=48,hidden=6144,heads=64,vocab=51200,dtype=mixed", "8xa100", 4, 2048, [], ("GPT 22B", 8, "22B/seqsel")),
    ("llama3-8b", "tpu-v5p-256", 128, 8192, [], None),
    ("vit-h14", "8xa100", 256, None, [], None),
    ("bert:layers=24,hidden=1024,heads=16,dtype=mixed", "8xa100", 256, 512, [], None),
    ("resnet101:depth=50", "8xh100", 1024, None, [], None),
    ("dlrm", "8xa100", 16384, None, [], None),
]


def published(wanted):
    """The published rate of a case, in words."""
    if wanted is None or not PUBLISHED.exists():
        return "-"
    model, gpus, row = wanted
    with PUBLISHED.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["model"] == model and int(line["n_gpus"]) == gpus and line["row"] == row:
                return rate_of(line)
    return "-"


def rate_of(line):
    notes = [line["dtype"], f"batch {line['global_batch']}", f"recompute {line['recompute']}" if line["recompute"] else ""]
    split = [f"{name}{line[name]}" for name in ["dp", "tp", "pp", "cp", "ep"] if line[name] not in ("", "1")]
    if line["unit"] == "tokens/s/GPU":
        value = float(line["measured"])
    else:
        value = int(line["global_batch"]) * int(line["seq"]) / float(line["seconds_per_step"]) / int(line["n_gpus"])
    return f"{value:,.0f} ({', '.join(note for note in [*notes, ' '.join(split)] if note)})"


def in_words(plan):
    """The plan's splits: the configs of the layers that take longest, with their share of the time."""
    total, by_config = 0.0, {}
    for layer in plan["layers"]:
        seconds = layer["compute_seconds"] + layer["comm_seconds"]
        total += seconds
        stored = layer.get("weights")
        text = layer["config"] + (f", weights {stored}" if stored and stored != layer["config"] else "")
        by_config[text] = by_config.get(text, 0.0) + seconds
    main = sorted(by_config.items(), key=lambda item: -item[1])[:2]
    words = [f"`{text}` {seconds / max(total, 1e-30):.0%}" for text, seconds in main]
    more = []
    if plan.get("micro_batches", 1) not in (None, 1):
        more.append(f"{plan['micro_batches']} micro-batches")
    policy = (plan.get("recompute") or {}).get("policy")
    if policy and policy != "off":
        more.append(f"recompute {policy}")
    if plan.get("pipeline"):
        more.append(f"{len(plan['pipeline']['stages'])} stages, {plan['pipeline']['schedule']}")
    return "; ".join(words + more)


def why(message):
    """The first sentence of a refusal."""
    return re.split(r"(?<=[a-z0-9])[.;] ", message.strip().removeprefix("error: "))[0][:160]


def row(case, program, seconds):
    model, machine, batch, tokens, options, wanted = case
    command = [str(program), "plan", model, "--machine", machine, "--batch", str(batch), *options, "--json"]
    command += ["--seq", str(tokens)] if tokens else []
    command += ["--time", str(seconds)] if seconds else []
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return [f"`{model}`", f"`{machine}`", str(batch), str(tokens or ""), " ".join(options[1:]), "not planned within 900 s", *["-"] * 4, published(wanted)]
    head = [f"`{model}`", f"`{machine}`", str(batch), str(tokens or ""), " ".join(options[1:])]
    if run.returncode != 0:
        return [*head, why(run.stderr or f"status {run.returncode}"), *["-"] * 4, published(wanted)]
    plan = json.loads(run.stdout)
    own = plan["throughput"]
    each = own["tokens_per_second_per_device"]
    rate = f"{each:,.0f} tokens/s" if each else f"{own['samples_per_second'] / plan['devices']:,.0f} samples/s"
    limit = plan["memory_limit_bytes"]
    memory = f"{plan['peak_memory_bytes'] / 1e9:.1f}" + (f" of {limit / 1e9:.1f} GB" if limit else " GB")
    mfu = f"{own['mfu']:.1%}" if own["mfu"] else "-"
    return [*head, in_words(plan), rate, mfu, memory, f"{plan['search_seconds']:.1f} s", published(wanted)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/models.md")
    parser.add_argument("--only", help="only cases whose model or machine contains this text")
    parser.add_argument("--time", type=float, help="seconds of search per case; the program's default otherwise")
    parser.add_argument("--program", type=Path, default=PROGRAM)
    args = parser.parse_args()
    titles = ["model", "machine", "batch", "tokens", "precision", "plan: configs by share of the time", "per device", "MFU", "memory", "search", "published, tokens/s per device"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for case in CASES:
        if args.only and args.only not in case[0] + case[1]:
            continue
        lines.append("| " + " | ".join(row(case, args.program, args.time)) + " |")
        print(lines[-1], flush=True, file=sys.stderr)
    processor = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.machine())
    version = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    limit = f", at most {args.time:g} s of search each" if args.time else ""
    text = "\n".join([f"Planned on {os.cpu_count()} cores ({processor}), {datetime.date.today()}, version {version}{limit}.", "", *lines])
    print(text)
    if args.write:
        page = PAGE.read_text()
        start, end = (page.index(mark) for mark in MARK)
        PAGE.write_text(page[: start + len(MARK[0])] + "\n" + text + "\n" + page[end:])


if __name__ == "__main__":
    main()
