"""Training steps as users of other libraries write them. `scripts/jax_coverage.py` plans and runs all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import steps
from jax import lax

# Name to a function that returns a step and its arguments. Libraries are imported inside.
FOREIGN = {}


def foreign(function):
    FOREIGN[function.__name__] = function
    return function


def optax_step(optimizer, loss):
    """`params, state, *batch -> params, state, loss`, by an optimizer of optax."""
    import optax

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def small_loss(params, x, y):
    h = jax.nn.gelu(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.mean((h @ params["out"]["w"] + params["out"]["b"] - y) ** 2)


def small(optimizer):
    params = {
        "in": {"w": steps.normal(32, 128, scale=0.2), "b": steps.normal(128, scale=0.1)},
        "out": {"w": steps.normal(128, 16, scale=0.1), "b": steps.normal(16, scale=0.1)},
    }
    return optax_step(optimizer, small_loss), (params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))


def _optimizers():
    def make(name, **options):
        def case():
            import optax

            return small(getattr(optax, name)(1e-2, **options))

        FOREIGN[f"optax_{name}"] = case

    for name in ("adamw", "adafactor", "lion", "lamb", "rmsprop", "nadam", "adagrad", "radam", "lars", "yogi", "sm3", "noisy_sgd"):
        make(name, **({"seed": 0} if name == "noisy_sgd" else {}))
    make("sgd", momentum=0.9, nesterov=True)


_optimizers()


@foreign
def optax_schedule_and_clipping():
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
    return small(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))


@foreign
def optax_multi_steps():
    import optax

    return small(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2))


@foreign
def optax_masked_decay():
    import optax

    mask = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    return small(optax.chain(optax.add_decayed_weights(1e-2, mask=mask), optax.sgd(1e-2)))


def linen(module, *inputs, loss):
    import optax

    variables = module.init(jax.random.key(0), inputs[0])
    optimizer = optax.adam(1e-3, eps=1e-3)

    def step(variables, state, *batch):
        def value(params):
            out, changed = module.apply({**variables, "params": params}, batch[0], mutable=["batch_stats"])
            return loss(out, *batch[1:]), changed

        (value, changed), grads = jax.value_and_grad(value, has_aux=True)(variables["params"])
        updates, state = optimizer.update(grads, state)
        return {**variables, **changed, "params": optax.apply_updates(variables["params"], updates)}, state, value

    return step, (variables, optimizer.init(variables["params"]), *inputs)


@foreign
def linen_mlp():
    import flax.linen as nn

    return linen(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(16)]), steps.normal(32, 32), steps.ids(16, 32), loss=steps.cross_entropy)


@foreign
def linen_resnet():
    import flax.linen as nn

    class Block(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            norm = functools.partial(nn.BatchNorm, use_running_average=False)
            h = nn.relu(norm()(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
            return nn.relu(norm()(nn.Conv(self.features, (3, 3), use_bias=False)(h)) + x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(16, (3, 3))(x)
            x = nn.max_pool(Block(16)(x), (2, 2), (2, 2))
            return nn.Dense(10)(Block(16)(x).mean((1, 2)))

    return linen(Net(), steps.normal(16, 8, 8, 3), steps.ids(10, 16), loss=steps.cross_entropy)


@foreign
def linen_transformer():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(64, 32)(tokens)
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
                x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
            return nn.Dense(64)(x)

    return linen(Net(), steps.ids(64, 16, 16), steps.ids(64, 16, 16), loss=steps.cross_entropy)


@foreign
def linen_lstm():
    import flax.linen as nn

    return linen(nn.RNN(nn.OptimizedLSTMCell(32)), steps.normal(16, 8, 16), loss=lambda out: jnp.mean(out**2))


def equinox(module, x, y, apply):
    import equinox as eqx
    import optax

    optimizer = optax.adamw(1e-3, eps=1e-3)

    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((apply(m, x) - y) ** 2))(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    return step, (module, optimizer.init(eqx.filter(module, eqx.is_array)), x, y)


@foreign
def equinox_mlp():
    import equinox as eqx

    model = eqx.nn.MLP(16, 4, 64, 2, key=jax.random.key(0))
    return equinox(model, steps.normal(32, 16), steps.normal(32, 4), lambda m, x: jax.vmap(m)(x))


@foreign
def equinox_conv():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 2)
    layers = [eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Conv2d(8, 4, 3, padding=1, key=keys[1])]
    return equinox(eqx.nn.Sequential(layers), steps.normal(16, 3, 8, 8), steps.normal(16, 4, 8, 8), lambda m, x: jax.vmap(m)(x))


@foreign
def equinox_gru():
    import equinox as eqx

    cell = eqx.nn.GRUCell(8, 16, key=jax.random.key(0))

    def apply(cell, x):
        return jax.vmap(lambda row: lax.scan(lambda h, t: (cell(t, h), None), jnp.zeros(16), row)[0])(x)

    return equinox(cell, steps.normal(16, 6, 8), steps.normal(16, 16), apply)


@foreign
def llama_scan_remat_accumulation():
    import optax

    width, heads, layers, vocab = 32, 4, 3, 64
    params = {"embed": steps.normal(vocab, width, scale=0.3), "blocks": steps.block_params(width, (layers,))}

    def loss(params, tokens):
        body = jax.checkpoint(lambda x, p: (steps.block(x, p, heads), None))
        x = lax.scan(body, params["embed"][tokens[:, :-1]], params["blocks"])[0]
        return steps.cross_entropy(x @ params["embed"].T, tokens[:, 1:])

    optimizer = optax.adamw(1e-3, eps=1e-3)

    def step(params, state, tokens):
        def micro(total, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        value, grads = jax.tree.map(lambda x: x / 2, lax.scan(micro, zero, tokens)[0])
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), steps.ids(vocab, 2, 16, 17))


@foreign
def diffusion():
    import optax

    params = {"w1": steps.normal(17, 64, scale=0.2), "w2": steps.normal(64, 16, scale=0.2)}

    def loss(params, x, key):
        first, second = jax.random.split(key)
        t, noise = jax.random.uniform(first, (x.shape[0], 1)), jax.random.normal(second, x.shape)
        noised = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise
        h = jax.nn.silu(jnp.concatenate([noised, t], 1) @ params["w1"])
        return jnp.mean((h @ params["w2"] - noise) ** 2)

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(64, 16), jax.random.key(1))


@foreign
def state_space_model():
    import optax

    params = {"a": steps.normal(16, scale=0.1), "b": steps.normal(16, 16, scale=0.2), "c": steps.normal(16, 4, scale=0.2)}

    def loss(params, x, y):
        def combine(first, second):
            return first[0] * second[0], second[0] * first[1] + second[1]

        inputs = x @ params["b"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(params["a"]), inputs.shape)
        return jnp.mean((lax.associative_scan(combine, (decay, inputs), axis=1)[1] @ params["c"] - y) ** 2)

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(16, 8, 16), steps.normal(16, 8, 4))


@foreign
def graph_network():
    import optax

    params = {"w1": steps.normal(8, 32, scale=0.2), "w2": steps.normal(32, 4, scale=0.2)}

    def loss(params, nodes, senders, receivers, y):
        h = jax.nn.relu(nodes @ params["w1"])
        h = h + jax.ops.segment_sum(h[senders], receivers, nodes.shape[0])
        return jnp.mean((h @ params["w2"] - y) ** 2)

    optimizer = optax.adam(1e-3, eps=1e-3)
    batch = steps.normal(32, 8), steps.ids(32, 128), steps.ids(32, 128), steps.normal(32, 4)
    return optax_step(optimizer, loss), (params, optimizer.init(params), *batch)


@foreign
def policy_gradient():
    import optax

    params = {"w1": steps.normal(4, 32, scale=0.3), "w2": steps.normal(32, 2, scale=0.3)}

    def loss(params, start, key):
        def act(state, key):
            logits = jax.nn.tanh(state @ params["w1"]) @ params["w2"]
            action = jax.random.categorical(key, logits)
            state = state * 0.9 + 0.1 * jax.nn.one_hot(action, 4)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            return state, (picked, -jnp.sum(state**2, -1))

        _, (picked, rewards) = lax.scan(act, start, jax.random.split(key, 5))
        returns = jnp.cumsum(rewards[::-1], 0)[::-1]
        return -jnp.mean(picked * lax.stop_gradient(returns - returns.mean(1, keepdims=True)))

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(32, 4), jax.random.key(2))


@foreign
def variational_autoencoder():
    import optax

    params = {"e": steps.normal(16, 16, scale=0.2), "d": steps.normal(8, 16, scale=0.2)}

    def loss(params, x, key):
        mean, log_var = jnp.split(x @ params["e"], 2, -1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
        divergence = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
        return jnp.mean(jnp.sum((z @ params["d"] - x) ** 2, -1) + divergence)

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(64, 16), jax.random.key(3))


@foreign
def contrastive_pairs():
    import optax

    params = {"a": steps.normal(16, 32, scale=0.2), "b": steps.normal(24, 32, scale=0.2)}

    def loss(params, left, right):
        a, b = left @ params["a"], right @ params["b"]
        a, b = a / jnp.linalg.norm(a, axis=-1, keepdims=True), b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        return steps.cross_entropy(10 * a @ b.T, jnp.arange(a.shape[0]))

    optimizer = optax.adamw(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(32, 16), steps.normal(32, 24))


@foreign
def spectral_layer():
    import optax

    params = {"w": steps.normal(9, scale=0.3), "out": steps.normal(16, 4, scale=0.3)}

    def loss(params, x, y):
        h = jnp.fft.irfft(jnp.fft.rfft(x, axis=-1) * params["w"], n=16, axis=-1)
        return jnp.mean((h @ params["out"] - y) ** 2)

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(32, 16), steps.normal(32, 4))


@foreign
def gaussian_process():
    import optax

    params = {"scale": jnp.float32(1.0), "noise": jnp.float32(0.5)}

    def loss(params, x, y):
        distance = jnp.sum((x[:, None] - x[None]) ** 2, -1)
        kernel = jnp.exp(-distance / params["scale"] ** 2) + (params["noise"] ** 2 + 1e-3) * jnp.eye(x.shape[0])
        factor = jnp.linalg.cholesky(kernel)
        alpha = jax.scipy.linalg.cho_solve((factor, True), y)
        return 0.5 * y @ alpha + jnp.sum(jnp.log(jnp.diag(factor)))

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(32, 3), steps.normal(32))


@foreign
def low_rank_adapters():
    import optax

    frozen = steps.normal(64, 64, scale=0.1)
    params = {"a": steps.normal(64, 4, scale=0.1), "b": steps.normal(4, 64, scale=0.1)}

    def loss(params, x, y):
        return jnp.mean((x @ (frozen + params["a"] @ params["b"]) - y) ** 2)

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(32, 64), steps.normal(32, 64))


@foreign
def averaged_weights():
    import optax

    step, (params, state, *batch) = small(optax.adam(1e-3))

    def averaged(params, state, average, *batch):
        params, state, value = step(params, state, *batch)
        return params, state, jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params), value

    return averaged, (params, state, params, *batch)
