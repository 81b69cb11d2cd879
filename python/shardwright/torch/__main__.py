"""Measures this computer, or a cluster, under PyTorch: machine and cost files for the planner.

    python -m shardwright.torch probe -o machine.toml                               one process
    torchrun --nproc-per-node 8 -m shardwright.torch probe -o machine.toml          all GPUs of a node, collectives by NCCL
    shardwright profile --list -m plan.json -o workloads.json
    python -m shardwright.torch profile workloads.json -o costs.json                the ops of a plan
    shardwright plan MODEL --machine machine.toml --costs costs.json

`probe` measures rates, memory and collectives on all processes at once. `profile` measures ops on one device, as
`python/profile_torch.py` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from torch import distributed

from ._probe import gpu_name, probe
from ._profile import add_arguments
from ._profile import run as run_profile


def _probe(given: argparse.Namespace) -> None:
    on_gpu = given.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif "OMP_NUM_THREADS" not in os.environ:
        # A process is a device: it has one core.
        torch.set_num_threads(1)
    alone = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    distributed.init_process_group(given.backend or ("nccl" if on_gpu else "gloo"))
    try:
        text = probe(given.name, given.device)
        if distributed.get_rank() == 0:
            with open(given.output + ".tmp", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(given.output + ".tmp", given.output)
            print(f"{distributed.get_world_size()} processes measured: {given.output}")
    finally:
        distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m shardwright.torch", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    machine = commands.add_parser("probe", help="measure rates, memory and collectives, and write a machine file")
    machine.add_argument("-o", "--output", required=True)
    machine.add_argument("--device", choices=["cuda", "cpu"], default=device)
    machine.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl on GPUs, else gloo")
    machine.add_argument("--name", help="name of the machine and its device; default: the GPU's name")
    machine.set_defaults(do=_probe)
    costs = commands.add_parser("profile", help="measure the ops of a list of workloads, and write a cost file")
    add_arguments(costs)
    costs.set_defaults(do=run_profile)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no GPU; use --device cpu")
    if given.do is run_profile and given.name is None and given.device == "cuda":
        given.name = gpu_name()
    given.do(given)


if __name__ == "__main__":
    main()
