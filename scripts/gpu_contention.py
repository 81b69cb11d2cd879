#!/usr/bin/env python3
"""How much slower kernels run while a collective occupies cores of the same GPU: scripts/gpu_contention.py [BLOCKS ...]

Needs one GPU, PyTorch and Triton. A collective is stood in for by a kernel of BLOCKS blocks that copies memory until it is told to stop, as
NCCL's blocks do (24 on an H100). Every kernel of a training step is timed alone and beside it.
"""

import statistics
import sys

import torch
import triton
import triton.language as tl

BYTES = 1 << 28


@triton.jit
def copy_beside(source, target, stop, blocks, count, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK
    lanes = tl.arange(0, CHUNK)
    rounds = 0
    running = tl.load(stop, volatile=True)
    while (running == 0) & (rounds < 20_000_000):
        tl.store(target + at + lanes, tl.load(source + at + lanes))
        at += blocks * CHUNK
        at = tl.where(at + CHUNK > count, tl.program_id(0).to(tl.int64) * CHUNK, at)
        rounds += 1
        running = tl.load(stop, volatile=True)
    tl.store(target + count + tl.program_id(0), rounds)


def kernels():
    """Usual kernels of a training step in bf16: name, call."""
    def tensor(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    a, w, wide = tensor(8192, 4096), tensor(4096, 4096), tensor(4096, 14336)
    up = tensor(8192, 14336)
    heads = [tensor(2, 32, 4096, 128) for _ in range(3)]
    x = tensor(8192, 14336)
    yield "product 8192 x 4096 x 4096", lambda: a @ w
    yield "product 8192 x 4096 x 14336", lambda: a @ wide
    yield "product 8192 x 14336 x 4096", lambda: up @ wide.T
    yield "attention 2 x 32 x 4096 x 128", lambda: torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    yield "element-wise, 705 MB", lambda: x * x


def milliseconds(call, stream, times=15):
    taken = []
    with torch.cuda.stream(stream):
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            for _ in range(4):
                call()
            end.record(stream)
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 4)
    return statistics.median(taken[3:])


def main():
    counts = [int(word) for word in sys.argv[1:]] or [16, 24, 32]
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    work, beside = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.randint(0, 9, (BYTES // 4,), device="cuda", dtype=torch.int32)
    target = torch.zeros(BYTES // 4 + 1024, device="cuda", dtype=torch.int32)
    stop, one = torch.zeros(1, device="cuda", dtype=torch.int32), torch.ones(1, device="cuda", dtype=torch.int32)
    halt = torch.cuda.Stream()
    cases = list(kernels())
    alone = {name: milliseconds(call, work) for name, call in cases}
    print(f"{torch.cuda.get_device_name()}, {cores} cores; PyTorch {torch.__version__}")
    for blocks in counts:
        stop.zero_()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(beside):
            begin.record(beside)
            copy_beside[(blocks,)](source, target, stop, blocks, BYTES // 4, CHUNK=4096, num_warps=16)
            end.record(beside)
        slowed = {name: milliseconds(call, work) for name, call in cases}
        with torch.cuda.stream(halt):
            stop.copy_(one)
        end.synchronize()
        rounds = int(target[BYTES // 4 : BYTES // 4 + blocks].sum())
        rate = 2 * 4 * 4096 * rounds / (begin.elapsed_time(end) * 1e-3)
        print(f"\n{blocks} blocks, {rate / 1e9:.0f} GB/s read and written; by cores alone {cores / (cores - blocks):.2f}x")
        for name, milli in slowed.items():
            print(f"  {name:32} {alone[name]:7.3f} ms alone  {milli:7.3f} ms beside  {milli / alone[name]:.2f}x")


if __name__ == "__main__":
    main()
