"""Modules and training loops as users write them. Each case compares processes under a plan with a single process.

`habits.py RANK WORLD PORT FOLDER` runs them."""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from processes import run_cases
from torch import distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright
from shardwright.torch import _verify, parallelize, plan, verify_plan

Results = dict[str, Any]


def folder() -> str:
    return sys.argv[4] if len(sys.argv) > 4 else tempfile.mkdtemp()


def planned(module: nn.Module, example: Any, loss_fn: Any = None, solver: str = "data", **options: Any) -> Any:
    return parallelize(module, example, loss_fn, solver=solver, progress=False, **options)


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def difference(a: Any, b: Any) -> float:
    a, b = whole(a.detach()), whole(b.detach())
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def gradients(module: nn.Module) -> dict[str, Any]:
    return {n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()}


def same_gradients(module: nn.Module, other: nn.Module) -> float:
    """The largest difference of gradients. One that only one module has counts as infinite."""
    mine, theirs = gradients(module), gradients(other)
    assert mine.keys() == theirs.keys()
    worst = 0.0
    for name, grad in mine.items():
        if (grad is None) != (theirs[name] is None):
            return float("inf")
        worst = max(worst, difference(grad, theirs[name])) if grad is not None else worst
    return worst


def compared(
    module: nn.Module,
    args: tuple[Any, ...],
    run: Callable[[nn.Module, tuple[Any, ...]], torch.Tensor] | None = None,
    example: Any = None,
    steps: int = 1,
    **options: Any,
) -> Results:
    """Losses and gradients of some passes, on one process and under a plan."""
    run = run or (lambda model, given: model(*given).square().mean())
    alone = copy.deepcopy(module)
    model = planned(module, example or args, **options)
    worst = loss = 0.0
    for step in range(steps):
        torch.manual_seed(step)
        want = run(alone, args)
        want.backward()
        torch.manual_seed(step)
        got = run(model, args)
        got.backward()
        loss = max(loss, difference(got, want))
        worst = max(worst, same_gradients(model, alone))
    return {"loss": loss, "gradients": worst, "gathered": dict(model._engine.gathered), "warnings": model.plan.warnings}


class Distilled(nn.Module):
    """A student beside a teacher whose pass is not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x).tanh()
        return self.student(x) - target


class Rounding(torch.autograd.Function):
    """Rounds; the gradient passes as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Rounding.apply(self.a(x)))


class Scheduled(nn.Module):
    """A number and a truth value that change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.warm = True
        self.scale = 1.0

    def forward(self, x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
        y = self.fc(x) * alpha * self.scale
        return y if self.warm else y.relu() + x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.down(functional.dropout(functional.gelu(self.up(self.norm(x))), 0.1, self.training))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Shuffled(nn.Module):
    """Dropout of a tensor whose dimensions are permuted in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.fc(x).transpose(0, 1), 0.5)


class Branch(nn.Module):
    """Branches on a value, and writes into a view."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if y.sum() > 0:
            y = y * 2
        z = y + 0
        z[:, 0] = 3.0
        z.relu_()
        return torch.fft.rfft(z).abs() + y[:, :5]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y, (h, _) = self.lstm(x)
        z, _ = self.gru(y.transpose(0, 1))
        return {"out": self.norm(z.transpose(0, 1).transpose(1, 2)).mean() + h.square().mean(), "state": h}


class Experts(nn.Module):
    """Tokens go to the experts that a router chooses, as Mixtral does it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


X = (8, 8)


class Squared(nn.Module):
    """Products of a tensor with itself, split along different dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return torch.bmm(y, y) + torch.baddbmm(y, y, y)


def squared() -> Results:
    return compared(Squared(), (torch.randn(4, 8, 8),), solver="megatron")


def teacher() -> Results:
    return compared(Distilled(), (torch.randn(X),), solver="fsdp")


def straight_through() -> Results:
    return compared(Rounded(), (torch.randn(X),), solver="megatron")


def schedule() -> Results:
    module = Scheduled()

    def run(model: Any, given: Any) -> torch.Tensor:
        total = model(*given, alpha=0.5).sum() + model(*given, alpha=0.25).sum()
        model.warm, kept = False, model.scale
        model.scale = 3.0
        total = total + model(*given).sum()
        model.warm, model.scale = True, kept
        return total

    return compared(module, (torch.randn(X),), run)


def recomputed(reentrant: bool) -> Results:
    module = Checkpointed(reentrant)
    x = torch.randn(8, 4, 8, requires_grad=reentrant)
    found = compared(module, (x,), solver="megatron")
    return {**found, "runs": module.blocks[0].runs}


def compiled() -> Results:
    """`torch.compile` of a planned module, of its parts before, and by its method."""
    model, inner = planned(Rounded(), (torch.randn(X),), solver="fsdp"), Rounded()
    inner.a = torch.compile(inner.a)
    calls = {
        "outside": lambda: torch.compile(model, backend="eager")(torch.randn(X)),
        "inside": lambda: planned(inner, (torch.randn(X),)),
        "method": model.compile,
    }
    return {name: refusal(call) for name, call in calls.items()}


def compiled_step() -> Results:
    """A compiled function around a planned module: the module runs by its plan, the rest is compiled."""
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph

    @torch.compile(backend=backend)
    def step(model: Any, given: Any) -> torch.Tensor:
        x = given[0].tanh() * 2
        y = model(x)
        return y.square().mean() + 0.5 * y.abs().mean()

    found = compared(Rounded(), (torch.randn(X),), step, solver="fsdp")
    return {**found, "graphs": len(seen)}


def refusal(call: Callable[[], Any]) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except shardwright.PlanError as error:
        return str(error)
    return ""


class Inner(nn.Module):
    """A part in its own precision."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.fc(x.float())


def precision(solver: str) -> Results:
    """Computing in 16 bits with weights of 32, against the same on one process."""
    module, x, y = nn.Sequential(Block(), nn.Linear(8, 8)).eval(), torch.randn(X), torch.randint(0, 8, (8,))
    alone = copy.deepcopy(module)
    model = planned(module, (x, y), functional.cross_entropy, solver, mixed_precision=torch.bfloat16)
    narrow = {n: p.bfloat16() for n, p in alone.named_parameters()}
    want = functional.cross_entropy(torch.func.functional_call(alone, narrow, (x.bfloat16(),)).float(), y)
    want.backward()
    with _verify.Watch() as watch:
        got = model(x, y)
    got.backward()
    gathered = sum(traffic.bytes for kind, traffic in watch.collectives if kind == "all-gather")
    types = {str(p.dtype) for p in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}
    total = sum(p.numel() for p in alone.parameters())
    return {
        "loss": difference(got, want), "gradients": same_gradients(model, alone), "types": sorted(types),
        "bytes": [gathered, 2 * total if solver == "fsdp" else 0], "gathered": dict(model._engine.gathered),
        **held_to_plan(model, x, y),
    }  # fmt: skip


def held_to_plan(model: Any, *args: Any) -> Results:
    """Collectives of a step, predicted and issued: number and bytes by kind."""
    found = verify_plan(model, *args)
    forms = [{kind: [t.count, t.bytes] for kind, t in side.items()} for side in (found.predicted, found.issued)]
    return {"predicted": forms[0], "issued": forms[1]}


def planned_autocast(solver: str) -> Results:
    """Planned under autocast, with a part that leaves it, and run under it: against autocast on one process."""
    module, x, y = nn.Sequential(Block(), Inner(), nn.Linear(8, 8)).eval(), torch.randn(X), torch.randint(0, 8, (8,))
    alone = copy.deepcopy(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = planned(module, (x, y), functional.cross_entropy, solver)
        got, want = model(x, y), functional.cross_entropy(alone(x), y)
        sent = held_to_plan(model, x, y)
    for p in model.parameters():
        p.grad = None
    got.backward()
    want.backward()
    types = {t.type.split("[")[0] for op in model._captured.graph.ops for t in (model._captured.graph.tensors[op.outputs[0]],)
             if op.name in ("0.up.linear", "1.fc", "0.gelu", "0.norm", "cross_entropy_loss.each")}  # fmt: skip
    return {
        "loss": difference(got, want), "gradients": same_gradients(model, alone), "gathered": dict(model._engine.gathered),
        "made": sorted(types), **sent,
    }  # fmt: skip


class Stack(nn.Module):
    """Blocks of attention, as planners see them repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3))
        self.runs = 0
        self.layers[1].self_attn.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.runs += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def planned_recomputation(policy: str, solver: str) -> Results:
    """The plan says what is computed again; the module says nothing of it."""
    module, x = Stack(), torch.randn(8, 4, 8)
    found = compared(module, (x,), steps=2, solver=solver, recompute=policy)
    return {**found, "runs": module.runs, "left": "forward" in module.layers[0].__dict__}


def micro_batches() -> Results:
    """A step in as many micro-batches as planned."""
    module, x, y = nn.Sequential(Block(), nn.Linear(8, 8)).eval(), torch.randn(X), torch.randint(0, 8, (8,))
    alone = copy.deepcopy(module)
    model = planned(module, (x, y), functional.cross_entropy, "fsdp", micro_batches=2)
    want = functional.cross_entropy(alone(x), y)
    want.backward()
    with _verify.Watch() as watch:
        got = model.accumulate(x, y)
    kinds = [kind for kind, traffic in watch.collectives if traffic.bytes > 4]
    return {
        "loss": difference(got, want), "gradients": same_gradients(model, alone), "planned": model.plan.data["micro_batches"],
        "reduced": kinds.count("reduce-scatter"), "refused": refusal(lambda: model.accumulate(x, y, micro_batches=3)),
    }  # fmt: skip


def uneven() -> Results:
    """Batches that processes cannot share equally."""
    model = planned(nn.Linear(8, 8), (torch.randn(X),))
    told = []
    for size in (8, 6, 5, 5, 7):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.randn(size, 8))
        told.append([str(w.message) for w in caught if "cannot be divided" in str(w.message)])
    return {"told": [len(t) for t in told], "message": told[2][0] if told[2] else ""}


def autocast() -> Results:
    def run(model: Any, given: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.cross_entropy(model(given[0]), torch.arange(8))

    return compared(Block(), (torch.randn(X),), run, example=(torch.randn(X),))


def permuted_dropout() -> Results:
    return compared(Shuffled(), (torch.randn(8, 4, 8),))


def branch() -> Results:
    return compared(Branch(), (torch.randn(X),), solver="megatron")


def recurrent() -> Results:
    def run(model: Any, given: Any) -> torch.Tensor:
        return model(*given)["out"]

    return compared(Recurrent(), (torch.randn(8, 4, 8),), run)


def experts() -> Results:
    return compared(Experts(), (torch.randn(4, 4, 8),))


def other_batches() -> Results:
    """Other batch sizes, uneven ones, evaluation, a criterion outside, and a copy."""
    module = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8))
    alone = copy.deepcopy(module)
    model = planned(module, (torch.randn(8, 4, 8),))
    twin = copy.deepcopy(model)
    worst = 0.0
    for batch in (8, 6, 5):
        x, y = torch.randn(batch, 4, 8), torch.randint(0, 8, (batch,))
        want, got, copied = (functional.cross_entropy(m(x), y) for m in (alone, model, twin))
        want.backward()
        got.backward()
        copied.backward()
        worst = max(worst, difference(want, got), difference(want, copied), same_gradients(model, alone), same_gradients(twin, alone))
    for m in (alone, model):
        m.eval()
    with torch.no_grad():
        want, got = alone(x), model(x)
    right = int((got.argmax(-1) == y).sum()) == int((want.argmax(-1) == y).sum())
    return {"difference": max(worst, difference(want, got)), "right": right, "training": module.training}


def hooks() -> Results:
    """Hooks of modules, activations and weights."""
    module = Rounded()
    alone = copy.deepcopy(module)
    model = planned(module, (torch.randn(X),))
    seen: dict[str, list[Any]] = {"alone": [], "model": []}
    for name, m in (("alone", alone), ("model", model)):

        def after(_: Any, __: Any, output: Any, name: str = name) -> Any:
            output.register_hook(lambda grad: seen[name].append(whole(grad).clone()))
            return output * 2

        m.a.register_forward_hook(after)
        m.b.weight.register_hook(lambda grad, name=name: seen[name].append(whole(grad).clone()))
    x = torch.randn(X)
    for m in (alone, model):
        m(x).square().mean().backward()
    grads = [torch.autograd.grad(m(x).square().mean(), list(m.parameters())) for m in (alone, model)]
    return {
        "gradients": same_gradients(model, alone),
        "seen": [len(seen["alone"]), len(seen["model"])],
        "hooks": max(difference(a, b) for a, b in zip(seen["alone"], seen["model"], strict=True)),
        "grad": max(difference(a, b) for a, b in zip(*grads, strict=True)),
    }


def loop() -> Results:
    """Accumulation without communication, clipping, a moving average, a frozen part, a state that is loaded again."""
    module = nn.Sequential(Block(), Block()).eval()
    module[0].up.weight.requires_grad_(False)
    alone = copy.deepcopy(module)
    model = planned(module, (torch.randn(X),))
    average = [torch.optim.swa_utils.AveragedModel(m) for m in (alone, model)]
    updates = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, model)]
    norms: list[list[float]] = [[], []]
    for step in range(2):
        parts = [torch.randn(X) for _ in range(3)]
        for i, m in enumerate((alone, model)):
            for part in parts[:2]:
                if i:
                    with model.no_sync():
                        m(part).square().mean().backward()
                else:
                    m(part).square().mean().backward()
            m(parts[2]).square().mean().backward()
            norms[i].append(float(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1))))
            updates[i].step()
            average[i].update_parameters(m)
            updates[i].zero_grad(set_to_none=bool(step))
    state = model.full_state_dict()
    loaded = copy.deepcopy(alone)
    loaded.load_state_dict(state)
    own = {n: whole(t) for n, t in average[1].module.state_dict().items()}
    return {
        "norms": norms,
        "weights": max(difference(a, b) for a, b in zip(alone.state_dict().values(), state.values(), strict=True)),
        "average": max(difference(t, own[n]) for n, t in average[0].module.state_dict().items()),
        "names": list(state) == list(alone.state_dict()),
    }


def local_batches() -> Results:
    """Each process has its own samples, as DistributedSampler gives them: DistributedDataParallel's semantics."""
    module = nn.Sequential(nn.Embedding(16, 8), Block(), nn.Linear(8, 16)).eval()
    alone = copy.deepcopy(module)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    worst, losses = 0.0, []
    ids, labels = torch.randint(0, 16, (12, 4)), torch.randint(0, 16, (12, 4))
    model = planned(module, (ids[:4],), batch="local")
    for sizes in ([4] * world, [2] * world, [3, 2]):
        start = sum(sizes[:rank])
        mine = slice(start, start + sizes[rank])
        if len(set(sizes)) == 1:
            out = model(ids[mine])
            loss = functional.cross_entropy(out.transpose(1, 2), labels[mine])
            losses.append(type(out) is torch.Tensor and out.shape == (sizes[rank], 4, 16))
        else:
            # Uneven batches are gathered: the result is whole.
            out = model(ids[mine])
            loss = functional.cross_entropy(out.transpose(1, 2), labels[: sum(sizes)])
        loss.backward()
        total = sum(sizes)
        functional.cross_entropy(alone(ids[:total]).transpose(1, 2), labels[:total]).backward()
        worst = max(worst, same_gradients(model, alone))
    try:
        planned(nn.Linear(8, 8), (torch.randn(X),))(torch.randn(X) + rank)
        refused = ""
    except shardwright.PlanError as error:
        refused = str(error)
    return {"gradients": worst, "shapes": losses, "refused": refused}


def sampled() -> Results:
    """A DataLoader with a DistributedSampler, as scripts for DistributedDataParallel have it."""
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 8, (16,)))
    module = Rounded()
    alone = nn.parallel.DistributedDataParallel(copy.deepcopy(module))
    model = planned(module, (torch.randn(4, 8),), batch="local")
    worst = 0.0
    sampler = torch.utils.data.DistributedSampler(data, seed=3)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
        for m in (alone, model):
            functional.cross_entropy(m(x), y).backward()
        worst = max(worst, same_gradients(model, alone.module))
    return {"gradients": worst, "samples": len(sampler)}


class Detector(nn.Module):
    """Losses by name, targets as a list of mappings, and a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.kinds = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        y = self.body(torch.stack(images)).relu().mean((2, 3))
        boxes = torch.stack([t["boxes"] for t in targets])
        if (boxes[:, 2:] <= boxes[:, :2]).any():
            raise ValueError("an empty box")
        labels = torch.stack([t["labels"] for t in targets])
        return {"boxes": functional.smooth_l1_loss(self.boxes(y), boxes), "kinds": functional.cross_entropy(self.kinds(y), labels)}


def several_losses() -> Results:
    corner = torch.rand(4, 2)
    targets = [{"boxes": torch.cat((c, c + 1)), "labels": torch.randint(0, 3, ())} for c in corner]

    def run(model: Any, given: Any) -> torch.Tensor:
        return sum(model(*given).values())

    found = compared(Detector(), (list(torch.randn(4, 3, 6, 6)), targets), run)
    steps = plan(Detector(), (list(torch.randn(4, 3, 6, 6)), targets), machine="cpu:2", progress=False)
    return {**found, "planned": sorted(name for name in steps.configs() if name in ("boxes", "kinds", "loss.sum"))}


def recomputed_inside_a_loss() -> Results:
    """Blocks that differ, with a loss around them."""
    blocks = [nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in ((4, 8), (8, 16))]
    module = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 8))
    alone, x, y = copy.deepcopy(module), torch.randn(8, 4, 8), torch.randint(0, 8, (8,))
    model = planned(module, (x, y), functional.cross_entropy, recompute="full")
    want, got = functional.cross_entropy(alone(x), y), model(x, y)
    want.backward()
    got.backward()
    return {"loss": difference(got, want), "gradients": same_gradients(model, alone), "again": sorted(model._recomputation.modules)}


def gathered_again() -> Results:
    """Whole weights are gathered for each pass, and are not held from the forward to the backward pass."""
    module, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(X)
    alone = copy.deepcopy(module)
    model = planned(module, (x,), solver="fsdp")
    seen: list[Any] = []
    fetch = type(model._engine.weights).read

    def read(*args: Any) -> Any:
        local = fetch(*args)
        seen.append(StorageWeakRef(local.untyped_storage()))
        return local

    with patch.object(type(model._engine.weights), "read", read), _verify.Watch() as watch:
        got = model(x).square().mean()
        held = sum(not storage.expired() for storage in seen)
        forward = [kind for kind, _ in watch.collectives].count("all-gather")
        got.backward(retain_graph=True)
    gathers = [kind for kind, _ in watch.collectives].count("all-gather")
    alone(x).square().mean().backward()
    first = same_gradients(model, alone)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    try:
        got.backward()
        changed = ""
    except RuntimeError as error:
        changed = str(error)
    return {"gradients": first, "seen": len(seen), "held": held, "forward": forward, "all": gathers, "changed": changed}


def precision_of_batch_norm() -> Results:
    """Batch norms keep their type: PyTorch wants their weights in that of the running statistics."""
    module = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
    alone, x, y = copy.deepcopy(module), torch.randn(8, 4, 8), torch.randint(0, 8, (8,))
    model = planned(module, (x, y), functional.cross_entropy, mixed_precision=torch.bfloat16)
    narrow = {n: p if n.startswith("1.") else p.bfloat16() for n, p in alone.named_parameters()}
    want = functional.cross_entropy(torch.func.functional_call(alone, narrow, (x.bfloat16(),)).float(), y)
    want.backward()
    got = model(x, y)
    got.backward()
    return {
        "loss": difference(got, want), "gradients": same_gradients(model, alone),
        "statistics": max(difference(a, b) for a, b in zip(alone.buffers(), model.buffers(), strict=True)),
    }  # fmt: skip


def saved() -> Results:
    """A plan made without processes, from a module without data, saved and loaded."""
    with torch.device("meta"):
        empty = Rounded()
    path = f"{folder()}/plan{distributed.get_rank()}.json"
    plan(empty, (torch.randn(X),), machine="cpu:2", solver="megatron", progress=False).save(path)
    module = Rounded()
    alone = copy.deepcopy(module)
    model = parallelize(module, (torch.randn(X),), plan=shardwright.Plan.load(path))
    x = torch.randn(X)
    for m in (alone, model):
        m(x).square().mean().backward()
    try:
        parallelize(Distilled(), (torch.randn(X),), plan=shardwright.Plan.load(path))
        refused = ""
    except shardwright.PlanError as error:
        refused = str(error)
    sharded = sum(p.placements[0].is_shard() for p in model.parameters())
    return {"gradients": same_gradients(model, alone), "sharded": sharded, "refused": refused}


def deferred() -> Results:
    """A module on the meta device is planned, allocated and loaded."""
    with torch.device("meta"):
        empty = Rounded()
    model, alone, x = planned(empty, (torch.randn(X),), solver="fsdp"), Rounded(), torch.randn(X)
    model.to_empty(device="cpu")
    model.load_state_dict(alone.state_dict())
    for m in (alone, model):
        m(x).square().mean().backward()
    return {"gradients": same_gradients(model, alone)}


def scaled() -> Results:
    """A loss scaler."""
    module, x = Rounded(), torch.randn(X)
    alone = copy.deepcopy(module)
    model = planned(module, (x,))
    for m in (alone, model):
        update, scaler = torch.optim.SGD(m.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(m(x).square().mean()).backward()
        scaler.unscale_(update)
        scaler.step(update)
        scaler.update()
    own = model.full_state_dict()
    return {"weights": max(difference(t, own[n]) for n, t in alone.state_dict().items())}


def freed() -> Results:
    """Models that are no longer used leave nothing behind."""
    model = planned(Rounded(), (torch.randn(X),))
    model(torch.randn(X).fill_(0.5)).square().mean().backward()
    left = [weakref.ref(x) for x in (model, model._engine, model._original, model.get_parameter("a.weight"))]
    del model
    gc.collect()
    return {"left": sum(x() is not None for x in left)}


def held() -> Results:
    """Gradients that the user still has are not written by the next step; memory that nobody has is used again."""
    model = planned(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8)), (torch.randn(X),))
    places, worst = [], 0.0
    for keeps in (True, False, False):
        model(torch.randn(X)).square().mean().backward()
        places.append(next(model.parameters()).grad.to_local().untyped_storage().data_ptr())
        if keeps:
            had = [p.grad for p in model.parameters()]
            copies = [g.to_local().clone() for g in had]
        model.zero_grad()
        worst = max(worst, *(float((g.to_local() - c).abs().max()) for g, c in zip(had, copies, strict=True)))
    return {"changed": worst, "fresh": places[1] != places[0], "again": places[2] == places[1]}


class Mapped(nn.Module):
    """Maps over the heads of a weight, and takes derivatives of a function of its argument."""

    def __init__(self, around: bool = False) -> None:
        super().__init__()
        self.fc, self.heads, self.around = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8, 8)), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if self.around:
            return torch.vmap(lambda w: (y @ w).tanh())(self.heads).mean(0)
        z = torch.vmap(lambda w, v: (v @ w).tanh(), in_dims=(0, None))(self.heads, y).mean(0)
        return z + torch.func.grad(lambda v: v.pow(3).sum())(y) * 0.1


def mapped() -> Results:
    """Transforms inside of a module run on whole tensors; what they cannot see is refused with the line."""
    found = compared(Mapped(), (torch.randn(X),))
    model = planned(Mapped(around=True), (torch.randn(X),))
    return {**found, "refused": refusal(lambda: model(torch.randn(X)))}


class Counted(nn.Module):
    """Counts its passes, branches on values, and writes into a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.passes, self.seen = nn.Linear(8, 8), 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        with torch.no_grad():
            self.fc.weight.clamp_(-0.3, 0.3)
        y = self.fc(x)
        self.seen.append(float(y.detach().sum()))
        return y * self.passes if self.seen[-1] != 0 else y


def counted() -> Results:
    """What a module keeps in its attributes is untouched by a capture on values."""
    module = Counted()
    found = compared(module, (torch.randn(X),), steps=2)
    return {**found, "passes": module.passes, "seen": len(module.seen)}


CASES: dict[str, Callable[[], Results]] = {
    "teacher": teacher,
    "counted": counted,
    "mapped": mapped,
    "held": held,
    "squared": squared,
    "straight_through": straight_through,
    "schedule": schedule,
    "checkpoint": lambda: recomputed(False),
    "reentrant checkpoint": lambda: recomputed(True),
    "compiled": compiled,
    "compiled step": compiled_step,
    "sampled": sampled,
    "several losses": several_losses,
    "recomputed inside a loss": recomputed_inside_a_loss,
    "gathered again": gathered_again,
    "precision of batch norm": precision_of_batch_norm,
    "precision data": lambda: precision("data"),
    "precision fsdp": lambda: precision("fsdp"),
    "precision megatron": lambda: precision("megatron"),
    "planned autocast data": lambda: planned_autocast("data"),
    "planned autocast fsdp": lambda: planned_autocast("fsdp"),
    "planned autocast megatron": lambda: planned_autocast("megatron"),
    "uneven": uneven,
    "recomputed full": lambda: planned_recomputation("full", "data"),
    "recomputed selective": lambda: planned_recomputation("selective", "megatron"),
    "micro-batches": micro_batches,
    "autocast": autocast,
    "permuted_dropout": permuted_dropout,
    "branch": branch,
    "recurrent": recurrent,
    "experts": experts,
    "other_batches": other_batches,
    "hooks": hooks,
    "loop": loop,
    "local_batches": local_batches,
    "saved": saved,
    "deferred": deferred,
    "scaled": scaled,
    "freed": freed,
}

if __name__ == "__main__":
    run_cases(CASES)
