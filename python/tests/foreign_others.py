"""Training steps that were written after the planner: other algorithms, kernels and habits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import steps
from foreign_models import adam_case
from foreign_steps import foreign
from jax import lax


def dense(*sizes):
    return [(steps.normal(a, b, scale=0.2), jnp.zeros(b)) for a, b in zip(sizes, sizes[1:], strict=False)]


def apply(layers, x):
    for w, b in layers[:-1]:
        x = jax.nn.silu(x @ w + b)
    return x @ layers[-1][0] + layers[-1][1]


@foreign
def soft_actor_critic():
    """Several updates of two critics and their slow copies in a scan, with keys that are split inside."""
    critics = jax.tree.map(lambda *xs: jnp.stack(xs), dense(12, 32, 1), dense(12, 32, 1))
    params = {"actor": dense(8, 32, 8), "critics": critics}

    def loss(params, slow, key, batch):
        mean, spread = jnp.split(apply(params["actor"], batch["obs"]), 2, -1)
        action = jnp.tanh(mean + jnp.exp(jnp.clip(spread, -5, 2)) * jax.random.normal(key, mean.shape))
        both = jnp.concatenate([batch["obs"], action], -1)
        taken = jnp.concatenate([batch["obs"], batch["action"]], -1)
        target = batch["reward"] + 0.99 * jnp.min(jax.vmap(apply, (0, None))(slow, both), 0)[:, 0]
        value = jax.vmap(apply, (0, None))(params["critics"], taken)[..., 0]
        policy = -jnp.mean(jnp.min(jax.vmap(apply, (0, None))(lax.stop_gradient(params["critics"]), both), 0))
        return jnp.mean((value - lax.stop_gradient(target)) ** 2) + policy

    def step(params, slow, key, batches):
        def update(carry, batch):
            params, slow, key = carry
            key, use = jax.random.split(key)
            value, grads = jax.value_and_grad(loss)(params, slow, use, batch)
            params = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)
            slow = jax.tree.map(lambda s, p: 0.99 * s + 0.01 * p, slow, params["critics"])
            return (params, slow, key), value

        (params, slow, key), values = lax.scan(update, (params, slow, key), batches)
        return params, slow, key, values.mean()

    batches = {"obs": steps.normal(3, 64, 8), "action": steps.normal(3, 64, 4), "reward": steps.normal(3, 64)}
    return step, (params, critics, jax.random.key(1), batches)


@foreign
def gated_recurrence():
    """A Mamba-like block: a causal depthwise convolution and an input-dependent recurrence, written as a scan over time."""
    params = {
        "in": steps.normal(32, 128, scale=0.2), "conv": steps.normal(4, 1, 64, scale=0.3), "gates": steps.normal(64, 64 + 16, scale=0.2),
        "decay": steps.normal(64, 8), "out": steps.normal(64, 32, scale=0.2),
    }  # fmt: skip

    def loss(params, x):
        h, gate = jnp.split(x @ params["in"], 2, -1)
        padded = jnp.pad(h, ((0, 0), (3, 0), (0, 0)))
        h = lax.conv_general_dilated(padded, params["conv"], (1,), "VALID", dimension_numbers=("NTC", "TIO", "NTC"), feature_group_count=64)
        h = jax.nn.silu(h)
        delta, read, write = jnp.split(h @ params["gates"], (64, 72), -1)
        delta = jax.nn.softplus(delta)
        decay = jnp.exp(-delta[..., None] * jnp.exp(params["decay"] * 0.1))

        def advance(state, inputs):
            a, b, c = inputs
            state = a * state + b
            return state, jnp.einsum("nds,ns->nd", state, c)

        change = (delta * h)[..., None] * write[..., None, :]
        inputs = tuple(jnp.moveaxis(value, 1, 0) for value in (decay, change, read))
        _, out = lax.scan(advance, jnp.zeros((x.shape[0], 64, 8)), inputs)
        return jnp.mean(((jnp.moveaxis(out, 0, 1) * jax.nn.silu(gate)) @ params["out"] - x) ** 2)

    return adam_case(params, loss, steps.normal(16, 12, 32))


@foreign
def consistency_diffusion():
    """Noise levels per sample, conditions dropped at random, an average of weights as teacher."""
    import optax

    params = {"time": steps.normal(16, 32, scale=0.2), "label": steps.normal(11, 32, scale=0.2), "net": dense(64 + 32, 64, 64)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))

    def denoise(params, x, sigma, label):
        waves = jnp.cos(jnp.log(sigma)[:, None] * 2.0 ** jnp.arange(16))
        condition = waves @ params["time"] + params["label"][label]
        inner = apply(params["net"], jnp.concatenate([x / jnp.sqrt(sigma[:, None] ** 2 + 1), condition], -1))
        return x / (sigma[:, None] ** 2 + 1) + inner * sigma[:, None] / jnp.sqrt(sigma[:, None] ** 2 + 1)

    def step(params, teacher, state, key, x, label):
        keys = jax.random.split(key, 3)
        sigma = jnp.exp(jax.random.normal(keys[0], (x.shape[0],)) * 1.2 - 1.2)
        label = jnp.where(jax.random.bernoulli(keys[1], 0.1, label.shape), 10, label)
        noisy = x + sigma[:, None] * jax.random.normal(keys[2], x.shape)

        def loss(params):
            near = lax.stop_gradient(denoise(teacher, noisy, sigma * 0.9, label))
            return jnp.mean(jnp.sqrt((denoise(params, noisy, sigma, label) - near) ** 2 + 1e-4))

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, jax.tree.map(lambda t, p: 0.95 * t + 0.05 * p, teacher, params), state, value

    return step, (params, params, optimizer.init(params), jax.random.key(0), steps.normal(64, 64), steps.ids(10, 64))


@foreign
def switch_experts():
    """One expert per token, with noise on the router, a capacity and a balancing loss."""
    params = {"router": steps.normal(32, 8, scale=0.3), "up": steps.normal(8, 32, 64, scale=0.2), "down": steps.normal(8, 64, 32, scale=0.2)}

    def loss(params, x, key):
        tokens = x.reshape(-1, 32)
        noise = jax.random.uniform(key, tokens.shape, minval=0.98, maxval=1.02)
        weights = jax.nn.softmax((tokens * noise) @ params["router"])
        chosen = jnp.argmax(weights, -1)
        mask = jax.nn.one_hot(chosen, 8)
        place = (jnp.cumsum(mask, 0) - 1) * mask
        kept = mask * (place < 40)
        slots = kept[..., None] * jax.nn.one_hot(place.sum(-1).astype(jnp.int32), 40)[:, None]
        inputs = jnp.einsum("tec,td->ecd", slots, tokens)
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"])), params["down"])
        y = jnp.einsum("tec,ecd->td", slots * jnp.max(weights, -1)[:, None, None], out)
        return jnp.mean((tokens + y) ** 2) + 0.01 * 8 * jnp.sum(mask.mean(0) * weights.mean(0))

    return adam_case(params, loss, steps.normal(16, 16, 32), jax.random.key(3))


@foreign
def nnx_dropout_in_place():
    """A module with dropout and batch statistics; its random state moves on with every call."""
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.last = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))

    model = Net(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, steps.normal(64, 16), steps.normal(64, 8))


@foreign
def haiku_state_and_keys():
    """`transform_with_state`: moving averages are state, dropout draws keys."""
    import haiku as hk
    import optax

    def forward(x, training):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(32)(x), training))
        return hk.Linear(8)(hk.dropout(hk.next_rng_key(), 0.1, x))

    net = hk.transform_with_state(forward)
    x, y = steps.normal(64, 16), steps.normal(64, 8)
    params, state = net.init(jax.random.PRNGKey(0), x, True)
    optimizer = optax.sgd(1e-2, momentum=0.9, nesterov=True)

    def step(params, state, momentum, key, x, y):
        def loss(params):
            out, new = net.apply(params, state, key, x, True)
            return jnp.mean((out - y) ** 2), new

        (value, state_), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, momentum = optimizer.update(grads, momentum)
        return optax.apply_updates(params, updates), state_, momentum, value

    return step, (params, state, optimizer.init(params), jax.random.PRNGKey(1), x, y)


@foreign
def donated_multi_steps():
    """A jitted step that donates its state; `optax.MultiSteps` updates every second call."""
    import optax

    optimizer = optax.MultiSteps(optax.chain(optax.add_decayed_weights(1e-4), optax.adam(1e-3)), 2)
    params = dense(16, 64, 64, 4)

    @functools.partial(jax.jit, donate_argnames=("params", "state"))
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((apply(p, x) - y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), steps.normal(64, 16), steps.normal(64, 4))


@foreign
def pallas_softmax_with_rule():
    """A kernel of the user's own with a derivative of its own, inside `custom_vjp`."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        x = x_ref[...]
        e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        y_ref[...] = e / jnp.sum(e, -1, keepdims=True)

    @jax.custom_vjp
    def softmax(x):
        spec = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, grid=(x.shape[0] // 8,), in_specs=[spec], out_specs=spec, out_shape=shape, interpret=True)(x)

    def forward(x):
        y = softmax(x)
        return y, y

    def backward(y, g):
        return (y * (g - jnp.sum(y * g, -1, keepdims=True)),)

    softmax.defvjp(forward, backward)

    def loss(params, x, y):
        return -jnp.mean(jnp.sum(jnp.log(softmax(apply(params, x)) + 1e-6) * y, -1))

    return adam_case(dense(16, 32, 8), loss, steps.normal(128, 16), jax.nn.one_hot(steps.ids(8, 128), 8))


@foreign
def pallas_flash_attention():
    """A transformer block with JAX's own flash attention for GPUs."""
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    sizes = BlockSizes(block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16)
    params = {"qkv": steps.normal(32, 96, scale=0.2), "out": steps.normal(32, 32, scale=0.2), "mlp": dense(32, 64, 32)}

    def loss(params, x):
        q, k, v = (part.reshape(*x.shape[:2], 2, 16) for part in jnp.split(x @ params["qkv"], 3, -1))
        h = mha(q, k, v, None, sm_scale=0.25, causal=True, block_sizes=sizes, interpret=True).reshape(x.shape)
        h = x + h @ params["out"]
        return jnp.mean((h + apply(params["mlp"], h)) ** 2)

    return adam_case(params, loss, steps.normal(8, 32, 32))


@foreign
def equinox_filtered():
    """`eqx.filter_jit` around a step with static fields, keys per sample, and an optimizer of filtered leaves."""
    import equinox as eqx
    import optax

    class Net(eqx.Module):
        layers: list
        drop: eqx.nn.Dropout
        name: str = eqx.field(static=True)
        activation: object

        def __call__(self, x, key):
            for layer in self.layers[:-1]:
                x = self.activation(layer(x))
            return self.layers[-1](self.drop(x, key=key))

    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    net = Net([eqx.nn.Linear(16, 32, key=keys[0]), eqx.nn.Linear(32, 8, key=keys[1])], eqx.nn.Dropout(0.1), "net", jax.nn.gelu)
    optimizer = optax.adafactor(1e-2)

    @eqx.filter_jit
    def step(net, state, key, x, y):
        def loss(net):
            out = jax.vmap(net)(x, jax.random.split(key, x.shape[0]))
            return jnp.mean((out - y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(net)
        updates, state = optimizer.update(grads, state, eqx.filter(net, eqx.is_array))
        return eqx.apply_updates(net, updates), state, value

    state = optimizer.init(eqx.filter(net, eqx.is_array))
    return step, (net, state, jax.random.PRNGKey(2), steps.normal(64, 16), steps.normal(64, 8))


@foreign
def conditional_random_field():
    """Emissions of a network, and the partition function of a chain by a scan of `logsumexp`."""
    params = {"net": dense(16, 32, 6), "moves": steps.normal(6, 6, scale=0.3)}

    def loss(params, x, tags):
        scores = apply(params["net"], x)

        def forward(alpha, emission):
            return jax.nn.logsumexp(alpha[:, :, None] + params["moves"], 1) + emission, None

        alpha, _ = lax.scan(forward, scores[:, 0], jnp.moveaxis(scores[:, 1:], 1, 0))
        emitted = jnp.take_along_axis(scores, tags[..., None], -1)[..., 0].sum(-1)
        moved = params["moves"][tags[:, :-1], tags[:, 1:]].sum(-1)
        return jnp.mean(jax.nn.logsumexp(alpha, -1) - emitted - moved)

    return adam_case(params, loss, steps.normal(32, 10, 16), steps.ids(6, 32, 10))


@foreign
def codebook_autoencoder():
    """A straight-through codebook that follows its inputs by moving averages (scatter-adds), beside gradients."""
    params = {"in": dense(16, 32, 8), "out": dense(8, 32, 16)}
    book = {"codes": steps.normal(24, 8), "counts": jnp.ones(24), "sums": steps.normal(24, 8)}

    def step(params, book, x):
        def loss(params):
            z = apply(params["in"], x)
            far = jnp.sum((z[:, None] - book["codes"]) ** 2, -1)
            nearest = jnp.argmin(far, -1)
            quantised = z + lax.stop_gradient(book["codes"][nearest] - z)
            out = apply(params["out"], quantised)
            return jnp.mean((out - x) ** 2) + 0.25 * jnp.mean((z - lax.stop_gradient(quantised)) ** 2), (z, nearest)

        (value, (z, nearest)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        counts = 0.9 * book["counts"] + 0.1 * jnp.zeros(24).at[nearest].add(1.0)
        sums = 0.9 * book["sums"] + 0.1 * jax.ops.segment_sum(z, nearest, 24)
        codes = sums / jnp.maximum(counts, 1e-3)[:, None]
        params = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)
        return params, {"codes": codes, "counts": counts, "sums": sums}, value

    return step, (params, book, steps.normal(128, 16))
