"""Small training steps of every kind, each with arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RNG = np.random.default_rng(7)


def normal(*shape, scale=1.0):
    return jnp.asarray((RNG.normal(size=shape) * scale).astype(np.float32))


def ids(below, *shape):
    return jnp.asarray(RNG.integers(below, size=shape).astype(np.int32))


def sgd(loss, lr=0.1):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), value

    return step


def adam(loss, lr=1e-2, b1=0.9, b2=0.999, eps=1e-3):
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        t = state["t"] + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["v"], grads)
        scale = lr * jnp.sqrt(1 - b2 ** t.astype(jnp.float32)) / (1 - b1 ** t.astype(jnp.float32))
        params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + eps), params, m, v)
        return params, {"m": m, "v": v, "t": t}, value

    return step


def adam_state(params):
    return {"m": jax.tree.map(jnp.zeros_like, params), "v": jax.tree.map(jnp.zeros_like, params), "t": jnp.int32(0)}


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def mlp(batch=64, width=128, layers=3):
    def loss(params, x, y):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return jnp.mean((x @ w + b - y) ** 2)

    params = [(normal(width, width, scale=0.1), normal(width, scale=0.1)) for _ in range(layers)]
    return sgd(loss), (params, normal(batch, width), normal(batch, width))


def cnn(batch=16):
    def loss(params, x, y):
        def conv(x, w, stride):
            return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        h = jax.nn.relu(conv(x, params["c1"], 1))
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        h = jax.nn.relu(conv(h, params["c2"], 2))
        return cross_entropy(h.reshape(h.shape[0], -1) @ params["f"], y)

    params = {
        "c1": normal(3, 3, 3, 16, scale=0.3),
        "c2": normal(3, 3, 16, 32, scale=0.1),
        "f": normal(4 * 4 * 32, 16, scale=0.1),
    }
    return sgd(loss), (params, normal(batch, 16, 16, 3), ids(16, batch))


def norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * g + b


def attend(x, qkv, out, heads):
    n, s, d = x.shape
    q, k, v = (t.reshape(n, s, heads, d // heads).transpose(0, 2, 1, 3) for t in jnp.split(x @ qkv, 3, -1))
    scores = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(d / heads)
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    return (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(n, s, d) @ out


def block(x, p, heads):
    x = x + attend(norm(x, p["g1"], p["b1"]), p["qkv"], p["out"], heads)
    return x + jax.nn.gelu(norm(x, p["g2"], p["b2"]) @ p["up"]) @ p["down"]


def block_params(d, layers=()):
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    params = {k: normal(*layers, *s, scale=0.1) for k, s in shapes.items()}
    return params | {k: normal(*layers, d, scale=0.1) + (k[0] == "g") for k in ("g1", "b1", "g2", "b2")}


def gpt(batch=16, seq=16, width=64, heads=8, layers=1, vocab=128):
    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]] + params["position"]
        for p in params["blocks"]:
            x = block(x, p, heads)
        return cross_entropy(x @ params["embed"].T, tokens[:, 1:])

    params = {
        "embed": normal(vocab, width, scale=0.3),
        "position": normal(seq, width, scale=0.3),
        "blocks": [block_params(width) for _ in range(layers)],
    }
    return adam(loss), (params, adam_state(params), ids(vocab, batch, seq + 1))


def scanned(batch=16, seq=16, width=64, heads=8, layers=3):
    def loss(params, x):
        body = jax.checkpoint(lambda x, p: (block(x, p, heads), None))
        return jnp.mean(lax.scan(body, x, params)[0] ** 2)

    return sgd(loss), (block_params(width, (layers,)), normal(batch, seq, width))


def moe(batch=64, width=32, hidden=64, experts=8):
    def loss(params, x):
        gates = jax.nn.softmax(x @ params["gate"])
        top, which = lax.top_k(gates, 2)
        weight = jnp.sum(jax.nn.one_hot(which, experts) * (top / top.sum(-1, keepdims=True))[..., None], 1)
        h = jax.nn.silu(jnp.einsum("nd,edh->enh", x, params["up"]))
        return jnp.mean((jnp.einsum("enh,ehd,ne->nd", h, params["down"], weight) - x) ** 2)

    params = {
        "gate": normal(width, experts, scale=0.3),
        "up": normal(experts, width, hidden, scale=0.1),
        "down": normal(experts, hidden, width, scale=0.1),
    }
    return sgd(loss), (params, normal(batch, width))


CASES = {"mlp": mlp, "cnn": cnn, "gpt": gpt, "scanned": scanned, "moe": moe}
