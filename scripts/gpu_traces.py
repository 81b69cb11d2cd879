#!/usr/bin/env python3
"""Writes small profiler traces of training steps on a GPU, with PyTorch (eager and compiled) and JAX: examples for `plan --refine`.

    scripts/gpu_traces.py FOLDER
"""

import glob
import gzip
import os
import shutil
import sys
import tempfile

GPT = "gpt:layers=2,hidden=512,heads=8,vocab=8192,seq=512"


def torch_trace(folder, engine, shapes):
    import torch
    from torch.profiler import ProfilerActivity, profile

    import gpu_torch

    step = gpu_torch.Step(GPT, "bf16", engine, "cuda", 8)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=shapes) as trace:
        for _ in range(2):
            step()
            trace.step()
        torch.cuda.synchronize()
    path = os.path.join(folder, f"{engine}.json")
    trace.export_chrome_trace(path)
    with open(path, "rb") as plain, gzip.open(path + ".gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    os.remove(path)


def jax_trace(folder):
    import jax

    import gpu_jax

    gpu_jax.STEPS = 1
    case = {"model": GPT, "batch": 8, "precision": "bf16", "engine": "xla"}
    with tempfile.TemporaryDirectory() as out:
        run = gpu_jax.kernels
        gpu_jax.kernels = lambda step: [jax.profiler.start_trace(out), step(), step(), jax.profiler.stop_trace()] and None
        gpu_jax.measure(case)
        gpu_jax.kernels = run
        (found,) = glob.glob(out + "/**/*.trace.json.gz", recursive=True)
        shutil.copy(found, os.path.join(folder, "xla.json.gz"))


if __name__ == "__main__":
    folder = sys.argv[1]
    torch_trace(folder, "torch-eager", True)
    torch_trace(folder, "torch-compile", True)
    jax_trace(folder)
