#!/usr/bin/env python3
"""Training steps on a GPU, measured with PyTorch and JAX, beside their predictions.

    scripts/bench_gpu.py measure -o measured.json [--only TEXT] [--seconds N]     on the machine with the GPU
    scripts/bench_gpu.py table measured.json [--machine 1xh200] [--costs h200]    anywhere: predicts and prints the table

`measure` runs every case (model, precision, engine) for some steps and writes the median step time and the peak memory. `table`
plans each case on one device for its engine, and prints predicted beside measured. `scripts/h200_steps.json` has the measurements of
docs/engines.md that rules were read from at first, `h200_second.json` those of the first test, `h200_held_out.json` those of the second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EAGER, COMPILE, XLA = "torch-eager", "torch-compile", "xla"
BIG = "gpt:layers=24,hidden=2048,heads=16"
LONG = "llama:layers=4,hidden=4096,ffn=14336,seq=8192,tied=no"
WIDE_MLP = "mlp:input=4096,hidden=8192,layers=6"

# Model, batch, precision, engines.
CASES = [
    ("gpt", 16, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("gpt", 16, "mixed", f"{EAGER} {COMPILE} {XLA}"),
    ("gpt:vocab=50304", 16, "bf16", f"{EAGER} {COMPILE}"),
    (BIG, 8, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    (BIG, 8, "mixed", f"{EAGER} {COMPILE}"),
    ("gpt:layers=24,hidden=1024,heads=16", 8, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("llama", 4, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("llama", 4, "mixed", f"{EAGER} {COMPILE}"),
    (LONG, 1, "mixed", f"{EAGER} {COMPILE}"),
    ("bert:dropout=0", 32, "bf16", f"{EAGER} {COMPILE}"),
    ("bert", 32, "mixed", f"{EAGER} {COMPILE}"),
    ("bert:dropout=0", 16, "f32", f"{EAGER}"),
    ("vit-b16", 128, "bf16", f"{EAGER} {COMPILE}"),
    ("resnet101:depth=50", 64, "f32", f"{EAGER} {COMPILE} {XLA}"),
    ("resnet101:depth=50", 128, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("resnet101", 64, "f32", f"{EAGER} {COMPILE}"),
    ("vgg16", 64, "f32", f"{EAGER} {COMPILE} {XLA}"),
    ("vgg16", 128, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    (WIDE_MLP, 4096, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    (WIDE_MLP, 2048, "f32", f"{EAGER} {COMPILE}"),
    ("mlp", 64, "f32", f"{EAGER} {COMPILE}"),
    ("dlrm", 2048, "f32", f"{EAGER} {COMPILE}"),
]
# Other models and sizes. Predictions for them were made before any rule was read from them. Those that the zoo does not have are
# predicted from their ONNX export.
SECOND = [
    ("gpt:layers=12,hidden=1024,heads=16", 16, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("gpt:layers=36,hidden=1280,heads=20,vocab=50304", 8, "mixed", f"{EAGER} {COMPILE} {XLA}"),
    ("gpt:layers=16,hidden=3072,heads=24,seq=2048,vocab=32000", 2, "bf16", f"{EAGER} {COMPILE}"),
    ("llama:layers=8,hidden=3072,heads=24,kv_heads=8,ffn=8192,vocab=32000,seq=4096,tied=no", 2, "mixed", f"{EAGER} {COMPILE} {XLA}"),
    ("llama:layers=20,hidden=1536,heads=12,kv_heads=4,ffn=4096,vocab=32000,seq=1024", 8, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("bert:layers=24,hidden=1024,heads=16,ffn=4096,dropout=0", 16, "bf16", f"{EAGER} {COMPILE}"),
    ("vit-l16", 64, "bf16", f"{EAGER} {COMPILE}"),
    ("resnet101:depth=152", 64, "f32", f"{EAGER} {COMPILE} {XLA}"),
    ("densenet121", 64, "f32", f"{EAGER} {COMPILE}"),
    ("transformer:dropout=0", 64, "bf16", f"{EAGER} {COMPILE}"),
    ("torchvision:name=mobilenet_v2", 128, "f32", f"{EAGER} {COMPILE}"),
    ("torchvision:name=convnext_tiny", 64, "f32", f"{EAGER} {COMPILE}"),
    ("unet", 16, "f32", f"{EAGER} {COMPILE}"),
    ("moe", 8, "bf16", f"{EAGER} {COMPILE}"),
    ("rnnlm", 64, "f32", EAGER),
    ("alexnet", 256, "f32", f"{EAGER} {COMPILE}"),
    ("dlrm:tables=16,dim=128,rows=500000", 4096, "f32", f"{EAGER} {COMPILE}"),
    ("resnet101:depth=152", 64, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("vgg16:dropout=0", 32, "f32", f"{XLA}"),
    ("mlp:input=2048,hidden=6144,layers=10", 8192, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("vit-b16", 64, "f32", EAGER),
    ("torchvision:name=mobilenet_v2", 128, "bf16", COMPILE),
    ("torchvision:name=convnext_tiny", 64, "bf16", f"{EAGER} {COMPILE}"),
    ("transformer", 64, "mixed", COMPILE),
    ("llama:layers=8,hidden=3072,heads=24,kv_heads=8,ffn=8192,vocab=32000,seq=4096,tied=no", 2, "bf16", COMPILE),
    ("gpt:layers=12,hidden=1024,heads=16", 16, "f32", EAGER),
]
SMALL = [
    ("gpt:layers=2,hidden=32,heads=2,vocab=50,seq=16", 2, "mixed", f"{EAGER} {XLA}"),
    ("llama:layers=2,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=50,seq=16", 2, "bf16", f"{EAGER} {XLA}"),
    ("bert:layers=1,hidden=32,heads=2,ffn=48,vocab=50,seq=16", 2, "f32", EAGER),
    ("vit-b16", 1, "f32", EAGER),
    ("resnet101:depth=50", 2, "f32", f"{EAGER} {XLA}"),
    ("vgg16", 1, "f32", f"{EAGER} {XLA}"),
    ("mlp:hidden=32", 4, "bf16", f"{EAGER} {XLA}"),
    ("dlrm:rows=100", 4, "f32", EAGER),
    ("transformer:layers=1,hidden=32,heads=2,ffn=48,vocab=50,seq=16", 2, "mixed", EAGER),
    ("moe:layers=1,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=50,seq=16", 2, "bf16", EAGER),
    ("rnnlm:hidden=16,vocab=50,seq=4", 2, "f32", EAGER),
    ("alexnet", 2, "f32", EAGER),
    ("densenet121", 2, "f32", EAGER),
    ("unet:image=32,width=4", 2, "bf16", EAGER),
    ("torchvision:name=mobilenet_v2", 2, "f32", EAGER),
]
# Models and sizes that no rule and no row of a cost file was read from: the test of the rules.
HELD_OUT = [
    ("gpt:layers=20,hidden=1600,heads=25", 4, "mixed", f"{EAGER} {COMPILE} {XLA}"),
    ("gpt:layers=6,hidden=512,heads=8,vocab=32000,seq=512", 32, "bf16", f"{EAGER} {COMPILE}"),
    ("llama:layers=12,hidden=2048,heads=16,kv_heads=16,ffn=5504,vocab=32000,seq=2048", 4, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("bert:seq=128,dropout=0", 64, "bf16", f"{EAGER} {COMPILE}"),
    ("vit-h14", 32, "bf16", f"{EAGER} {COMPILE}"),
    ("resnet101:depth=50", 32, "f32", f"{COMPILE} {XLA}"),
    ("resnet101:depth=50", 256, "bf16", f"{EAGER} {COMPILE}"),
    ("vgg16:dropout=0", 48, "bf16", f"{EAGER} {COMPILE} {XLA}"),
    ("densenet121", 96, "bf16", f"{EAGER} {COMPILE}"),
    ("unet:width=48", 8, "f32", f"{EAGER} {COMPILE}"),
    ("torchvision:name=resnext50_32x4d", 64, "f32", f"{EAGER} {COMPILE}"),
    ("torchvision:name=mobilenet_v3_large", 128, "f32", f"{EAGER} {COMPILE}"),
    ("mlp:input=1024,hidden=4096,layers=4", 16384, "f32", f"{EAGER} {COMPILE} {XLA}"),
    ("dlrm:tables=26,dim=64,rows=200000", 8192, "f32", f"{EAGER} {COMPILE}"),
    ("transformer:layers=4,hidden=768,heads=12,ffn=3072,dropout=0", 32, "mixed", f"{EAGER} {COMPILE}"),
    ("alexnet", 128, "bf16", f"{EAGER} {COMPILE}"),
    ("moe:experts=16,hidden=512,heads=8,kv_heads=8,layers=8", 16, "bf16", COMPILE),
    ("torchvision:name=wide_resnet50_2", 64, "bf16", f"{EAGER} {COMPILE}"),
    ("bert:layers=6,hidden=1024,heads=16,ffn=4096,seq=256,dropout=0", 32, "f32", EAGER),
]
EXPORTED = {"torchvision", "unet"}
SETS = {"usual": CASES, "second": SECOND, "held-out": HELD_OUT, "small": SMALL}


def cases(which):
    for model, batch, precision, engines in SETS[which]:
        for engine in engines.split():
            yield {"model": model, "batch": batch, "precision": precision, "engine": engine}


def name(case):
    return f"{case['model']} batch {case['batch']} {case['precision']} {case['engine']}"


def backend(engine):
    if engine == XLA:
        import gpu_jax as module
    else:
        import gpu_torch as module
    return module


def host_launch_us():
    """Microseconds of this computer's host per kernel, at this time: other programs slow it down."""
    path = os.path.join(ROOT, "python", "shardwright", "torch", "_host.py")
    spec = importlib.util.spec_from_file_location("host", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.host_launch_seconds() * 1e6


def measure_here(given):
    """Measures the cases of one process, and prints one line of JSON for each."""
    begin = time.monotonic()
    chosen = [case for case in cases(given.cases) if given.only in name(case) and case["engine"] in given.engines.split(",")]
    if given.part:
        part, parts = map(int, given.part.split("/"))
        chosen = chosen[part::parts]
    for case in chosen:
        if time.monotonic() - begin > given.seconds:
            print(f"time limit before {name(case)}", file=sys.stderr)
            break
        module = backend(case["engine"])
        try:
            case |= module.measure(case, once=given.once, device=given.device)
        except Exception as error:  # one case's failure must not end the others
            case["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        module.release()
        if given.device == "cuda" and "step_ms" in case:
            case["host_launch_us"] = host_launch_us()
        line = json.dumps(case)
        print(line, flush=True)
        if given.output:
            with open(given.output, "a") as out:
                out.write(line + "\n")


def measured(path):
    with open(path) as lines:
        return [case for case in map(json.loads, lines) if "step_ms" in case]


def exported(case, folder):
    """The ONNX file of a model that the zoo does not have; none where it has it. Needs PyTorch, onnx and onnxscript."""
    family = case["model"].partition(":")[0]
    if family not in EXPORTED:
        return None
    path = os.path.join(folder, f"{case['model']}-{case['precision']}".replace(":", "-").replace("=", "-") + ".onnx")
    if not os.path.exists(path):
        import gpu_torch

        gpu_torch.export(case["model"], case["precision"], path)
    return path


def machine_of(case, given):
    """The machine, with the host's time per kernel where it was measured beside the step: a file, or the name."""
    if "host_launch_us" not in case:
        return given.machine
    shown = subprocess.run([given.binary, "machines", given.machine], capture_output=True, text=True, check=True).stdout
    path = os.path.join(tempfile.gettempdir(), f"{given.machine}-{case['host_launch_us']:.1f}us.toml".replace("/", "-"))
    with open(path, "w") as out:
        out.write(shown.replace("[device]", f"[device]\nhost_launch = \"{case['host_launch_us']:.2f} us\"", 1))
    return path


def predict(case, given):
    """The predicted step in milliseconds and peak bytes of one device."""
    file = exported(case, given.exports)
    command = [given.binary, "plan", file or case["model"], "--batch", str(case["batch"]), "--machine", machine_of(case, given),
               "--memory", "none", "--recompute", "off", "--solver", "data", "--json"]
    command += [] if file else ["--precision", case["precision"]]
    if given.costs:
        command += ["--costs", given.costs]
    if not given.no_engine:
        command += ["--engine", case["engine"]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"
    return json.loads(done.stdout), None


def table(given):
    rows = measured(given.measured)
    print("| model | batch | precision | engine | measured ms | predicted ms | error | measured GiB | predicted GiB | error |")
    print("|---|---:|---|---|---:|---:|---:|---:|---:|---:|")
    errors, left_out = {}, 0
    for case in rows:
        if given.only not in name(case):
            continue
        # The zoo's losses are in f32 now. Compilers fuse the widening; op by op it is another step.
        if case.get("loss") == "bf16" and case["engine"] == EAGER:
            left_out += 1
            continue
        plan, wrong = predict(case, given)
        if plan is None:
            print(f"| {case['model']} | {case['batch']} | {case['precision']} | {case['engine']} | {case['step_ms']:.1f} | {wrong} |")
            continue
        step, peak = plan["simulated"]["step_seconds"] * 1e3, plan["peak_memory_bytes"]
        time_error = step / case["step_ms"] - 1
        # Some engines hold the widened logits.
        memory_error = peak / case["allocated"] - 1 if "allocated" in case and case.get("loss") != "bf16" else None
        # The host of a loaded computer is slower than the tables say.
        bound = "bound by the host" if case.get("host_ms", 0) > 0.85 * case["step_ms"] else "bound by the device"
        for key in [case["engine"], bound, "all"]:
            errors.setdefault(key, []).append((abs(time_error), None if memory_error is None else abs(memory_error)))
        print(f"| {case['model']} | {case['batch']} | {case['precision']} | {case['engine']} | {case['step_ms']:.1f} | {step:.1f} | "
              f"{time_error:+.0%} | {case.get('allocated', 0) / 2**30:.2f} | {peak / 2**30:.2f} | "
              f"{'' if memory_error is None else f'{memory_error:+.0%}'} |")
    print("\n| cases | number | time error: median | largest | memory error: median | largest |\n|---|---:|---:|---:|---:|---:|")
    for key, pairs in sorted(errors.items(), key=lambda item: (item[0] == "all", "bound" in item[0], item[0])):
        times, memories = [time for time, _ in pairs], [memory for _, memory in pairs if memory is not None] or [0.0]
        print(f"| {key} | {len(pairs)} | {statistics.median(times):.1%} | {max(times):.1%} | {statistics.median(memories):.1%} | {max(memories):.1%} |")
    if left_out:
        print(f"\n{left_out} steps with a loss in bf16 op by op were left out.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("measure", help="measure steps on this machine's GPU")
    run.add_argument("-o", "--output")
    run.add_argument("--only", default="", help="only cases whose name contains this text")
    run.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after this long")
    run.add_argument("--once", action="store_true", help="compile and run once, to fill the compilers' caches")
    run.add_argument("--part", help="I/N: every N-th case, from the I-th")
    run.add_argument("--device", default="cuda")
    run.add_argument("--cases", choices=SETS, default="usual", help="held-out: no rule was read from them; small: a check of the programs")
    run.add_argument("--engines", default=f"{EAGER},{COMPILE},{XLA}", help="only these engines")
    run.set_defaults(do=measure_here)
    show = commands.add_parser("table", help="predict the measured cases and print both")
    show.add_argument("measured")
    show.add_argument("--only", default="")
    show.add_argument("--machine", default="1xh200")
    show.add_argument("--costs", default="h200")
    show.add_argument("--no-engine", action="store_true")
    show.add_argument("--exports", default="/tmp", help="where ONNX files of models are written that the zoo does not have")
    show.add_argument("--binary", default=os.path.join(ROOT, "target", "release", "shardwright"))
    show.set_defaults(do=table)
    given = parser.parse_args()
    given.do(given)


if __name__ == "__main__":
    main()
