"""Measures operator times with PyTorch, on CPU or CUDA, for Shardwright's cost model: `python -m shardwright.torch profile`.

It needs nothing but PyTorch; `python/profile_torch.py` runs it without the package.

`shardwright profile --list -o WORKLOADS.json` writes the workloads; the word `attention` stands for a grid of sizes of fused
attention, forward and backward, `short-attention` for many short sequences, `experts` for the ops that send tokens to experts, and `convolutions` for those of usual
networks.
`--only f32` measures one element type. `--merge` keeps the other rows of an older file. `--costs COSTS.json` reads the result.

`--tf32` measures products and convolutions of f32 in TF32, and `--channels-last` convolutions in that memory format. Both go
into tables of their own mode, and only workloads that a mode changes are measured.

Method. On CUDA each operator is captured several times into a CUDA graph, and events time the graph: this is device
time, without Python or launch overhead. Operands rotate through copies that together exceed the cache (up to 512 MiB),
since operands mostly come from memory in training. The result is the median of several timings after a warm-up. Matrix
products and convolutions in f32 run with TF32 off. On the CPU one thread runs, timed by the wall clock. A failed operator
gets no row: zeros would be read as times.
"""
from __future__ import annotations

import argparse, datetime, json, math, os, platform, statistics, sys, time


import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
          "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
CACHE = 256 << 20
ROTATE = 512 << 20


def attention_grid():
    """Fused attention of usual sizes: batch times key heads, query heads per key head, queries, visible keys per query, and head
    sizes. Half of the rows are causal."""
    rows = set()
    for size in [64, 128]:
        for length in [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]:
            for heads in [8, 32, 128]:
                for repeat in [1, 4, 8]:
                    if heads * length <= 128 * 16384:
                        rows |= {(heads // repeat, repeat, length, visible, size, size) for visible in [length, length // 2 + 1]}
    # A block of queries against all keys, as in context parallelism, and latent attention.
    rows |= {(groups, 4, q, k, 128, 128) for groups in [2, 8] for k in [8192, 32768] for q in [k // 8, k // 4, k // 2]}
    rows |= {(32, 1, length, visible, 192, 128) for length in [2048, 4096, 8192] for visible in [length, length // 2 + 1]}
    classes = [("attention", "bf16"), ("attention_grad", "bf16")]
    tables = [{"class": cls, "dtype": dtype, "rows": sorted(map(list, rows))} for cls, dtype in classes]
    small = sorted(list(row) for row in rows if row[2] <= 4096 and row[0] * row[1] <= 32 and row[4] == 64)
    tables += [{"class": cls, "dtype": "f32", "rows": small} for cls, _ in classes]
    return {"format": "shardwright-workloads", "tables": tables}


def short_attention_grid():
    """Fused attention of many short sequences, as in vision and text encoders."""
    rows = set()
    for length in [64, 128, 197, 256, 257, 384, 512]:
        for groups in [128, 256, 512, 768, 1024, 2048]:
            for size in [64, 80, 128]:
                if groups * length * size <= 1 << 27:
                    rows |= {(groups, 1, length, visible, size, size) for visible in [length, length // 2 + 1]}
    tables = [{"class": cls, "dtype": "bf16", "rows": sorted(map(list, rows))} for cls in ["attention", "attention_grad"]]
    return {"format": "shardwright-workloads", "tables": tables}


def convolutions_grid():
    """Convolutions of usual networks, dense, grouped and by channel, with both gradients: samples, groups, inputs and results of a
    group, sizes of the result, the kernel and the strides."""
    dense, apart = set(), set()
    add = lambda rows, n, g, c, o, side, k, s: rows.add((n, g, c, o, side, side, k, k, s, s))
    for n in [16, 64, 128]:
        # Pairs of 3x3 convolutions as in U-Net and VGG, and blocks as in ResNet.
        for width, side in [(64, 256), (64, 224), (64, 112), (128, 112), (128, 128), (256, 64), (256, 56), (128, 56), (512, 32),
                            (512, 28), (256, 28), (512, 14), (1024, 16), (1024, 14), (512, 7)]:
            if n * width * side * side > 1 << 29:
                continue
            add(dense, n, 1, width, width, side, 3, 1)
            add(dense, n, 1, width // 2, width, side, 3, 1)
            add(dense, n, 1, 2 * width, width, side, 3, 1)
            add(dense, n, 1, width, width, side // 2, 3, 2)
        for width, side in [(64, 56), (128, 28), (256, 14), (512, 7), (96, 56), (192, 28), (384, 14), (768, 7), (160, 14), (320, 7)]:
            add(dense, n, 1, width, 4 * width, side, 1, 1)
            add(dense, n, 1, 4 * width, width, side, 1, 1)
            add(dense, n, 1, 4 * width, 2 * width, side, 1, 1)
            add(dense, n, 1, 2 * width, 4 * width, side // 2 or 1, 1, 2)
        # First layers: three channels.
        for width, side, k, s in [(64, 112, 7, 2), (64, 224, 3, 1), (32, 112, 3, 2), (64, 256, 3, 1), (96, 56, 4, 4), (768, 14, 16, 16),
                                  (1024, 14, 16, 16), (1280, 16, 14, 14), (64, 55, 11, 4), (32, 149, 3, 2)]:
            add(dense, n, 1, 3, width, side, k, s)
        for width, side in [(32, 112), (96, 112), (144, 56), (192, 28), (384, 14), (576, 14), (960, 7), (64, 112), (240, 28), (480, 14),
                            (672, 14), (1152, 7), (96, 56), (192, 56), (768, 7), (128, 56), (256, 28), (512, 14), (1024, 7)]:
            for k in [3, 5, 7]:
                add(apart, n, width, 1, 1, side, k, 1)
                if k < 7 and side > 7:
                    add(apart, n, width, 1, 1, side // 2, k, 2)
        for g, c, side in [(32, 4, 56), (32, 8, 28), (32, 16, 14), (32, 32, 7)]:
            add(apart, n, g, c, c, side, 3, 1)
    rows = sorted(map(list, apart)) + sorted(map(list, dense))
    classes = ["conv", "conv_grad_input", "conv_grad_weight"]
    tables = [{"class": cls, "dtype": dtype, "rows": rows} for cls in classes for dtype in ["f32", "bf16"]]
    return {"format": "shardwright-workloads", "tables": tables}


def experts_grid():
    """Ops that send tokens to experts and back, by the bytes that they move."""
    rows = [[1 << i] for i in range(16, 33)]
    classes = ["route", "slots", "dispatch", "combine", "combine_grad_weights", "top_k", "take_along", "put_along", "gather", "scatter_add"]
    tables = [{"class": cls, "dtype": dtype, "rows": rows} for cls in classes for dtype in ["f32", "bf16"]]
    return {"format": "shardwright-workloads", "tables": tables}


def conv_case(dims):
    """(input shape, weight shape, output shape, stride, groups, spatial rank) for n, groups, c/g, o/g, out.., kernel.., stride.."""
    n, g, c, o = dims[:4]
    d = (len(dims) - 4) // 3
    out, kernel, stride = dims[4 : 4 + d], dims[4 + d : 4 + 2 * d], dims[4 + 2 * d :]
    size = [(a - 1) * s + k for a, k, s in zip(out, kernel, stride)]
    return [n, g * c, *size], [g * o, c, *kernel], [n, g * o, *out], list(stride), g, d


class Bench:
    """Operands and a function per workload class. `make` returns (operands, function of operands), and optionally a second
    function whose time is subtracted."""

    def __init__(self, device, channels_last=False):
        self.device, self.channels_last = device, channels_last

    def rand(self, shape, dtype):
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def arranged(self, x):
        return x.to(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def make(self, cls, dtype, sizes):
        t, size = DTYPES[dtype], DTYPES[dtype].itemsize
        if cls == "gemm_f8":
            b, m, n, k = sizes
            if b > 1 or m % 16 or n % 16 or k % 16:
                return None  # such products stay in 16 bits
            one = torch.ones((), device=self.device)
            # Both operands are rounded first, with scales that are known: one pass over each.
            narrow = lambda x: x.to(torch.float8_e4m3fn)
            f = lambda x, w: torch._scaled_mm(narrow(x), narrow(w).t(), one, one, out_dtype=t)
            return (self.rand((m, k), t), self.rand((n, k), t)), f
        if cls.startswith("gemm"):
            b, m, n, k = sizes
            # "gemm_tn": the first operand is stored transposed.
            first, second = (cls[5:] or "nn")

            def matrix(rows, columns, transposed):
                shape = (columns, rows) if transposed == "t" else (rows, columns)
                x = self.rand(shape if b == 1 else (b, *shape), t)
                return x.mT if transposed == "t" else x

            return (matrix(m, k, first), matrix(k, n, second)), torch.mm if b == 1 else torch.bmm
        if cls in ("conv", "conv_grad_input", "conv_grad_weight"):
            x, w, y, stride, g, d = conv_case(sizes)
            conv = torch.ops.aten.convolution_backward
            rest = dict(stride=stride, padding=[0] * d, dilation=[1] * d, transposed=False, output_padding=[0] * d, groups=g)
            if cls == "conv":
                f = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[d]
                return tuple(map(self.arranged, (self.rand(x, t), self.rand(w, t)))), lambda a, b: f(a, b, stride=stride, groups=g)
            mask = [cls == "conv_grad_input", cls == "conv_grad_weight", False]
            f = lambda dy, a, b: conv(dy, a, b, None, output_mask=mask, **rest)
            return tuple(map(self.arranged, (self.rand(y, t), self.rand(x, t), self.rand(w, t)))), f
        if cls in ("attention", "attention_grad"):
            groups, repeat, q, visible, d, e = sizes
            # Half of the keys visible on average is a causal mask; other bands take as long as that many keys.
            causal = q > 1 and visible == (q + 2) // 2
            keys = q if causal else visible
            tensors = [(groups * repeat, q, d), (groups, keys, d), (groups, keys, e)]
            operands = tuple(self.rand((1, *shape), t).requires_grad_() for shape in tensors)

            def forward(q, k, v):
                with torch.enable_grad():
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=repeat > 1)

            def both(*operands):
                y = forward(*operands)
                return torch.autograd.grad(y, operands, torch.ones_like(y))

            return (operands, forward) if cls == "attention" else (operands, both, forward)
        if cls in ("lstm", "lstm_grad"):
            # cuDNN's recurrent layer with inputs of width 1: nearly only the recurrence.
            steps, batch, inner, hidden = sizes
            if inner != hidden:
                return None  # cuDNN has no layer for a block of the recurrence
            lstm = torch.nn.LSTM(1, hidden, device=self.device, dtype=t)
            x = self.rand((steps, batch, 1), t)

            def forward(x):
                with torch.enable_grad():
                    return lstm(x)[0]

            def both(x):
                y = forward(x)
                return torch.autograd.grad(y, list(lstm.parameters()), torch.ones_like(y))

            return ((x,), forward) if cls == "lstm" else ((x,), both, forward)
        return self.memory_bound(cls, t, size, sizes[0])

    def memory_bound(self, cls, t, size, nbytes):
        """Memory-bound operators. `nbytes` is the total read and written."""
        aten = torch.ops.aten

        def flat(tensors, row=1):
            # Elements per tensor if `tensors` of them are moved in full.
            return max(row, nbytes // (size * tensors) // row * row)

        def rows(tensors, width=1024):
            n = flat(tensors)
            width = min(width, n)
            return (max(1, n // width), width)

        if cls == "unary":
            return (self.rand(flat(2), t),), torch.relu
        if cls == "unary_grad":
            n = flat(3)
            return (self.rand(n, t), self.rand(n, t)), lambda y, g: aten.threshold_backward(g, y, 0)
        if cls == "binary":
            n = flat(3)
            return (self.rand(n, t), self.rand(n, t)), torch.add
        if cls == "compare":
            n = max(1, nbytes // (2 * size + 1))
            return (self.rand(n, t), self.rand(n, t)), torch.lt
        if cls == "select":
            n = max(1, nbytes // (3 * size + 1))
            return (self.rand(n, t) > 0, self.rand(n, t), self.rand(n, t)), torch.where
        if cls == "cast":
            n = max(1, nbytes // (size + 4))
            return (self.rand(n, torch.float32 if t != torch.float32 else torch.bfloat16),), lambda x: x.to(t)
        if cls in ("fill", "iota"):
            return (self.rand(flat(1), t),), lambda x: x.fill_(1.0)
        if cls == "broadcast":
            r, w = rows(1)
            return (self.rand((1, w), t),), lambda x: x.expand(r, w).clone(memory_format=torch.contiguous_format)
        if cls in ("reshape", "slice", "concat", "pad"):
            return (self.rand(flat(2), t),), torch.clone
        if cls == "transpose":
            r, w = rows(2)
            return (self.rand((r, w), t),), lambda x: x.t().clone(memory_format=torch.contiguous_format)
        if cls == "reduce":
            return (self.rand(rows(1), t),), lambda x: x.sum(1)
        if cls in ("softmax", "log_softmax"):
            f = torch.softmax if cls == "softmax" else torch.log_softmax
            return (self.rand(rows(2), t),), lambda x: f(x, 1)
        if cls in ("softmax_grad", "log_softmax_grad"):
            f = aten._softmax_backward_data if cls == "softmax_grad" else aten._log_softmax_backward_data
            shape = rows(3)
            return (self.rand(shape, t), self.rand(shape, t)), lambda y, g: f(g, y, 1, t)
        if cls in ("sum_exp", "cross_entropy"):
            return (self.rand(rows(1), t),), lambda x: torch.logsumexp(x, 1)
        if cls == "cross_entropy_grad":
            shape = rows(2)
            return (self.rand(shape, t),), lambda x: torch.softmax(x, 1)
        if cls == "variance":
            return (self.rand(rows(1), t),), lambda x: x.var(1)
        if cls == "normalize":
            shape = rows(2)
            w = self.rand(shape[1], t)
            return (self.rand(shape, t),), lambda x: F.layer_norm(x, shape[1:], w, w)
        if cls in ("norm_grad_stats", "norm_grad_params"):
            shape = rows(2)
            return (self.rand(shape, t), self.rand(shape, t)), lambda x, g: (x * g).sum(0 if "params" in cls else 1)
        if cls == "norm_grad_input":
            n = flat(3)
            return (self.rand(n, t), self.rand(n, t)), lambda x, g: torch.addcmul(g, x, g)
        if cls == "dropout":
            return (self.rand(flat(2), t),), lambda x: F.dropout(x, 0.1, True)
        if cls in ("sgd", "momentum"):
            n = flat(3 if cls == "sgd" else 5)
            w = [self.rand(n, t) for _ in range(2 if cls == "sgd" else 3)]
            if cls == "sgd":
                return tuple(w), lambda p, g: p.add_(g, alpha=-0.01)
            return tuple(w), lambda p, g, v: torch._fused_sgd_([p], [g], [v], weight_decay=0.0, momentum=0.9, lr=0.01,
                                                               dampening=0.0, nesterov=False, maximize=False, is_first_step=False)
        if cls == "adam":
            w = [self.rand(flat(7), t).abs() for _ in range(4)]
            step = torch.ones((), device=self.device)
            return tuple(w), lambda p, g, m, v: torch._fused_adam_([p], [g], [m], [v], [], [step], lr=0.01, beta1=0.9,
                                                                   beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
        if cls in ("route", "top_k"):
            # Scores of 64 experts per token, the two best of them.
            return (self.rand((max(1, nbytes // (64 * size + 16)), 64), t),), lambda x: x.topk(2, 1)
        if cls == "slots":
            ids = torch.randint(0, 64, (max(2, nbytes // 8),), device=self.device, dtype=torch.int32)
            return (ids,), lambda x: x.sort(stable=True)
        if cls in ("dispatch", "combine", "combine_grad_weights"):
            n, width = flat(2) // 4096, 4096
            if n < 2:
                return None
            x, slots = self.rand((n, width), t), torch.randperm(n, device=self.device)
            if cls == "dispatch":
                return (x, slots), lambda x, i: x.index_select(0, i)
            if cls == "combine_grad_weights":
                return (x, self.rand((n, width), t), slots), lambda x, g, i: (x * g.index_select(0, i)).sum(1)
            weights = self.rand((n, 1), t)
            return (x, slots, weights), lambda x, i, w: torch.zeros_like(x).index_add_(0, i, x * w)
        if cls in ("take_along", "put_along"):
            r, w = rows(2)
            ids = torch.randint(0, w, (r, w), device=self.device)
            if cls == "take_along":
                return (self.rand((r, w), t), ids), lambda x, i: x.gather(1, i)
            return (self.rand((r, w), t), ids), lambda x, i: torch.zeros_like(x).scatter_add_(1, i, x)
        if cls in ("gather", "scatter_add"):
            r, w = rows(2)
            table = self.rand((max(2, min(r, 30000)), w), t)
            ids = torch.randint(0, table.shape[0], (r,), device=self.device)
            if cls == "gather":
                return (table, ids), lambda a, i: a.index_select(0, i)
            grad = self.rand((r, w), t)
            return (grad, ids), lambda g, i: torch.zeros_like(table).index_add_(0, i, g)
        if cls in ("max_pool", "avg_pool"):
            n = max(64, nbytes * 4 // 5 // size)
            side = max(8, min(64, int(math.sqrt(n / 64)) // 2 * 2))
            x = self.rand((max(1, n // (side * side)), side, side), t)
            f = F.max_pool2d if cls == "max_pool" else F.avg_pool2d
            return (x[None],), lambda x: f(x, 2)
        if cls in ("max_pool_grad", "avg_pool_grad"):
            n = max(64, nbytes * 4 // 5 // size)
            side = max(8, min(64, int(math.sqrt(n / 64)) // 2 * 2))
            x = self.rand((1, max(1, n // (side * side)), side, side), t)
            if cls == "avg_pool_grad":
                g = self.rand((1, x.shape[1], side // 2, side // 2), t)
                return (g, x), lambda g, x: aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], [0, 0], False, True, None)
            y, index = F.max_pool2d(x, 2, return_indices=True)
            return (y, x), lambda g, x: aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
        if cls == "cumsum":
            return (self.rand(rows(2), t),), lambda x: x.cumsum(1)
        if cls == "one_hot":
            r, w = rows(1)
            ids = torch.randint(0, w, (r, 1), device=self.device)
            return (ids, torch.arange(w, device=self.device)), lambda i, a: (i == a).to(t)
        return None


def copies(operands):
    """Several sets of operands that together exceed the cache."""
    nbytes = sum(x.numel() * x.element_size() for x in operands)
    count = 1 if nbytes >= CACHE else min(16, max(1, ROTATE // max(1, nbytes)))
    clone = lambda x: x.detach().clone().requires_grad_(x.requires_grad)
    return [operands] + [tuple(clone(x) for x in operands) for _ in range(count - 1)]


def time_cuda(sets, f):
    for s in sets[:2]:
        f(*s)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    f(*sets[0])
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end) * 1e-3, 2e-6)
    repeats = int(min(40, max(2, 0.004 / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            f(*sets[i % len(sets)])
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(5 if once < 0.02 else 3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / repeats)
    del graph
    return statistics.median(times)


def time_cpu(sets, f):
    begin = time.perf_counter()
    f(*sets[0])
    once = time.perf_counter() - begin
    repeats = int(min(200, max(1, 0.01 / max(once, 1e-6))))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for i in range(repeats):
            f(*sets[i % len(sets)])
        times.append((time.perf_counter() - begin) / repeats)
    return statistics.median(times)


def merged(old, new):
    """The tables of both; rows of `new` replace those of `old` with the same sizes."""
    key = lambda t: (t["class"], t["dtype"], t.get("mode"))
    tables = {key(t): {tuple(row[:-1]): row for row in t["rows"]} for t in old}
    for table in new:
        rows = tables.setdefault(key(table), {})
        rows.update({tuple(row[:-1]): row for row in table["rows"]})
    return [{"class": cls, "dtype": dtype, "mode": mode, "rows": sorted(rows.values())} for (cls, dtype, mode), rows in tables.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `profile`."""
    parser.add_argument("workloads")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--merge", metavar="OLD.json", help="a cost file of the same device whose other rows are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="device name for the cost file (default: PyTorch's name)")
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit in seconds; the measurements so far are written")
    parser.add_argument("--only", choices=DTYPES, help="only this element type")
    parser.add_argument("--tf32", action="store_true", help="multiply f32 in TF32")
    parser.add_argument("--channels-last", action="store_true", help="convolutions in the memory format channels_last")


def run(args: argparse.Namespace) -> None:
    """Measures and writes the cost file."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    torch.set_num_threads(1)
    on_gpu = args.device == "cuda"
    measure = time_cuda if on_gpu else time_cpu
    bench = Bench(args.device, args.channels_last)
    mode = "_".join(["tf32"] * args.tf32 + ["channels_last"] * args.channels_last) or None
    if args.workloads == "attention":
        document = attention_grid()
    elif args.workloads == "experts":
        document = experts_grid()
    elif args.workloads == "short-attention":
        document = short_attention_grid()
    elif args.workloads == "convolutions":
        document = convolutions_grid()
    else:
        with open(args.workloads) as f:
            document = json.load(f)
    if document.get("format") != "shardwright-workloads":
        sys.exit(f"{args.workloads}: not a workload list; make one with `shardwright profile --list -o FILE`")
    if args.only:
        document["tables"] = [t for t in document["tables"] if t["dtype"] == args.only]
    if mode:
        changed = lambda t: ("conv" in t["class"] or not args.channels_last and "gemm" in t["class"]) and (t["dtype"] == "f32" or not args.tf32)
        document["tables"] = [t for t in document["tables"] if changed(t)]
    begin, done, failed, tables = time.monotonic(), 0, {}, []
    # Coarse to fine across all tables, so that a time limit thins every table equally.
    fineness = lambda i: i & -i or 1 << 40
    jobs = [(-fineness(i), i, n, row) for n, t in enumerate(document["tables"]) for i, row in enumerate(t["rows"])]
    jobs = [(n, row) for _, _, n, row in sorted(jobs)]
    results = {n: [] for n in range(len(document["tables"]))}
    for n, row in jobs:
        if time.monotonic() - begin > args.seconds:
            print(f"time limit reached after {done} of {len(jobs)} workloads", file=sys.stderr)
            break
        table = document["tables"][n]
        try:
            made = bench.make(table["class"], table["dtype"], row)
            if made is None:
                continue
            operands, f, *without = made
            with torch.no_grad():
                sets = copies(operands)
                seconds = measure(sets, f)
                if without:  # a backward pass is timed together with its forward pass, whose time is subtracted
                    seconds -= measure(sets, without[0])
            del operands, sets, made, f, without
            if seconds > 0 and math.isfinite(seconds):
                results[n].append([*row, max(1, round(seconds * 1e9))])
                done += 1
        except (RuntimeError, NotImplementedError, ValueError, TypeError, KeyError) as error:
            reason = str(error).splitlines()[0][:100]
            failed[(table["class"], table["dtype"], reason)] = failed.get((table["class"], table["dtype"], reason), 0) + 1
            if on_gpu and "out of memory" in reason:
                torch.cuda.empty_cache()
        if on_gpu and done % 500 == 0:
            torch.cuda.empty_cache()
    for n, table in enumerate(document["tables"]):
        if results[n]:
            tables.append({"class": table["class"], "dtype": table["dtype"], "mode": mode, "rows": sorted(results[n])})
    for (cls, dtype, reason), count in sorted(failed.items()):
        print(f"not measured: {cls} {dtype} x{count}: {reason}", file=sys.stderr)
    name = args.name or (torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu")
    method, source = [], []
    if args.merge:
        with open(args.merge) as f:
            old = json.load(f)
        if old["device"].lower() != name.lower():
            sys.exit(f"{args.merge}: measured on {old['device']}, not on {name}")
        method, source = [old["method"]], [f"{old['source']} ({old['date']})"]
        tables = merged(old["tables"], tables)
    header = {
        "format": "shardwright-costs",
        "version": 1,
        "device": name,
        "date": datetime.date.today().isoformat(),
        "source": "; ".join(source + [f"PyTorch {torch.__version__}" + (f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if on_gpu else ", one thread")]),
        "method": (method or ["CUDA graph of repeated calls on rotating operands, median of 3-5; TF32 off but in tables of mode tf32" if on_gpu else "wall clock, median of 5"])[0],
    }
    text = json.dumps(header)[:-1] + ', "tables": [\n' + ",\n".join(
        f'{{"class": "{t["class"]}", "dtype": "{t["dtype"]}", ' + (f'"mode": "{t["mode"]}", ' if t["mode"] else "") + '"rows": [\n' + ",\n".join(json.dumps(r, separators=(",", ":")) for r in t["rows"]) + "]}"
        for t in tables) + "\n]}\n"
    with open(args.output + ".tmp", "w") as f:
        f.write(text)
    os.replace(args.output + ".tmp", args.output)
    print(f"{done} measured in {time.monotonic() - begin:.0f} s, {sum(failed.values())} failed: {args.output}")

