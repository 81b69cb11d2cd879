"""Training steps in the habits of Flax, Equinox and optax: modules in place, mutable collections, filtered and static leaves, chains."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import steps
from foreign_steps import foreign, small, small_loss
from jax import lax


@foreign
def optax_long_chain():
    """Zeroed NaNs, adaptive clipping, a trace, decay by mask, hyperparameters in the state, and a schedule."""
    import optax

    @optax.inject_hyperparams
    def make(rate, decay):
        return optax.chain(
            optax.zero_nans(), optax.adaptive_grad_clip(0.1), optax.centralize(), optax.scale_by_adam(eps=1e-3),
            optax.add_decayed_weights(decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
            optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 100)), optax.scale(-rate),
        )  # fmt: skip

    return small(make(rate=1e-2, decay=1e-3))


@foreign
def optax_lookahead():
    import optax

    optimizer = optax.lookahead(optax.sgd(1e-2), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(small(optax.sgd(1.0))[1][0])

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(small_loss)(params.fast, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))


@foreign
def optax_sharpness_aware():
    """SAM: a gradient at an adversarial point, as a transformation that calls the gradient again."""
    import optax

    params = small(optax.sgd(1.0))[1][0]
    optimizer = optax.contrib.sam(optax.adam(1e-2, eps=1e-3), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), 2, opaque_mode=True)

    def step(params, state, x, y):
        grad = jax.grad(lambda p, _: small_loss(p, x, y))
        updates, state = optimizer.update(grad(params, 0), state, params, grad_fn=grad)
        return optax.apply_updates(params, updates), state

    return step, (params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))


@foreign
def optax_frozen_by_label():
    """`multi_transform` with frozen parameters, differentiated with respect to some of them only."""
    import optax

    params = small(optax.sgd(1.0))[1][0]
    labels = {"in": "frozen", "out": "trained"}
    optimizer = optax.multi_transform({"trained": optax.adamw(1e-2, eps=1e-3), "frozen": optax.set_to_zero()}, labels)
    return small(optimizer)[0], (params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))


@foreign
def linen_mutable_collections():
    """A train state with batch statistics, a dropout key that is folded by the step, donation, and a static flag."""
    import flax.linen as nn
    import optax
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(64)(x))
            x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
            self.sow("intermediates", "width", x.mean())
            count = self.variable("calls", "count", lambda: jnp.zeros((), jnp.int32))
            count.value = count.value + 1
            return nn.Dense(10)(x)

    class State(train_state.TrainState):
        batch_stats: Any
        calls: Any
        key: jax.Array

    model = Net()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((1, 32)), train=True)
    state = State.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2, eps=1e-3), batch_stats=variables["batch_stats"],
        calls=variables["calls"], key=jax.random.key(2),
    )  # fmt: skip

    @functools.partial(jax.jit, static_argnames="train", donate_argnums=0)
    def step(state, batch, train=True):
        key = jax.random.fold_in(state.key, state.step)

        def loss(params):
            collections = {"params": params, "batch_stats": state.batch_stats, "calls": state.calls}
            mutable = ["batch_stats", "intermediates", "calls"]
            logits, changed = state.apply_fn(collections, batch["image"], train=train, mutable=mutable, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), (changed, logits)

        (value, (changed, logits)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"], calls=changed["calls"])
        return state, {"loss": value, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}

    return step, (state, {"image": steps.normal(64, 32), "label": steps.ids(10, 64)})


@foreign
def linen_scanned_dropout():
    """`nn.scan` over layers with parameters and dropout keys per layer, under `nn.remat`, in 16-bit compute types."""
    import flax.linen as nn
    from foreign_steps import linen

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.LayerNorm(dtype=jnp.float32)(x)
            h = nn.MultiHeadDotProductAttention(4)(h, h)
            return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(h))), h.mean()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(64, 32)(tokens)
            block = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3, unroll=3)
            x, means = block()(x, None)
            return nn.Embed(64, 32, name="out").attend(x) + means.sum()

    return linen(Net(), steps.ids(64, 16, 8), steps.ids(64, 16, 8), loss=steps.cross_entropy)


@foreign
def nnx_norms_metrics_in_place():
    """Modules, an optimizer, metrics and keys of NNX, all changed inside of the step; `nnx.value_and_grad` with auxiliary values."""
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(32, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.out = nnx.Linear(64, 10, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] = self.calls[...] + 1
            return self.out(self.drop(nnx.relu(self.norm(self.inner(x)))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def step(model, optimizer, metrics, x, labels):
        def loss(model):
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        metrics.update(loss=value, logits=logits, labels=labels)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, metrics, steps.normal(64, 32), steps.ids(10, 64))


@foreign
def nnx_vmapped_ensemble():
    """An ensemble made by `nnx.vmap`, with shared and own parameters, and a step decorated with `nnx.jit`."""
    import optax
    from flax import nnx

    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(key)), nnx.gelu, nnx.Linear(32, 2, rngs=nnx.Rngs(key)))

    models = create(jax.random.split(jax.random.key(0), 4))
    optimizer = nnx.Optimizer(models, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(models, optimizer, x, y):
        def loss(models):
            out = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(models, x)
            return jnp.mean((out - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(models)
        optimizer.update(models, grads)
        return value

    return step, (models, optimizer, steps.normal(64, 8), steps.normal(64, 2))


@foreign
def nnx_low_rank_part():
    """Gradients of LoRA parameters only (`DiffState`), with the rest of the module frozen, under `nnx.split` and `nnx.merge`."""
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(32, 32, rngs=rngs)
            self.low = nnx.LoRA(32, 4, 32, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.base(x) + self.low(x))

    graph, low, rest = nnx.split(Net(nnx.Rngs(0)), nnx.LoRAParam, ...)
    optimizer = optax.adam(1e-2, eps=1e-3)

    def functional(low, rest, state, x, y):
        value, grads = jax.value_and_grad(lambda low: jnp.mean((nnx.merge(graph, low, rest)(x) - y) ** 2))(low)
        updates, state = optimizer.update(grads, state, low)
        return optax.apply_updates(low, updates), state, value

    return functional, (low, rest, optimizer.init(low), steps.normal(64, 32), steps.normal(64, 32))


@foreign
def nnx_recurrent_scan():
    """An NNX cell under `nnx.scan` over time, whose carry is made inside."""
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.cell = nnx.GRUCell(8, 16, rngs=rngs)
            self.out = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            scan = nnx.scan(lambda carry, cell, x: cell(carry, x), in_axes=(nnx.Carry, None, 1), out_axes=(nnx.Carry, 1))
            return self.out(scan(jnp.zeros((len(x), 16)), self.cell, x)[1])

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-1), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, steps.normal(32, 6, 8), steps.normal(32, 6, 4))


@foreign
def equinox_partitioned_ensemble():
    """An ensemble by `filter_vmap`, frozen leaves by `partition`, functions among the leaves, under `filter_jit`."""
    import equinox as eqx
    import optax

    @eqx.filter_vmap
    def create(key):
        return eqx.nn.MLP(8, 2, 32, 2, activation=jax.nn.silu, key=key)

    models = create(jax.random.split(jax.random.key(0), 4))
    trained = jax.tree.map(eqx.is_inexact_array, models)
    trained = eqx.tree_at(lambda m: m.layers[0].bias, trained, False)
    optimizer = optax.adamw(1e-2, eps=1e-3)

    @eqx.filter_jit
    def step(models, state, x, y, act):
        moving, frozen = eqx.partition(models, trained)

        @eqx.filter_value_and_grad
        def loss(moving):
            models = eqx.combine(moving, frozen)
            out = eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))(models, x)
            return jnp.mean(act(out - y) ** 2)

        value, grads = loss(moving)
        updates, state = optimizer.update(grads, state, moving)
        return eqx.combine(eqx.apply_updates(moving, updates), frozen), state, value

    return step, (models, optimizer.init(eqx.partition(models, trained)[0]), steps.normal(64, 8), steps.normal(64, 2), jnp.tanh)


@foreign
def equinox_checkpointed_scan():
    """Equal layers as one stacked module in a scan with `eqx.filter_checkpoint`, dropout keys, and `eqx.error_if`."""
    import equinox as eqx
    import optax

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        drop: eqx.nn.Dropout

        def __init__(self, key):
            self.norm, self.drop = eqx.nn.LayerNorm(16), eqx.nn.Dropout(0.1)
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=key)

        def __call__(self, x, key):
            h = jax.vmap(self.norm)(x)
            return x + self.drop(self.attention(h, h, h), key=key)

    blocks = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), 3))
    optimizer = optax.adam(1e-2, eps=1e-3)

    def equinox_step(blocks, state, x, y, key):
        @eqx.filter_value_and_grad
        def loss(blocks):
            arrays, rest = eqx.partition(blocks, eqx.is_array)

            def run(x, key):
                @eqx.filter_checkpoint
                def body(x, own):
                    part, key = own
                    return eqx.combine(part, rest)(x, key), None

                return lax.scan(body, x, (arrays, jax.random.split(key, 3)))[0]

            out = jax.vmap(run)(x, jax.random.split(key, len(x)))
            return jnp.mean((out - y) ** 2)

        value, grads = loss(blocks)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(blocks, updates), state, value

    return equinox_step, (blocks, optimizer.init(eqx.filter(blocks, eqx.is_array)), steps.normal(16, 8, 16), steps.normal(16, 8, 16), jax.random.key(2))


@foreign
def half_precision_policy():
    """Parameters in f32, computing in bf16, outputs in f32, a loss scale, and an exponential average in f32."""
    import optax

    params = small(optax.sgd(1.0))[1][0]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, eps=1e-3, mu_dtype=jnp.bfloat16))

    def step(params, average, state, x, y):
        def loss(params):
            cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            return small_loss(cast, x.astype(jnp.bfloat16), y).astype(jnp.float32) * 128

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / 128, grads), state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 0.01), state, value

    return step, (params, params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))


@foreign
def epoch_of_shuffled_batches():
    """An epoch in one step: a permutation of the data, batches by reshape, updates in a scan, metrics stacked."""
    import optax

    optimizer = optax.adam(1e-2, eps=1e-3)
    params = small(optimizer)[1][0]

    @functools.partial(jax.jit, static_argnums=(5, 6), donate_argnums=(0, 1))
    def step(params, state, key, x, y, size, optimizer):
        order = jax.random.permutation(key, len(x))

        def update(carry, index):
            params, state = carry
            value, grads = jax.value_and_grad(small_loss)(params, x[index], y[index])
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), {"loss": value, "norm": optax.global_norm(grads)}

        (params, state), metrics = lax.scan(update, (params, state), order.reshape(-1, size))
        return params, state, metrics

    return step, (params, optimizer.init(params), jax.random.key(0), steps.normal(128, 32), steps.normal(128, 16), 32, optimizer)
