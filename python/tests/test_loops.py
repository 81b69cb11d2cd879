"""Loops over micro-batches and over stacked weights are planned like steps without loops."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import steps
from jax import lax
from test_parallelize import assert_close

from shardwright.jax import parallelize, verify_plan


def accumulated(count, batch=32, inside=False):
    """Gradients of an MLP, accumulated by a scan over micro-batches. The batch is divided outside the step, or inside."""

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def step(w, x, y):
        if inside:
            x, y = (t.reshape(count, batch // count, *t.shape[1:]) for t in (x, y))

        def micro(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(w, *part)), None

        value, grad = jax.tree.map(lambda t: t / count, lax.scan(micro, (jnp.zeros(()), jnp.zeros_like(w)), (x, y))[0])
        return w - 0.1 * grad, value

    shape = (batch,) if inside else (count, batch // count)
    return step, (steps.normal(64, 64, scale=0.1), steps.normal(*shape, 64), steps.normal(*shape, 64))


@pytest.mark.parametrize("solver", ["data", "fsdp"])
def test_the_batch_of_accumulated_gradients_is_the_batch(solver):
    step, args = accumulated(2)
    fast = parallelize(step, *args, machine="cpu:8", solver=solver)
    assert fast.in_shardings[1].spec[0] is None and fast.in_shardings[1].spec[1] is not None
    assert fast.explain().startswith("data parallel over 8; ")
    assert_close(fast(*args), jax.jit(step)(*args))


def test_a_batch_that_is_divided_inside_is_split_in_its_parts():
    step, args = accumulated(2, inside=True)
    fast = parallelize(step, *args, machine="cpu:8", solver="data")
    products = [config for name, config in fast.plan.configs().items() if "dot_general" in name]
    assert products and all("8" in config for config in products), fast.plan.configs()
    assert_close(fast(*args), jax.jit(step)(*args))


@functools.cache
def scanned():
    def loss(params, x):
        body = lambda x, p: (x + jnp.tanh(x @ p["up"].astype(jnp.bfloat16).astype(jnp.float32)) @ p["down"], None)  # noqa: E731
        return jnp.mean(lax.scan(body, x, params)[0] ** 2)

    params = {"up": steps.normal(4, 32, 64, scale=0.1), "down": steps.normal(4, 64, 32, scale=0.1)}
    return steps.sgd(loss), (params, steps.normal(16, 32))


def test_megatron_splits_stacked_weights_by_columns_and_rows():
    step, args = scanned()
    fast = parallelize(step, *args, machine="cpu:8", solver="megatron")
    up, down = fast.in_shardings[0]["up"].spec, fast.in_shardings[0]["down"].spec
    assert up[2] is not None and up[:2] == (None, None)
    assert down[1] is not None and down[0] is None
    assert_close(fast(*args), jax.jit(step)(*args))


def test_random_bits_are_split_as_the_tensor_that_they_mask():
    def loss(w, x, key):
        h = x @ w
        return jnp.mean((h * jax.random.bernoulli(key, 0.5, h.shape)) ** 2)

    args = steps.normal(32, 32), steps.normal(64, 32), jax.random.PRNGKey(0)
    fast = parallelize(steps.sgd(loss), *args, machine="cpu:8", solver="data")
    rounds = [config for name, config in fast.plan.configs().items() if re.search(r"(^|/)(xor|shift_\w+|or)(\.\d+)?$", name)]
    # The key itself is a few numbers.
    assert rounds.count("d0=8") > len(rounds) / 2, fast.plan.configs()
    assert {kind for kind, _, _ in verify_plan(fast).compiled} == {"all-reduce"}
    assert_close(fast(*args), jax.jit(steps.sgd(loss))(*args))


@pytest.mark.parametrize("length, unroll", [(4, 4), (4, True), (6, 4), (1, 1)])
def test_unrolled_loops_are_planned_as_loops(length, unroll):
    def loss(w, x):
        h, means = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.mean()), x, w, unroll=unroll)
        return (h**2).sum() + means.sum()

    step, args = steps.sgd(loss), (steps.normal(length, 32, 32, scale=0.2), steps.normal(64, 32))
    fast = parallelize(step, *args, machine="cpu:8", solver="data")
    assert_close(fast(*args), jax.jit(step)(*args))
    assert not fast.first.planned.stand_ins
    verification = verify_plan(fast)
    assert verification.agreement > 0.95, verification.table()
