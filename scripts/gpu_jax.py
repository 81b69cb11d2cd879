"""The zoo's models in JAX, and the measurement of their training steps under XLA. Used by scripts/bench_gpu.py.

The whole step, with the optimizer, is one jitted function whose state is donated. Sizes are those of scripts/gpu_torch.py.
"""

from __future__ import annotations

import glob
import gzip
import json
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

WARM, STEPS = 3, 10


def options(spec):
    name, _, rest = spec.partition(":")
    return name, dict(pair.split("=") for pair in rest.split(",") if pair)


class Weights:
    """Random weights by name, made once."""

    def __init__(self, dtype):
        self.dtype, self.all, self.key = dtype, {}, jax.random.key(0)

    def __call__(self, name, *shape, scale=0.02):
        self.key, key = jax.random.split(self.key)
        self.all[name] = (scale * jax.random.normal(key, shape, jnp.float32)).astype(self.dtype)


def norm(x, w, b=None):
    wide = x.astype(jnp.float32)
    if b is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    y = y.astype(x.dtype) * w
    return y if b is None else y + b


def cross_entropy(logits, labels, wide):
    if wide:
        logits = logits.astype(jnp.float32)
    logits = jax.nn.log_softmax(logits, -1)
    return -jnp.take_along_axis(logits, labels[..., None], -1).mean(dtype=jnp.float32)


def attend(q, k, v, causal):
    cuda = q.dtype != jnp.float32 and jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn" if cuda else "xla")


def gpt(o, batch, dtype, wide):
    layers, hidden, heads = (int(o.get(k, d)) for k, d in [("layers", 12), ("hidden", 768), ("heads", 12)])
    vocab, seq = int(o.get("vocab", 50257)), int(o.get("seq", 1024))
    make = Weights(dtype)
    make("wte", vocab, hidden)
    make("wpe", seq, hidden)
    for i in range(layers):
        for name in ["q", "k", "v", "out"]:
            make(f"{i}.{name}", hidden, hidden)
            make(f"{i}.{name}.b", hidden)
        make(f"{i}.fc1", hidden, 4 * hidden)
        make(f"{i}.fc1.b", 4 * hidden)
        make(f"{i}.fc2", 4 * hidden, hidden)
        make(f"{i}.fc2.b", hidden)
        for name in ["ln1", "ln2"]:
            make(f"{i}.{name}", hidden)
            make(f"{i}.{name}.b", hidden)
    make("ln_f", hidden)
    make("ln_f.b", hidden)

    def loss(w, tokens, labels):
        linear = lambda x, name: x @ w[name] + w[name + ".b"]
        x = w["wte"][tokens] + w["wpe"]
        for i in range(layers):
            y = norm(x, w[f"{i}.ln1"], w[f"{i}.ln1.b"])
            q, k, v = (linear(y, f"{i}.{name}").reshape(batch, seq, heads, -1) for name in "qkv")
            x = x + linear(attend(q, k, v, True).reshape(batch, seq, -1), f"{i}.out")
            y = norm(x, w[f"{i}.ln2"], w[f"{i}.ln2.b"])
            x = x + linear(jax.nn.gelu(linear(y, f"{i}.fc1")), f"{i}.fc2")
        return cross_entropy(norm(x, w["ln_f"], w["ln_f.b"]) @ w["wte"].T, labels, wide)

    ids = lambda seed: jax.random.randint(jax.random.key(seed), (batch, seq), 0, vocab)
    return make.all, loss, (ids(1), ids(2))


def llama(o, batch, dtype, wide):
    read = lambda key, default: int(o.get(key, default))
    layers, hidden, heads, kv = read("layers", 16), read("hidden", 2048), read("heads", 32), read("kv_heads", 8)
    inner, vocab, seq = read("ffn", 8192), read("vocab", 128256), read("seq", 2048)
    size, tied = hidden // heads, o.get("tied", "yes") == "yes"
    make = Weights(dtype)
    make("embedding", vocab, hidden)
    if not tied:
        make("logits", hidden, vocab)
    for i in range(layers):
        shapes = {"q": (hidden, hidden), "k": (hidden, kv * size), "v": (hidden, kv * size), "out": (hidden, hidden),
                  "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden), "norm1": (hidden,), "norm2": (hidden,)}
        for name, shape in shapes.items():
            make(f"{i}.{name}", *shape)
    make("norm", hidden)
    half = jnp.arange(size // 2) / (size // 2)
    angle = jnp.arange(seq)[:, None, None] * 500000.0 ** -half
    cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)

    def turn(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(w, tokens, labels):
        x = w["embedding"][tokens]
        for i in range(layers):
            y = norm(x, w[f"{i}.norm1"])
            q = turn((y @ w[f"{i}.q"]).reshape(batch, seq, heads, size))
            k = turn((y @ w[f"{i}.k"]).reshape(batch, seq, kv, size))
            v = (y @ w[f"{i}.v"]).reshape(batch, seq, kv, size)
            x = x + attend(q, k, v, True).reshape(batch, seq, -1) @ w[f"{i}.out"]
            y = norm(x, w[f"{i}.norm2"])
            x = x + (jax.nn.silu(y @ w[f"{i}.gate"]) * (y @ w[f"{i}.up"])) @ w[f"{i}.down"]
        x = norm(x, w["norm"])
        return cross_entropy(x @ (w["embedding"].T if tied else w["logits"]), labels, wide)

    ids = lambda seed: jax.random.randint(jax.random.key(seed), (batch, seq), 0, vocab)
    return make.all, loss, (ids(1), ids(2))


def mlp(o, batch, dtype, wide):
    hidden, layers, width = int(o.get("hidden", 1024)), int(o.get("layers", 3)), int(o.get("input", 784))
    make = Weights(dtype)
    for i in range(layers):
        make(f"{i}", width, hidden)
        make(f"{i}.b", hidden)
        width = hidden
    make("out", hidden, 10)
    make("out.b", 10)

    def loss(w, x, labels):
        for i in range(layers):
            x = jax.nn.relu(x @ w[f"{i}"] + w[f"{i}.b"])
        return cross_entropy(x @ w["out"] + w["out.b"], labels, wide)

    x = jax.random.normal(jax.random.key(1), (batch, int(o.get("input", 784)))).astype(dtype)
    return make.all, loss, (x, jax.random.randint(jax.random.key(2), (batch,), 0, 10))


def conv(x, w, stride, pad):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW"))


def pool(x, size, stride, pad):
    window = (1, 1, size, size), (1, 1, stride, stride), [(0, 0), (0, 0), (pad, pad), (pad, pad)]
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window)


def vgg16(o, batch, dtype, wide):
    stages = [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]
    make, c = Weights(dtype), 3
    for stage, (width, count) in enumerate(stages):
        for i in range(count):
            make(f"{stage}.{i}", width, c, 3, 3)
            make(f"{stage}.{i}.b", width, 1, 1)
            c = width
    for name, shape in {"fc6": (512 * 49, 4096), "fc7": (4096, 4096), "fc8": (4096, 1000)}.items():
        make(name, *shape)
        make(name + ".b", shape[1])

    def loss(w, x, labels):
        for stage, (_, count) in enumerate(stages):
            for i in range(count):
                x = jax.nn.relu(conv(x, w[f"{stage}.{i}"], 1, 1) + w[f"{stage}.{i}.b"])
            x = pool(x, 2, 2, 0)
        x = x.reshape(batch, -1)
        for i, name in enumerate(["fc6", "fc7"]):
            x = jax.nn.relu(x @ w[name] + w[name + ".b"])
            x = jnp.where(jax.random.bernoulli(jax.random.key(i), 0.5, x.shape), x * 2, 0).astype(x.dtype)
        return cross_entropy(x @ w["fc8"] + w["fc8.b"], labels, wide)

    x = jax.random.normal(jax.random.key(1), (batch, 3, 224, 224)).astype(dtype)
    return make.all, loss, (x, jax.random.randint(jax.random.key(2), (batch,), 0, 1000))


def resnet(o, batch, dtype, wide):
    blocks = {"50": [3, 4, 6, 3], "152": [3, 8, 36, 3]}.get(o.get("depth"), [3, 4, 23, 3])
    make = Weights(dtype)

    def add(name, c, width, k):
        make(name, width, c, k, k, scale=0.05)
        make(name + ".w", width, 1, 1)
        make(name + ".b", width, 1, 1)

    add("stem", 3, 64, 7)
    c, plan = 64, []
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for i in range(count):
            name = f"{stage}.{i}"
            plan.append((name, 2 if stage and not i else 1, i == 0))
            add(f"{name}.1", c, width, 1)
            add(f"{name}.2", width, width, 3)
            add(f"{name}.3", width, 4 * width, 1)
            if i == 0:
                add(f"{name}.s", c, 4 * width, 1)
            c = 4 * width
    make("fc", c, 1000)
    make("fc.b", 1000)

    def loss(w, x, labels):
        def unit(x, name, stride, pad):
            y = conv(x, w[name], stride, pad)
            wide = y.astype(jnp.float32)
            mean = wide.mean((0, 2, 3), keepdims=True)
            var = (wide * wide).mean((0, 2, 3), keepdims=True) - mean * mean
            return ((wide - mean) * jax.lax.rsqrt(var + 1e-5)).astype(y.dtype) * w[name + ".w"] + w[name + ".b"]

        x = pool(jax.nn.relu(unit(x, "stem", 2, 3)), 3, 2, 1)
        for name, stride, project in plan:
            y = jax.nn.relu(unit(x, f"{name}.1", 1, 0))
            y = jax.nn.relu(unit(y, f"{name}.2", stride, 1))
            y = unit(y, f"{name}.3", 1, 0)
            x = jax.nn.relu(y + (unit(x, f"{name}.s", stride, 0) if project else x))
        return cross_entropy(x.mean((2, 3)) @ w["fc"] + w["fc.b"], labels, wide)

    x = jax.random.normal(jax.random.key(1), (batch, 3, 224, 224)).astype(dtype)
    return make.all, loss, (x, jax.random.randint(jax.random.key(2), (batch,), 0, 1000))


FAMILIES = {"gpt": gpt, "llama": llama, "mlp": mlp, "vgg16": vgg16, "resnet101": resnet}
TRANSFORMERS = {"gpt", "llama"}


def measure(case, once=False, device="cuda"):
    """Median step time of a case, and the memory that XLA assigned."""
    name, o = options(case["model"])
    mixed = case["precision"] == "mixed"
    dtype = jnp.float32 if case["precision"] in ("f32", "tf32", "ieee") else jnp.bfloat16
    # XLA's default multiplies f32 in TF32.
    jax.config.update("jax_default_matmul_precision", "highest" if case["precision"] == "ieee" else None)
    weights, loss, inputs = FAMILIES[name](o, case["batch"], dtype, dtype != jnp.float32)
    adam = name in TRANSFORMERS
    wide = lambda x: x.astype(jnp.float32)
    state = {"w": weights}
    if mixed:
        state["master"] = jax.tree.map(wide, weights)
    if adam:
        zeros = lambda: jax.tree.map(jnp.zeros_like, state.get("master", weights))
        state |= {"m": zeros(), "v": zeros()}

    def step(state, *inputs):
        value, grads = jax.value_and_grad(loss)(state["w"], *inputs)
        old = state.get("master", state["w"])
        new = dict(state)
        if adam:
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, old)
            new["m"] = jax.tree.map(lambda m, g: (0.9 * m + 0.1 * g).astype(m.dtype), state["m"], grads)
            new["v"] = jax.tree.map(lambda v, g: (0.999 * v + 0.001 * g * g).astype(v.dtype), state["v"], grads)
            update = lambda p, m, v: (p - 1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype)
            updated = jax.tree.map(update, old, new["m"], new["v"])
        else:
            updated = jax.tree.map(lambda p, g: (p - 1e-3 * g).astype(p.dtype), old, grads)
        if mixed:
            new["master"] = updated
            updated = jax.tree.map(lambda p: p.astype(dtype), updated)
        new["w"] = updated
        return new, value

    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, *inputs).compile()
    result = {"first_s": round(time.perf_counter() - begin, 1), "parameters": sum(x.size for x in weights.values())}
    if once:
        return result
    for _ in range(WARM):
        state, value = compiled(state, *inputs)
    value.block_until_ready()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(STEPS):
            state, value = compiled(state, *inputs)
        value.block_until_ready()
        times.append((time.perf_counter() - begin) * 1e3 / STEPS)
    result |= {"step_ms": statistics.median(times), "fastest_ms": min(times), "slowest_ms": max(times)}
    sizes = compiled.memory_analysis()
    if sizes is not None:
        result["allocated"] = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + max(
            0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
        result["temporary"] = sizes.temp_size_in_bytes
    if device == "cuda":
        result["in_use"] = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

        def once_more():
            nonlocal state
            state, value = compiled(state, *inputs)
            value.block_until_ready()

        result["profile"] = kernels(once_more)
    return result


def kernels(step, limit=60):
    """The kernels of a step by the profiler's trace: name, number of launches, microseconds; the slowest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        found = glob.glob(folder + "/**/*.trace.json.gz", recursive=True)
        if not found:
            return None
        with gzip.open(found[0]) as text:
            events = json.load(text)["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in str(e.get("args"))}
    streams = {(e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name" and "Stream" in str(e.get("args"))}
    table = {}
    for event in events:
        place = event.get("pid"), event.get("tid")
        if event.get("ph") == "X" and place[0] in devices and (not streams or place in streams):
            count, total = table.get(event["name"], (0, 0.0))
            table[event["name"]] = (count + 1, total + event.get("dur", 0.0))
    rows = sorted(((name[:120], count, round(total, 1)) for name, (count, total) in table.items()), key=lambda r: -r[2])
    return {"kernels": sum(r[1] for r in rows), "busy_ms": sum(r[2] for r in rows) / 1e3, "rows": rows[:limit]}


def release():
    """Frees what a case held."""
    jax.clear_caches()
