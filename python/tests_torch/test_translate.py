"""Ops become the planner's ops with names from the module, and compute the same on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from shardwright import plan
from shardwright.torch._capture import capture
from shardwright.torch._run import Run
from shardwright.torch._translate import Step, Translator

X = torch.randn(4, 6, 8)
IMAGE = torch.randn(4, 6, 8, 8)

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
    """A function of a weight that stands for the first argument."""

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


def step_of(module: nn.Module, *inputs: Any) -> Step:
    return Translator(capture(module, inputs, {}, None), module, "net").run()


def run_whole(step: Step, module: nn.Module, mesh: Any, inputs: tuple[Any, ...]) -> Any:
    """Every op by its own kernel, nothing split."""
    for group in step.groups:
        group.whole = False
    form = {
        op.name: {
            "inputs": [["R"]] * len(op.inputs),
            "outputs": [["R"]] * len(op.outputs),
            "split": [],
        }
        for op in step.graph.ops
    }
    return Run(step, form, mesh)(module, list(inputs))[0]


@pytest.mark.parametrize("name", OPS)
def test_kernels_compute_what_pytorch_computes(mesh: Any, name: str) -> None:
    function, (x, *rest) = OPS[name]
    module = Call(function, x)
    step = step_of(module, *rest)
    got = run_whole(step, module, mesh, tuple(rest))
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    want = module(*rest)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    mine = torch.autograd.grad(got.float().pow(2).sum(), module.weight)[0]
    theirs = torch.autograd.grad(want.float().pow(2).sum(), module.weight)[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    # And the planner takes it for what it is: shapes and types are inferred again there.
    plan(step.text(), machine="flat:2", solver="data", progress=False)


def test_names_are_those_of_the_modules() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)))
    names = [op.name for op in step_of(module, torch.randn(3, 4)).graph.ops]
    assert {"0", "0.add_bias", "1.0", "1.0.mean", "1.1"} <= set(names)


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
    weights = [t for t, source in step.sources.items() if source.parameter]
    assert len(weights) == 1
    assert sum(weights[0] in op.inputs for op in step.graph.ops) == 2
