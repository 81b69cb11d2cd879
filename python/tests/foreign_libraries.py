"""Training steps in the style of Flax NNX, Flax Linen's transforms, Haiku, and optax's less usual optimizers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import steps
from foreign_steps import FOREIGN, foreign, linen, optax_step, small, small_loss
from jax import lax


def contributed(name, **options):
    """An optimizer of `optax.contrib`."""

    def case():
        import optax

        return small(getattr(optax.contrib, name)(1e-2, **options))

    FOREIGN[f"optax_{name}"] = case


contributed("muon")
contributed("schedule_free_adamw")
contributed("prodigy")
contributed("ademamix")


@foreign
def optax_lbfgs():
    import optax

    optimizer = optax.lbfgs()

    def step(params, state, x, y):
        loss = functools.partial(small_loss, x=x, y=y)
        value, grads = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state, value

    _, (params, _, *batch) = small(optax.sgd(1e-2))
    return step, (params, optimizer.init(params), *batch)


@foreign
def optax_labelled_groups():
    import optax

    def labels(params):
        return jax.tree.map(lambda p: "decayed" if p.ndim > 1 else "plain", params)

    groups = {"decayed": optax.inject_hyperparams(optax.adamw)(1e-3), "plain": optax.sgd(1e-2)}
    return small(optax.multi_transform(groups, labels))


@foreign
def optax_apply_if_finite():
    import optax

    return small(optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3))


def nnx_step(model, loss, *batch):
    """`model, optimizer, *batch -> loss`, with both changed in place."""
    import optax
    from flax import nnx

    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-3), wrt=nnx.Param)

    def step(model, optimizer, *batch):
        value, grads = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, *batch)


@foreign
def nnx_convolutions():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.head = nnx.Linear(16 * 16, 10, rngs=rngs)

        def __call__(self, x):
            h = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
            return self.head(self.drop(h.reshape(h.shape[0], -1)))

    def loss(model, x, y):
        return steps.cross_entropy(model(x), y)

    return nnx_step(Net(nnx.Rngs(0)), loss, steps.normal(16, 8, 8, 3), steps.ids(10, 16))


@foreign
def nnx_transformer():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = nnx.LayerNorm(32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x):
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    def loss(model, tokens):
        return steps.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    return nnx_step(Net(nnx.Rngs(0)), loss, steps.ids(64, 16, 17))


@foreign
def nnx_scanned_layers():
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 32, rngs=rngs)

        def __call__(self, x):
            return x + nnx.tanh(self.linear(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return layer(x)

            return forward(x, self.layers)

    def make(rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Layer(rngs)

        return create(rngs)

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    return nnx_step(Net(nnx.Rngs(0)), loss, steps.normal(32, 32), steps.normal(32, 32))


@foreign
def nnx_functional():
    import optax
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(16, 64, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(64, 4, rngs=nnx.Rngs(1)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-3, eps=1e-3)

    def loss(params, rest, x, y):
        return jnp.mean((nnx.merge(graph, params, rest)(x) - y) ** 2)

    return optax_step(optimizer, loss), (params, optimizer.init(params), rest, steps.normal(32, 16), steps.normal(32, 4))


@foreign
def linen_train_state():
    import flax.linen as nn
    import optax
    from flax.training.train_state import TrainState

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(64)(x)
            x = nn.Dropout(0.2, deterministic=not train)(nn.silu(nn.GroupNorm(8)(x)))
            return nn.Dense(8)(x)

    net, x, y = Net(), steps.normal(32, 16), steps.ids(8, 32)
    params = net.init(jax.random.key(0), x, train=False)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3, eps=1e-3))

    @jax.jit
    def step(state, batch, key):
        def loss(params):
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            logits = state.apply_fn({"params": params}, batch["x"], train=True, rngs=rngs)
            value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
            return value, logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        accuracy = jnp.mean(logits.argmax(-1) == batch["y"])
        return state.apply_gradients(grads=grads), {"loss": value, "accuracy": accuracy}

    return step, (state, {"x": x, "y": y}, jax.random.key(1))


@foreign
def linen_scanned_remat():
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.SelfAttention(4)(nn.RMSNorm()(x))
            return x + h + nn.Dense(32)(nn.swish(nn.Dense(64)(nn.RMSNorm()(x)))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return blocks()(x, None)[0]

    return linen(Net(), steps.normal(16, 8, 32), loss=lambda out: jnp.mean(out**2))


@foreign
def linen_partitioned_params():
    import flax.linen as nn
    import optax

    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "model"))
    net = nn.Sequential([nn.Dense(64, kernel_init=init), nn.relu, nn.Dense(8)])
    x, y = steps.normal(32, 16), steps.normal(32, 8)
    params = nn.meta.unbox(net.init(jax.random.key(0), x))
    optimizer = optax.adam(1e-3, eps=1e-3)
    step = optax_step(optimizer, lambda params, x, y: jnp.mean((net.apply(params, x) - y) ** 2))
    return step, (params, optimizer.init(params), x, y)


def haiku(function, *inputs, loss):
    """A step of a function under `hk.transform_with_state`."""
    import haiku as hk
    import optax

    net = hk.transform_with_state(function)
    params, state = net.init(jax.random.key(0), inputs[0])
    optimizer = optax.adam(1e-3, eps=1e-3)

    def step(params, state, opt_state, key, *batch):
        def value(params):
            out, changed = net.apply(params, state, key, batch[0])
            return loss(out, *batch[1:]), changed

        (value, changed), grads = jax.value_and_grad(value, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), changed, opt_state, value

    return step, (params, state, optimizer.init(params), jax.random.PRNGKey(1), *inputs)


@foreign
def haiku_mlp():
    import haiku as hk

    def net(x):
        return hk.nets.MLP([64, 8])(hk.dropout(hk.next_rng_key(), 0.1, x))

    return haiku(net, steps.normal(32, 16), steps.ids(8, 32), loss=steps.cross_entropy)


@foreign
def haiku_residual_network():
    import haiku as hk

    def net(x):
        x = hk.Conv2D(16, 3)(x)
        for stride in (1, 2):
            h = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(16, 3, stride=stride, with_bias=False)(x), is_training=True)
            x = jax.nn.relu(h + hk.Conv2D(16, 1, stride=stride)(x))
        return hk.Linear(10)(x.mean((1, 2)))

    return haiku(net, steps.normal(16, 8, 8, 3), steps.ids(10, 16), loss=steps.cross_entropy)


@foreign
def haiku_lstm():
    import haiku as hk

    def net(x):
        core = hk.LSTM(32)
        out, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(x.shape[0]))
        return hk.Linear(4)(out[-1])

    return haiku(net, steps.normal(16, 8, 8), steps.ids(4, 16), loss=steps.cross_entropy)


@foreign
def haiku_attention():
    import haiku as hk

    def net(tokens):
        x = hk.Embed(64, 32)(tokens) + hk.get_parameter("position", [tokens.shape[1], 32], init=jnp.zeros)
        h = hk.LayerNorm(-1, True, True)(x)
        init = hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(4, 8, w_init=init, model_size=32)(h, h, h)
        return hk.Linear(64)(x)

    return haiku(net, steps.ids(64, 16, 8), steps.ids(64, 16, 8), loss=steps.cross_entropy)


@foreign
def equinox_transformer():
    import equinox as eqx
    import optax

    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(64, 32, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(4, 32, key=keys[1])
            self.norm = eqx.nn.LayerNorm(32)
            self.head = eqx.nn.Linear(32, 64, key=keys[2])
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, tokens, key):
            x = jax.vmap(self.embed)(tokens)
            h = jax.vmap(self.norm)(x)
            mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
            x = self.dropout(x + self.attention(h, h, h, mask=mask), key=key)
            return jax.vmap(self.head)(x)

    model, optimizer = Net(jax.random.key(0)), optax.adamw(1e-3, eps=1e-3)

    @eqx.filter_jit
    def step(model, state, tokens, key):
        def loss(model):
            keys = jax.random.split(key, tokens.shape[0])
            return steps.cross_entropy(jax.vmap(model)(tokens[:, :-1], keys), tokens[:, 1:])

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, steps.ids(64, 16, 9), jax.random.key(1))


@foreign
def equinox_stateful_norm():
    import equinox as eqx
    import optax

    def make():
        keys = jax.random.split(jax.random.key(0), 2)
        return eqx.nn.Sequential(
            [eqx.nn.Linear(16, 32, key=keys[0]), eqx.nn.BatchNorm(32, axis_name="batch", mode="batch"), eqx.nn.Linear(32, 4, key=keys[1])]
        )

    model, state = eqx.nn.make_with_state(make)()
    optimizer = optax.adam(1e-3, eps=1e-3)

    def step(model, state, opt_state, x, y):
        def loss(model, state):
            out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return jnp.mean((out - y) ** 2), state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, opt_state, steps.normal(32, 16), steps.normal(32, 4))


@foreign
def chex_dataclass_state():
    import chex

    @chex.dataclass
    class State:
        params: Any
        momentum: Any
        count: Any

    def step(state, x, y):
        value, grads = jax.value_and_grad(small_loss)(state.params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
        rate = lax.select(state.count < 10, 1e-2, 1e-3)
        params = jax.tree.map(lambda p, m: p - rate * m, state.params, momentum)
        return State(params=params, momentum=momentum, count=state.count + 1), value

    import optax

    _, (params, _, *batch) = small(optax.sgd(1e-2))
    zeros = jax.tree.map(jnp.zeros_like, params)
    return step, (State(params=params, momentum=zeros, count=jnp.int32(0)), *batch)
