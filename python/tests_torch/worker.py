"""One training process: `worker.py RANK WORLD PORT FOLDER`. The first process prints its results as JSON lines."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from models import MODELS, Attention, loss_of
from processes import run_cases
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Shard

from shardwright import DoesNotFit, PlanError
from shardwright.torch import _probe, _verify, _weights, parallelize, probe, verify_plan

STEPS = 5
WORLD = int(sys.argv[2])
Results = dict[str, Any]


def train(model: torch.nn.Module, args: Any, kwargs: Any, loss_fn: Any, optimizer: str) -> list[float]:
    """Trains some steps. The step number seeds dropout, so that all runs draw the same masks."""
    if optimizer == "adam":
        update: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        output = model(*args, **kwargs) if loss_fn is None else loss_fn(model(*args[:-1], **kwargs), args[-1])
        loss = loss_of(output)
        losses.append(float(loss.detach()))
        loss.backward()
        update.step()
        update.zero_grad()
    return losses


def largest_difference(state: Any, other: Any) -> float:
    """The largest difference between two states."""
    assert state.keys() == other.keys()
    return max(float((state[name].double() - other[name].double()).abs().max()) for name in state)


def trained(name: str, solver: str, optimizer: str = "momentum", **options: Any) -> Results:
    """Trains a model on one process and on all."""
    torch.manual_seed(0)
    module, args, kwargs, loss_fn = MODELS[name]()
    module.train()
    alone = copy.deepcopy(module)
    losses = train(alone, args, kwargs, loss_fn, optimizer)
    model = parallelize(
        module, args, loss_fn, example_kwargs=kwargs, solver=solver, optimizer=optimizer, progress=False, **options
    )
    together = train(model, args, kwargs, None, optimizer)
    difference = largest_difference(alone.state_dict(), model.full_state_dict())
    verification = verify_plan(model, *args, **kwargs)
    shards = [any(isinstance(at, Shard) for at in p.placements) for p in model.parameters()]
    return {
        "losses": losses,
        "together": together,
        "difference": difference,
        "sharded": sum(shards),
        "weights": len(shards),
        "gathered": dict(model._engine.gathered),
        "calls": sum(len(run.calls) for run in model._engine._runs.values() if run is not None),
        "ops": len(model._captured.graph.ops),
        "predicted": {kind: [t.count, t.bytes] for kind, t in verification.predicted.items()},
        "issued": {kind: [t.count, t.bytes] for kind, t in verification.issued.items()},
        "explained": model.explain("all"),
        "measured": model.measured,
        "own": module.get_parameter("fc1.weight") is model.get_parameter("fc1.weight") if name == "mlp" else None,
    }


def measured() -> Results:
    """Measures several plans for these processes. Small messages only, to be quick."""
    _probe._MESSAGES = (1 << 12, 1 << 14)
    machine = probe()
    text = [machine]
    distributed.broadcast_object_list(text, src=WORLD - 1)
    found = trained("mlp", "exact", measure=True)
    return {**found, "machine": machine, "same": text[0] == machine}


def accumulated() -> Results:
    """Gradients of two passes, all-reduced in several batches, against one process."""
    _weights.TOGETHER = 4096
    torch.manual_seed(0)
    module, args, _, loss_fn = MODELS["mlp"]()
    module.eval()
    alone = copy.deepcopy(module)
    model = parallelize(module, args, loss_fn, solver="data", progress=False)
    with _verify.Watch() as watch:
        for _ in range(2):
            loss_fn(alone(*args[:-1]), args[-1]).backward()
            model(*args).backward()
    # All but the loss.
    sent = [traffic.bytes // 4 for _, traffic in watch.collectives if traffic.bytes > 4]
    _weights.TOGETHER = 25 << 20
    want = {name: p.grad for name, p in alone.named_parameters()}
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"difference": largest_difference(want, got), "sent": sent, "elements": sum(p.numel() for p in alone.parameters())}


def kept() -> Results:
    """Saves the state of one plan and loads it under another, as whole tensors and as a distributed checkpoint."""
    torch.manual_seed(0)
    module, args, _, loss_fn = MODELS["cnn"]()
    other = copy.deepcopy(module)
    for p in other.parameters():
        p.data.zero_()
    third = copy.deepcopy(other)
    first = parallelize(module, args, loss_fn, solver="fsdp", progress=False)
    train(first, args, {}, None, "momentum")
    second = parallelize(other, args, loss_fn, solver="data", progress=False)
    second.load_state_dict(first.full_state_dict())
    folder = os.path.join(sys.argv[4], "checkpoint")
    checkpoint.save({"model": first.state_dict()}, checkpoint_id=folder)
    last = parallelize(third, args, loss_fn, solver="megatron", progress=False)
    state = {"model": last.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    last.load_state_dict(state["model"])
    difference = largest_difference(first.full_state_dict(), last.full_state_dict())
    want = float(first(*args))
    return {
        "names": list(first.state_dict()) == list(copy.deepcopy(other).state_dict()),
        "dtensors": all(isinstance(p, DTensor) for p in first.parameters()),
        "loss": want,
        "by_hand": float(second(*args)),
        "checkpoint": float(last(*args)),
        "difference": difference,
    }


def evaluated() -> Results:
    """Attention in evaluation: no loss, a DTensor as the result, a mask and a flag as arguments."""
    torch.manual_seed(0)
    module = Attention().eval()
    x, mask = torch.randn(8, 8, 16), torch.rand(8, 8) > 0.2
    want = module(x, mask=mask)
    model = parallelize(module, {"x": x, "mask": mask}, solver="data", progress=False)
    with torch.no_grad():
        got = model(mask=mask, x=x)
    return {"type": type(got).__name__, "difference": float((got.full_tensor() - want).abs().max())}


def staged(name: str, solver: str, schedule: str) -> Results:
    """Trains in a pipeline of two groups, four micro-batches, with a stage's weights on two processes."""
    torch.manual_seed(0)
    module, args, kwargs, loss_fn = MODELS[name]()
    module.eval()
    alone = copy.deepcopy(module)
    options = {"solver": solver, "pipeline": 2, "schedule": schedule, "micro_batches": 4, "progress": False}
    model = parallelize(module, args, loss_fn, example_kwargs=kwargs, **options)
    updates = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        loss = loss_fn(alone(*args[:-1]), args[-1])
        loss.backward()
        losses[0].append(float(loss.detach()))
        losses[1].append(float(model.step(*args)))
        for update in updates:
            update.step()
            update.zero_grad()
    whole = model.full_state_dict()
    return {
        "losses": losses,
        "difference": largest_difference(dict(alone.named_parameters()), whole),
        "own": [len(list(model.parameters())), len(whole)],
        "sharded": sum(p.placements[0].is_shard() for p in model.parameters()),
        "stages": model.stages,
        "forward": message(lambda: model(*args)),
        "uneven": message(lambda: model.step(*(x[:6] for x in args))),
    }


def message(call: Callable[[], Any]) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except PlanError as error:
        return str(error)
    return "nothing"


def refused() -> Results:
    """The messages of refused calls."""
    messages = {}

    def expect(name: str, kind: type[Exception], call: Callable[[], Any]) -> None:
        try:
            call()
            messages[name] = "nothing"
        except kind as error:
            messages[name] = str(error)

    torch.manual_seed(0)
    module, (x, y), _, loss_fn = MODELS["mlp"]()
    expect("machine", PlanError, lambda: parallelize(copy.deepcopy(module), (x, y), loss_fn, machine="flat:8"))
    expect("memory", DoesNotFit, lambda: parallelize(copy.deepcopy(module), (x, y), loss_fn, memory="1kB"))
    pipeline = {"pipeline": 2, "micro_batches": 4, "progress": False}
    unknown = {**pipeline, "schedule": "zb-h1"}
    messages["schedule"] = message(lambda: parallelize(copy.deepcopy(module), (x, y), loss_fn, solver="data", **unknown))
    tied, _, inputs, _ = MODELS["gpt2"]()
    messages["tied"] = message(lambda: parallelize(tied, inputs, solver="data", **pipeline))
    return messages


def cases() -> dict[str, Callable[[], Results]]:
    """All cases, by name."""
    solvers = ["exact", "data", "megatron", "fsdp"]
    found: dict[str, Callable[[], Results]] = {
        f"{name} {solver}": lambda name=name, solver=solver: trained(name, solver) for name in MODELS for solver in solvers
    }
    found["mlp untied"] = lambda: trained("mlp", "exact", "adam", untied=True)
    found["measured"] = measured
    found["accumulated"] = accumulated
    found["kept"] = kept
    found["evaluated"] = evaluated
    found["staged mlp"] = lambda: staged("mlp", "exact", "1f1b")
    found["staged fsdp"] = lambda: staged("mlp", "fsdp", "gpipe")
    for solver, schedule in [("megatron", "interleaved"), ("fsdp", "zb-v"), ("data", "dualpipe-v")]:
        found[f"staged {schedule}"] = lambda solver=solver, schedule=schedule: staged("mlp", solver, schedule)
    found["refused"] = refused
    return found


if __name__ == "__main__":
    run_cases(cases())
