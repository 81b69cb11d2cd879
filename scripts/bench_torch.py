#!/usr/bin/env python3
"""Times training steps of PyTorch modules on processes of this machine, one thread each, and counts their traffic:
PyTorch's DistributedDataParallel (`ddp`), `fully_shard` (`fsdp2`) and `parallelize_module` (`tp`), and the plans of
`shardwright.torch`.

    scripts/bench_torch.py --processes 16 --models mlp,gpt --plans ddp,data,exact,kept --probe mine.toml
    scripts/bench_torch.py --processes 4,16 --sizes medium,large --plans ddp,data,fsdp2,fsdp,tp,megatron,exact --seconds 280

`kept` is the plan that `parallelize(measure=True)` keeps. Several numbers of processes and sizes share the seconds.

Prints one JSON line per model and plan: seconds of the slowest process, and the first one's processor
time, which other programs disturb less. Needs torch, and the Python package.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings

WARM = 3


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", default="4", help="one number, or several")
    parser.add_argument("--models", default="mlp,gpt")
    parser.add_argument("--plans", default="ddp,data,exact")
    parser.add_argument("--machine", help="what plans are for; as many CPUs as there are processes by default")
    parser.add_argument("--probe", help="plan for the processes as they are: measure them and write a machine file here")
    parser.add_argument("--seconds", type=float, default=140, help="begin nothing new after this long")
    parser.add_argument("--search", type=float, default=10, help="seconds for each search")
    parser.add_argument("--steps", type=int, default=6, help="of each variant, after three that are not counted")
    parser.add_argument("--sizes", default="large", help="small (for a try), medium (a step takes about a tenth of a second), large")
    return parser.parse_args()


def start(given: argparse.Namespace) -> None:
    """All runs, one after the other. Each takes its part of what is left of the seconds."""
    end = time.perf_counter() + given.seconds
    runs = [(int(count), size) for size in given.sizes.split(",") for count in str(given.processes).split(",")]
    failed = 0
    for i, (count, size) in enumerate(runs):
        failed = max(failed, run(count, size, max((end - time.perf_counter()) / (len(runs) - i), 1)))
    sys.exit(failed)


def run(count: int, size: str, seconds: float) -> int:
    """Starts the processes; the first one prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(count):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        quiet = subprocess.DEVNULL if rank else None
        command = [sys.executable, *sys.argv, "--sizes", size, "--seconds", str(seconds)]
        processes.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
    try:
        return processes[0].wait(seconds + 30)
    except subprocess.TimeoutExpired:
        print(json.dumps({"processes": count, "sizes": size, "fails": "out of time"}), flush=True)
        return 1
    finally:
        for process in processes:
            process.kill()


def models(sizes: str):
    """Name -> module, inputs, loss."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            n, s, c = x.shape
            y = self.norm1(x)
            q, k, v = (
                f(y).view(n, s, self.heads, c // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(n, s, c))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class Stack(nn.Module):
        def __init__(self, width: int, heads: int, blocks: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def mlp():
        width, batch = {"small": (64, 32), "medium": (512, 256), "large": (4096, 512)}[sizes]
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        x = torch.randn(batch, width)
        return nn.Sequential(*layers), (x, torch.randn(batch, width)), functional.mse_loss

    def gpt():
        width, batch, tokens = {"small": (32, 16, 8), "medium": (256, 16, 64), "large": (1024, 16, 128)}[sizes]
        x = torch.randn(batch, tokens, width)
        return Stack(width, 16, 4), (x, torch.randn(batch, tokens, width)), functional.mse_loss

    return {"mlp": mlp, "gpt": gpt}


def tensor_parallel(module, world: int):
    """Weights split by columns and rows in turn, with PyTorch's `parallelize_module`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    columns = lambda: ColwiseParallel(use_local_output=False)  # noqa: E731
    if hasattr(module, "blocks"):
        block = {**{name: columns() for name in ("query", "key", "value", "up")}, "out": RowwiseParallel(), "down": RowwiseParallel()}
        for part in module.blocks:
            parallelize_module(part, mesh, block)
        return module
    return parallelize_module(module, mesh, {str(2 * i): RowwiseParallel() if i % 2 else columns() for i in range(4)})


def measure(steps, count: int) -> list[tuple[list[float], list[float]]]:
    """Of each variant: seconds of the slowest process, and processor seconds of this one with all its threads, step by step. The
    variants take turns, so that other programs disturb all of them alike."""
    import torch
    from torch import distributed

    found = [([], []) for _ in steps]
    for _ in range(WARM + count):
        for step, (seconds, busy) in zip(steps, found, strict=True):
            distributed.barrier()
            begin, used = time.perf_counter(), time.process_time()
            step()
            took = torch.tensor(time.perf_counter() - begin)
            busy.append(time.process_time() - used)
            distributed.all_reduce(took, op=distributed.ReduceOp.MAX)
            seconds.append(float(took))
    return [(seconds[WARM:], busy[WARM:]) for seconds, busy in found]


def work(given: argparse.Namespace) -> None:
    import torch
    from torch import distributed

    from shardwright.torch import parallelize, probe, verify_plan

    warnings.filterwarnings("ignore")
    begin = time.perf_counter()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    makers = models(given.sizes)
    machine = given.machine
    if given.probe:
        text, machine = probe(), given.probe
        if rank == 0:
            with open(given.probe, "w", encoding="utf-8") as file:
                file.write(text)
            print(json.dumps({"probed": given.probe, "seconds": round(time.perf_counter() - begin, 1)}), flush=True)
        distributed.barrier()
    for name in given.models.split(","):
        ready: list = []
        for plan in given.plans.split(","):
            late = torch.tensor(float(time.perf_counter() - begin > given.seconds))
            distributed.all_reduce(late)
            if late:
                continue
            torch.manual_seed(0)
            module, inputs, loss_fn = makers[name]()
            found: dict = {"model": name, "plan": plan, "processes": world, "sizes": given.sizes, "torch": torch.__version__}
            if plan in ("ddp", "fsdp2", "tp"):
                if plan == "ddp":
                    model = torch.nn.parallel.DistributedDataParallel(module)
                elif plan == "tp":
                    model = tensor_parallel(module, world)
                else:
                    from torch.distributed.fsdp import fully_shard

                    for block in getattr(module, "blocks", module):
                        if list(block.parameters()):
                            fully_shard(block)
                    model = fully_shard(module)
                # Every process has the whole batch where weights are split.
                share = inputs if plan == "tp" else [x.chunk(world)[rank].contiguous() for x in inputs]

                def loss(model=model, share=share, loss_fn=loss_fn):
                    return loss_fn(model(*share[:-1]), share[-1])
            else:
                kept = plan == "kept"
                options = {"machine": machine, "measure": kept, "time": given.search, "progress": False}
                model = parallelize(module, inputs, loss_fn, solver="exact" if kept else plan, **options)
                verified = verify_plan(model, *inputs)
                for p in model.parameters():
                    p.grad = None
                found["predicted_seconds"] = model.plan.step_seconds
                found["predicted_data_seconds"] = model.plan.baselines["data"]
                found["measured"] = {name: round(s, 5) for name, s in model.measured.items()}
                found["configs"] = sorted(set(model.plan.configs().values()))
                found["predicted"] = {kind: [t.count, t.bytes] for kind, t in verified.predicted.items()}
                found["issued"] = {kind: [t.count, t.bytes] for kind, t in verified.issued.items()}

                def loss(model=model, inputs=inputs):
                    return model(*inputs)

            update = torch.optim.SGD(model.parameters(), lr=0.001)

            def step(loss=loss, update=update):
                loss().backward()
                update.step()
                update.zero_grad()

            try:
                step()
            except NotImplementedError as error:
                # DTensor has no rule for an op (attention on CPUs).
                if rank == 0:
                    print(json.dumps({**found, "fails": str(error)}), flush=True)
                continue
            ready.append((found, step))
        for (found, _), (seconds, busy) in zip(ready, measure([step for _, step in ready], given.steps), strict=True):
            found["median_seconds"] = statistics.median(seconds)
            found["seconds"] = [round(s, 5) for s in seconds]
            found["median_cpu_seconds"] = statistics.median(busy)
            if rank == 0:
                print(json.dumps(found), flush=True)
        del ready
    distributed.destroy_process_group()


if __name__ == "__main__":
    arguments = options()
    if "RANK" in os.environ:
        work(arguments)
    else:
        start(arguments)
