"""Predicts published training steps (`scripts/bench published FILE.csv`) and prints predicted, measured, error.

The file has one measured step per row: model sizes, machine, degrees and seconds per step; or it is vTrain's table of runs on one node
(`# GPUs,global batch,...`). Model, machine, engine and plan follow from the row's columns and from what its source says of its trainer.
Rows that `plan --as` cannot express are counted by reason. Only the host's time per kernel of the engine `megatron` was measured on such rows.
"""

import argparse
import collections
import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = "source row model layers hidden heads kv_heads ffn seq vocab dtype gpu n_gpus dp tp pp micro_batch global_batch".split()
NODE_COLUMNS = ["# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
                "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)"]
# Text in a row's model, and the published config of that name. The first that fits counts.
PRESETS = [("LLAMA3_8B", "llama3-8b"), ("LLAMA3_70B", "llama3-70b"), ("LLAMA3.1_405B", "llama3-405b"), ("Llama3 70B", "llama3-70b"),
           ("Llama-3.1-8B", "llama3-8b"), ("Llama-3.1-70B", "llama3-70b"), ("Llama-3.1-405B", "llama3-405b"),
           ("Qwen3_30B", "qwen3-30b-a3b"), ("Qwen3 MoE 30B", "qwen3-30b-a3b"), ("Qwen3_235B", "qwen3-235b-a22b"),
           ("DeepSeekV3", "deepseek-v3"), ("DeepSeek V3", "deepseek-v3"), ("Mixtral-8x7B", "mixtral-8x7b"), ("Mixtral-8x22B", "mixtral-8x22b")]
# Text in a row's GPU, and the machine of that GPU. The first that fits counts.
GPUS = [("800 Gb/s", "a100-4nic"), ("A100-40GB", "a100-40gb"), ("A100", "a100"), ("96GB", "h100-96gb"), ("GB200", "gb200"), ("B200", "b200"),
        ("H200", "h200"), ("H100", "h100"), ("V100-16GB", "v100-16gb"), ("V100", "v100"), ("L4", "l4")]

# Samples per chip of MaxText's rows that do not state them: the recipes that print the same tokens per second (AI-Hypercomputer/tpu-recipes,
# training/trillium, llama3_1_8b_8192, llama3_1_70b_8192 and llama2_70b_4096_sc). They offload some activations to the host and recompute the
# others; full recomputation is the nearest policy.
RECIPES = {"Llama-3.1-8B TPU v6e": 4, "Llama-3.1-70B TPU v6e": 5, "Llama-2-70B TPU v6e": 2}
TPUS = {"TPU v5e": "v5e", "TPU v6e": "v6e", "TPU v5p": "v5p"}
# A directory for the configs of models without a preset.
CONFIGS = tempfile.TemporaryDirectory(prefix="published-")

# GiB that torchtitan's page prints beside its rows: the most that the allocator had reserved (`reserved_bytes.all.peak` of torchtitan/metrics.py).
RESERVED = {"table 1 FSDP eager": 82.4, "table 1 FSDP+compile": 77.0, "table 1 FSDP+compile+fp8": 76.8, "table 2 cp1": 83.9, "table 2 cp2": 84.2,
            "table 2 cp4": 84.0, "table 2 cp8": 84.5, "table 3 FSDP eager": 67.0, "table 3 FSDP+compile": 62.0, "table 3 FSDP+compile+fp8": 61.8,
            "table 4 2D": 71.9, "table 4 2D+AsyncTP": 67.6, "table 5 1F1B": 82.5, "table 5 Interleaved 1F1B": 72.7, "table 6 cp1": 75.3,
            "table 6 cp2": 75.9, "table 6 cp4": 77.1, "table 6 cp8": 84.9}


def node_row(row: dict, number: int) -> dict:
    """A run of vTrain on one node, in the columns of `COLUMNS`. Megatron-DeepSpeed with full recomputation; the vocabulary is assumed."""
    gpus, batch, micro, hidden, heads, layers, seq, tp, dp, pp, milliseconds = (row[column] for column in NODE_COLUMNS)
    return {"source": "VIA-Research/vTrain one node", "row": str(number), "model": "GPT", "layers": layers, "hidden": hidden, "heads": heads,
            "kv_heads": heads, "ffn": str(4 * int(hidden)), "seq": seq, "vocab": "51200", "experts": "", "dtype": "fp16", "gpu": "A100 (800 Gb/s per node of 8)",
            "n_gpus": gpus, "dp": dp, "tp": tp, "pp": pp, "vp": "", "cp": "1", "ep": "1", "micro_batch": micro, "global_batch": batch,
            "zero_fsdp": "none", "recompute": "full", "schedule": "1F1B", "seconds_per_step": str(float(milliseconds) / 1e3), "notes": ""}


def scaled_sizes(scale: int) -> dict:
    """MaxText's default decoder at a `global_parameter_scale` (MaxText/configs/base.yml, `get_individual_scales` of pyconfig.py)."""
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    heads, hidden, layers = cycles + (rest > 0), cycles + (rest > 1), cycles
    return {"hidden_size": 2048 << hidden, "num_hidden_layers": 16 << layers, "num_attention_heads": 16 << heads,
            "num_key_value_heads": 16 << heads, "intermediate_size": 7168 << heads, "head_dim": 256, "vocab_size": 32000}


def scaled_flops(sizes: dict, samples: int, seq: int) -> float:
    """Flops of a step as MaxText counts them (`calculate_tflops_training_per_device` of 2024: attention without its mask)."""
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    products = sizes["hidden_size"] * (3 * sizes["intermediate_size"] + 4 * heads)
    weights = sizes["num_hidden_layers"] * products + sizes["hidden_size"] * sizes["vocab_size"]
    return 6 * samples * seq * weights + 12 * samples * seq**2 * heads * sizes["num_hidden_layers"]


def maxtext_row(row: dict) -> dict:
    """A run of MaxText with what its recipe says of it; unchanged where the recipe is not known."""
    samples = int(row["micro_batch"] or RECIPES.get(row["row"], 0))
    chips, rate = int(row["n_gpus"]), float(row["measured"])
    if not samples:
        return row
    known = {"micro_batch": str(samples), "global_batch": row["global_batch"] or str(samples * chips), "dp": row["dp"] or str(chips),
             "tp": row["tp"] or "1", "pp": row["pp"] or "1", "recompute": "full", "zero_fsdp": "FSDP"}
    if row["unit"].startswith("tokens"):
        return {**row, **known, "seconds_per_step": str(samples * int(row["seq"]) / rate)}
    sizes = scaled_sizes(int(row["row"].removesuffix("B")))
    path = Path(CONFIGS.name) / f"maxtext-{row['row']}.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False, **sizes}))
    # A global batch in samples; the rate is one chip's.
    flops = scaled_flops(sizes, int(known["global_batch"]), int(row["seq"])) / chips
    return {**row, **known, "micro_batch": str(int(known["global_batch"]) // int(known["dp"])), "config": str(path),
            "seconds_per_step": str(flops / (rate * 1e12))}


def trainer(row: dict) -> str:
    """The trainer of a row."""
    names = [("torchtitan", "torchtitan"), ("Megatron-LM@d98e8a64dd", "megatron-core"), ("Bridge", "megatron-bridge"), ("Automodel", "automodel"),
             ("alpa", "alpa"), ("maxtext", "maxtext"), ("Mist", "mist"), ("Megatron", "megatron"), ("calculon", "megatron"), ("vTrain", "megatron")]
    return next((name for text, name in names if text in row["source"]), "")


def engine(row: dict) -> str | None:
    """What runs the kernels of a row."""
    known = trainer(row)
    if known == "torchtitan":
        # Only the first rows are eager; the page compiles in all later ones.
        return "torchtitan-eager" if "eager" in row["notes"] else "torchtitan"
    return {"megatron": "megatron", "megatron-core": "megatron-core", "megatron-bridge": "megatron-bridge", "automodel": "torch-compile", "alpa": "xla", "maxtext": "xla"}.get(known)


def gradients(row: dict) -> str:
    """The type that the row's gradients are summed and reduced in."""
    # Megatron-LM: `accumulate_allreduce_grads_in_fp32` is set with bf16 (training/arguments.py); Megatron-Bridge's recipes for performance have
    # `grad_reduce_in_fp32 = False`. torchtitan: `mixed_precision_reduce = float32`; Automodel's FSDP2 policy reduces in f32 as well.
    wide = trainer(row) in ("torchtitan", "automodel") or "Megatron-LM@d98e8a64dd" in row["source"]
    return "f32" if wide else "bf16"


def fragments(row: dict) -> float:
    """What the row's engine reserves beyond the memory in use, as a share of it (`[reserves]` of its table)."""
    name = engine(row)
    while name:
        table = tomllib.loads((ROOT / f"crates/cost/engines/{name}.toml").read_text())
        if "reserves" in table:
            return table["reserves"].get("fragments", 0.0)
        name = table.get("like")
    return 0.0


def reserves(row: dict) -> list[float]:
    """What torchtitan of 2024 reserves beside a plan's peak, in GiB, counted from the row's sizes: the columns of `memories`.

    The allocator has a pool per stream. FSDP2 reduces gradients into f32 on a stream of its own, and gathers weights into a buffer on another
    (torch/distributed/_composable/fsdp/_fsdp_collectives.py). Embedding and head are one group, which is gathered from the start to the end of
    the forward pass, and the last block stays gathered (torchtitan/parallelisms/parallelize_llama.py, `apply_fsdp`). In pipelines gradients are
    summed unsharded in f32 (`to_accumulated_grad_if_needed` of _fsdp_param.py), which a plan counts in 16 bits. The loss in parallel holds four
    f32 tensors of the logits' size (torch/distributed/tensor/parallel/loss.py), where a plan counts three. Op by op, the result of a block's last
    product is kept, which nothing reads (`selective` saves every second product).
    """
    number = {key: int(row[key]) for key in "layers hidden heads kv_heads ffn vocab seq tp pp n_gpus global_batch".split()}
    hidden, tensor, stages = number["hidden"], number["tp"], number["pp"]
    key_width = hidden // number["heads"] * number["kv_heads"]
    block = 2 * hidden * (hidden + key_width) + 3 * hidden * number["ffn"]
    ends = 2 * number["vocab"] * hidden
    # Weights that one device computes with, and those that it stores.
    own = (number["layers"] * block + ends) / (tensor * stages)
    stored = own * tensor * stages / number["n_gpus"]
    pools = 4 * stored + 2 * ends / tensor / (2 if stages > 1 else 1)
    gathered = 2 * (ends + block) / tensor if stages == 1 else 0
    sums = 2 * own if stages > 1 else 0
    tokens = number["global_batch"] * number["seq"] / (number["n_gpus"] / tensor)
    loss = 4 * tokens * number["vocab"] / tensor if tensor > 1 and stages == 1 else 0
    kept = 2 * tokens * hidden * number["layers"] if "eager" in row["notes"] else 0
    return [part / 2**30 for part in (pools, gathered, sums, loss, kept)]


def memories(known: list[dict]) -> None:
    """Memory of rows whose source prints it: in use as predicted, what is counted beside it, the allocator's fragments, and as measured."""
    rows = [(row, RESERVED[row["row"]]) for row in known if trainer(row) == "torchtitan" and row["row"] in RESERVED]
    if not rows:
        return
    print("\n| row | plan's peak, GiB | pools | gathered | f32 sums | loss | kept | with fragments | measured, GiB (reserved) | error |")
    print("|---|" + "---|" * 9)
    errors = []
    for row, measured in rows:
        used, beside = row["memory"] / 2**30, reserves(row)
        reserved = (used + sum(beside)) * (1 + fragments(row))
        errors.append(reserved / measured - 1)
        parts = " | ".join(f"{part:.1f}" for part in beside)
        print(f"| {row['row']} | {used:.1f} | {parts} | {reserved:.1f} | {measured:.1f} | {errors[-1]:+.1%} |")
    sizes = [abs(error) for error in errors]
    print(f"| all {len(rows)} rows | " + "| " * 7 + f"| mean {statistics.mean(sizes):.1%}, median {statistics.median(sizes):.1%} |")


def machine(row: dict) -> str | None:
    """The machine of a row."""
    chip = TPUS.get(row["gpu"])
    if chip:
        # Names of v5p slices count two cores per chip.
        return f"tpu-{chip}-{int(row['n_gpus']) * (2 if chip == 'v5p' else 1)}"
    name = next((known for text, known in GPUS if text in row["gpu"]), None)
    return name and f"{row['n_gpus']}x{name}"


def model(row: dict) -> str | None:
    """The model of a row: by its sizes where they are stated, else by its name."""
    if "config" in row:
        return row["config"]
    preset = next((preset for text, preset in PRESETS if text in row["model"]), None)
    if row["layers"] and row["hidden"] and row["heads"] and not row["experts"]:
        sizes = f"layers={row['layers']},hidden={row['hidden']},heads={row['heads']},vocab={row['vocab']},seq={row['seq']}"
        if row["model"].startswith("GPT"):
            # Megatron's defaults: dropout of 0.1 (arXiv 2205.05198 counts its masks). Fused attention came in 2023.
            old = ",attention=plain,dropout=0.1" if trainer(row) == "megatron" else ""
            return f"gpt:{sizes},ffn={row['ffn'] or 0}{old}"
        if "lama" in row["model"]:
            # Llama of 7 billion weights and more has a table of its own for the logits.
            return f"llama:{sizes},kv_heads={row['kv_heads']},ffn={row['ffn']},tied=no"
    return preset


def policies(row: dict) -> list[str]:
    """What the row recomputes; where it does not say and weights are sharded, the policies in the order in which they are tried until one fits."""
    recompute = row["recompute"]
    if not recompute and "FSDP" in row["zero_fsdp"]:
        return ["off", "selective", "full"]
    return ["full" if recompute.startswith("full") else "selective" if recompute.startswith("selective") else "off"]


def degrees(row: dict, policy: str) -> str | None:
    """The row's plan as `--as` takes it."""
    known, stages = trainer(row), int(row["pp"])
    parts = [f"tp={row['tp']}", f"pp={row['pp']}", f"dp={row['dp']}"]
    if row["cp"] not in ("", "1"):
        parts.append(f"cp={row['cp']}")
    if row["ep"] not in ("", "1"):
        parts.append(f"ep={row['ep']}")
    if row["micro_batch"]:
        size = int(row["micro_batch"])
        if known == "torchtitan" and stages > 1:
            # The column has the samples of a rank. torchtitan divides them into as many micro-batches as there are ranks of the pipeline.
            size = max(size // stages, 1)
        parts.append(f"mbs={size}")
    sharded = row["zero_fsdp"]
    if "FSDP" in sharded:
        # In a pipeline torchtitan gathers weights once per step and sums gradients once (`reshard_after_forward` is off): ZeRO-1's traffic.
        parts.append("zero=1" if stages > 1 else "zero=3")
    elif "ZeRO-1" in sharded or "distributed optimizer" in sharded or "reduce-scatter" in sharded:
        parts.append("zero=1")
    elif sharded not in ("", "none"):
        return None
    parts.append(f"recompute={policy}")
    if row["tp"] != "1" and (known in ("megatron-core", "megatron-bridge", "torchtitan", "maxtext") or "sequence parallel" in row["recompute"]):
        parts.append("sp")
    schedule = row["schedule"].lower()
    if stages > 1:
        if row["vp"] not in ("", "1"):
            parts.append(f"vp={row['vp']}")
        elif "interleaved" in schedule:
            # torchtitan gives every rank two stages; Megatron's rows do not state theirs: the fastest is taken.
            parts.append("vp=2" if known == "torchtitan" else "schedule=interleaved")
    return ",".join(parts)


def command(row: dict, program: str, policy: str) -> list[str] | str:
    """The command that predicts a row, or why there is none."""
    missing = [key for key in ("dp", "tp", "pp", "global_batch", "seconds_per_step") if not row[key]]
    if missing:
        return f"{', '.join(missing)} not stated"
    name, on, plan = model(row), machine(row), degrees(row, policy)
    if not (name and on and plan):
        return "no such model, machine or sharding"
    precision = "fp8" if "fp8" in row["dtype"] else "mixed"
    run = [program, "plan", name, "--machine", on, "--batch", row["global_batch"], "--seq", row["seq"], "--precision", precision,
           "--gradients", gradients(row), "--as", plan, "--memory", "none", "--json", "-q"]
    if ":" in name:
        del run[run.index("--seq"):run.index("--seq") + 2]
    return run + (["--engine", engine(row)] if engine(row) else [])


def predict(row: dict, program: str) -> dict:
    """A row with its prediction."""
    for policy in policies(row):
        wanted = command(row, program, policy)
        if isinstance(wanted, str):
            return {**row, "reason": wanted}
        run = subprocess.run(wanted, capture_output=True, text=True)
        if run.returncode != 0:
            reason = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"status {run.returncode}"
            return {**row, "reason": re.sub(r"\d+", "N", reason), "detail": reason, "command": wanted}
        plan = json.loads(run.stdout)
        if plan["fits"]:
            break
    step, measured = plan["simulated"]["step_seconds"], float(row["seconds_per_step"])
    uniform = plan["uniform"]
    return {**row, "step": step, "measured": measured, "error": step / measured - 1, "mbs": uniform["mbs"], "chunks": uniform["vp"],
            "computing": plan["simulated"]["compute_seconds"], "memory": plan["peak_memory_bytes"], "command": wanted}


def source(row: dict) -> str:
    """A short name of a row's source."""
    return row["source"].strip('"').split(" ")[0] + (" (one node)" if row["source"].endswith("one node") else "")


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau-a of measured and predicted steps."""
    agree = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for at, a in enumerate(pairs) for b in pairs[at + 1:])
    count = len(pairs) * (len(pairs) - 1) // 2
    return 2 * agree / count - 1


def orders(known: list[dict]) -> None:
    """How the order of configurations is kept, for every model that was measured with several on one machine and batch."""
    groups = collections.defaultdict(list)
    for row in known:
        sizes = (row["layers"], row["hidden"], row["seq"], row["n_gpus"], row["global_batch"], row["dtype"])
        groups[(source(row), row["model"], *sizes)].append((row["measured"], row["step"]))
    groups = {key: pairs for key, pairs in groups.items() if len(pairs) >= 3}
    if not groups:
        return
    print("\n| source | model | GPUs | batch | configurations | Kendall's tau | regret |\n|---|---|---|---|---|---|---|")
    taus, regrets = [], []
    for key, pairs in groups.items():
        chosen, best = min(pairs, key=lambda pair: pair[1])[0], min(pairs)[0]
        taus.append(kendall(pairs))
        regrets.append(chosen / best - 1)
        if len(groups) <= 40:
            name = key[1] if key[1] != "GPT" else f"GPT {key[2]}x{key[3]}"
            print(f"| {key[0]} | {name} | {key[5]} | {key[6]} | {len(pairs)} | {taus[-1]:.2f} | {regrets[-1]:.1%} |")
    print(f"| all | {len(groups)} models | | | | {statistics.mean(taus):.2f} | {statistics.mean(regrets):.1%}, at most {max(regrets):.1%} |")


def read(path: Path) -> list[dict]:
    """The rows of a table."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and all(column in rows[0] for column in NODE_COLUMNS):
        return [node_row(row, at + 2) for at, row in enumerate(rows)]
    if not rows or any(column not in rows[0] for column in COLUMNS):
        sys.exit(f"{path}: not a table of measured steps; its columns are {', '.join(COLUMNS)}, ...")
    return [maxtext_row(row) if trainer(row) == "maxtext" else row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the measured steps, as CSV")
    parser.add_argument("--program", default=str(ROOT / "target/release/shardwright"))
    parser.add_argument("--only", default="", help="rows whose source or model contains this text")
    parser.add_argument("--stages", choices=["one", "several"], help="rows without or with pipeline stages")
    parser.add_argument("--every", type=int, default=1, help="every so manieth row")
    parser.add_argument("--commands", action="store_true", help="also print the command of every row")
    parser.add_argument("--save", type=Path, help="a JSON file for all rows with their predictions")
    options = parser.parse_args()
    rows = [row for row in read(options.file) if options.only in row["source"] + row["model"]]
    if options.stages:
        rows = [row for row in rows if (row["pp"] in ("", "1")) == (options.stages == "one")]
    rows = rows[:: options.every]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda row: predict(row, options.program), rows))
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1))
    known = [row for row in rows if "error" in row]
    print("| source | row | model | GPUs | plan | measured, s | predicted, s | computing, s | memory, GiB | error |\n|---|---|---|---|---|---|---|---|---|---|")
    for row in known:
        plan = f"tp={row['tp']} pp={row['pp']} vp={row['chunks']} dp={row['dp']} mbs={row['mbs']}"
        times = f"{row['measured']:.3f} | {row['step']:.3f} | {row['computing']:.3f} | {row['memory'] / 2**30:.1f}"
        name = row["model"] if row["model"] != "GPT" else f"GPT {row['layers']}x{row['hidden']}"
        print(f"| {source(row)} | {row['row']} | {name} | {row['n_gpus']} | {plan} | {times} | {row['error']:+.1%} |")
        if options.commands:
            print("  " + " ".join(row["command"]), file=sys.stderr)
    print("\n| source | rows | mean error | median error | mean signed |\n|---|---|---|---|---|")
    groups = collections.defaultdict(list)
    for row in known:
        groups[source(row)].append(row["error"])
    for row in known:
        groups["all"].append(row["error"])
        groups["all, p = 1" if row["pp"] == "1" else "all, p > 1"].append(row["error"])
    for name, errors in groups.items():
        sizes = [abs(error) for error in errors]
        print(f"| {name} | {len(errors)} | {statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | {statistics.mean(errors):+.1%} |")
    memories(known)
    orders(known)
    reasons = collections.Counter(row["reason"] for row in rows if "reason" in row)
    for reason, count in reasons.most_common():
        print(f"not predicted, {count} rows: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
