"""Training steps of recent architectures and habits: state space duality, rings of devices, adapters, kernels with rules of their own."""

from __future__ import annotations

import functools
import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import steps
from foreign_calls import layers
from foreign_models import adam_case
from foreign_steps import foreign, optax_step
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


@foreign
def state_space_duality():
    """Mamba 2: matrix products inside of chunks, and a scan over the states between them."""
    width, heads, state, chunk = 32, 4, 8, 8
    params = {
        "in": steps.normal(width, 2 * width + 2 * state + heads, scale=0.2),
        "conv": steps.normal(4, width + 2 * state, scale=0.3),
        "decay": steps.normal(heads, scale=0.1),
        "skip": steps.normal(heads, scale=0.1),
        "out": steps.normal(width, width, scale=0.2),
    }

    def segment_sums(x):
        total = jnp.cumsum(x, -1)
        size = x.shape[-1]
        return jnp.where(jnp.tril(jnp.ones((size, size), bool)), total[..., :, None] - total[..., None, :], -jnp.inf)

    def mixer(params, x):
        n, length, _ = x.shape
        z, inner, dt = jnp.split(x @ params["in"], [width, 2 * width + 2 * state], -1)
        padded = jnp.pad(inner, ((0, 0), (3, 0), (0, 0)))
        inner = jax.nn.silu(sum(padded[:, i : i + length] * params["conv"][i] for i in range(4)))
        v, b, c = jnp.split(inner, [width, width + state], -1)
        dt = jax.nn.softplus(dt)
        v = v.reshape(n, length, heads, -1) * dt[..., None]
        v, b, c = (t.reshape(n, length // chunk, chunk, *t.shape[2:]) for t in (v, b, c))
        decay = jnp.moveaxis((-jnp.exp(params["decay"]) * dt).reshape(n, length // chunk, chunk, heads), -1, 1)
        total = jnp.cumsum(decay, -1)
        inside = jnp.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, jnp.exp(segment_sums(decay)), v)
        states = jnp.einsum("bcln,bhcl,bclhp->bchpn", b, jnp.exp(total[..., -1:] - total), v)

        def carry_on(carried, slices):
            new, last = slices
            return carried * last[..., None, None] + new, carried

        lasts = jnp.moveaxis(jnp.exp(total[..., -1]), -1, 0)
        _, before = lax.scan(carry_on, jnp.zeros_like(states[:, 0]), (jnp.moveaxis(states, 1, 0), lasts))
        across = jnp.einsum("bcln,cbhpn,bhcl->bclhp", c, before, jnp.exp(total))
        y = (inside + across + v * params["skip"][:, None]).reshape(n, length, width)
        return (y * jax.nn.silu(z)) @ params["out"]

    def loss(params, x, y):
        return jnp.mean((x + mixer(params, x) - y) ** 2)

    return adam_case(params, loss, steps.normal(8, 32, width), steps.normal(8, 32, width))


@foreign
def ring_attention():
    """Attention over a sequence that is split over all devices: keys and values go round a ring, in a `shard_map`."""
    mesh = Mesh(np.asarray(jax.devices()), ("ring",))
    count = len(jax.devices())
    params = {"qkv": steps.normal(16, 48, scale=0.3), "out": steps.normal(16, 16, scale=0.3)}

    def ring(q, k, v):
        pairs = [(i, (i + 1) % count) for i in range(count)]

        def turn(carry, _):
            out, most, total, k, v = carry
            scores = jnp.einsum("nqd,nkd->nqk", q, k) / 4
            highest = jnp.maximum(most, scores.max(-1))
            weights, scale = jnp.exp(scores - highest[..., None]), jnp.exp(most - highest)
            out = out * scale[..., None] + jnp.einsum("nqk,nkd->nqd", weights, v)
            k, v = (lax.ppermute(x, "ring", pairs) for x in (k, v))
            return (out, highest, total * scale + weights.sum(-1), k, v), None

        start = (jnp.zeros_like(q), jnp.full_like(q[..., 0], -1e9), jnp.zeros_like(q[..., 0]), k, v)
        (out, _, total, *_), _ = lax.scan(turn, start, None, length=count)
        return out / total[..., None]

    spec = P(None, "ring", None)
    attend = jax.shard_map(ring, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)

    def loss(params, x, y):
        q, k, v = jnp.split(x @ params["qkv"], 3, -1)
        return jnp.mean((attend(q, k, v) @ params["out"] - y) ** 2)

    return adam_case(params, loss, steps.normal(4, 64, 16), steps.normal(4, 64, 16))


@foreign
def flash_attention_by_blocks():
    """Attention block by block, with a backward pass of its own that computes the scores again."""
    block = 8

    def blocks(x):
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, block, x.shape[-1]), 2, 0)

    def forward(q, k, v):
        def over_keys(carry, kv):
            out, most, total = carry
            scores = jnp.einsum("nhqd,nhkd->nhqk", q, kv[0]) / math.sqrt(q.shape[-1])
            highest = jnp.maximum(most, scores.max(-1))
            weights, scale = jnp.exp(scores - highest[..., None]), jnp.exp(most - highest)
            return (out * scale[..., None] + weights @ kv[1], highest, total * scale + weights.sum(-1)), None

        start = (jnp.zeros_like(q), jnp.full(q.shape[:-1], -jnp.inf), jnp.zeros(q.shape[:-1]))
        (out, most, total), _ = lax.scan(over_keys, start, (blocks(k), blocks(v)))
        return out / total[..., None], most + jnp.log(total)

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def save(q, k, v):
        out, log_sum = forward(q, k, v)
        return out, (q, k, v, out, log_sum)

    def backward(saved, grad):
        q, k, v, out, log_sum = saved
        delta = jnp.sum(out * grad, -1)

        def over_keys(dq, kv):
            key, value = kv
            weights = jnp.exp(jnp.einsum("nhqd,nhkd->nhqk", q, key) / math.sqrt(q.shape[-1]) - log_sum[..., None])
            dscores = weights * (grad @ jnp.swapaxes(value, -1, -2) - delta[..., None]) / math.sqrt(q.shape[-1])
            return dq + dscores @ key, (jnp.swapaxes(dscores, -1, -2) @ q, jnp.swapaxes(weights, -1, -2) @ grad)

        dq, (dk, dv) = lax.scan(over_keys, jnp.zeros_like(q), (blocks(k), blocks(v)))
        return dq, *(jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in (dk, dv))

    attend.defvjp(save, backward)
    params = {"qkv": steps.normal(32, 96, scale=0.2), "out": steps.normal(32, 32, scale=0.2)}

    def loss(params, x, y):
        heads = (x @ params["qkv"]).reshape(*x.shape[:2], 3, 4, 8)
        q, k, v = (jnp.swapaxes(heads[:, :, i], 1, 2) for i in range(3))
        return jnp.mean((jnp.swapaxes(attend(q, k, v), 1, 2).reshape(x.shape) @ params["out"] - y) ** 2)

    return adam_case(params, loss, steps.normal(8, 32, 32), steps.normal(8, 32, 32))


@foreign
def fourier_neural_operator():
    """Spectral convolutions over a grid by `rfft2`, with complex weights for the lowest modes."""
    width, modes = 8, 3
    params = {
        "lift": steps.normal(3, width, scale=0.3),
        "real": steps.normal(2, 2, width, width, modes, modes, scale=0.1),
        "imag": steps.normal(2, 2, width, width, modes, modes, scale=0.1),
        "local": steps.normal(2, width, width, scale=0.3),
        "project": steps.normal(width, 1, scale=0.3),
    }

    def spectral(x, weights):
        spectrum = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros_like(spectrum)
        for part, rows in enumerate((slice(None, modes), slice(-modes, None))):
            low = jnp.einsum("nxyi,ioxy->nxyo", spectrum[:, rows, :modes], weights[part])
            out = out.at[:, rows, :modes].set(low)
        return jnp.fft.irfft2(out, s=x.shape[1:3], axes=(1, 2))

    def loss(params, x, y):
        grid = jnp.stack(jnp.meshgrid(jnp.linspace(0, 1, 16), jnp.linspace(0, 1, 16)), -1)
        h = jnp.concatenate([x, jnp.broadcast_to(grid, (len(x), 16, 16, 2))], -1) @ params["lift"]
        for at in range(2):
            h = jax.nn.gelu(spectral(h, params["real"][at] + 1j * params["imag"][at]) + h @ params["local"][at])
        out = h @ params["project"]
        return jnp.mean(jnp.linalg.norm((out - y).reshape(len(x), -1), axis=1) / jnp.linalg.norm(y.reshape(len(x), -1), axis=1))

    return adam_case(params, loss, steps.normal(8, 16, 16, 1), steps.normal(8, 16, 16, 1))


@foreign
def nnx_adapters():
    """LoRA of NNX around a frozen model: the optimizer sees the adapters alone."""
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.LoRALinear(32, 64, lora_rank=4, rngs=rngs)
            self.down = nnx.LoRALinear(64, 8, lora_rank=4, rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.gelu(self.up(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)

    def nnx_step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    return nnx_step, (model, optimizer, steps.normal(64, 32), steps.normal(64, 8))


def _contributed():
    def make(name, **options):
        def case():
            import optax.contrib

            optimizer = getattr(optax.contrib, name)(**options)
            params = layers(32, 64, 16)
            loss = lambda p, x, y: jnp.mean((jax.nn.tanh(x @ p["w0"]) @ p["w1"] - y) ** 2)  # noqa: E731
            return optax_step(optimizer, loss), (params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))

        case.__name__ = f"optax_contrib_{name}"
        foreign(case)

    make("dadapt_adamw", learning_rate=1.0)
    make("dog", learning_rate=1.0)
    make("dowg", learning_rate=1.0)
    make("cocob", learning_rate=1.0)
    make("acprop", learning_rate=1e-2)


_contributed()


@foreign
def plateau_and_mechanic():
    """A learning rate that is found (`mechanize`), lowered on plateaus that the loss decides, and gradients clipped by their weights."""
    import optax
    import optax.contrib

    optimizer = optax.chain(
        optax.adaptive_grad_clip(0.1), optax.contrib.mechanize(optax.adam(1e-2)), optax.contrib.reduce_on_plateau(patience=2, accumulation_size=2)
    )
    params = layers(32, 64, 16)

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(x @ p["w0"]) @ p["w1"] - y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), steps.normal(64, 32), steps.normal(64, 16))


@foreign
def grouped_query_decode():
    """Decoding with grouped heads, rotary positions, and caches that every row writes at a position of its own."""
    heads, groups, size, length = 8, 2, 8, 16
    params = {
        "q": steps.normal(32, heads * size, scale=0.2),
        "kv": steps.normal(32, 2 * groups * size, scale=0.2),
        "out": steps.normal(heads * size, 32, scale=0.2),
    }

    def rotary(x, at):
        angles = at[:, None] / 100.0 ** (jnp.arange(0, size, 2) / size)
        a, b = jnp.split(x, 2, -1)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def decode(params, cache, x, at):
        q = rotary((x @ params["q"]).reshape(-1, heads, size), at)
        k, v = jnp.split((x @ params["kv"]).reshape(-1, groups, 2 * size), 2, -1)
        write = jax.vmap(lambda rows, new, at: lax.dynamic_update_slice(rows, new[None], (at, 0, 0)))
        keys, values = write(cache["k"], rotary(k, at), at), write(cache["v"], v, at)
        grouped = q.reshape(-1, groups, heads // groups, size)
        scores = jnp.einsum("ngqd,ntgd->ngqt", grouped, keys) / math.sqrt(size)
        seen = jnp.arange(length)[None] <= at[:, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e9))
        out = jnp.einsum("ngqt,ntgd->ngqd", weights, values).reshape(-1, heads * size)
        return x + out @ params["out"], {"k": keys, "v": values}, at + 1

    cache = {name: steps.normal(16, length, groups, size) for name in ("k", "v")}
    return decode, (params, cache, steps.normal(16, 32), steps.ids(length - 1, 16))


@foreign
def equinox_typed():
    """Equinox modules with shapes in their annotations, checked while the step is traced."""
    import equinox as eqx
    import optax
    from jaxtyping import Array, Float, jaxtyped

    class Gated(eqx.Module):
        w: Float[Array, "2 inner outer"]
        scale: Float[Array, " outer"]

        def __call__(self, x: Float[Array, " inner"]) -> Float[Array, " outer"]:
            a, b = jnp.einsum("i,gio->go", x, self.w)
            return jax.nn.silu(a) * b * self.scale

    @jaxtyped(typechecker=None)
    def loss(model, x: Float[Array, "batch inner"], y: Float[Array, "batch outer"]) -> Float[Array, ""]:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    model = Gated(steps.normal(2, 32, 16, scale=0.2), jnp.ones(16))
    optimizer = optax.adam(1e-2, eps=1e-3)

    @eqx.filter_jit
    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    return step, (model, optimizer.init(eqx.filter(model, eqx.is_array)), steps.normal(64, 32), steps.normal(64, 16))


@foreign
def linen_bidirectional():
    """`nn.RNN` with LSTM cells in both directions over sequences of different lengths."""
    import flax.linen as nn
    import optax

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, lengths):
            cells = nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True), nn.RNN(nn.GRUCell(16), return_carry=True)
            (carry, backward), h = nn.Bidirectional(*cells, return_carry=True)(x, seq_lengths=lengths)
            return nn.Dense(4)(jnp.concatenate([h.mean(1), carry[1], backward], -1))

    model, optimizer = Net(), optax.adam(1e-2, eps=1e-3)
    x, lengths = steps.normal(16, 12, 8), steps.ids(11, 16) + 1
    params = model.init(jax.random.key(0), x, lengths)
    loss = lambda params, x, lengths, y: steps.cross_entropy(model.apply(params, x, lengths), y)  # noqa: E731
    return optax_step(optimizer, loss), (params, optimizer.init(params), x, lengths, steps.ids(4, 16))


@foreign
def line_search_in_a_loop():
    """Steps that are halved in a `while_loop` until the loss falls enough."""
    params = layers(16, 32, 4)

    def step(params, x, y):
        loss = lambda p: jnp.mean((jax.nn.tanh(x @ p["w0"]) @ p["w1"] - y) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        slope = sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))
        moved = lambda size: jax.tree.map(lambda p, g: p - size * g, params, grads)  # noqa: E731
        too_far = lambda carry: (loss(moved(carry[0])) > value - 0.5 * carry[0] * slope) & (carry[1] < 20)  # noqa: E731
        size, tries = lax.while_loop(too_far, lambda carry: (carry[0] / 2, carry[1] + 1), (jnp.float32(8.0), jnp.int32(0)))
        return moved(size), value, tries

    return step, (params, steps.normal(64, 16), steps.normal(64, 4))


@foreign
def bf16_with_master_weights():
    """Compute in bf16, weights and Adam in 32 bits, a scale of the loss that overflows lower; the update is skipped by `cond`."""
    params = {"scale": jnp.float32(1024.0), "good": jnp.int32(0), "w": layers(32, 64, 16)}
    state = steps.adam_state(params["w"])

    def step(params, state, x, y):
        def loss(w):
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), w)
            out = jax.nn.relu(x.astype(jnp.bfloat16) @ half["w0"]) @ half["w1"]
            return jnp.mean((out.astype(jnp.float32) - y) ** 2) * params["scale"]

        def update(operands):
            w, state, grads = operands
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
            v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
            w = jax.tree.map(lambda p, m, v: p - 1e-2 * m / (jnp.sqrt(v) + 1e-3), w, m, v)
            return w, {"m": m, "v": v, "t": state["t"] + 1}

        value, grads = jax.value_and_grad(loss)(params["w"])
        grads = jax.tree.map(lambda g: g / params["scale"], grads)
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
        w, state = lax.cond(finite, update, lambda operands: operands[:2], (params["w"], state, grads))
        good = jnp.where(finite, params["good"] + 1, 0)
        scale = jnp.where(finite, jnp.where(good % 100 == 99, params["scale"] * 2, params["scale"]), params["scale"] / 2)
        return {"scale": scale, "good": good, "w": w}, state, value / params["scale"]

    return step, (params, state, steps.normal(64, 32), steps.normal(64, 16))


@foreign
def shifted_windows():
    """Attention in windows that a roll shifts, with learned biases by relative position (Swin)."""
    size, heads, width = 4, 2, 16
    relative = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1).reshape(-1, 2)
    offsets = relative[:, None] - relative[None] + size - 1
    index = jnp.asarray(offsets[..., 0] * (2 * size - 1) + offsets[..., 1])
    params = {
        "qkv": steps.normal(2, width, 3 * width, scale=0.2),
        "bias": steps.normal(2, (2 * size - 1) ** 2, heads, scale=0.1),
        "out": steps.normal(2, width, width, scale=0.2),
        "head": steps.normal(width, 8, scale=0.2),
    }

    def windows(x):
        n, h, w, d = x.shape
        x = x.reshape(n, h // size, size, w // size, size, d)
        return jnp.swapaxes(x, 2, 3).reshape(-1, size * size, d)

    def whole(x, n, h, w):
        x = x.reshape(n, h // size, w // size, size, size, -1)
        return jnp.swapaxes(x, 2, 3).reshape(n, h, w, -1)

    def loss(params, x, labels):
        n, h, w, _ = x.shape
        for at in range(2):
            shift = size // 2 * at
            tokens = windows(jnp.roll(x, (-shift, -shift), (1, 2)))
            q, k, v = jnp.moveaxis((tokens @ params["qkv"][at]).reshape(*tokens.shape[:2], 3, heads, -1), 2, 0)
            scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / 3 + jnp.moveaxis(params["bias"][at][index], -1, 0)
            mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(tokens.shape) @ params["out"][at]
            x = x + jnp.roll(whole(mixed, n, h, w), (shift, shift), (1, 2))
        return steps.cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    return adam_case(params, loss, steps.normal(16, 8, 8, width), steps.ids(8, 16))


@foreign
def evolution_strategy():
    """Gradients from antithetic samples of the weights, a population under `vmap`, with ranks as fitness."""
    params = layers(8, 32, 4)

    def step(params, key, x, y):
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        noise = jax.random.normal(key, (32, flat.size))
        noise = jnp.concatenate([noise, -noise])
        fitness = jax.vmap(lambda p: -jnp.mean((jnp.tanh(x @ unravel(p)["w0"]) @ unravel(p)["w1"] - y) ** 2))(flat + 0.1 * noise)
        ranks = jnp.argsort(jnp.argsort(fitness)) / (len(noise) - 1) - 0.5
        return unravel(flat + 0.1 * ranks @ noise), fitness.mean()

    return step, (params, jax.random.key(2), steps.normal(16, 8), steps.normal(16, 4))
