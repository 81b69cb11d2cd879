"""Training steps that use more of JAX than products and loops: special functions, factorisations, callbacks, own meshes, attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import steps
from foreign_models import adam_case
from foreign_steps import foreign, small_loss
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P


def layers(*sizes):
    return {f"w{at}": steps.normal(a, b, scale=0.2) for at, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))}


@foreign
def rational_student_likelihood():
    """A likelihood by `gammaln` and `betaln`, whose gradients are `digamma`."""

    def loss(params, x, y):
        h = jnp.tanh(x @ params["w0"]) @ params["w1"]
        mean, scale, freedom = h[:, 0], jax.nn.softplus(h[:, 1]) + 0.1, jax.nn.softplus(h[:, 2]) + 1
        z = (y - mean) / scale
        density = jax.scipy.special.gammaln((freedom + 1) / 2) - jax.scipy.special.gammaln(freedom / 2)
        density -= 0.5 * jnp.log(freedom * jnp.pi) + jnp.log(scale) + (freedom + 1) / 2 * jnp.log1p(z**2 / freedom)
        prior = jax.scipy.special.betaln(1 + jnp.abs(params["w1"]), 2.0).mean() + jax.scipy.special.erfinv(jnp.tanh(mean) * 0.9).mean()
        return prior * 1e-2 - density.mean()

    return adam_case(layers(16, 32, 3), loss, steps.normal(64, 16), steps.normal(64))


@foreign
def reparameterised_draws():
    """Gamma, Dirichlet and Poisson draws, whose gradients are implicit."""

    def loss(params, key, x):
        a, b, c = jax.random.split(key, 3)
        h = jax.nn.softplus(x @ params["w0"]) + 0.3
        draws = jax.random.gamma(a, h)
        mixed = jax.random.dirichlet(b, h[:, :4])
        counts = jax.random.poisson(c, lax.stop_gradient(h[:, :4]))
        return jnp.mean(draws) + jnp.mean(mixed[:, 0] * counts.sum(1))

    return adam_case(layers(8, 16), loss, jax.random.key(2), steps.normal(32, 8))


@foreign
def complex_spectrum_loss():
    """A filter in frequency, with complex parameters, and a loss on short-time spectra."""
    import optax

    params = {"filter": steps.normal(33) + 1j * steps.normal(33), "w": steps.normal(64, 64, scale=0.1)}
    optimizer = optax.adam(1e-2, eps=1e-3)

    def loss(params, x, y):
        x = jnp.fft.irfft(jnp.fft.rfft(x @ params["w"]) * params["filter"], n=64)
        frames = jnp.stack([x[:, at : at + 16] for at in range(0, 48, 8)], 1) * jnp.hanning(16)
        return jnp.mean((jnp.abs(jnp.fft.rfft(frames)) - y) ** 2)

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads = jax.tree.map(jnp.conj, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), steps.normal(32, 64), jnp.abs(steps.normal(32, 6, 9)))


@foreign
def diagonal_complex_recurrence():
    """An S5-like layer: a complex diagonal recurrence by `associative_scan`, forwards and in reverse."""
    params = {"a": steps.normal(16), "b": steps.normal(8, 16, 2, scale=0.3), "c": steps.normal(2, 16, 8, 2, scale=0.3)}

    def loss(params, x, y):
        decay = jnp.exp(-jnp.exp(params["a"]) + 1j * params["a"])
        inputs = x @ (params["b"][..., 0] + 1j * params["b"][..., 1])
        combine = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])  # noqa: E731
        decays = jnp.broadcast_to(decay, inputs.shape)
        out = 0
        for at, reverse in enumerate((False, True)):
            h = lax.associative_scan(combine, (decays, inputs), axis=1, reverse=reverse)[1]
            out = out + (h @ (params["c"][at, ..., 0] + 1j * params["c"][at, ..., 1])).real
        return jnp.mean((out - y) ** 2)

    return adam_case(params, loss, steps.normal(16, 12, 8), steps.normal(16, 12, 8))


@foreign
def gaussian_process_by_solves():
    """Kernel hyperparameters by Cholesky, triangular solves, and a conjugate-gradient solve with an implicit gradient."""
    params = {"length": jnp.zeros(4), "noise": jnp.zeros(())}

    def loss(params, x, y):
        z = x * jnp.exp(params["length"])
        kernel = jnp.exp(-0.5 * jnp.sum((z[:, None] - z[None]) ** 2, -1)) + (0.1 + jnp.exp(params["noise"])) * jnp.eye(len(x))
        chol, lower = jax.scipy.linalg.cho_factor(kernel, lower=True)
        quadratic = y @ jax.scipy.linalg.cho_solve((chol, lower), y)
        weights, _ = jax.scipy.sparse.linalg.cg(lambda v: kernel @ v, y, maxiter=20)
        return quadratic + jnp.log(jnp.diag(chol)).sum() + 0.1 * jnp.sum(weights**2)

    return adam_case(params, loss, steps.normal(48, 4), steps.normal(48))


@foreign
def factorised_layers():
    """QR, SVD, `solve`, `inv`, `expm`, `lstsq` and `slogdet` of parameters and of batches."""
    params = {"w": steps.normal(12, 12, scale=0.2), "v": steps.normal(12, 12, scale=0.2), "b": steps.normal(6, 12)}

    def loss(params, x, y):
        q, r = jnp.linalg.qr(params["w"] + 2 * jnp.eye(12))
        u = jax.scipy.linalg.expm(params["v"] - params["v"].T)
        h = jnp.linalg.solve(r + 3 * jnp.eye(12), (x @ q @ u).T).T
        grams = h.reshape(8, 8, 12)
        grams = jnp.swapaxes(grams, 1, 2) @ grams + jnp.eye(12)
        spectrum = jnp.linalg.svd(params["b"], compute_uv=False)
        fit = jnp.linalg.lstsq(lax.stop_gradient(h), y)[0]
        return jnp.linalg.slogdet(grams)[1].mean() + jnp.linalg.inv(grams).sum() + spectrum.sum() + jnp.mean((h @ fit - y) ** 2)

    return adam_case(params, loss, steps.normal(64, 12), steps.normal(64, 3))


@foreign
def shampoo():
    """Preconditioners by `eigh` of sums of outer products."""
    params = layers(24, 16, 8)

    def loss(params, x, y):
        return jnp.mean((jax.nn.relu(x @ params["w0"]) @ params["w1"] - y) ** 2)

    def root(m):
        values, vectors = jnp.linalg.eigh(m)
        return (vectors * jnp.maximum(values, 1e-2) ** -0.25) @ vectors.T

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        state = jax.tree.map(lambda s, g: (s[0] + g @ g.T, s[1] + g.T @ g), state, grads, is_leaf=lambda s: isinstance(s, tuple))
        def scaled(g, s):
            return root(s[0]) @ g @ root(s[1])

        updates = {name: scaled(g, state[name]) for name, g in grads.items()}
        return jax.tree.map(lambda p, u: p - 0.1 * u, params, updates), state, value

    state = {name: (jnp.eye(p.shape[0]), jnp.eye(p.shape[1])) for name, p in params.items()}
    return step, (params, state, steps.normal(64, 24), steps.normal(64, 8))


@foreign
def host_callbacks():
    """A host function with a derivative rule, and prints inside a scan."""

    @jax.custom_jvp
    def host_tanh(x):
        return jax.pure_callback(lambda x: np.tanh(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

    host_tanh.defjvp(lambda primals, tangents: (host_tanh(*primals), (1 - host_tanh(*primals) ** 2) * tangents[0]))

    def loss(params, x, y):
        def body(h, w):
            jax.debug.callback(lambda value: None, h.mean())
            return host_tanh(h @ w), None

        h = lax.scan(body, x, params["w"])[0]
        return jnp.mean((jax.vmap(host_tanh)(h) - y) ** 2)

    return adam_case({"w": steps.normal(2, 16, 16, scale=0.3)}, loss, steps.normal(32, 16), steps.normal(32, 16))


@foreign
def logged_values():
    """Prints and an `io_callback` of the loss, as loggers write them."""
    from jax.experimental import io_callback

    def loss(params, x, y):
        value = small_loss(params, x, y)
        jax.debug.print("loss {}", value)
        count = io_callback(lambda v: np.float32(0), jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(value))
        return value + count

    params = {
        "in": {"w": steps.normal(32, 64, scale=0.2), "b": steps.normal(64)},
        "out": {"w": steps.normal(64, 16, scale=0.1), "b": steps.normal(16)},
    }
    return adam_case(params, loss, steps.normal(64, 32), steps.normal(64, 16))


@foreign
def expert_exchange_by_shard_map():
    """Experts on devices, exchanged by `all_to_all` inside `shard_map`, and its gradient."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("expert",))

    def loss(params, x, y):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert"))
        def experts(x, w):
            parts = lax.all_to_all(x.reshape(8, -1, 16), "expert", 0, 0, tiled=False)
            return lax.all_to_all(jnp.tanh(parts @ w[0]), "expert", 0, 0).reshape(-1, 16)

        return jnp.mean((experts(x @ params["in"], params["experts"]) - y) ** 2)

    params = {"in": steps.normal(16, 16, scale=0.3), "experts": steps.normal(8, 16, 16, scale=0.3)}
    return adam_case(params, loss, steps.normal(128, 16), steps.normal(128, 16))


@foreign
def partly_manual_mesh():
    """`shard_map` over one axis of a mesh, the other one left to the compiler."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(params, x):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
        def layer(x, w):
            return x @ w - lax.pmean(jnp.mean(x @ w, 0), "data")

        return jnp.mean(layer(jnp.tanh(x @ params["w0"]), params["w1"]) ** 2)

    return adam_case(layers(16, 32, 8), loss, steps.normal(64, 16))


@foreign
def replicas_by_pmap():
    """A `pmap` with a mean over replicas inside of a step."""

    def loss(params, x):
        replica = jax.pmap(lambda w, x: lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "r"), axis_name="r", in_axes=(None, 0))
        return replica(params["w0"], x.reshape(8, -1, 16))[0] + jnp.mean(params["w0"] ** 2)

    return adam_case(layers(16, 32), loss, steps.normal(64, 16))


@foreign
def explicit_mesh():
    """A step of explicit-mode arrays, with shardings of results stated."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    own = lambda *spec: jax.NamedSharding(mesh, P(*spec))  # noqa: E731

    def step(params, x, y):
        def loss(params):
            h = jax.nn.relu(jnp.einsum("nd,dh->nh", x, params["w0"], out_sharding=own("data", "model")))
            out = jnp.einsum("nh,ho->no", h, params["w1"], out_sharding=own("data", None))
            out = jax.sharding.reshard(out, own("data", None))
            return jnp.mean((out - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = {"w0": place(steps.normal(16, 32, scale=0.3), None, "model"), "w1": place(steps.normal(32, 8, scale=0.3), "model", None)}
    return step, (params, place(steps.normal(64, 16), "data", None), place(steps.normal(64, 8), "data", None))


@foreign
def kernel_with_its_own_partitioning():
    """`custom_partitioning` with a Shardy rule, under a custom derivative."""

    @custom_partitioning
    def softmax(x):
        x = x - lax.stop_gradient(x.max(-1, keepdims=True))
        return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)

    def partition(mesh, args, result):
        spec = args[0].sharding
        return mesh, lambda x: jax.nn.softmax(x), spec, (spec,)

    softmax.def_partition(
        partition=partition, infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding, sharding_rule="n c -> n c",
        need_replication_factors=("c",),
    )  # fmt: skip

    @jax.custom_vjp
    def call(x):
        return softmax(x)

    def backward(y, g):
        return (y * (g - (g * y).sum(-1, keepdims=True)),)

    call.defvjp(lambda x: (call(x),) * 2, backward)

    def loss(params, x, labels):
        return -jnp.mean(jnp.log(jnp.take_along_axis(call(jnp.tanh(x @ params["w0"]) @ params["w1"]), labels[:, None], 1) + 1e-6))

    return adam_case(layers(16, 32, 8), loss, steps.normal(64, 16), steps.ids(8, 64))


def attention_case(**options):
    params = {name: steps.normal(32, 32 if name in "qo" else 16, scale=0.2) for name in "qkvo"}

    def loss(params, x, y, lengths):
        n, s, _ = x.shape
        q, k, v = ((x @ params[name]).reshape(n, s, -1, 8) for name in "qkv")
        out = jax.nn.dot_product_attention(q, k, v, **{name: f(n, s, lengths) for name, f in options.items()})
        return jnp.mean((out.reshape(n, s, -1) @ params["o"] - y) ** 2)

    lengths = jnp.asarray(np.arange(16) % 8 + 1, jnp.int32)
    return adam_case(params, loss, steps.normal(16, 8, 32), steps.normal(16, 8, 32), lengths)


@foreign
def attention_grouped_causal_window():
    return attention_case(is_causal=lambda *_: True, local_window_size=lambda *_: (4, 0))


@foreign
def attention_padded_with_bias():
    return attention_case(
        key_value_seq_lengths=lambda n, s, lengths: lengths,
        query_seq_lengths=lambda n, s, lengths: lengths,
        bias=lambda n, s, _: -0.1 * jnp.abs(jnp.arange(s)[:, None] - jnp.arange(s))[None, None].astype(jnp.float32),
    )
