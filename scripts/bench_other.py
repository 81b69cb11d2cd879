"""One training step of a model in JAX or PyTorch, timed: what `bench_run.py` puts beside ours, each in its own process.

    python3 scripts/bench_other.py jax "vgg16:batch=16,dropout=0" --devices 1 --steps 3

JAX splits the batch over `--devices` host devices; PyTorch uses one thread. The last line printed is a
JSON object: the median step without the first, and the loss. Weights and data are random; f32, SGD.
"""

import argparse
import json
import os
import statistics
import time

# Output channels, kernel, stride, padding, then the pool that follows (size, stride); then features of the classifier.
PLAIN = lambda channels: (channels, 3, 1, 1, None)
CNNS = {
    "alexnet": (
        [(64, 11, 4, 2, (3, 2)), (192, 5, 1, 2, (3, 2)), PLAIN(384), PLAIN(256), (256, 3, 1, 1, (3, 2))],
        256 * 6 * 6,
    ),
    "vgg16": (
        [
            layer
            for channels, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]
            for layer in [PLAIN(channels)] * (count - 1) + [(channels, 3, 1, 1, (2, 2))]
        ],
        512 * 7 * 7,
    ),
}


def options_of(spec):
    """`mlp:batch=256,hidden=4096` as a name and a table."""
    name, _, options = spec.partition(":")
    return name, {key: float(value) for key, value in (pair.split("=") for pair in options.split(","))}


def timed(steps, step):
    """Runs the steps; the median time without the first, which compiles and asks for memory."""
    times, loss = [], 0.0
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - start)
    return {"step_seconds": statistics.median(times[1:] or times), "loss": loss}


def in_jax(spec, devices, steps):
    """Data parallel over the host devices."""
    # Before JAX is loaded. One device is one thread: the comparison is of kernels.
    alone = " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if devices == 1 else ""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}{alone}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    model, options = options_of(spec)
    of = lambda *keys: tuple(int(options[key]) for key in keys)
    (batch,) = of("batch")
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.standard_normal(shape, dtype=np.float32) * 0.02)
    linear = lambda n, m: (normal(n, m), np.zeros(m, np.float32))
    dense = lambda p, x: x @ p[0] + p[1]

    def cross_entropy(logits, labels):
        rows = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(rows, labels[..., None], -1))

    def conv(p, x, stride, pad):
        y = lax.conv_general_dilated(
            x, p[0], (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return jax.nn.relu(y + p[1][:, None, None])

    def pool(x, size, stride):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, stride, stride), "VALID")

    if model == "mlp":
        hidden, layers = of("hidden", "layers")
        params = [linear(hidden, hidden) for _ in range(layers)] + [linear(hidden, 10)]
        data = (normal(batch, hidden), rng.integers(0, 10, batch).astype(np.int32))

        def loss(params, x, labels):
            for p in params[:-1]:
                x = jax.nn.relu(dense(p, x))
            return cross_entropy(dense(params[-1], x), labels)

    elif model in CNNS:
        shapes, features = CNNS[model]
        convolutions, inputs = [], 3
        for channels, kernel, *_ in shapes:
            convolutions.append((normal(channels, inputs, kernel, kernel), np.zeros(channels, np.float32)))
            inputs = channels
        params = (convolutions, [linear(features, 4096), linear(4096, 4096), linear(4096, 1000)])
        data = (normal(batch, 3, 224, 224), rng.integers(0, 1000, batch).astype(np.int32))

        def loss(params, x, labels):
            for p, (_, _, stride, pad, pooled) in zip(params[0], shapes):
                x = conv(p, x, stride, pad)
                x = pool(x, *pooled) if pooled else x
            x = x.reshape(x.shape[0], -1)
            for p in params[1][:-1]:
                x = jax.nn.relu(dense(p, x))
            return cross_entropy(dense(params[1][-1], x), labels)

    else:
        hidden, heads, seq, vocab, layers = of("hidden", "heads", "seq", "vocab", "layers")
        norm = lambda: (np.ones(hidden, np.float32), np.zeros(hidden, np.float32))

        def block():
            attend = [linear(hidden, hidden) for _ in range(4)]
            return norm(), attend, norm(), linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

        params = (normal(vocab, hidden), normal(seq, hidden), [block() for _ in range(layers)], norm())
        ids = lambda: rng.integers(0, vocab, (batch, seq)).astype(np.int32)
        data = (ids(), ids())

        def layer_norm(p, x):
            mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
            return (x - mean) * lax.rsqrt(var + 1e-5) * p[0] + p[1]

        def attention(p, x):
            split = lambda y: y.reshape(*y.shape[:2], heads, hidden // heads)
            q, k, v = (split(dense(w, x)) for w in p[:3])
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (hidden // heads) ** -0.5
            mask = jnp.tril(jnp.ones((seq, seq), bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
            return dense(p[3], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

        def loss(params, tokens, labels):
            table, positions, blocks, last = params
            x = table[tokens] + positions
            for first, attend, second, up, down in blocks:
                x = x + attention(attend, layer_norm(first, x))
                x = x + dense(down, jax.nn.gelu(dense(up, layer_norm(second, x))))
            return cross_entropy(layer_norm(last, x) @ table.T, labels)

    mesh = Mesh(np.array(jax.devices()), ("d",))
    everywhere, by_sample = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("d",)))

    def train(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    train = jax.jit(train, donate_argnums=0, out_shardings=(everywhere, everywhere))
    params = jax.device_put(params, everywhere)
    x, y = (jax.device_put(part, by_sample) for part in data)

    def step():
        nonlocal params
        params, value = train(params, x, y)
        jax.block_until_ready((params, value))
        return float(value)

    return timed(steps, step)


def in_torch(spec, steps):
    """One thread; convolutional models only, which is where kernels of their own pay most."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model, options = options_of(spec)
    shapes, features = CNNS[model]
    layers, inputs = [], 3
    for channels, kernel, stride, pad, pooled in shapes:
        layers += [nn.Conv2d(inputs, channels, kernel, stride, pad), nn.ReLU()]
        layers += [nn.MaxPool2d(*pooled)] if pooled else []
        inputs = channels
    layers += [nn.Flatten(), nn.Linear(features, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    network = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batch = int(options["batch"])
    x, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return timed(steps, step)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["jax", "torch"])
    parser.add_argument("model", help="as the command line takes it, with all its options")
    parser.add_argument("--devices", type=int, default=1, help="JAX only")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    answer = in_jax(given.model, given.devices, given.steps) if given.engine == "jax" else in_torch(given.model, given.steps)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
