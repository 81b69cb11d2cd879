"""Equations that the planner cannot read are planned as calls, and the step computes what `jax.jit` computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from jax.sharding import PartitionSpec as P
from test_parallelize import assert_close

from shardwright import PlanError
from shardwright.jax import parallelize, verify_plan


def fft(x, w):
    return jnp.abs(jnp.fft.fft(x @ w)).sum()


def fft_2d(x, w):
    return jnp.real(jnp.fft.ifft2(jnp.fft.fft2(x.reshape(4, 8, 32)) * 2)).sum() + w.sum()


def gamma(x, w):
    return jax.scipy.special.gammaln(1 + jnp.abs(x @ w)).sum() + jax.scipy.special.digamma(1 + jnp.abs(x)).mean()


def linear_algebra(x, w):
    square = w.T @ w + jnp.eye(32)
    return jnp.linalg.slogdet(square)[1] + jnp.linalg.cholesky(square).sum() + jnp.linalg.solve(square, x.T).sum()


def batched_linear_algebra(x, w):
    h = (x @ w).reshape(16, 8, 8)
    return jnp.linalg.eigvalsh(h @ h.transpose(0, 2, 1) + jnp.eye(8)).sum()


def callback(x, w):
    h = jax.pure_callback(lambda x: np.tanh(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x @ w, vmap_method="sequential")
    jax.debug.print("seen {}", h[0, 0])
    return h.sum()


def data_dependent_loop(x, w):
    return jax.lax.while_loop(lambda h: jnp.abs(h).max() > 0.1, lambda h: jnp.tanh(h @ w) * 0.5, x).sum()


def associative(x, w):
    gates = jax.nn.sigmoid(x @ w)
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    return jax.lax.associative_scan(combine, (gates, x), axis=0)[1].mean()


def small_integers(x, w):
    q = jnp.clip(jnp.round(x * 10), -127, 127).astype(jnp.int8)
    return (q.astype(jnp.float32) @ w / 10).sum()


def eight_bit_floats(x, w):
    return (x.astype(jnp.float8_e4m3fn).astype(jnp.float32) @ w).sum()


def shard_mapped(x, w):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    mean = jax.shard_map(lambda h: jax.lax.pmean(jnp.tanh(h).sum(0), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    return mean(x @ w).sum()


def shard_mapped_by_samples(x, w):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(4, 2), ("x", "y"))
    product = jax.shard_map(lambda h, w: jnp.tanh(h @ w), mesh=mesh, in_specs=(P("x"), P(None, "y")), out_specs=P("x", "y"))
    return product(x, w).sum()


def pmapped(x, w):
    return jax.pmap(lambda h: jnp.tanh(h @ w))(x.reshape(8, 2, 32)).sum()


def pmapped_mean(x, w):
    replica = jax.pmap(lambda w, x: jax.lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "r"), axis_name="r", in_axes=(None, 0))
    return replica(w, x.reshape(8, -1, 32))[0]


def exchanged(x, w):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    # The axis splits dimensions of 32 and of 8.
    exchange = lambda h, w: jax.lax.all_to_all(jnp.tanh(h @ w[0]), "x", 1, 0, tiled=True)  # noqa: E731
    weights = jnp.broadcast_to(w, (8, 32, 32))
    return (jax.shard_map(exchange, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))(x, weights) ** 2).sum()


def scalar_gamma(x, w):
    return (x @ w).sum() * jax.scipy.special.gammaln(1 + jnp.abs(w[0, 0])) + jax.lax.cond(w[0, 1] > 0, jnp.sin, jnp.cos, w[0, 2])


def references(x, w):
    total = jax.new_ref(jnp.zeros(()))

    def body(h, _):
        total[...] += jnp.mean(h)
        return jnp.tanh(h @ w), None

    h = jax.lax.scan(body, x, None, length=3)[0]
    total[...] *= 2
    return h.sum() + total[...]


STEPS = [
    fft, fft_2d, gamma, linear_algebra, batched_linear_algebra, callback, data_dependent_loop, associative, small_integers,
    eight_bit_floats, shard_mapped, shard_mapped_by_samples, pmapped, pmapped_mean, exchanged, scalar_gamma, references,
]  # fmt: skip


@pytest.mark.parametrize("loss", STEPS, ids=lambda f: f.__name__)
def test_results_equal_one_device(loss):
    rows = 16 if loss is pmapped else 32
    args = steps.normal(rows, 32), steps.normal(32, 32, scale=0.2)
    fast = parallelize(loss, *args, machine="cpu:8")
    assert_close(fast(*args), jax.jit(loss)(*args))


def test_images_of_bytes_are_arguments_and_split():
    def loss(w, images):
        return jnp.mean((images.astype(jnp.float32).reshape(images.shape[0], -1) / 255 @ w) ** 2)

    args = steps.normal(192, 16), jnp.asarray(np.arange(64 * 192).reshape(64, 8, 8, 3) % 256, jnp.uint8)
    fast = parallelize(loss, *args, machine="cpu:8", solver="data")
    assert_close(fast(*args), loss(*args))
    assert fast.in_shardings[1].spec[0] is not None


def test_complex_arguments_and_results_work():
    def step(z, w):
        return z * 2j + w, jnp.abs(z).sum()

    args = steps.normal(16, 4) + 1j * steps.normal(16, 4), steps.normal(16, 4)
    assert_close(parallelize(step, *args, machine="cpu:8")(*args), step(*args))


def test_an_element_wise_call_is_split_with_its_operand():
    def loss(w, x):
        return jax.scipy.special.gammaln(1 + jnp.abs(x @ w)).sum()

    args = steps.normal(64, 64), steps.normal(512, 64)
    fast = parallelize(loss, *args, machine="cpu:8", solver="data")
    verification = verify_plan(fast)
    assert {kind for kind, _, _ in verification.compiled} == {"all-reduce"}, verification.table()
    assert "lgamma" in fast.explain() and "test_equations.py" in fast.explain()


@pytest.mark.parametrize("context", [True, False])
def test_meshes_in_explicit_mode_are_replaced(context):
    mesh = jax.make_mesh((8,), ("x",))
    args = steps.normal(64, 32), steps.normal(32, 32)

    def step(x, w):
        return jnp.tanh(x @ w).sum()

    def resharding(x, w):
        return jnp.tanh(jax.sharding.reshard(x, P(None, None)) @ w).sum()

    want = step(*args)
    placed = tuple(jax.device_put(x, jax.NamedSharding(mesh, P("x", None) if x is args[0] else P())) for x in args)
    for function in (step, resharding):
        if context:
            with jax.set_mesh(mesh):
                assert_close(parallelize(function, *placed, machine="cpu:8")(*placed), want)
        else:
            assert_close(parallelize(function, *placed, machine="cpu:8")(*placed), want)


def test_errors_name_the_line_of_the_users_code():
    def step(x):
        return jax.lax.fori_loop(0, 3_000_000, lambda i, h: jnp.tanh(h), x).sum()

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(PlanError, match=rf"test_equations\.py:{line}.*operations") as error:
        parallelize(step, steps.normal(16, 16), machine="cpu:8")
    assert "program.mlir" not in str(error.value)


def test_rules_split_calls_of_the_user():
    def step(x, w):
        call = jax.ffi.ffi_call("my_kernel", jax.ShapeDtypeStruct((64, 16), jnp.float32))
        return call(x @ w).sum()

    args = steps.normal(64, 32), steps.normal(32, 16)
    fast = parallelize(step, *args, machine="cpu:8", solver="data", rules={"my_kernel": "n d -> n d"})
    assert fast.in_shardings[0].spec[0] is not None
    assert any("split by its rule" in warning for warning in fast.plan.data["warnings"])
    assert re.search(r"my_kernel|ffi_call", fast.explain())


def test_explain_opens_with_a_sentence_and_folds_equal_blocks():
    step, args = steps.gpt(layers=6)
    fast = parallelize(step, *args, machine="cpu:8", solver="data")
    text = fast.explain()
    assert text.startswith("data parallel over 8; parameters replicated; optimizer state replicated\n")
    assert "['blocks'][*]['qkv'] (6)" in text
    assert len(text.splitlines()) < 80 < len(fast.explain("all").splitlines())


def test_name_scopes_reach_the_compiled_program():
    def step(x, w):
        with jax.named_scope("encoder"):
            return jnp.tanh(x @ w).sum()

    args = steps.normal(64, 32), steps.normal(32, 32)
    text = parallelize(jax.jit(step), *args, machine="cpu:8").lower(*args).compile().as_text()
    assert re.search(r'op_name="[^"]*encoder/[^"]*dot_general', text)


@pytest.mark.parametrize("memory", [1e9, np.int64(10**9), "80GB", 2**30])
def test_memory_limits_are_bytes_or_text(memory):
    args = steps.normal(64, 32), steps.normal(32, 32)
    fast = parallelize(lambda x, w: (x @ w).sum(), *args, machine="cpu:8", memory=memory)
    assert fast.plan.memory_limit_bytes in (10**9, 80 * 10**9, 2**30)


def test_a_memory_limit_of_few_bytes_is_explained():
    with pytest.raises(PlanError, match='memory="80GB"'):
        parallelize(lambda x: x.sum(), steps.normal(64, 32), machine="cpu:8", memory=80)


def test_refusals_inside_functions_of_the_text_are_replaced_too():
    def step(x, w):
        solve = jax.jit(lambda a, b: jax.scipy.linalg.expm(a) @ b)
        return solve(w, x.T).sum() + solve(w * 0.5, x.T).sum()

    args = steps.normal(16, 16), steps.normal(16, 16, scale=0.1)
    assert_close(parallelize(step, *args, machine="cpu:8")(*args), jax.jit(step)(*args))


def test_the_specs_of_a_shard_map_are_kept_by_the_plan():
    fast = parallelize(shard_mapped_by_samples, steps.normal(64, 32), steps.normal(32, 32), machine="cpu:8")
    configs = [config for name, config in fast.plan.configs().items() if "specs" in name]
    assert configs == ["d0=4·d1=2"], fast.plan.configs()


def test_sums_that_leave_a_shard_map_are_predicted():
    verification = verify_plan(parallelize(shard_mapped, steps.normal(64, 32), steps.normal(32, 32), machine="cpu:8"))
    assert verification.agreement > 0.95, verification.table()


def test_axes_that_split_dimensions_of_several_sizes_are_kept_by_the_plan():
    fast = parallelize(exchanged, steps.normal(32, 32), steps.normal(32, 32), machine="cpu:8")
    configs = [config for name, config in fast.plan.configs().items() if "specs/" in name]
    assert configs == ["d0=8"], fast.plan.configs()


def test_rows_of_top_k_stay_where_they_are():
    def step(x, w):
        values, places = jax.lax.top_k(x @ w, 4)
        return (values * places).sum(1)

    args = steps.normal(512, 64), steps.normal(64, 64)
    fast = parallelize(step, *args, machine="cpu:8", solver="data")
    assert_close(fast(*args), jax.jit(step)(*args))
    verification = verify_plan(fast)
    assert not verification.compiled, verification.table()


def test_references_of_the_surroundings_are_refused_with_the_line():
    total = jax.new_ref(jnp.zeros(()))

    def step(x):
        total[...] += x.sum()
        return x * 2

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(PlanError, match=rf"test_equations\.py:{line}.*made outside"):
        parallelize(step, steps.normal(16, 16), machine="cpu:8")
    with pytest.raises(PlanError, match="argument 0 is a reference"):
        parallelize(lambda ref: ref[...], jax.new_ref(jnp.ones(8)), machine="cpu:8")
