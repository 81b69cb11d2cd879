"""Micro-batches and recomputation change the memory of a step, not its results. What cannot be kept is refused, with its line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from jax import lax
from test_parallelize import assert_close

from shardwright import PlanError
from shardwright.jax import parallelize, train_step, verify_plan


def sgd(loss):
    return train_step(loss, lambda grads, state, params: (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state))


def model():
    return {"table": steps.normal(64, 32, scale=0.3), "w": steps.normal(32, 64, scale=0.2)}


def mean_over_counted_tokens(params, tokens, mask):
    log_p = jax.nn.log_softmax(jnp.tanh(params["table"][tokens]) @ params["w"])
    losses = -jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    return jnp.sum(losses * mask) / jnp.sum(mask)


def with_dropout(params, tokens, key):
    h = params["table"][tokens]
    return steps.cross_entropy(h * jax.random.bernoulli(key, 0.8, h.shape) @ params["w"], tokens)


def in_half_precision(params, tokens):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return steps.cross_entropy((half["table"][tokens] @ half["w"]).astype(jnp.float32), tokens)


def by_number(params, tokens):
    losses = jnp.sum((params["table"][tokens] @ params["w"]) ** 2, (1, 2))
    return jnp.mean(losses * jnp.arange(tokens.shape[0])) / 1000


def convolution(params, tokens):
    x = params["table"][tokens][..., None]
    kernel = params["w"][:3, :12].reshape(3, 1, 1, 12)
    return jnp.mean(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2)


def mask():
    return jnp.asarray(np.arange(16 * 8).reshape(16, 8) % 5 > 1, jnp.float32)


KEPT = {
    mean_over_counted_tokens: lambda: (steps.ids(64, 16, 8), mask()),
    with_dropout: lambda: (steps.ids(64, 16, 8), jax.random.key(0)),
    in_half_precision: lambda: (steps.ids(64, 16, 8),),
    by_number: lambda: (steps.ids(64, 16, 8),),
    convolution: lambda: (steps.ids(64, 16, 8),),
}


@pytest.mark.parametrize("loss", KEPT, ids=lambda f: f.__name__)
def test_results_of_micro_batches_equal_those_of_the_batch(loss):
    args = model(), None, *KEPT[loss]()
    fast = parallelize(sgd(loss), *args, machine="cpu:8", solver="data", micro_batches=2)
    loops = [eqn for eqn in fast.first.step.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert loops and all(eqn.params["length"] == 2 for eqn in loops)
    got, want = fast(*args), jax.jit(sgd(loss))(*args)
    # Gradients of 16-bit products are rounded once per micro-batch.
    scale = 50 if loss is in_half_precision else 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5 * scale)


def test_steps_of_any_form_are_divided_and_results_per_sample_come_back():
    def step(params, tokens):
        def loss(params):
            logits = params["table"][tokens] @ params["w"]
            return steps.cross_entropy(logits, tokens), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        scale = jnp.minimum(1, 1 / jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))))
        return jax.tree.map(lambda p, g: p - scale * g, params, grads), value, logits, jnp.sum(logits.argmax(-1) == tokens)

    args = model(), steps.ids(64, 16, 8)
    fast = parallelize(step, *args, machine="cpu:8", solver="data", micro_batches=4)
    assert_close(fast(*args), jax.jit(step)(*args))


def statistics_of_the_batch(params, tokens):
    h = params["table"][tokens] @ params["w"]
    return jnp.mean(jnp.tanh((h - h.mean(0)) / (h.std(0) + 1)))


def pairs(params, tokens):
    h = params["table"][tokens].mean(1)
    return steps.cross_entropy(h @ h.T, jnp.arange(h.shape[0]))


def hardest(params, tokens):
    return jnp.max(jnp.mean((params["table"][tokens] @ params["w"]) ** 2, (1, 2)))


def neighbours(params, tokens):
    h = params["table"][tokens].reshape(8, -1)
    return jnp.mean(jnp.tanh(h.sum(1)))


def running(params, tokens):
    return jnp.mean(jnp.cumsum(params["table"][tokens], 0) ** 2)


@pytest.mark.parametrize("loss", [statistics_of_the_batch, pairs, hardest, neighbours, running], ids=lambda f: f.__name__)
def test_steps_whose_samples_meet_are_refused_with_their_line(loss):
    lines = range(loss.__code__.co_firstlineno + 1, loss.__code__.co_firstlineno + 4)
    with pytest.raises(PlanError, match="micro-batches") as error:
        parallelize(sgd(loss), model(), None, steps.ids(64, 16, 8), machine="cpu:8", micro_batches=2)
    assert any(f"test_micro_batches.py:{line}:" in str(error.value) for line in lines), error.value


def test_numbers_of_micro_batches_and_unknown_batches_are_explained():
    args = model(), None, steps.ids(64, 16, 8)
    with pytest.raises(PlanError, match=r"does not divide the batch of 16; use one of 1, 2, 4, 8, 16"):
        parallelize(sgd(in_half_precision), *args, machine="cpu:8", micro_batches=3)
    with pytest.raises(PlanError, match="micro_batches=0"):
        parallelize(sgd(in_half_precision), *args, machine="cpu:8", micro_batches=0)
    with pytest.raises(PlanError, match="batch_argnums"):
        loss = lambda p, x, y: jnp.sum(x) + jnp.sum(y) + jnp.sum(p["w"])  # noqa: E731
        parallelize(sgd(loss), *args, steps.normal(3), machine="cpu:8", micro_batches=2)


def blocks(params, x):
    for p in params:
        x = x + jnp.tanh(steps.norm(x, 1, 0) @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(lax.scan(lambda x, p: (x + jnp.tanh(steps.norm(x, 1, 0) @ p["up"]) @ p["down"], None), x, params)[0] ** 2)


@functools.cache
def weights(stacked):
    layers = (4,) if stacked else ()
    one = lambda: {"up": steps.normal(*layers, 32, 64, scale=0.1), "down": steps.normal(*layers, 64, 32, scale=0.1)}  # noqa: E731
    return one() if stacked else [one() for _ in range(4)]


@pytest.mark.parametrize(("loss", "policy"), [(blocks, "selective"), (scanned, "full"), (blocks, "elementwise")])
def test_blocks_are_recomputed_by_a_policy(loss, policy):
    args = weights(loss is scanned), None, steps.normal(64, 32)
    fast = parallelize(sgd(loss), *args, machine="cpu:8", solver="data", recompute=policy)
    text = str(fast.first.step.jaxpr)
    assert text.count("remat" if "remat" in text else "checkpoint") >= (1 if loss is scanned else 4)
    assert_close(fast(*args), jax.jit(sgd(loss))(*args))


def test_recomputation_and_micro_batches_lower_xlas_memory():
    # Long sequences of small layers: activations are most of the memory.
    args = weights(True), None, steps.normal(64, 256, 32)
    used = {}
    for name, options in {"plain": {}, "full": {"recompute": "full"}, "both": {"recompute": "full", "micro_batches": 4}}.items():
        fast = parallelize(sgd(scanned), *args, machine="cpu:8", solver="data", **options)
        used[name] = fast.first.compiled_bytes()
    assert used["full"] < 0.7 * used["plain"] and used["both"] < 0.7 * used["full"], used


def test_the_fewest_micro_batches_that_fit_are_taken():
    args = weights(True), None, steps.normal(64, 256, 32)
    whole = parallelize(sgd(scanned), *args, machine="cpu:8", solver="data").first.compiled_bytes()
    fast = parallelize(sgd(scanned), *args, machine="cpu:8", solver="data", micro_batches="auto", memory=0.6 * whole)
    assert any(eqn.primitive.name == "scan" and eqn.params["length"] in (2, 4) for eqn in fast.first.step.jaxpr.eqns)
    assert fast.first.compiled_bytes() <= 0.6 * whole


def test_recomputation_that_cannot_be_applied_is_refused_with_the_line():
    def step(params, x):
        return steps.sgd(blocks)(params, x)

    args = weights(False), steps.normal(64, 32)
    with pytest.raises(PlanError, match=rf"test_micro_batches\.py:{step.__code__.co_firstlineno} .*train_step"):
        parallelize(step, *args, machine="cpu:8", recompute="full")
    with pytest.raises(PlanError, match="use one of off, full, selective, elementwise"):
        parallelize(sgd(blocks), args[0], None, args[1], machine="cpu:8", recompute="some")
    with pytest.raises(PlanError, match="neither a loop nor equal blocks"):
        parallelize(sgd(pairs), model(), None, steps.ids(64, 16, 8), machine="cpu:8", recompute="full")


def test_blocks_under_checkpoint_stay_as_they_are():
    def loss(params, x):
        body = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None))
        return jnp.mean(lax.scan(body, x, params)[0] ** 2)

    args = weights(True), None, steps.normal(64, 32)
    plain, again = (parallelize(sgd(loss), *args, machine="cpu:8", solver="data", recompute=r) for r in (None, "selective"))
    assert [e.primitive.name for e in plain.first.step.jaxpr.eqns] == [e.primitive.name for e in again.first.step.jaxpr.eqns]


def plain_blocks(params, x):
    for p in params:
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def plain_scanned(params, x):
    return jnp.mean(lax.scan(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None), x, params)[0] ** 2)


@pytest.mark.parametrize("solver", ["data", "fsdp"])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (plain_blocks, {}),
        (plain_blocks, {"micro_batches": 4}),
        (plain_blocks, {"micro_batches": 4, "recompute": "full"}),
        (plain_scanned, {}),
        (plain_scanned, {"micro_batches": 4}),
        (plain_scanned, {"recompute": "selective"}),
        (plain_scanned, {"recompute": "full"}),
        (plain_scanned, {"micro_batches": 4, "recompute": "full"}),
    ],
    ids=[
        "whole",
        "micro-batches",
        "micro-batches, recomputed",
        "loop",
        "loop, micro-batches",
        "loop, partly recomputed",
        "loop, recomputed",
        "loop, micro-batches, recomputed",
    ],
)
def test_xlas_memory_is_predicted(loss, options, solver):
    layers = (4,) if loss is plain_scanned else ()
    one = lambda: {"up": steps.normal(*layers, 32, 128, scale=0.1), "down": steps.normal(*layers, 128, 32, scale=0.1)}  # noqa: E731
    args = one() if layers else [one() for _ in range(4)], None, steps.normal(64, 256, 32)
    fast = parallelize(sgd(loss), *args, machine="cpu:8", solver=solver, **options)
    found = verify_plan(fast, *args)
    # XLA gathers one block's weights after the other inside of its loops, which saves more than is predicted where little else is held.
    near = 0.15 if solver == "fsdp" and len(options) == 2 and layers else 0.1
    assert found.predicted_peak_bytes == pytest.approx(found.compiled_peak_bytes, rel=near)
