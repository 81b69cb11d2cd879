#!/usr/bin/env python3
"""Writes the test cases of the StableHLO reader: small training steps, as JAX lowers and as JAX computes them.

    python -m venv venv && venv/bin/pip install jax && venv/bin/python scripts/stablehlo_cases.py

Each case is NAME.mlir.gz (the text) and NAME.json.gz (inputs and JAX's results, flat lists) in
crates/stablehlo/tests/stablehlo. The tests read those files and need no Python.
"""

import gzip
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "python/tests"))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from steps import block, cross_entropy

FOLDER = pathlib.Path(__file__).parent.parent / "crates/stablehlo/tests/stablehlo"
RNG = np.random.default_rng(7)


def normal(*shape, scale=1.0):
    return jnp.asarray(np.round(RNG.normal(size=shape) * scale, 4).astype(np.float32))


def ids(below, *shape):
    return jnp.asarray(RNG.integers(below, size=shape).astype(np.int32))


def pack(path, text):
    # No name and no time in the header: the same content is the same file.
    with open(path, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        packed.write(text.encode())


def numbers(tree):
    flat = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [[float(f"{x:.9g}") for x in leaf.astype(np.float64).ravel()] for leaf in flat]


def case(name, step, *arguments, **options):
    store(name, jax.jit(step, **options).lower(*arguments), step, arguments)


def store(name, lowered, step, arguments):
    text = lowered.as_text(debug_info=name.startswith("named"))
    # Where this machine keeps its files is nobody's business.
    pack(FOLDER / f"{name}.mlir.gz", re.sub(r'"/[^"]*/([^"/]*)"', r'"\1"', text))
    results = jax.jit(step)(*arguments)
    values = {"inputs": numbers(arguments), "outputs": numbers(results)}
    pack(FOLDER / f"{name}.json.gz", json.dumps(values))
    print(name, len(lowered.as_text()))


def sgd(loss, lr=0.1):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return value, jax.tree.map(lambda p, g: p - lr * g, params, grads)

    return step


def adam(loss, lr=1e-2, b1=0.9, b2=0.999, eps=1e-8):
    def step(params, m, v, t, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        t = t + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)
        scale = lr * jnp.sqrt(1 - b2 ** t.astype(jnp.float32)) / (1 - b1 ** t.astype(jnp.float32))
        params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + eps), params, m, v)
        return params, m, v, t, value

    return step


# A perceptron, its batch donated too; names of arguments come with the text.
def mlp_loss(params, x, y):
    h = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"] - y) ** 2)


MLP = {"w1": normal(6, 8), "b1": normal(8), "w2": normal(8, 4)}
case("mlp_sgd", sgd(mlp_loss), MLP, normal(4, 6), normal(4, 4), donate_argnums=(0,))
case("named_mlp_sgd", sgd(mlp_loss), MLP, normal(4, 6), normal(4, 4))


# Convolutions in both orders of dimensions, strided, grouped, dilated; both kinds of pooling.
def cnn_loss(params, x, y):
    def conv(x, w, stride, **more):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)

    h = jax.nn.relu(conv(x, params["c1"], 2))
    h = conv(h, params["c2"], 1, feature_group_count=2)
    h = conv(h, params["c3"], 1, rhs_dilation=(2, 2))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    h = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID") / 4
    return cross_entropy(h.reshape(h.shape[0], -1) @ params["f"], y)


CNN = {"c1": normal(3, 3, 2, 4, scale=0.5), "c2": normal(3, 3, 2, 6, scale=0.3), "c3": normal(3, 3, 6, 4, scale=0.3),
       "f": normal(4, 3)}
case("cnn_sgd", sgd(cnn_loss), CNN, normal(2, 8, 8, 2), ids(3, 2))


def nchw_loss(params, x):
    h = lax.conv_general_dilated(x, params["a"], (2, 1), ((1, 2), (0, 1)))
    h = lax.conv_transpose(h, params["b"], (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return jnp.mean(jnp.tanh(h) ** 2)


case("conv_nchw", sgd(nchw_loss), {"a": normal(4, 3, 3, 2), "b": normal(2, 4, 3, 3)}, normal(2, 3, 7, 5))


# A transformer with tied embeddings and Adam.
def block_params(d=8, layers=()):
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 2 * d), "down": (2 * d, d)}
    params = {k: normal(*layers, *s, scale=0.3) for k, s in shapes.items()}
    return params | {k: normal(*layers, d, scale=0.3) + (k[0] == "g") for k in ("g1", "b1", "g2", "b2")}


def gpt_loss(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["position"]
    for p in params["blocks"]:
        x = block(x, p, 2)
    return cross_entropy(x @ params["embed"].T, tokens[:, 1:])


GPT = {"embed": normal(11, 8, scale=0.3), "position": normal(5, 8, scale=0.3), "blocks": [block_params(), block_params()]}
ZEROS = jax.tree.map(jnp.zeros_like, GPT)
case("gpt_adam", adam(gpt_loss), GPT, ZEROS, ZEROS, jnp.int32(0), ids(11, 2, 6))


# The same blocks under scan, rematerialised.
def scan_loss(params, x):
    body = jax.checkpoint(lambda x, p: (block(x, p, 2), None))
    return jnp.mean(lax.scan(body, x, params)[0] ** 2)


case("scan_transformer", sgd(scan_loss), block_params(layers=(3,)), normal(2, 4, 8))


# A recurrence over time: carried state, outputs and their derivative.
def rnn_loss(params, xs):
    def cell(h, x):
        h = jnp.tanh(x @ params["u"] + h @ params["w"])
        return h, h

    return jnp.mean(lax.scan(cell, jnp.zeros((2, 4)), xs)[1] ** 2)


case("scan_rnn", sgd(rnn_loss), {"u": normal(3, 4), "w": normal(4, 4)}, normal(5, 2, 3))


# A mixture of experts: top-2 gates, dispatch by one-hot products.
def moe_loss(params, x):
    gates = jax.nn.softmax(x @ params["gate"])
    top, which = lax.top_k(gates, 2)
    weight = jnp.sum(jax.nn.one_hot(which, 4) * (top / top.sum(-1, keepdims=True))[..., None], 1)
    h = jax.nn.silu(jnp.einsum("nd,edh->enh", x, params["up"]))
    return jnp.mean((jnp.einsum("enh,ehd,ne->nd", h, params["down"], weight) - x) ** 2)


case("moe", sgd(moe_loss), {"gate": normal(6, 4), "up": normal(4, 6, 8), "down": normal(4, 8, 6)}, normal(5, 6))


def index_loss(params, i, j):
    rows = params["table"][i]
    picked = params["table"][j, i % 4]
    added = jnp.zeros((7, 4)).at[j].add(rows)
    return jnp.mean(rows**2) + jnp.mean(picked**3) + jnp.mean(added[2:5] ** 2) + jnp.mean(jnp.flip(rows, 0) * rows)


case("indexing", sgd(index_loss), {"table": normal(7, 4)}, ids(7, 6), ids(7, 6))


# Random numbers are whole-number arithmetic, the same on every machine.
def dropout_loss(params, key, x):
    keep = jax.random.bernoulli(key, 0.8, (4, 6))
    noise = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (4, 6))
    return jnp.mean((jnp.where(keep, x / 0.8, 0) + noise) @ params ** 2)


case("dropout", sgd(dropout_loss), normal(6, 3), jax.random.PRNGKey(3), normal(4, 6))


def rows(x, i):
    return (jnp.sort(x, 0), jnp.argsort(-x), jnp.argmax(x, 0), jnp.argmin(x), lax.top_k(x, 3), jnp.cumsum(x, 1),
            lax.cumsum(x, 0, reverse=True), x.min(1), (x > 0).all(0), (x > 1).any(1), i.max(), i.min(), jnp.median(x))


case("rows", rows, normal(4, 6), ids(9, 5))


def elements(x, y, i):
    floats = (jnp.exp(x), jnp.log1p(y), jnp.expm1(x), jnp.sin(x), jnp.cos(x), jnp.tan(x), jnp.floor(x), jnp.ceil(x),
              jnp.round(x), jnp.sign(x), jnp.abs(x), y**x, y**3, jnp.sqrt(y), jnp.arctan2(x, y), x % y, lax.rem(x, y),
              jnp.clip(x, -0.5, 0.5), jax.nn.gelu(x, approximate=False), jax.nn.softplus(x), jax.nn.sigmoid(x),
              jnp.where(x > y, x, y), jnp.minimum(x, 0.3), 2.0 - x, 3.0 / y, lax.erf_inv(jnp.tanh(x)), jnp.cbrt(y))
    whole = (i + 3, -i, abs(i - 4), i // 3, i % 4, i << 2, i >> 1, i & 5, i | 8, i ^ 3, ~i, jnp.sign(i - 4), i.astype(jnp.float32))
    unsigned = i.astype(jnp.uint32) * np.uint32(2654435761)
    bits = (unsigned // np.uint32(7), unsigned > np.uint32(2**31), (unsigned >> 5).astype(jnp.float32), jnp.isfinite(1 / x))
    return floats, whole, bits, x.astype(jnp.bfloat16).astype(jnp.float32)


case("elements", elements, normal(3, 4), jnp.abs(normal(3, 4)) + 0.1, ids(9, 6))


def shapes(x, i, p):
    table = np.arange(12, dtype=np.float32).reshape(3, 4) ** 2
    return (x[1:, ::2], lax.dynamic_slice(x, (i, 0), (2, 3)), lax.dynamic_update_slice(x, x[:2, :2] * 2, (i, 1)),
            jnp.roll(x, 1, 0), jnp.flip(x, 1), lax.pad(x, 1.5, ((1, 2, 1), (-1, 0, 0))), jnp.concatenate([x, x.T.reshape(3, 4)], 1),
            x * table, jnp.tile(x, (2, 1)), x.T + x.reshape(4, 3), lax.cond(p, lambda x: x * 2, lambda x: x + 1, x),
            lax.fori_loop(0, 5, lambda k, x: x * 1.5 + k, x), jnp.eye(3), jnp.linspace(0.0, 1.0, 5))


case("shapes", shapes, normal(3, 4), jnp.int32(1), jnp.array(True))


# Attention in the forms in which JAX and its users write it, each with its own weights.
def projected(p, x, z):
    return (jnp.einsum("btm,mnh->btnh", a, p[k]) for k, a in (("q", x), ("k", z), ("v", z)))


def masked_attention(q, k, v, seen):
    q, k, v = (t.swapaxes(1, 2) for t in (q, k, v))
    scores = jnp.where(seen[:, None, None, :] > 0, q @ k.swapaxes(2, 3) / 2.0, -1e9)
    return jax.nn.softmax(scores) @ v


def shifted_attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * 0.5, k)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def attention_loss(params, x, z, seen):
    attend = jax.nn.dot_product_attention
    made = [
        attend(*projected(params[0], x, x), is_causal=True),
        attend(*projected(params[1], x, x), is_causal=True, local_window_size=(2, 0)),
        attend(*projected(params[2], x, z)),
        masked_attention(*projected(params[3], x, z), seen),
        shifted_attention(*projected(params[4], x, z)),
    ]
    return sum(jnp.mean(jnp.sin(y) ** 2) for y in made)


def attention_params(heads, groups):
    shapes = {"q": (6, heads, 4), "k": (6, groups, 4), "v": (6, groups, 4)}
    return {k: normal(*s) for k, s in shapes.items()}


def bf16_loss(params, x, implementation=None):
    q, k, v = projected(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), *2 * [x.astype(jnp.bfloat16)])
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return jnp.mean(y.astype(jnp.float32) ** 2)


ATTENTION = [attention_params(*heads) for heads in ((2, 2), (4, 2), (4, 1), (3, 3), (2, 2))]
SEEN = jnp.asarray([[1, 1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1, 1]], jnp.int32)
case("attention", sgd(attention_loss), ATTENTION, normal(2, 5, 6), normal(2, 7, 6), SEEN)
case("attention_bf16", sgd(bf16_loss), attention_params(4, 2), normal(2, 5, 6))


# The same by cuDNN's kernels: lowered for GPUs as if there were one, computed by XLA.
from jax._src.cudnn import fused_attention_stablehlo  # noqa: E402

fused_attention_stablehlo.check_cudnn_version = fused_attention_stablehlo.check_compute_capability = lambda *_: 91000
CUDNN = [{k: normal(6, heads, 8) for k, heads in (("q", 4), ("k", 2), ("v", 2))}, normal(2, 16, 6)]
GPU = jax.jit(sgd(lambda *given: bf16_loss(*given, implementation="cudnn"))).trace(*CUDNN)
store("attention_cudnn", GPU.lower(lowering_platforms=("cuda",)), sgd(bf16_loss), CUDNN)
