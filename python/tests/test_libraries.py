"""Steps as users of Flax NNX, Equinox and optax write them. Tests of a library that is missing are skipped."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps

from shardwright import PlanError
from shardwright.jax import parallelize


def nnx_model(nnx, optax):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.second = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(self.dropout(jax.nn.relu(self.norm(self.first(x)))))

    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_step(nnx):
    def step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step


@pytest.mark.parametrize("jitted", [False, True])
def test_nnx_modules_are_changed_in_place(jitted):
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    step = nnx_step(nnx)
    model, optimizer = nnx_model(nnx, optax)
    x, y = steps.normal(32, 16), steps.normal(32, 4)
    fast = parallelize(nnx.jit(step) if jitted else step, model, optimizer, x, y, machine="cpu:8")
    want_model, want_optimizer = nnx_model(nnx, optax)
    want_step = nnx.jit(step)
    losses, want = [], []
    for _ in range(4):
        losses.append(float(fast(model, optimizer, x, y)))
        want.append(float(want_step(want_model, want_optimizer, x, y)))
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    assert len(set(losses)) == 4
    assert len(fast.steps) == 1
    np.testing.assert_allclose(model.norm.mean[...], want_model.norm.mean[...], rtol=1e-3, atol=1e-5)
    assert int(model.dropout.rngs.count[...]) == int(want_model.dropout.rngs.count[...]) == 4
    assert int(optimizer.step[...]) == 4
    # Module and optimizer keep their variables: the model that the user holds is the one that was trained.
    assert fast.shard((model, optimizer, x, y))[0] is model


def test_nnx_steps_that_change_the_structure_are_refused():
    nnx = pytest.importorskip("flax.nnx")

    class Counter(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

    def step(module, x):
        module.seen = nnx.Variable(x.sum())
        return (x @ module.w[...]).sum()

    with pytest.raises(PlanError, match="structure of an NNX module"):
        parallelize(step, Counter(), jnp.ones((8, 8)), machine="cpu:8")


@pytest.mark.parametrize("jitted", [False, True])
def test_equinox_modules_are_arguments(jitted):
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    model = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    x, y = steps.normal(32, 16), steps.normal(32, 4)

    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    fast = parallelize(eqx.filter_jit(step) if jitted else step, model, state, x, y, machine="cpu:8")
    want = eqx.filter_jit(step)
    mine, other = (model, state), copy.deepcopy((model, state))
    for _ in range(3):
        *mine, loss = fast(*mine, x, y)
        *other, want_loss = want(*other, x, y)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-3)
    assert mine[0].activation is model.activation
    assert len(fast.steps) == 1
