"""Training steps of less usual programs: decoding with a cache, small integers, sparse matrices, references, odd trees, several players."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import steps
from foreign_calls import layers
from foreign_models import adam_case
from foreign_steps import foreign
from jax import lax
from jax.experimental import checkify, sparse
from jax.sharding import PartitionSpec as P


@foreign
def cached_decoding():
    """Rollouts by a policy that decodes with a cache of keys and values, and a policy-gradient update."""
    vocab, width, length = 32, 16, 8
    params = {"embed": steps.normal(vocab, width), "qkv": steps.normal(width, 3 * width, scale=0.3), "head": steps.normal(width, vocab, scale=0.3)}

    def logits_of(params, token, cache, at):
        q, k, v = jnp.split(params["embed"][token] @ params["qkv"], 3, -1)
        keys = lax.dynamic_update_slice_in_dim(cache[0], k[:, None], at, 1)
        values = lax.dynamic_update_slice_in_dim(cache[1], v[:, None], at, 1)
        scores = jnp.einsum("nd,ntd->nt", q, keys) / 4
        scores = jnp.where(jnp.arange(length) <= at, scores, -jnp.inf)
        return jnp.einsum("nt,ntd->nd", jax.nn.softmax(scores), values) @ params["head"], (keys, values)

    def loss(params, tokens, reward):
        cache = (jnp.zeros((len(tokens), length, width)),) * 2

        def body(cache, at):
            logits, cache = logits_of(params, tokens[:, at], cache, at)
            return cache, logits

        logits = jnp.swapaxes(lax.scan(body, cache, jnp.arange(length - 1))[1], 0, 1)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        return -jnp.mean(chosen * reward[:, None])

    def step(params, key, prompt, target):
        def decode(at, carry):
            tokens, cache = carry
            logits, cache = logits_of(params, tokens[:, at], cache, at)
            best = lax.top_k(logits, 4)[0][:, -1:]
            drawn = jax.random.categorical(jax.random.fold_in(key, at), jnp.where(logits >= best, logits, -1e9))
            return tokens.at[:, at + 1].set(drawn.astype(tokens.dtype)), cache

        tokens = jnp.zeros((len(prompt), length), jnp.int32).at[:, 0].set(prompt)
        cache = (jnp.zeros((len(prompt), length, width)),) * 2
        tokens, _ = lax.fori_loop(0, length - 1, decode, (tokens, cache))
        reward = jnp.mean(tokens == target[:, None], 1)
        value, grads = jax.value_and_grad(loss)(params, tokens, reward - reward.mean())
        return jax.tree.map(lambda p, g: p - g, params, grads), tokens, value

    return step, (params, jax.random.key(5), steps.ids(vocab, 32), steps.ids(vocab, 32))


@foreign
def integer_products():
    """Int8 activations and int4 weights with 32-bit sums, and fp8 products with scales."""
    params = layers(32, 64, 16)

    @jax.custom_vjp
    def int8(x, w):
        sx, sw = jnp.abs(x).max(-1, keepdims=True) / 127, jnp.abs(w).max(0) / 7
        q, p = jnp.round(x / sx).astype(jnp.int8), jnp.round(w / sw).astype(jnp.int4)
        return lax.dot(q, p.astype(jnp.int8), preferred_element_type=jnp.int32).astype(jnp.float32) * sx * sw

    int8.defvjp(lambda x, w: (int8(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(params, x, y):
        h = jax.nn.relu(int8(x, params["w0"]))
        scale = lax.stop_gradient(jnp.abs(h).max() / 448)
        q = (h / scale).astype(jnp.float8_e4m3fn)
        out = lax.dot(q, params["w1"].astype(jnp.float8_e5m2), preferred_element_type=jnp.float32) * scale
        return jnp.mean((out - y) ** 2)

    return adam_case(params, loss, steps.normal(64, 32), steps.normal(64, 16))


@foreign
def augmented_bytes():
    """Images of bytes: random crops and flips by `vmap` of `dynamic_slice`, resized, with label smoothing and mixup."""
    params = layers(12 * 12 * 3, 64, 10)

    def loss(params, images, labels, key):
        a, b, c = jax.random.split(key, 3)
        crop = lambda image, at: lax.dynamic_slice(image, (at[0], at[1], 0), (12, 12, 3))  # noqa: E731
        x = jax.vmap(crop)(images, jax.random.randint(a, (len(images), 2), 0, 5))
        x = jnp.where(jax.random.bernoulli(b, 0.5, (len(images), 1, 1, 1)), x[:, :, ::-1], x)
        x = jax.image.resize(x.astype(jnp.float32) / 255, (len(images), 24, 24, 3), "bilinear")
        x = jax.image.resize(x, (len(images), 12, 12, 3), "linear")
        mix, other = jax.random.beta(c, 1.0, 1.0), jax.random.permutation(b, len(images))
        targets = jax.nn.one_hot(labels, 10) * 0.9 + 0.01
        x, targets = mix * x + (1 - mix) * x[other], mix * targets + (1 - mix) * targets[other]
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(jax.nn.relu(x.reshape(len(x), -1) @ params["w0"]) @ params["w1"]) * targets, -1))

    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3)), jnp.uint8)
    return adam_case(params, loss, images, steps.ids(10, 32), jax.random.key(4))


@foreign
def sparse_features():
    """A BCOO matrix of features, and an embedding bag by `segment_sum` and `segment_max`."""
    params = {"w": steps.normal(64, 16, scale=0.3), "bag": steps.normal(100, 16, scale=0.3), "out": steps.normal(32, 4)}
    matrix = sparse.BCOO.fromdense((steps.normal(32, 64) > 1.2).astype(jnp.float32), nse=300)

    def loss(params, matrix, bag, rows, y):
        h = matrix @ params["w"]
        bags = jax.ops.segment_sum(params["bag"][bag], rows, 32) + jax.ops.segment_max(params["bag"][bag], rows, 32)
        return jnp.mean((jnp.concatenate([h, jnp.where(jnp.isfinite(bags), bags, 0)], 1) @ params["out"] - y) ** 2)

    return adam_case(params, loss, matrix, steps.ids(100, 200), jnp.sort(steps.ids(32, 200)), steps.normal(32, 4))


@foreign
def sorted_and_counted():
    """Ranking losses: sorts, `searchsorted`, histograms, medians, quantiles, cumulative maxima, and scatters by maximum and product."""

    def loss(params, x, y):
        scores = (x @ params["w0"])[:, 0]
        order = jnp.argsort(-lax.stop_gradient(scores))
        ranks = jnp.zeros_like(scores).at[order].set(jnp.arange(len(scores), dtype=jnp.float32))
        risk = lax.cumlogsumexp(scores[order])
        bins = jnp.histogram(y, bins=8, range=(-3, 3))[0]
        place = jnp.searchsorted(jnp.linspace(-2, 2, 7), y)
        peak = jnp.full(8, -10.0).at[place].max(scores) + jnp.ones(8).at[place].multiply(1 + 0.01 * y)
        robust = jnp.median(jnp.abs(scores - y)) + jnp.quantile(scores, 0.9) + lax.cummax(scores)[-1]
        return jnp.mean(risk - scores[order]) + robust + 1e-3 * jnp.sum(peak * bins) + 1e-3 * jnp.mean(ranks * scores)

    return adam_case(layers(16, 4), loss, steps.normal(64, 16), steps.normal(64))


@foreign
def second_derivatives():
    """A physics-informed loss: Laplacians by `hessian`, `jvp` of `grad`, and forward-mode Jacobians."""
    params = layers(2, 32, 32, 1)

    def field(params, point):
        h = jnp.tanh(point @ params["w0"])
        return (jnp.tanh(h @ params["w1"]) @ params["w2"])[0]

    def loss(params, points, edge):
        laplacian = lambda p: jnp.trace(jax.hessian(field, 1)(params, p))  # noqa: E731
        slope = jax.vmap(jax.jacfwd(field, 1), (None, 0))(params, points)
        curved = jax.jvp(jax.vmap(jax.grad(field, 1), (None, 0)), (params, points), (jax.tree.map(jnp.zeros_like, params), slope))[1]
        inside = jax.vmap(laplacian)(points) - jnp.sin(points.sum(1))
        return jnp.mean(inside**2) + jnp.mean(jax.vmap(field, (None, 0))(params, edge) ** 2) + 1e-2 * jnp.mean(curved**2)

    return adam_case(params, loss, steps.normal(64, 2), steps.normal(32, 2))


@foreign
def implicit_layer():
    """A fixed point by `while_loop` with its gradient by `custom_root`-like implicit differentiation, and an ODE by `odeint`."""
    from jax.experimental.ode import odeint

    params = {"w": steps.normal(8, 8, scale=0.1), "u": steps.normal(4, 8), "f": steps.normal(8, 8, scale=0.2)}

    def loss(params, x, y):
        def residual(z):
            return jnp.tanh(z @ params["w"] + x @ params["u"]) - z

        def solve(f, z):
            return lax.while_loop(lambda s: (s[1] < 30) & (jnp.abs(f(s[0])).max() > 1e-5), lambda s: (s[0] + f(s[0]), s[1] + 1), (z, 0))[0]

        def tangent(g, y):
            return lax.fori_loop(0, 30, lambda _, z: z - (y - g(z)), jnp.zeros_like(y))

        z = lax.custom_root(residual, jnp.zeros((len(x), 8)), solve, tangent)
        path = odeint(lambda h, t: jnp.tanh(h @ params["f"]) * (1 - t), z, jnp.linspace(0.0, 1.0, 3))
        return jnp.mean((path[-1] - y) ** 2)

    return adam_case(params, loss, steps.normal(32, 4), steps.normal(32, 8))


@foreign
def checked_step():
    """A step under `checkify`, which returns an error beside the results."""

    def step(params, x, y):
        def loss(params):
            h = jax.nn.relu(x @ params["w0"]) @ params["w1"]
            checkify.check(jnp.all(jnp.isfinite(h)), "not finite: {}", h.sum())
            return jnp.mean((h - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    checked = checkify.checkify(step, errors=checkify.user_checks | checkify.nan_checks)

    def flagged(params, x, y):
        error, results = checked(params, x, y)
        # Its numbers count the checks of all traces so far; its flags say what failed.
        return results, [leaf for leaf in jax.tree.leaves(error) if leaf.dtype == bool]

    return flagged, (layers(16, 32, 4), steps.normal(64, 16), steps.normal(64, 4))


@foreign
def exported_function():
    """An exported function, called inside of a step with its gradient."""
    from jax import export

    params = layers(16, 32, 4)
    apply = jax.jit(lambda params, x: jnp.tanh(x @ params["w0"]) @ params["w1"])
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, steps.normal(64, 16)))
    called = export.export(apply)(*types).call

    def loss(params, x, y):
        return jnp.mean((called(params, x) - y) ** 2)

    return adam_case(params, loss, steps.normal(64, 16), steps.normal(64, 4))


@foreign
def mutable_references():
    """A step that keeps statistics in references (`jax.new_ref`), as in a loop with side effects."""

    def loss(params, x, y):
        total = jax.new_ref(jnp.zeros(()))

        def body(h, w):
            total[...] += jnp.mean(lax.stop_gradient(h) ** 2)
            return jnp.tanh(h @ w), None

        h, _ = lax.scan(body, x, params["w"])
        return jnp.mean((h - y) ** 2) + 0 * total[...]

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, ({"w": steps.normal(2, 16, 16, scale=0.3)}, steps.normal(64, 16), steps.normal(64, 16))


@foreign
def branches_and_maps():
    """`switch` by an argument, `cond` with several results, `lax.map` in batches, `vmap` of `cond`, `select_n`, a dynamic loop."""
    params = layers(16, 16, 16)

    def loss(params, x, y, stage):
        acts = [jax.nn.relu, jnp.tanh, lambda h: h * jax.nn.sigmoid(h)]
        h = lax.switch(stage, acts, x @ params["w0"])
        h, norm = lax.cond(stage > 0, lambda h: (h / 2, jnp.abs(h).sum()), lambda h: (h, jnp.zeros(())), h)
        h = h + lax.map(lambda row: jnp.tanh(row @ params["w1"]), x, batch_size=16)
        h = h + jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r))(h)
        h = lax.fori_loop(0, stage + 1, lambda _, h: h * 0.9, lax.stop_gradient(h)) + h
        return jnp.mean((h - y) ** 2) + 1e-3 * norm

    return adam_case(params, loss, steps.normal(64, 16), steps.normal(64, 16), jnp.asarray(1))


class Batch(NamedTuple):
    x: jax.Array
    y: jax.Array
    weight: jax.Array | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "empty", "step"], meta_fields=["name", "depth"])
@dataclass(frozen=True)
class State:
    params: dict
    empty: jax.Array
    step: jax.Array
    name: str
    depth: int


@foreign
def odd_trees():
    """Data classes with meta fields, named tuples with None, integer keys, empty arrays, Python numbers, a batch of seven."""

    class Trainer:
        rate = 0.1

        def __call__(self, state: State, batch: Batch, scale=1.0, **metrics):
            def loss(params):
                h = batch.x
                for at in range(state.depth):
                    h = jnp.tanh(h @ params[at])
                assert batch.weight is None
                return jnp.mean((h - batch.y) ** 2) * scale + state.empty.sum()

            value, grads = jax.value_and_grad(loss)(state.params)
            params = jax.tree.map(lambda p, g: p - self.rate * g, state.params, grads)
            return State(params, state.empty, state.step + 1, state.name, state.depth), {"loss": value, "none": None, "n": 3}

    params = {0: steps.normal(16, 24, scale=0.3), 1: steps.normal(24, 8, scale=0.3)}
    state = State(params, jnp.zeros((0, 4)), jnp.asarray(0), "run", 2)
    return Trainer(), (state, Batch(steps.normal(7, 16), steps.normal(7, 8)), 2.0)


@foreign
def bits_and_hashes():
    """Bits as data: `bitcast`, population counts, shifts, hashed features, `rbg` keys, choices without replacement."""
    params = {"table": steps.normal(256, 8, scale=0.3), "out": steps.normal(8, 1)}

    def loss(params, ids, key, y):
        mixed = (ids.astype(jnp.uint32) * jnp.uint32(2654435761)) ^ (ids.astype(jnp.uint32) >> 3)
        rows = params["table"][(mixed >> 24).astype(jnp.int32)]
        flips = lax.population_count(mixed).astype(jnp.float32) + lax.clz(mixed).astype(jnp.float32)
        noise = lax.bitcast_convert_type(jax.random.bits(key, rows.shape) >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1.5
        picked = jax.random.choice(key, len(ids), (16,), replace=False)
        out = ((rows + 0.1 * noise).sum(1) @ params["out"])[:, 0] * (1 + 1e-2 * flips.mean(1))
        return jnp.mean((out - y)[picked] ** 2)

    return adam_case(params, loss, steps.ids(1000, 64, 4), jax.random.key(3, impl="rbg"), steps.normal(64))


@foreign
def placed_inside():
    """`device_put` and shardings of the user's inside of a step, barriers, and a custom linear solve."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(4, 2), ("a", "b"))

    def loss(params, x, y):
        h = jax.device_put(jnp.tanh(x @ params["w0"]), jax.NamedSharding(mesh, P("a", "b")))
        h, w = lax.optimization_barrier((h, params["w1"]))
        gram = h.T @ h + jnp.eye(32)
        z = lax.custom_linear_solve(lambda v: gram @ v, h.T @ y, lambda f, b: jnp.linalg.solve(gram, b), symmetric=True)
        return jnp.mean((h @ z + h @ w - y) ** 2)

    return adam_case(layers(16, 32, 8), loss, steps.normal(64, 16), steps.normal(64, 8))


@foreign
def own_monoids():
    """Reductions by functions of the user's own: `lax.reduce`, `reduce_window`, arg-max with values, products along an axis."""

    def loss(params, x, y):
        h = (x @ params["w0"]).reshape(len(x), 8, 8)
        best, where = lax.reduce(
            (lax.stop_gradient(h), jnp.broadcast_to(jnp.arange(8.0), h.shape)), (-jnp.inf, 0.0),
            lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] > b[0], a[1], b[1])), (2,),
        )  # fmt: skip
        pooled = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "SAME") + lax.reduce_window(
            h, 0.0, lax.add, (1, 2, 2), (1, 2, 2), ((0, 0), (0, 0), (0, 0))
        )
        return jnp.mean((pooled.prod(-1).sum(-1) * 1e-3 - y) ** 2) + 1e-3 * jnp.mean(best + where)

    return adam_case(layers(16, 64), loss, steps.normal(32, 16), steps.normal(32))


@foreign
def adversarial_training():
    """Projected gradient attacks inside of the step, differentiated again (TRADES), with a per-example mask."""
    params = layers(16, 64, 4)

    def logits(params, x):
        return jax.nn.gelu(x @ params["w0"]) @ params["w1"]

    def loss(params, x, labels):
        clean = jax.nn.log_softmax(logits(params, x))
        attack = jax.grad(lambda x: -jnp.sum(jnp.exp(lax.stop_gradient(clean)) * jax.nn.log_softmax(logits(params, x))))

        def move(x_adv, _):
            return x + jnp.clip(x_adv + 0.02 * jnp.sign(attack(x_adv)) - x, -0.1, 0.1), None

        x_adv = lax.stop_gradient(lax.scan(move, x + 1e-3, None, length=3)[0])
        robust = jnp.sum(jnp.exp(clean) * (clean - jax.nn.log_softmax(logits(params, x_adv))), -1)
        nll = -jnp.take_along_axis(clean, labels[:, None], 1)[:, 0]
        return jnp.mean(jnp.where(labels > 0, nll + robust, nll))

    return adam_case(params, loss, steps.normal(64, 16), steps.ids(4, 64))


@foreign
def gan_two_players():
    """Transposed convolutions, spectral normalisation by power iteration, two optimizers, and alternate updates by `cond`."""
    import optax

    g_opt, d_opt = optax.adam(1e-3, b1=0.5, eps=1e-3), optax.rmsprop(1e-3, eps=1e-3)
    g = {"in": steps.normal(8, 4 * 4 * 16, scale=0.2), "up": steps.normal(4, 4, 16, 3, scale=0.2)}
    d = {"conv": steps.normal(4, 4, 3, 8, scale=0.2), "out": steps.normal(4 * 4 * 8, 1, scale=0.2)}

    def generate(g, z):
        h = jax.nn.relu(z @ g["in"]).reshape(-1, 4, 4, 16)
        return jnp.tanh(lax.conv_transpose(h, g["up"], (2, 2), "SAME"))

    def judge(d, u, x):
        w = d["out"]
        u = lax.stop_gradient(w.T @ (w @ u))
        u = u / (jnp.linalg.norm(u) + 1e-6)
        h = lax.conv_general_dilated(x, d["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (jax.nn.leaky_relu(h).reshape(len(x), -1) @ (w / (jnp.linalg.norm(w @ u) + 1e-6)))[:, 0], u

    def step(g, d, u, states, count, key, real):
        z = jax.random.normal(key, (len(real), 8))

        def d_loss(d):
            fake, _ = judge(d, u, generate(g, z))
            true, new_u = judge(d, u, real)
            return jnp.mean(jax.nn.relu(1 - true) + jax.nn.relu(1 + fake)), new_u

        (d_value, u), grads = jax.value_and_grad(d_loss, has_aux=True)(d)
        updates, d_state = d_opt.update(grads, states[1], d)
        d = optax.apply_updates(d, updates)

        def update(g, state):
            value, grads = jax.value_and_grad(lambda g: -jnp.mean(judge(d, u, generate(g, z))[0]))(g)
            updates, state = g_opt.update(grads, state, g)
            return optax.apply_updates(g, updates), state, value

        g, g_state, g_value = lax.cond(count % 2 == 0, update, lambda g, s: (g, s, jnp.zeros(())), g, states[0])
        return g, d, u, (g_state, d_state), count + 1, {"d": d_value, "g": g_value}

    args = g, d, jnp.ones((1,)), (g_opt.init(g), d_opt.init(d)), jnp.asarray(0), jax.random.key(1), steps.normal(32, 8, 8, 3)
    return step, args
