"""Pallas kernels: which dimensions of their grids are split, and that every device runs its part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from shardwright.jax import parallelize, plan
from shardwright.jax._pallas import _bodies as bodies
from shardwright.jax._pallas import kernel_name, kernel_rule, unread_results


def kernels(jaxpr):
    """The Pallas calls of a function, in inner bodies too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            yield from (found for body in bodies(eqn) for found in kernels(body))


def rules_of(function, *args):
    """The kernels of a function by name, with their rules."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [(kernel_name(eqn), kernel_rule(eqn, unread_results(jaxpr))) for eqn in kernels(jaxpr)]


def rule_of(function, *args):
    return rules_of(function, *args)[0][1]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


BLOCKS = BlockSizes(block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16)


def gpu_loss(w, x):
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    heads = lambda y: y.reshape(*y.shape[:2], 4, 16)  # noqa: E731
    out = mha(heads(q), heads(k), heads(v), None, sm_scale=0.25, causal=True, block_sizes=BLOCKS, interpret=True)
    return jnp.mean(out**2)


def train(w, x):
    loss, grad = jax.value_and_grad(gpu_loss)(w, x)
    return w - 0.1 * grad, loss


@pytest.mark.parametrize("solver", ["auto", "data", "megatron"])
def test_attention_kernels_run_split_forwards_and_backwards(solver):
    w, x = random(64, 192) / 8, random(4, 64, 64, seed=1)
    step = parallelize(train, w, x, machine="cpu:8", solver=solver)
    new, loss = step(w, x)
    expected, expected_loss = jax.jit(train)(w, x)
    np.testing.assert_allclose(new, expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_gpu_attention_split_samples_and_heads(causal):
    q = jnp.zeros((2, 64, 4, 16))
    attend = functools.partial(mha, segment_ids=None, sm_scale=0.25, causal=causal, block_sizes=BLOCKS, interpret=True)
    rules = dict(rules_of(jax.grad(lambda q, k, v: attend(q, k, v).sum(), argnums=(0, 1, 2)), q, q, q))
    assert sorted(rules) == ["mha_backward", "mha_forward", "mha_preprocess_backward"]
    for rule in rules.values():
        sample, head = rule.operands[0][0], rule.operands[0][2]
        assert rule.parts[sample] == 2 and rule.parts[head] == 4
        assert all({sample, head} <= set(names) for names in (*rule.operands, *rule.results))
    # Blocks of queries know their number only where a mask needs it.
    forward = rules["mha_forward"]
    assert (forward.operands[0][1] is None) == causal and forward.operands[1][1] is None


def test_flash_attention_of_tpus_is_planned_as_attention():
    shape = jax.ShapeDtypeStruct((8, 4, 256, 128), jnp.float32)
    attend = functools.partial(flash_attention, causal=True)
    loss = lambda q, k, v: attend(q, k, v).sum()  # noqa: E731
    found = rules_of(jax.grad(loss, argnums=(0, 1, 2)), shape, shape, shape)
    assert len(found) == 3
    for name, rule in found:
        assert name.startswith("_flash_attention_")
        first, second = rule.operands[0][:2]
        assert first is not None and second is not None and rule.operands[0][2:] == (None, None)
        assert all(names[:2] == (first, second) for names in rule.results)
    made = plan(jax.grad(loss), shape, shape, shape, machine="tpu-v5p-8")
    calls = [config for name, config in made.configs().items() if name.endswith("ffi_call")]
    assert calls and all("d0" in config or "d1" in config for config in calls), made.configs()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_splash_attention_runs_split(kv_heads):
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((128, 128))] * 4)
    blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), 128)
    sizes = splash_attention_kernel.BlockSizes(**blocks, block_kv_compute=128)
    kernel = splash_attention_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=True)
    attend = jax.vmap(kernel)
    q, k = random(2, 4, 128, 128), random(2, kv_heads, 128, 128, seed=1)

    def step(q, k, v):
        return jax.value_and_grad(lambda *args: jnp.sum(attend(*args) ** 2), argnums=(0, 1, 2))(q * 0.1, k, v)

    rules = {name.split("_")[2]: sorted(rule.parts.values()) for name, rule in rules_of(step, q, k, k)}
    # Heads that share keys add their gradients up, one after the other.
    assert rules == {"fwd": [2, kv_heads], "dq": [2, kv_heads], "dkv": [2, 4] if kv_heads == 4 else [2]}
    found, expected = parallelize(step, q, k, k, machine="cpu:8", solver="auto")(q, k, k), jax.jit(step)(q, k, k)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def scaled(x, blocks, body, out_map=lambda i: (i, 0), in_map=lambda i: (i, 0), **options):
    rows = x.shape[0] // blocks
    return pl.pallas_call(
        body,
        grid=(blocks,),
        in_specs=[pl.BlockSpec((rows, x.shape[1]), in_map)],
        out_specs=pl.BlockSpec((rows, x.shape[1]), out_map),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
        **options,
    )(x)


def double(x_ref, y_ref):
    y_ref[...] = 2 * x_ref[...]


def add_number(x_ref, y_ref):
    y_ref[...] = x_ref[...] + pl.program_id(0)


def add_number_if(x_ref, y_ref):
    y_ref[...] = jax.lax.cond(x_ref[0, 0] > 0, lambda: x_ref[...] + pl.program_id(0), lambda: x_ref[...])


def carry(x_ref, y_ref, scratch):
    scratch[...] += x_ref[...]
    y_ref[...] = scratch[...]


def test_a_kernel_of_the_users_own_is_split_along_its_grid():
    x = random(32, 8)
    assert rule_of(lambda x: scaled(x, 4, double), x).parts == {0: 4}
    step = parallelize(lambda x: scaled(jnp.sin(x), 8, double), x, machine="cpu:8", solver="data")
    assert "P('" in str(step.out_shardings) or step.out_shardings.spec != jax.sharding.PartitionSpec()
    np.testing.assert_allclose(step(x), 2 * np.sin(x), rtol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: scaled(x, 4, add_number),
        # Every cell writes the same block, or blocks in another order.
        lambda x: scaled(x, 4, double, out_map=lambda i: (0, 0)),
        lambda x: scaled(x, 4, double, out_map=lambda i: (3 - i, 0)),
        lambda x: scaled(x, 4, double, in_map=lambda i: (i // 2, 0)),
        lambda x: scaled(x, 4, carry, scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)]),
    ],
    ids=["number", "same", "reversed", "overlapping", "scratch"],
)
def test_kernels_whose_cells_depend_on_each_other_stay_whole(call):
    x = random(32, 8)
    assert rule_of(call, x).parts == {}
    step = parallelize(lambda x: call(jnp.sin(x)), x, machine="cpu:8", solver="auto")
    np.testing.assert_array_equal(step(x), jax.jit(lambda x: call(jnp.sin(x)))(x))


def test_numbers_inside_of_branches_are_found():
    assert rule_of(lambda x: scaled(x, 4, add_number_if), random(32, 8)).parts == {}


def test_parallel_scratch_and_vmapped_grids_are_split():
    x = random(32, 8)
    parallel = functools.partial(
        scaled, blocks=4, body=carry, scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )  # fmt: skip
    assert rule_of(parallel, x).parts == {0: 4}
    many = jax.vmap(lambda x: scaled(x, 4, add_number))
    assert rule_of(many, random(3, 32, 8)).parts == {0: 3}
    assert rule_of(many, random(3, 32, 8)).operands == ((0, None, None),)
