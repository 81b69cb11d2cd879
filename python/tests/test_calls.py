"""Every kind of call that `jax.jit` takes has the results of `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from test_parallelize import assert_close

from shardwright.jax import parallelize, verify_plan


def linear(width=32, batch=64):
    return {"w": steps.normal(width, width, scale=0.2)}, steps.normal(batch, width)


def evaluate(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)


@pytest.mark.parametrize("batch", [128, 8, 37])
def test_another_batch_size_is_planned_again(batch):
    params, x = linear()
    fast = parallelize(evaluate, params, x, machine="cpu:8", solver="data")
    other = steps.normal(batch, 32)
    assert_close(fast(params, other), evaluate(params, other))
    assert_close(fast(params, x), evaluate(params, x))
    # The second call of a shape uses its plan again.
    fast(params, other)
    assert len(fast.steps) == 2


def test_other_element_types_are_planned_again():
    params, x = linear()
    fast = parallelize(evaluate, params, x, machine="cpu:8", solver="data")
    got = fast(params, x.astype(jnp.bfloat16))
    assert got.dtype == evaluate(params, x.astype(jnp.bfloat16)).dtype
    ints = jnp.ones((64, 32), jnp.int32)
    assert_close(fast(params, ints), evaluate(params, ints))


def test_another_structure_of_arguments_is_planned_again():
    step, args = steps.mlp(layers=3)
    fast = parallelize(step, *args, machine="cpu:8", solver="data")
    fewer = (args[0][:-1], *args[1:])
    assert_close(fast(*fewer), step(*fewer))
    with pytest.raises(TypeError):
        fast(*args[:-1])


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


@jax.custom_jvp
def doubled_slope(x):
    return jnp.sin(x)


doubled_slope.defjvp(lambda primals, tangents: (doubled_slope(*primals), 2 * jnp.cos(primals[0]) * tangents[0]))


@pytest.mark.parametrize("rule", [straight_through, doubled_slope])
@pytest.mark.parametrize("constrain", [True, False])
def test_gradients_of_the_sharded_function_keep_custom_derivatives(rule, constrain):
    params, x = linear()

    def loss(params, x):
        return jnp.mean(rule(x @ params["w"]) ** 2)

    fast = parallelize(loss, params, x, machine="cpu:8", solver="data", constrain=constrain)
    want = jax.grad(loss)(params, x)
    assert float(jnp.abs(want["w"]).max()) > 0.01
    assert_close(jax.grad(fast)(params, x), want)
    assert_close(fast(params, x), loss(params, x))


def test_custom_derivatives_in_loops_are_kept():
    params, x = linear()

    def loss(params, x):
        body = jax.checkpoint(lambda h, _: (straight_through(4 * h @ params["w"]) / 4, None))
        return jnp.mean(jax.lax.scan(body, x, None, length=3)[0] ** 2)

    fast = parallelize(loss, params, x, machine="cpu:8", solver="data")
    assert_close(jax.grad(fast)(params, x), jax.grad(loss)(params, x))


def test_random_keys_go_in_and_out():
    params, x = linear()

    def step(params, x, key):
        key, use = jax.random.split(key)
        keep = jax.random.bernoulli(use, 0.5, x.shape)
        return evaluate(params, jnp.where(keep, x, 0)), key

    for key in (jax.random.key(3), jax.random.key(3, impl="rbg")):
        fast = parallelize(step, params, x, key, machine="cpu:8")
        loss, after = fast(params, x, key)
        want, want_after = jax.jit(step)(params, x, key)
        assert after.dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(after), jax.random.key_data(want_after))
        assert_close(loss, want)
        assert_close(fast(params, x, after)[0], jax.jit(step)(params, x, want_after)[0])
        assert jax.tree.structure(fast.shard((params, x, key))) == jax.tree.structure((params, x, key))


def test_keyword_static_and_other_arguments_work():
    params, x = linear()

    def step(params, x, power, *, scale, act="tanh", note=None):
        h = getattr(jnp, act)(x @ params["w"]) ** power
        return {"loss": jnp.sum(h) * scale, "note": note, "act": act}

    fast = parallelize(
        step, params, x, 2, static_argnums=2, kwargs={"scale": 3.0, "act": "tanh"}, machine="cpu:8", solver="data"
    )
    for power, act, scale in ((2, "tanh", 3.0), (3, "sin", 0.5), (2, "tanh", 4.0)):
        got = fast(params, x, power, scale=scale, act=act)
        want = step(params, x, power, scale=scale, act=act)
        assert got["act"] == act and got["note"] is None
        assert_close(got["loss"], want["loss"])
    assert len(fast.steps) == 2


def test_static_arguments_of_a_jitted_step_are_static():
    params, x = linear()

    def step(params, x, layers, final):
        for _ in range(layers):
            x = jnp.tanh(x @ params["w"])
        return final(x), x

    jitted = jax.jit(step, static_argnames=("layers", "final"), donate_argnums=1)
    fast = parallelize(jitted, params, x, 2, jnp.sum, machine="cpu:8", solver="data")
    given = jnp.copy(x)
    assert_close(fast(params, given, 3, final=jnp.mean), step(params, x, 3, jnp.mean))
    placed = fast.shard((params, jnp.copy(x), 2, jnp.sum))
    fast(*placed)
    assert placed[1].is_deleted() and not placed[0]["w"].is_deleted()


def test_large_constants_of_closures_are_not_in_the_text():
    table, params = steps.normal(512, 256), {"w": steps.normal(256, 64, scale=0.1)}

    def step(params, ids):
        return jnp.mean((table[ids] @ params["w"]) ** 2)

    ids = steps.ids(512, 128)
    for function in (step, jax.jit(step)):
        fast = parallelize(function, params, ids, machine="cpu:8", solver="data", roles={"arg0": "parameter"})
        assert len(fast.first.planned.text) < 40_000
        assert_close(fast(params, ids), step(params, ids))
        assert verify_plan(fast).compiled_peak_bytes > 0
