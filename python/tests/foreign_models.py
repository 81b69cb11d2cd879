"""Training steps of many architectures and algorithms, as people write them in plain JAX with optax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import steps
from foreign_steps import foreign, optax_step
from jax import lax


def adam_case(params, loss, *batch):
    import optax

    optimizer = optax.adam(1e-3, eps=1e-3)
    return optax_step(optimizer, loss), (params, optimizer.init(params), *batch)


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype) * scale


def rotate(x, positions):
    """Rotary embeddings of `n s h d`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def llama_block(x, p, heads, groups):
    n, s, d = x.shape
    h = rms(x, p["n1"])
    q = (h @ p["q"]).reshape(n, s, heads, -1)
    k, v = ((h @ p[name]).reshape(n, s, groups, -1) for name in "kv")
    q, k = rotate(q, jnp.arange(s)), rotate(k, jnp.arange(s))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(n, s, -1)
    x = x + out @ p["o"]
    h = rms(x, p["n2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def llama_params(width, heads, groups, layers=(), dtype=jnp.float32):
    d = width // heads
    shapes = {"q": (width, width), "k": (width, groups * d), "v": (width, groups * d), "o": (width, width)}
    shapes |= {"gate": (width, 2 * width), "up": (width, 2 * width), "down": (2 * width, width)}
    params = {name: steps.normal(*layers, *shape, scale=0.1) for name, shape in shapes.items()}
    params |= {name: jnp.ones((*layers, width)) for name in ("n1", "n2")}
    return jax.tree.map(lambda p: p.astype(dtype), params)


def llama(layers, dtype=jnp.float32, policy=None, accumulate=1):
    """A MaxText-like step: scanned blocks under recomputation, gradients accumulated, clipped AdamW with a schedule."""
    import optax

    width, heads, groups, vocab = 32, 4, 2, 64
    params = {
        "embed": steps.normal(vocab, width, scale=0.3),
        "blocks": llama_params(width, heads, groups, (layers,)),
        "norm": jnp.ones(width),
        "head": steps.normal(width, vocab, scale=0.1),
    }

    def loss(params, tokens, mask):
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        block = jax.checkpoint(lambda x, p: (llama_block(x, p, heads, groups), None), policy=policy)
        x = lax.scan(block, params["embed"][tokens[:, :-1]], params["blocks"])[0]
        logits = (rms(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * mask[:, 1:]) / jnp.maximum(mask[:, 1:].sum(), 1)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, eps=1e-3))

    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        if accumulate > 1:
            parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

            def micro(total, part):
                found = jax.value_and_grad(loss)(params, part["tokens"], part["mask"])
                return jax.tree.map(jnp.add, total, found), None

            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            value, grads = jax.tree.map(lambda x: x / accumulate, lax.scan(micro, zero, parts)[0])
        else:
            value, grads = jax.value_and_grad(loss)(params, batch["tokens"], batch["mask"])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "step": state["step"] + 1}, metrics

    batch = {"tokens": steps.ids(vocab, 16, 17), "mask": steps.ids(2, 16, 17).astype(jnp.float32)}
    return step, ({"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}, batch)


@foreign
def llama_scan_full_remat():
    return llama(3)


@foreign
def llama_scan_saved_dots():
    return llama(3, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


@foreign
def llama_bf16_accumulated():
    return llama(2, jnp.bfloat16, accumulate=2)


@foreign
def llama_unrolled():
    width, heads, groups, vocab = 32, 4, 2, 64
    params = {
        "embed": steps.normal(vocab, width, scale=0.3),
        "blocks": [llama_params(width, heads, groups) for _ in range(2)],
    }

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for p in params["blocks"]:
            x = llama_block(x, p, heads, groups)
        return steps.cross_entropy(x @ params["embed"].T, tokens[:, 1:])

    return adam_case(params, loss, steps.ids(vocab, 16, 17))


def expert_params(width, hidden, experts):
    return {
        "gate": steps.normal(width, experts, scale=0.3),
        "up": steps.normal(experts, width, hidden, scale=0.1),
        "down": steps.normal(experts, hidden, width, scale=0.1),
    }


@foreign
def experts_with_capacity():
    experts, capacity = 8, 16

    def loss(params, x, y):
        gates = jax.nn.softmax(x @ params["gate"])
        top, which = lax.top_k(gates, 2)
        mask = jax.nn.one_hot(which, experts)
        place = jnp.cumsum(mask.reshape(-1, experts), 0).reshape(mask.shape) * mask - 1
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity) * mask[..., None]
        combine = jnp.einsum("nk,nkec->nec", top, slots)
        inputs = jnp.einsum("nkec,nd->ecd", slots, x)
        h = jax.nn.gelu(jnp.einsum("ecd,edh->ech", inputs, params["up"]))
        out = jnp.einsum("nec,ecd->nd", combine, jnp.einsum("ech,ehd->ecd", h, params["down"]))
        balance = experts * jnp.sum(mask.mean((0, 1)) * gates.mean(0))
        return jnp.mean((out - y) ** 2) + 0.01 * balance

    return adam_case(expert_params(32, 64, experts), loss, steps.normal(64, 32), steps.normal(64, 32))


@foreign
def experts_sorted_ragged():
    experts = 4

    def loss(params, x, y):
        which = jnp.argmax(x @ params["gate"], -1)
        order = jnp.argsort(which)
        sizes = jnp.bincount(which, length=experts).astype(jnp.int32)
        h = jax.nn.silu(lax.ragged_dot(x[order], params["up"], sizes))
        out = lax.ragged_dot(h, params["down"], sizes)
        weight = jnp.take_along_axis(jax.nn.softmax(x @ params["gate"]), which[:, None], 1)
        return jnp.mean((jnp.zeros_like(out).at[order].set(out) * weight - y) ** 2)

    return adam_case(expert_params(16, 32, experts), loss, steps.normal(64, 16), steps.normal(64, 16))


@foreign
def u_net_diffusion():
    def conv(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def group_norm(x, groups=4):
        n, h, w, c = x.shape
        x = x.reshape(n, h, w, groups, c // groups)
        mean, var = x.mean((1, 2, 4), keepdims=True), x.var((1, 2, 4), keepdims=True)
        return ((x - mean) * lax.rsqrt(var + 1e-5)).reshape(n, h, w, c)

    def net(p, x, t):
        freqs = jnp.exp(-jnp.arange(8.0))
        emb = jnp.concatenate([jnp.sin(t[:, None] * freqs), jnp.cos(t[:, None] * freqs)], -1) @ p["time"]
        h1 = jax.nn.silu(group_norm(conv(x, p["in"]) + emb[:, None, None]))
        h2 = jax.nn.silu(group_norm(conv(h1, p["down"], 2)))
        n, h, w, c = h2.shape
        flat = h2.reshape(n, h * w, c)
        q, k, v = jnp.split(flat @ p["qkv"], 3, -1)
        flat = flat + jax.nn.softmax(q @ k.swapaxes(1, 2) / c**0.5) @ v
        up = lax.conv_transpose(flat.reshape(n, h, w, c), p["up"], (2, 2), "SAME")
        return conv(jnp.concatenate([up, h1], -1), p["out"])

    params = {
        "time": steps.normal(16, 16, scale=0.1),
        "in": steps.normal(3, 3, 3, 16, scale=0.2),
        "down": steps.normal(3, 3, 16, 32, scale=0.1),
        "qkv": steps.normal(32, 96, scale=0.1),
        "up": steps.normal(2, 2, 32, 16, scale=0.1),
        "out": steps.normal(3, 3, 32, 3, scale=0.1),
    }

    def loss(params, x, key):
        first, second = jax.random.split(key)
        t = jax.random.randint(first, (x.shape[0],), 0, 1000)
        alpha = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))[t][:, None, None, None]
        noise = jax.random.normal(second, x.shape)
        return jnp.mean((net(params, jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise, t / 1000.0) - noise) ** 2)

    return adam_case(params, loss, steps.normal(16, 8, 8, 3), jax.random.key(4))


@foreign
def selective_state_space():
    width, states = 16, 8
    params = {
        "in": steps.normal(width, 2 * width, scale=0.2),
        "conv": steps.normal(4, width, scale=0.2),
        "dt": steps.normal(width, width, scale=0.1),
        "bc": steps.normal(width, 2 * states, scale=0.2),
        "a": jnp.log(jnp.broadcast_to(jnp.arange(1.0, states + 1), (width, states))),
        "out": steps.normal(width, width, scale=0.2),
    }

    def loss(params, x, y):
        h, gate = jnp.split(x @ params["in"], 2, -1)
        padded = jnp.pad(h, ((0, 0), (3, 0), (0, 0)))
        h = jax.nn.silu(sum(padded[:, i : i + h.shape[1]] * params["conv"][i] for i in range(4)))
        dt = jax.nn.softplus(h @ params["dt"])
        b, c = jnp.split(h @ params["bc"], 2, -1)
        decay = jnp.exp(-dt[..., None] * jnp.exp(params["a"]))
        inputs = (dt * h)[..., None] * b[:, :, None]

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, hidden = lax.associative_scan(combine, (decay, inputs), axis=1)
        out = jnp.einsum("nsdk,nsk->nsd", hidden, c) * jax.nn.silu(gate)
        return jnp.mean((out @ params["out"] - y) ** 2)

    return adam_case(params, loss, steps.normal(16, 12, width), steps.normal(16, 12, width))


@foreign
def graph_attention():
    params = {"w": steps.normal(8, 4, 8, scale=0.3), "a": steps.normal(4, 16, scale=0.3), "out": steps.normal(32, 4, scale=0.2)}

    def loss(params, nodes, senders, receivers, labels, mask):
        h = jnp.einsum("nf,fhd->nhd", nodes, params["w"])
        pairs = jnp.concatenate([h[senders], h[receivers]], -1)
        logits = jax.nn.leaky_relu(jnp.einsum("ehd,hd->eh", pairs, params["a"]))
        top = jax.ops.segment_max(logits, receivers, nodes.shape[0])
        weights = jnp.exp(logits - top[receivers])
        total = jax.ops.segment_sum(weights, receivers, nodes.shape[0])
        messages = h[senders] * (weights / (total[receivers] + 1e-9))[..., None]
        out = jax.ops.segment_sum(messages, receivers, nodes.shape[0]).reshape(nodes.shape[0], -1) @ params["out"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(out), labels[:, None], 1)[:, 0]
        return -jnp.sum(picked * mask) / mask.sum()

    edges = steps.ids(32, 128), steps.ids(32, 128)
    return adam_case(params, loss, steps.normal(32, 8), *edges, steps.ids(4, 32), jnp.ones(32))


@foreign
def proximal_policy():
    """Rollout of an environment, advantages by a reverse scan, and epochs over shuffled minibatches."""
    import optax

    params = {"body": steps.normal(4, 32, scale=0.3), "pi": steps.normal(32, 3, scale=0.3), "v": steps.normal(32, 1, scale=0.3)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3, eps=1e-3))

    def apply(params, obs):
        h = jnp.tanh(obs @ params["body"])
        return h @ params["pi"], (h @ params["v"])[..., 0]

    def step(params, opt_state, obs, key):
        def act(obs, key):
            logits, value = apply(params, obs)
            action = jax.random.categorical(key, logits)
            after = 0.9 * obs + 0.1 * jax.nn.one_hot(action, 4)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            return after, (obs, action, picked, value, -jnp.sum(after**2, -1))

        keys = jax.random.split(key, 9)
        last, (seen, actions, picked, values, rewards) = lax.scan(act, obs, keys[:8])

        def accumulate(carry, row):
            value, reward = row
            advantage = reward + 0.99 * carry[1] - value + 0.95 * carry[0]
            return (advantage, value), advantage

        zero = jnp.zeros(obs.shape[0]), apply(params, last)[1]
        advantages = lax.scan(accumulate, zero, (values, rewards), reverse=True)[1]
        data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, actions, picked, advantages, advantages + values))

        def loss(params, seen, action, old, advantage, target):
            logits, value = apply(params, seen)
            new = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            ratio = jnp.exp(new - old)
            clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            return -clipped.mean() + 0.5 * jnp.mean((value - target) ** 2)

        def epoch(carry, key):
            order = jax.random.permutation(key, data[0].shape[0])
            parts = jax.tree.map(lambda x: x[order].reshape(2, -1, *x.shape[1:]), data)

            def update(carry, part):
                params, opt_state = carry
                value, grads = jax.value_and_grad(loss)(params, *part)
                updates, opt_state = optimizer.update(grads, opt_state)
                return (optax.apply_updates(params, updates), opt_state), value

            return lax.scan(update, carry, parts)

        (params_after, opt_state), losses = lax.scan(epoch, (params, opt_state), jax.random.split(keys[8], 2))
        return params_after, opt_state, last, losses.mean()

    return step, (params, optimizer.init(params), steps.normal(16, 4), jax.random.key(5))


@foreign
def deep_q_network():
    import optax

    params = {"w1": steps.normal(4, 32, scale=0.3), "w2": steps.normal(32, 3, scale=0.3)}
    optimizer = optax.rmsprop(1e-3)

    def q(params, x):
        return jax.nn.relu(x @ params["w1"]) @ params["w2"]

    def step(params, target, opt_state, batch, count):
        def loss(params):
            best = jnp.argmax(q(params, batch["next"]), -1)
            after = jnp.take_along_axis(q(target, batch["next"]), best[:, None], 1)[:, 0]
            wanted = lax.stop_gradient(batch["reward"] + 0.99 * (1 - batch["done"]) * after)
            now = jnp.take_along_axis(q(params, batch["obs"]), batch["action"][:, None], 1)[:, 0]
            return optax.huber_loss(now, wanted).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        target = lax.cond(count % 4 == 0, lambda: params, lambda: target)
        return params, target, opt_state, count + 1, value

    batch = {"obs": steps.normal(32, 4), "next": steps.normal(32, 4), "action": steps.ids(3, 32)}
    batch |= {"reward": steps.normal(32), "done": steps.ids(2, 32).astype(jnp.float32)}
    return step, (params, params, optimizer.init(params), batch, jnp.int32(0))


@foreign
def vision_transformer_dropout():
    width, heads = 32, 4
    params = {
        "patch": steps.normal(48, width, scale=0.1),
        "cls": steps.normal(1, 1, width, scale=0.1),
        "position": steps.normal(17, width, scale=0.1),
        "blocks": [steps.block_params(width) for _ in range(2)],
        "head": steps.normal(width, 10, scale=0.1),
    }

    def loss(params, images, labels, key):
        n = images.shape[0]
        x = images.reshape(n, 4, 4, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(n, 16, 48) @ params["patch"]
        x = jnp.concatenate([jnp.broadcast_to(params["cls"], (n, 1, width)), x], 1) + params["position"]
        for p in params["blocks"]:
            key, use = jax.random.split(key)
            x = steps.block(x, p, heads)
            x = jnp.where(jax.random.bernoulli(use, 0.9, x.shape), x / 0.9, 0)
        return steps.cross_entropy(x[:, 0] @ params["head"], labels)

    return adam_case(params, loss, steps.normal(16, 16, 16, 3), steps.ids(10, 16), jax.random.key(6))


@foreign
def gradient_penalty():
    """Generator and critic in one step; the critic's loss has a gradient of a gradient."""
    import optax

    gen = {"w1": steps.normal(8, 32, scale=0.3), "w2": steps.normal(32, 16, scale=0.3)}
    critic = {"w1": steps.normal(16, 32, scale=0.3), "w2": steps.normal(32, 1, scale=0.3)}
    optimizer = optax.adam(1e-3, b1=0.5, eps=1e-3)

    def generate(p, z):
        return jnp.tanh(jax.nn.relu(z @ p["w1"]) @ p["w2"])

    def score(p, x):
        return (jax.nn.leaky_relu(x @ p["w1"]) @ p["w2"])[..., 0]

    def step(gen, critic, states, x, key):
        first, second = jax.random.split(key)
        z = jax.random.normal(first, (x.shape[0], 8))
        fake = generate(gen, z)

        def critic_loss(p):
            mix = jax.random.uniform(second, (x.shape[0], 1))
            slopes = jax.vmap(jax.grad(lambda row: score(p, row)))(mix * x + (1 - mix) * fake)
            penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12) - 1) ** 2)
            return score(p, fake).mean() - score(p, x).mean() + 10 * penalty

        loss, grads = jax.value_and_grad(critic_loss)(critic)
        updates, critic_state = optimizer.update(grads, states[1])
        critic = optax.apply_updates(critic, updates)
        grads = jax.grad(lambda p: -score(critic, generate(p, z)).mean())(gen)
        updates, gen_state = optimizer.update(grads, states[0])
        return optax.apply_updates(gen, updates), critic, (gen_state, critic_state), loss

    states = optimizer.init(gen), optimizer.init(critic)
    return step, (gen, critic, states, steps.normal(32, 16), jax.random.key(7))


@foreign
def meta_learning():
    params = {"w1": steps.normal(4, 32, scale=0.3), "w2": steps.normal(32, 1, scale=0.3)}

    def task_loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)

    def loss(params, x, y, x_test, y_test):
        def adapted(x, y, x_test, y_test):
            inner = params
            for _ in range(2):
                grads = jax.grad(task_loss)(inner, x, y)
                inner = jax.tree.map(lambda p, g: p - 0.1 * g, inner, grads)
            return task_loss(inner, x_test, y_test)

        return jax.vmap(adapted)(x, y, x_test, y_test).mean()

    tasks = steps.normal(16, 8, 4), steps.normal(16, 8, 1), steps.normal(16, 8, 4), steps.normal(16, 8, 1)
    return adam_case(params, loss, *tasks)


@foreign
def neural_ode():
    params = {"w1": steps.normal(8, 32, scale=0.3), "w2": steps.normal(32, 8, scale=0.3)}

    def loss(params, x, y):
        def field(x):
            return jnp.tanh(x @ params["w1"]) @ params["w2"]

        def runge_kutta(_, x):
            k1 = field(x)
            k2 = field(x + 0.05 * k1)
            k3 = field(x + 0.05 * k2)
            return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + field(x + 0.1 * k3))

        return jnp.mean((lax.fori_loop(0, 5, runge_kutta, x) - y) ** 2)

    return adam_case(params, loss, steps.normal(32, 8), steps.normal(32, 8))


@foreign
def deep_equilibrium():
    """A fixed point by a loop whose trip count depends on data, with an implicit gradient."""
    params = {"w": steps.normal(16, 16, scale=0.1), "u": steps.normal(8, 16, scale=0.3), "out": steps.normal(16, 4, scale=0.3)}

    def iterate(f, z):
        def go(state):
            return (jnp.max(jnp.abs(state[1] - state[0])) > 1e-5) & (state[2] < 50)

        return lax.while_loop(go, lambda state: (state[1], f(state[1]), state[2] + 1), (z, f(z), 0))[1]

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def fixed_point(f, params, x):
        return iterate(lambda z: f(params, x, z), jnp.zeros((x.shape[0], 16)))

    def forward(f, params, x):
        z = fixed_point(f, params, x)
        return z, (params, x, z)

    def backward(f, kept, slope):
        params, x, z = kept
        _, pull = jax.vjp(lambda z: f(params, x, z), z)
        u = iterate(lambda u: pull(u)[0] + slope, slope)
        return jax.vjp(lambda params, x: f(params, x, z), params, x)[1](u)

    fixed_point.defvjp(forward, backward)

    def loss(params, x, y):
        z = fixed_point(lambda p, x, z: jnp.tanh(z @ p["w"] + x @ p["u"]), params, x)
        return jnp.mean((z @ params["out"] - y) ** 2)

    return adam_case(params, loss, steps.normal(32, 8), steps.normal(32, 4))


@foreign
def speech_ctc():
    import optax

    params = {"w1": steps.normal(16, 32, scale=0.2), "w2": steps.normal(32, 12, scale=0.2)}

    def loss(params, x, pads, labels, label_pads):
        logits = jax.nn.relu(x @ params["w1"]) @ params["w2"]
        return optax.ctc_loss(logits, pads, labels, label_pads).mean()

    frames = steps.normal(16, 10, 16), jnp.zeros((16, 10))
    return adam_case(params, loss, *frames, 1 + steps.ids(11, 16, 4), jnp.zeros((16, 4)))


@foreign
def encoder_decoder():
    width, heads, vocab = 32, 4, 64

    def attention(q, kv, p, bias):
        def split(x):
            return x.reshape(*x.shape[:2], heads, -1)

        q, k, v = split(q @ p["q"]), split(kv @ p["k"]), split(kv @ p["v"])
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / (width / heads) ** 0.5 + bias
        return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(q.shape[0], -1, width) @ p["o"]

    def mlp(x, p):
        return jax.nn.relu(x @ p["up"]) @ p["down"]

    def layer(names):
        return {name: steps.normal(width, width, scale=0.15) for name in names}

    dense = {"up": steps.normal(width, 64, scale=0.1), "down": steps.normal(64, width, scale=0.1)}
    params = {"embed": steps.normal(vocab, width, scale=0.3), "encoder": layer("qkvo"), "self": layer("qkvo"), "cross": layer("qkvo")}
    params |= {"mlp1": dense, "mlp2": dense, "bias": steps.normal(32, heads, scale=0.1)}

    def loss(params, source, target):
        def buckets(q, k):
            return params["bias"][jnp.clip(jnp.arange(q)[:, None] - jnp.arange(k)[None] + 16, 0, 31)].transpose(2, 0, 1)[None]

        pad = jnp.where(source[:, None, None] > 0, 0.0, -1e9)
        x = params["embed"][source]
        x = x + attention(x, x, params["encoder"], buckets(x.shape[1], x.shape[1]) + pad)
        x = x + mlp(x, params["mlp1"])
        y = params["embed"][target[:, :-1]]
        causal = jnp.where(jnp.tri(y.shape[1], dtype=bool), 0.0, -1e9)
        y = y + attention(y, y, params["self"], causal)
        y = y + attention(y, x, params["cross"], pad)
        y = y + mlp(y, params["mlp2"])
        return steps.cross_entropy(y @ params["embed"].T, target[:, 1:])

    return adam_case(params, loss, steps.ids(vocab, 16, 12), steps.ids(vocab, 16, 9))


@foreign
def masked_language_model():
    width, vocab = 32, 64
    params = {"embed": steps.normal(vocab, width, scale=0.3), "block": steps.block_params(width), "bias": jnp.zeros(vocab)}

    def loss(params, tokens, positions, labels, weights):
        x = steps.block(params["embed"][tokens], params["block"], 4)
        picked = jnp.take_along_axis(x, positions[..., None], 1)
        logits = picked @ params["embed"].T + params["bias"]
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
        return -jnp.sum(found * weights) / (weights.sum() + 1e-5)

    return adam_case(params, loss, steps.ids(vocab, 16, 16), steps.ids(16, 16, 3), steps.ids(vocab, 16, 3), jnp.ones((16, 3)))


@foreign
def recommendation():
    """Embedding tables with sums over bags, and interactions by products of pairs."""
    params = {
        "tables": [steps.normal(128, 16, scale=0.1) for _ in range(3)],
        "bottom": steps.normal(8, 16, scale=0.2),
        "top": steps.normal(16 + 6, 1, scale=0.2),
    }

    def loss(params, dense, bags, clicked):
        x = jax.nn.relu(dense @ params["bottom"])
        rows = [x, *(table[bags[:, i]].sum(1) for i, table in enumerate(params["tables"]))]
        stacked = jnp.stack(rows, 1)
        pairs = jnp.einsum("nid,njd->nij", stacked, stacked)
        upper = jnp.triu_indices(4, 1)
        logits = (jnp.concatenate([x, pairs[:, upper[0], upper[1]]], 1) @ params["top"])[:, 0]
        return jnp.mean(jnp.maximum(logits, 0) - logits * clicked + jnp.log1p(jnp.exp(-jnp.abs(logits))))

    return adam_case(params, loss, steps.normal(32, 8), steps.ids(128, 32, 3, 4), steps.ids(2, 32).astype(jnp.float32))


@foreign
def radiance_field():
    params = [steps.normal(i, o, scale=0.2) for i, o in ((36, 32), (32, 32), (32, 4))]

    def field(params, points):
        powers = 2.0 ** jnp.arange(6)
        angles = (points[..., None] * powers).reshape(*points.shape[:-1], -1)
        h = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        for w in params[:-1]:
            h = jax.nn.relu(h @ w)
        return h @ params[-1]

    def loss(params, origins, directions, colours, key):
        depths = jnp.linspace(1.0, 4.0, 8) + 0.1 * jax.random.uniform(key, (origins.shape[0], 8))
        points = origins[:, None] + directions[:, None] * depths[..., None]
        raw = jax.vmap(functools.partial(field, params))(points)
        opacity = 1 - jnp.exp(-jax.nn.relu(raw[..., 3]) * 0.4)
        through = jnp.cumprod(jnp.concatenate([jnp.ones((opacity.shape[0], 1)), 1 - opacity[:, :-1] + 1e-10], 1), 1)
        seen = jnp.sum((opacity * through)[..., None] * jax.nn.sigmoid(raw[..., :3]), 1)
        return jnp.mean((seen - colours) ** 2)

    rays = steps.normal(32, 3), steps.normal(32, 3), steps.normal(32, 3)
    return adam_case(params, loss, *rays, jax.random.key(8))


@foreign
def distillation():
    teacher = [steps.normal(16, 64, scale=0.2), steps.normal(64, 8, scale=0.2)]
    params = [steps.normal(16, 16, scale=0.2), steps.normal(16, 8, scale=0.2)]

    def logits(layers, x):
        return jax.nn.relu(x @ layers[0]) @ layers[1]

    def loss(params, x, y):
        student = logits(params, x)
        target = jax.nn.softmax(lax.stop_gradient(logits(teacher, x)) / 2)
        soft = -jnp.mean(jnp.sum(target * jax.nn.log_softmax(student / 2), -1))
        return soft + steps.cross_entropy(student, y)

    return adam_case(params, loss, steps.normal(32, 16), steps.ids(8, 32))


@foreign
def quantised_training():
    params = {"w1": steps.normal(16, 64, scale=0.2), "w2": steps.normal(64, 8, scale=0.2)}

    @jax.custom_vjp
    def product(x, w):
        sx, sw = jnp.abs(x).max(-1, keepdims=True) / 127, jnp.abs(w).max(0, keepdims=True) / 127
        qx, qw = jnp.round(x / sx).astype(jnp.int8), jnp.round(w / sw).astype(jnp.int8)
        return lax.dot(qx, qw, preferred_element_type=jnp.int32).astype(jnp.float32) * sx * sw

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(params, x, y):
        return jnp.mean((product(jax.nn.relu(product(x, params["w1"])), params["w2"]) - y) ** 2)

    return adam_case(params, loss, steps.normal(32, 16), steps.normal(32, 8))


@foreign
def dynamic_loss_scale():
    import optax

    params = {"w1": steps.normal(16, 64, scale=0.2), "w2": steps.normal(64, 8, scale=0.2)}
    optimizer = optax.adam(1e-3, eps=1e-3)

    def step(params, state, scale, x, y):
        def loss(params):
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            out = jax.nn.relu(x.astype(jnp.float16) @ half["w1"]) @ half["w2"]
            return scale["value"] * jnp.mean((out.astype(jnp.float32) - y) ** 2)

        grads = jax.tree.map(lambda g: g / scale["value"], jax.grad(loss)(params))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, new_state = optimizer.update(grads, state)
        updated = optax.apply_updates(params, updates)
        params, state = lax.cond(finite, lambda: (updated, new_state), lambda: (params, state))
        value = jnp.where(finite, scale["value"], scale["value"] / 2)
        return params, state, {"value": value, "good": jnp.where(finite, scale["good"] + 1, 0)}, finite

    scale = {"value": jnp.float32(1024.0), "good": jnp.int32(0)}
    return step, (params, optimizer.init(params), scale, steps.normal(32, 16), steps.normal(32, 8))


@foreign
def dilated_convolutions():
    params = {"in": steps.normal(1, 1, 16, scale=0.3), "layers": [steps.normal(2, 16, 32, scale=0.2) for _ in range(3)], "out": steps.normal(16, 8, scale=0.2)}

    def loss(params, x, y):
        h = x @ params["in"][0]
        for i, w in enumerate(params["layers"]):
            wide = lax.conv_general_dilated(
                h, w, (1,), [(2**i, 0)], rhs_dilation=(2**i,), dimension_numbers=("NWC", "WIO", "NWC")
            )
            a, b = jnp.split(wide, 2, -1)
            h = h + jnp.tanh(a) * jax.nn.sigmoid(b)
        return steps.cross_entropy(h @ params["out"], y)

    return adam_case(params, loss, steps.normal(16, 16, 1), steps.ids(8, 16, 16))


@foreign
def depthwise_separable():
    params = {"stem": steps.normal(3, 3, 3, 16, scale=0.2), "depth": steps.normal(3, 3, 1, 16, scale=0.3), "point": steps.normal(1, 1, 16, 32, scale=0.2)}
    params |= {"squeeze": steps.normal(32, 8, scale=0.2), "excite": steps.normal(8, 32, scale=0.2), "head": steps.normal(32, 10, scale=0.2)}

    def loss(params, x, y):
        conv = functools.partial(lax.conv_general_dilated, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = jax.nn.hard_swish(conv(x, params["stem"], (2, 2)))
        h = jax.nn.relu6(conv(h, params["depth"], (1, 1), feature_group_count=16))
        h = conv(h, params["point"], (1, 1))
        h = h * jax.nn.sigmoid(jax.nn.relu(h.mean((1, 2)) @ params["squeeze"]) @ params["excite"])[:, None, None]
        return steps.cross_entropy(h.mean((1, 2)) @ params["head"], y)

    return adam_case(params, loss, steps.normal(16, 16, 16, 3), steps.ids(10, 16))


@foreign
def coupling_flow():
    params = [{"w1": steps.normal(8, 32, scale=0.2), "w2": steps.normal(32, 16, scale=0.1), "l": jnp.eye(16)} for _ in range(2)]

    def loss(params, x):
        log_det = jnp.zeros(x.shape[0])
        for p in params:
            x = jax.scipy.linalg.solve_triangular(p["l"], x.T, lower=True).T
            log_det = log_det - jnp.sum(jnp.log(jnp.abs(jnp.diag(p["l"]))))
            a, b = x[:, :8], x[:, 8:]
            scale, shift = jnp.split(jax.nn.relu(a @ p["w1"]) @ p["w2"], 2, -1)
            scale = jnp.tanh(scale)
            x, log_det = jnp.concatenate([b * jnp.exp(scale) + shift, a], 1), log_det + scale.sum(-1)
        return jnp.mean(0.5 * jnp.sum(x**2, -1) - log_det)

    return adam_case(params, loss, steps.normal(32, 16))


@foreign
def natural_gradient():
    """Conjugate gradients with products of the Fisher matrix."""
    params = {"w1": steps.normal(8, 16, scale=0.3), "w2": steps.normal(16, 4, scale=0.3)}

    def step(params, x, y):
        def out(params):
            return jnp.tanh(x @ params["w1"]) @ params["w2"]

        value, grads = jax.value_and_grad(lambda p: jnp.mean((out(p) - y) ** 2))(params)

        def fisher(v):
            _, tangent = jax.jvp(out, (params,), (v,))
            (product,) = jax.vjp(out, params)[1](tangent / x.shape[0])
            return jax.tree.map(lambda p, v: p + 0.1 * v, product, v)

        direction, _ = jax.scipy.sparse.linalg.cg(fisher, grads, maxiter=5)
        return jax.tree.map(lambda p, d: p - 0.1 * d, params, direction), value

    return step, (params, steps.normal(32, 8), steps.normal(32, 4))


@foreign
def private_gradients():
    """Gradients per sample, clipped, with noise."""
    params = {"w1": steps.normal(8, 32, scale=0.3), "w2": steps.normal(32, 4, scale=0.3)}

    def step(params, x, y, key):
        def loss(params, x, y):
            return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)

        values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, x, y)
        norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in jax.tree.leaves(grads)))
        factors = jnp.minimum(1.0, 1.0 / norms)
        leaves, tree = jax.tree.flatten(jax.tree.map(lambda g: jnp.einsum("n,nij->ij", factors, g), grads))
        keys = jax.random.split(key, len(leaves))
        noisy = [(g + 0.1 * jax.random.normal(k, g.shape)) / x.shape[0] for g, k in zip(leaves, keys, strict=True)]
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.tree.unflatten(tree, noisy)), values.mean()

    return step, (params, steps.normal(32, 8), steps.normal(32, 4), jax.random.key(9))


@foreign
def linear_attention_chunks():
    """Gated linear attention: a scan over chunks that carries the state of every head."""
    params = {name: steps.normal(32, 32, scale=0.2) for name in "qkvo"}

    def loss(params, x, y):
        n, s, _ = x.shape
        q, k, v = ((x @ params[name]).reshape(n, s // 4, 4, 4, 8).transpose(1, 0, 3, 2, 4) for name in "qkv")
        mask = jnp.tri(4)

        def chunk(state, qkv):
            q, k, v = qkv
            inside = jnp.einsum("nhqd,nhkd->nhqk", q, k) * mask
            out = jnp.einsum("nhqk,nhkd->nhqd", inside, v) + q @ state
            return 0.9 * state + k.swapaxes(-1, -2) @ v, out

        _, out = lax.scan(chunk, jnp.zeros((n, 4, 8, 8)), (q, k, v))
        out = out.transpose(1, 0, 3, 2, 4).reshape(n, s, 32)
        return jnp.mean((out @ params["o"] - y) ** 2)

    return adam_case(params, loss, steps.normal(16, 16, 32), steps.normal(16, 16, 32))


@foreign
def preference_optimisation():
    width, vocab = 32, 64
    reference = {"embed": steps.normal(vocab, width, scale=0.3), "block": steps.block_params(width)}
    params = jax.tree.map(jnp.copy, reference)

    def score(params, tokens):
        x = steps.block(params["embed"][tokens[:, :-1]], params["block"], 4)
        logs = jax.nn.log_softmax(x @ params["embed"].T)
        return jnp.take_along_axis(logs, tokens[:, 1:, None], -1)[..., 0].sum(-1)

    def loss(params, chosen, rejected):
        both = jnp.concatenate([chosen, rejected])
        new, old = score(params, both), lax.stop_gradient(score(reference, both))
        margins = jnp.split(new - old, 2)
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (margins[0] - margins[1])))

    return adam_case(params, loss, steps.ids(vocab, 16, 9), steps.ids(vocab, 16, 9))


@foreign
def object_queries():
    """Detection with queries, matched by cost through a greedy loop."""
    params = {"backbone": steps.normal(12, 32, scale=0.2), "queries": steps.normal(6, 32, scale=0.3), "head": steps.normal(32, 5, scale=0.2)}

    def match(cost):
        def pick(state, _):
            cost, chosen = state
            flat = jnp.argmin(cost)
            q, t = flat // cost.shape[1], flat % cost.shape[1]
            cost = cost.at[q].set(jnp.inf).at[:, t].set(jnp.inf)
            return (cost, chosen.at[t].set(q)), None

        start = cost, jnp.zeros(cost.shape[1], jnp.int32)
        return lax.scan(pick, start, None, length=cost.shape[1])[0][1]

    def loss(params, images, boxes):
        tokens = images.reshape(images.shape[0], 16, 12) @ params["backbone"]
        weights = jax.nn.softmax(jnp.einsum("qd,nsd->nqs", params["queries"], tokens))
        out = jnp.einsum("nqs,nsd->nqd", weights, tokens) @ params["head"]
        distance = jnp.abs(out[:, :, None, :4] - boxes[:, None]).sum(-1)
        chosen = jax.vmap(match)(lax.stop_gradient(distance))
        return jnp.take_along_axis(distance, chosen[:, None], 1).mean() + jnp.mean(jax.nn.softplus(out[..., 4]))

    return adam_case(params, loss, steps.normal(16, 8, 8, 3), steps.normal(16, 3, 4))


@foreign
def tensor_product_potential():
    """Energies of atoms and forces by a gradient, trained on both."""
    params = {"radial": steps.normal(8, 16, scale=0.3), "species": steps.normal(4, 16, scale=0.3), "out": steps.normal(16, 1, scale=0.3)}

    def energy(params, positions, species):
        delta = positions[:, None] - positions[None]
        distance = jnp.sqrt(jnp.sum(delta**2, -1) + jnp.eye(positions.shape[0]))
        basis = jnp.exp(-((distance[..., None] - jnp.linspace(0, 4, 8)) ** 2))
        h = jnp.einsum("ijb,bc,jc->ic", basis, params["radial"], params["species"][species])
        return (jax.nn.silu(h) @ params["out"]).sum()

    def loss(params, positions, species, energies, forces):
        value, slopes = jax.vmap(jax.value_and_grad(energy, 1), (None, 0, 0))(params, positions, species)
        return jnp.mean((value - energies) ** 2) + jnp.mean((slopes + forces) ** 2)

    return adam_case(params, loss, steps.normal(16, 6, 3), steps.ids(4, 16, 6), steps.normal(16), steps.normal(16, 6, 3))
