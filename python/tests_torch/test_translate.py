"""Translations to the planner's ops: names, and results on one process and on blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from shardwright import plan
from shardwright.torch import parallelize
from shardwright.torch._capture import Capture, capture
from shardwright.torch._engine import Engine
from shardwright.torch._graph import AtenCall, Input
from shardwright.torch._kernels import SPECIAL, Block, Blocks, LocalShapeError, check_shapes, local_function
from shardwright.torch._ops import TABLE
from shardwright.torch._translate import Translator

X = torch.randn(4, 6, 8)
IMAGE = torch.randn(4, 6, 8, 8)
#: Queries with two heads per key head.
QUERIES, KEYS = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
VISIBLE = torch.randn(2, 1, 6, 6) > -0.5

OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unary": (lambda x: (x.abs() + 1).log().tanh().sqrt().exp().sigmoid() + x.sin().cos() - x.erf(), (X,)),
    "activations": (lambda x: functional.silu(x) + functional.leaky_relu(x, 0.2) + functional.gelu(x, approximate="tanh"), (X,)),
    "numbers": (lambda x: (2 * x - 1) / 3 + (1 - x) ** 2 + x**3 + x / 2, (X,)),
    "binary": (lambda x: torch.maximum(x, x * x) - torch.minimum(x, 1 / (x * x + 1)), (X,)),
    "where": (lambda x, m: torch.where(m, x, -x).masked_fill(~m, 0.5), (X, X > 0)),
    "views": (lambda x: x.reshape(24, 8).unsqueeze(1).squeeze(1).view(4, 48).flatten(), (X,)),
    "orders": (lambda x: x.transpose(1, 2).permute(2, 0, 1).contiguous(), (X,)),
    "slices": (lambda x: x[:, 1:5:2].sum(1, keepdim=True) + x[:, 2].unsqueeze(1) + x[..., -1:], (X,)),
    "parts": (lambda x: torch.cat([p * i for i, p in enumerate(x.split(3, 2))], 2) + torch.stack(x.unbind(1), 1), (X,)),
    "pad": (lambda x: functional.pad(x, (1, 2, 0, 1), value=2.0), (X,)),
    "expand": (lambda x: x[:, :1].expand(4, 6, 8) * x, (X,)),
    "sums": (lambda x: x.sum(-1, keepdim=True) + x.mean((0, 1)) + x.mean() + x.sum(), (X,)),
    "softmax": (lambda x: x.softmax(-1) + functional.log_softmax(x, 1), (X,)),
    "products": (lambda x: x @ x[0].t() + torch.einsum("nsc,ntc->nst", x, x) + x.bmm(x.transpose(1, 2)), (X,)),
    "causal": (lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True), (X,)),
    "heads": (lambda x, k: functional.scaled_dot_product_attention(x[:, :2], k, k, scale=0.3), (QUERIES, KEYS)),
    "grouped": (lambda x, k: functional.scaled_dot_product_attention(x, k, k, is_causal=True, enable_gqa=True), (QUERIES, KEYS)),
    "visible": (lambda x, m: functional.scaled_dot_product_attention(x, x, x, attn_mask=m), (QUERIES, VISIBLE)),
    "biased": (lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=x[0, 0, :, :6]), (QUERIES,)),
    "masked": (lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=x[:, :, :6] * 2), (X,)),
    "pools": (lambda x: functional.max_pool2d(x, 3, 2, 1) + functional.avg_pool2d(x, 2) + functional.adaptive_avg_pool2d(x, 4), (IMAGE,)),
    "group conv": (lambda x: functional.conv2d(x, torch.ones(6, 3, 3, 3), padding="same", groups=2), (IMAGE,)),
    "mse": (lambda x: functional.mse_loss(x, x * 2), (X,)),
    "bce": (lambda x: functional.binary_cross_entropy_with_logits(x, (x > 0).float()), (X,)),
    "nll": (lambda x, y: functional.nll_loss(x[0].log_softmax(-1), y), (X, torch.tensor([1, 2, -100, 0, 7, 7]))),
    "cross entropy": (lambda x, y: functional.cross_entropy(x, y, ignore_index=2), (X, torch.randint(0, 6, (4, 8)))),
    "types": (lambda x: x.double().sum().float() + x.to(torch.bfloat16).sum().float(), (X,)),
}


class Call(nn.Module):
    """A function whose first argument is a weight."""

    def __init__(self, function: Callable[..., Any], x: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(x.clone())

    def forward(self, *rest: Any) -> Any:
        return self.function(self.weight, *rest)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A mesh of this process alone."""
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("one",))
    distributed.destroy_process_group()


def step_of(module: nn.Module, *inputs: Any) -> Capture:
    return capture(module, inputs, {}, None)


def run_whole(step: Capture, module: nn.Module, mesh: Any, inputs: tuple[Any, ...], fuse: bool = False) -> Any:
    """Runs every planner op by itself (or nodes as one ATen op), nothing split."""
    form = {
        op.name: {
            "inputs": [["R"]] * len(op.inputs),
            "outputs": [["R"]] * len(op.outputs),
            "split": [],
        }
        for op in step.graph.ops
    }
    engine = Engine(module, step.planned(form), mesh)
    engine.fuse = fuse
    result = module(*inputs)
    assert engine._runs and all(run is not None for run in engine._runs.values()), "every call runs by the plan"
    return result


@pytest.mark.parametrize("fuse", [False, True], ids=["ops", "nodes"])
@pytest.mark.parametrize("name", OPS)
def test_local_calls_compute_the_same_as_pytorch(mesh: Any, name: str, fuse: bool) -> None:
    function, (x, *rest) = OPS[name]
    module = Call(function, x)
    step = step_of(module, *rest)
    got = run_whole(step, module, mesh, tuple(rest), fuse)
    want = function(module.weight, *rest)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    mine = torch.autograd.grad(got.float().pow(2).sum(), module.weight)[0]
    theirs = torch.autograd.grad(want.float().pow(2).sum(), module.weight)[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    # The planner infers the same shapes and types.
    plan(step.text(), machine="flat:2", solver="data", progress=False)


def test_a_new_pointwise_op_needs_only_a_translation(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cosh(t: Translator, x: Any) -> int:
        return t.emit("", "unary", [t.tensor(x)], t.result_shape(), f="exp")

    monkeypatch.setitem(TABLE, torch.ops.aten.cosh.default, cosh)
    module = Call(torch.cosh, X)
    got = run_whole(step_of(module), module, mesh, ())
    torch.testing.assert_close(got, torch.cosh(X), rtol=0, atol=0)


def test_an_op_that_counts_global_sizes_must_be_listed() -> None:
    blocks = Blocks([Block((8, 4), [4, 0], [4, 4])], [Block((16, 4), [8, 0], [8, 4])])
    call = AtenCall(torch.ops.aten.broadcast_to.default, (Input(0), [2, 8, 4]))
    with pytest.raises(LocalShapeError, match="broadcast_to.*`SPECIAL`"):
        check_shapes(call, blocks, [torch.float32])
    assert all(special.reason for special in SPECIAL.values())


def split(x: torch.Tensor, dim: int | None) -> list[tuple[Block, torch.Tensor]]:
    """The blocks of two processes, each with its shard: halves along a dimension, or the whole tensor twice."""
    if dim is None:
        return [(Block(tuple(x.shape), [0] * x.dim(), list(x.shape)), x)] * 2
    shards = x.chunk(2, dim)
    starts = [[i * size if d == dim else 0 for d, size in enumerate(shards[0].shape)] for i in range(2)]
    return [(Block(tuple(x.shape), at, list(shard.shape)), shard) for at, shard in zip(starts, shards, strict=True)]


aten = torch.ops.aten
A, B, C, D, E = (Input(i) for i in range(5))
SDPA = aten.scaled_dot_product_attention.default
TABLE_ROWS = torch.randn(6, 3)
IDS = torch.tensor([[5, 0, 2], [3, 3, 1]])
LOGITS, LABELS = torch.randn(5, 6), torch.tensor([5, 0, -100, 3, 2])
LARGEST = LOGITS.amax(-1)
TOTAL = (LOGITS - LARGEST.unsqueeze(-1)).exp().sum(-1)
MEAN, VARIANCE = X.mean((0, 1)), X.var((0, 1), correction=0)

#: Results of the pieces that no overload computes.
PIECES = {
    "variance": VARIANCE,
    "normalize": (X - MEAN) * (VARIANCE + 1e-5).rsqrt() * MEAN + MEAN,
    "sum_exp": TOTAL,
    "cross_entropy": functional.cross_entropy(LOGITS, LABELS, reduction="none"),
}


def conv(target: Any, rank: int, padding: Any) -> tuple[Any, ...]:
    """A depthwise convolution whose channels are split."""
    tensors = [torch.randn(2, 4, *[5] * rank), torch.randn(4, 1, *[3] * rank)]
    return target, tensors, (A, B, None, [1] * rank, padding, [1] * rank, 4), [1, 0], 1


#: Overload or piece, its tensors, its arguments, the split dimension of each tensor and that of the result (or a sum).
SPLITS: list[tuple[Any, ...]] = [
    (aten.view.default, [X], (A, [4, 48]), [0], 0),
    (aten._unsafe_view.default, [X], (A, [4, 48]), [0], 0),
    (aten.reshape.default, [X], (A, [24, 8]), [0], 0),
    (aten.squeeze.default, [torch.randn(2, 1, 3)], (A,), [0], 0),
    (aten.squeeze.dim, [torch.randn(2, 3)], (A, 0), [0], 0),
    (aten.squeeze.dims, [torch.randn(2, 1, 3)], (A, [0, 1]), [0], 0),
    (aten.expand.default, [torch.randn(4, 1, 8)], (A, [4, 6, 8]), [0], 0),
    (aten.adaptive_avg_pool1d.default, [X], (A, [4]), [2], 2),
    (aten.adaptive_avg_pool2d.default, [IMAGE], (A, [4, 2]), [2], 2),
    (aten.adaptive_avg_pool3d.default, [torch.randn(1, 2, 4, 4, 4)], (A, [2, 2, 1]), [2], 2),
    *(conv(op.default, n, [1] * n) for n, op in enumerate((aten.conv1d, aten.conv2d, aten.conv3d), 1)),
    *(conv(op.padding, n, "same") for n, op in enumerate((aten.conv1d, aten.conv2d, aten.conv3d), 1)),
    (aten.mean.default, [X], (A,), [1], None),
    (aten.mean.dim, [X], (A, [0, 1]), [1], None),
    (aten.mean.dim, [X], (A, [1]), [0], 0),
    (aten.embedding.default, [TABLE_ROWS, IDS], (A, B), [0, None], None),
    (aten.embedding.default, [TABLE_ROWS, IDS], (A, B), [None, 0], 0),
    (aten.gather.default, [LOGITS, LABELS.clamp(min=0).unsqueeze(1)], (A, 1, B), [1, None], None),
    (aten.dropout.default, [X], (A, 0.3, X.stride()), [1], 1),
    (SDPA, [QUERIES, QUERIES, QUERIES], (A, B, C, None, 0.0, True), [2, None, None], 2),
    (SDPA, [QUERIES, QUERIES, QUERIES], (A, B, C, None, 0.0, True), [1, 1, 1], 1),
    (SDPA, [QUERIES, QUERIES, QUERIES, VISIBLE], (A, B, C, D), [2, None, None, 2], 2),
    ("variance", [X, MEAN], (A, B, [0, 1], 24), [1, None], None),
    ("normalize", [X, MEAN, VARIANCE, MEAN, MEAN], (A, B, C, D, E, [0, 1], [2], 1e-5), [1, None, None, None, None], 1),
    ("sum_exp", [LOGITS, LARGEST], (A, B), [1, None], None),
    ("cross_entropy", [LOGITS, LABELS, LARGEST, TOTAL], (A, B, C, D, -100), [1, None, None, None], None),
    # Derived from the overload itself.
    (aten.unsqueeze.default, [X], (A, 1), [0], 0),
    (aten.slice.Tensor, [X], (A, 1, 2, 5), [0], 0),
    (aten.einsum.default, [X, X], ("nsc,ntc->nst", [A, B]), [2, 2], None),
]


@pytest.mark.parametrize(("target", "tensors", "args", "dims", "result"), SPLITS, ids=lambda x: str(x) if callable(x) else "")
def test_shards_compute_the_blocks_of_the_whole(target: Any, tensors: Any, args: Any, dims: Any, result: int | None) -> None:
    inputs = [split(x, dim) for x, dim in zip(tensors, dims, strict=True)]
    torch.manual_seed(0)
    if isinstance(target, str):
        want = PIECES[target]
    else:
        args = (A, 0.3, True) if (drops := target is aten.dropout.default) else args
        want = target(*fx.node.map_aggregate(args, lambda a: tensors[a.index] if isinstance(a, Input) else a))
        args = (A, 0.3, X.stride()) if drops else args
    got = []
    for process in range(2):
        torch.manual_seed(0)
        blocks, shards = zip(*(both[process] for both in inputs), strict=True)
        output = split(want, result)[process][0]
        got.append(local_function(AtenCall(target, args), Blocks(list(blocks), [output]))(list(shards)))
    torch.testing.assert_close(sum(got) if result is None else torch.cat(got, result), want)


def test_every_special_case_is_tested_on_shards() -> None:
    assert {target for target, *_ in SPLITS} >= SPECIAL.keys()


def test_one_process_runs_too(mesh: Any) -> None:
    module, x = nn.Linear(4, 2), torch.randn(3, 4)
    want = module(x).sum()
    model = parallelize(module, (x,), progress=False)
    got = model(x).sum()
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(model.get_parameter("weight").grad.full_tensor(), x.sum(0).expand(2, 4))


def test_op_names_are_module_paths() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)))
    names = [op.name for op in step_of(module, torch.randn(3, 4)).graph.ops]
    assert {"0", "0.add_bias", "1.0", "1.0.mean", "1.1"} <= set(names)


def test_attention_is_one_op() -> None:
    def kinds(function: Callable[..., Any], x: torch.Tensor, *rest: Any) -> list[str]:
        return [op.kind for op in step_of(Call(function, x), *rest).graph.ops]

    for name in ("heads", "grouped", "biased"):
        function, (x, *rest) = OPS[name]
        assert kinds(function, x, *rest).count("attention") == 1, name
    dropped = lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)  # noqa: E731
    assert "attention" not in kinds(dropped, QUERIES), "random bits are drawn for all weights"


def test_a_tied_weight_is_one_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids))

    step = step_of(Tied(), torch.randint(0, 10, (4, 3)))
    weights = [t for t, tensor in enumerate(step.graph.tensors) if tensor.role == "parameter"]
    assert len(weights) == 1
    assert sum(weights[0] in op.inputs for op in step.graph.ops) == 2
