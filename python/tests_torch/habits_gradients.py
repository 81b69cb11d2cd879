"""Uses of weights and gradients that go beyond a training loop: gradients of gradients, other weights, penalties, inference mode.
Each case compares processes under a plan with a single process.

`habits_gradients.py RANK WORLD PORT FOLDER` runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from habits import Block, Results, Rounded, X, compared, difference, folder, planned, refusal, same_gradients, whole
from processes import run_cases
from torch import nn
from torch.nn import functional


class Penalized(nn.Module):
    """A critic whose gradient is penalized."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(functional.softmax(self.norm(self.a(x)), -1))


def twice(solver: str) -> Results:
    """Gradients of gradients: of inputs, of weights, and of a loss inside of the plan."""

    def of_inputs(model: Any, given: Any) -> torch.Tensor:
        x = given[0].clone().requires_grad_()
        y = model(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (grad.norm(dim=1) - 1).square().mean()

    def of_weights(model: Any, given: Any) -> torch.Tensor:
        loss = model(*given).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in grads)

    found = [compared(Penalized(), (torch.randn(X),), run, solver=solver) for run in (of_inputs, of_weights)]
    module, x, y = Penalized(), torch.randn(X), torch.arange(8)
    alone = copy.deepcopy(module)
    model = planned(module, (x, y), functional.cross_entropy, solver)

    def step(loss: Callable[..., torch.Tensor]) -> None:
        given = x.clone().requires_grad_()
        value = loss(given, y)
        (grad,) = torch.autograd.grad(value, given, create_graph=True)
        (value + grad.square().sum()).backward()

    step(lambda x, y: functional.cross_entropy(alone(x), y))
    refused = refusal(lambda: step(model))
    inside = 0.0 if refused else same_gradients(model, alone)
    return {"gradients": max(inside, *(f["gradients"] for f in found)), "refused": refused}


def penalty(solver: str) -> Results:
    """Weights in the loss, outside of the module."""

    def run(model: Any, given: Any) -> torch.Tensor:
        return whole(model(*given).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters()))

    return compared(Rounded(), (torch.randn(X),), run, solver=solver)


def other_weights(solver: str) -> Results:
    """The module with other weights, which are results of ops (`functional_call`), also between postponed passes."""

    def run(model: Any, given: Any) -> torch.Tensor:
        weights = dict(model.named_parameters())
        grads = torch.autograd.grad(model(*given).square().mean(), list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g * w for (n, w), g in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(model, fast, given).square().mean()

    found = compared(Rounded(), (torch.randn(X),), run, solver=solver)
    module, x = Rounded(), torch.randn(X)
    alone = copy.deepcopy(module)
    model = planned(module, (x,), solver=solver)
    average = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
    with model.no_sync():
        model(x).square().mean().backward()
    with torch.no_grad():
        torch.func.functional_call(model, average, (x,))
    model(x).abs().mean().backward()
    (alone(x).square().mean() + alone(x).abs().mean()).backward()
    return {**found, "kept": same_gradients(model, alone)}


def inference(solver: str) -> Results:
    """`torch.inference_mode`, with writes into results, and training after it."""
    module, x = nn.Sequential(Block(), nn.Linear(8, 8)).eval(), torch.randn(X)
    alone = copy.deepcopy(module)
    model = planned(module, (x,), solver=solver)
    with torch.inference_mode():
        want, got = alone(x), model(x)
        worst = max(difference(got, want), difference(got.argmax(-1), want.argmax(-1)))
        want, got = want + 1, got + 1
        want += 1
        got += 1
        worst = max(worst, difference(got.square(), want.square()))
    for m in (model, alone):
        m(x).square().mean().backward()
    return {"values": worst, "gradients": same_gradients(model, alone)}


class Table(nn.Module):
    """A table that its lookups write (`max_norm`), and a weight that the module also refers to in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(16, 8, max_norm=1.0, sparse=True), nn.Linear(8, 8)
        self.again = [self.fc.weight]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.table(ids)) @ self.again[0].t()


def written_table(solver: str) -> Results:
    ids = torch.randint(0, 6, (8, 4))
    module = Table()
    alone = copy.deepcopy(module)
    model = planned(module, (ids,), solver=solver)
    for m in (model, alone):
        update = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            m(ids).square().mean().backward()
            update.step()
            update.zero_grad()
    own = model.full_state_dict()
    return {
        "weights": max(difference(t, own[n]) for n, t in alone.state_dict().items()),
        "warned": any("sparse=True" in w and "habits_gradients.py" in w for w in model.plan.warnings),
    }


def kept_weights(solver: str) -> Results:
    """Hooks and attributes that weights have before they are planned, and an optimizer that was made too early."""

    def hooked() -> nn.Module:
        torch.manual_seed(1)
        module = Rounded()
        module.a.weight.register_hook(lambda grad: grad * 2)
        module.b.weight.no_decay = True

        def update(p: Any) -> None:
            with torch.no_grad():
                p.sub_(0.1 * p.grad)
            p.grad = None

        module.b.bias.register_post_accumulate_grad_hook(update)
        return module

    x, alone, module = torch.randn(X), hooked(), hooked()
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    model = planned(module, (x,), solver=solver)
    for m in (model, alone):
        m(x).square().mean().backward()
    moved = max(difference(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    before = model.full_state_dict()
    with torch.no_grad():
        model.a.weight.zero_()
    return {
        "gradients": same_gradients(model, alone), "weights": moved, "attribute": model.b.weight.no_decay, "refused": refusal(early.step),
        "copied": float(before["a.weight"].abs().max()),
    }  # fmt: skip


def containers() -> Results:
    """A planned container is indexed and iterated; what cannot work is refused."""
    model = planned(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(X),))
    other = planned(Rounded(), (torch.randn(X),))
    x = torch.randn(X)
    return {
        "length": len(model), "kinds": [type(m).__name__ for m in model], "first": type(model[0]).__name__,
        "without": hasattr(other, "__len__"), "true": bool(other),
        "pickled": refusal(lambda: torch.save(model, f"{folder()}/model.pt")),
        "transformed": refusal(lambda: torch.func.vmap(lambda row: model(row[None]))(x)),
    }  # fmt: skip


CASES: dict[str, Callable[[], Results]] = {
    "containers": containers,
    "twice data": lambda: twice("data"),
    "twice fsdp": lambda: twice("fsdp"),
    "twice megatron": lambda: twice("megatron"),
    "penalty data": lambda: penalty("data"),
    "penalty fsdp": lambda: penalty("fsdp"),
    "penalty megatron": lambda: penalty("megatron"),
    "other weights data": lambda: other_weights("data"),
    "other weights fsdp": lambda: other_weights("fsdp"),
    "other weights megatron": lambda: other_weights("megatron"),
    "inference data": lambda: inference("data"),
    "inference fsdp": lambda: inference("fsdp"),
    "inference megatron": lambda: inference("megatron"),
    "written table data": lambda: written_table("data"),
    "written table fsdp": lambda: written_table("fsdp"),
    "written table megatron": lambda: written_table("megatron"),
    "kept weights data": lambda: kept_weights("data"),
    "kept weights fsdp": lambda: kept_weights("fsdp"),
    "kept weights megatron": lambda: kept_weights("megatron"),
}

if __name__ == "__main__":
    run_cases(CASES)
