"""Sharded steps compute the same results as one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps

from shardwright import PlanError
from shardwright.jax import parallelize


@functools.cache
def case(name):
    """A step, its arguments, and the results of two steps on one device."""
    step, args = steps.CASES[name]()
    first = jax.jit(step)(*args)
    return step, args, first, jax.jit(step)(*follow(first, args))


def follow(results, args):
    """The arguments of the next step: the results, then the same batch."""
    return (*results[:-1], *args[len(results) - 1 :])


def assert_close(got, want):
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("solver", ["exact", "data", "megatron", "fsdp"])
@pytest.mark.parametrize("name", steps.CASES)
def test_results_equal_one_device(name, solver):
    step, args, first, second = case(name)
    fast = parallelize(step, *args, machine="cpu:8", solver=solver)
    got = fast(*args)
    assert_close(got, first)
    # Results have the shardings that the next step reads.
    assert_close(fast(*follow(got, args)), second)
    placed = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), got, fast.out_shardings)
    assert all(jax.tree.leaves(placed))


@pytest.mark.parametrize("solver", ["exact", "data", "megatron", "fsdp"])
@pytest.mark.parametrize("name", ["gpt", "scanned"])
def test_attention_that_is_planned_as_one_op_equals_one_device(name, solver):
    step, args, first, _ = case(name)
    fast = parallelize(step, *args, machine="cpu:8", solver=solver, plain_attention=False)
    assert any(op.endswith(".fused") for op in fast.plan.configs())
    assert_close(fast(*args), first)


def test_levels_of_a_machine_are_axes_of_the_mesh():
    step, args, first, _ = case("mlp")
    fast = parallelize(step, *args, machine="p100x16:8")
    assert [device.id for device in fast.mesh.devices.flat] == list(range(8))
    assert [name.split(".")[0] for name in fast.mesh.axis_names] == sorted(
        (name.split(".")[0] for name in fast.mesh.axis_names), key=["node", "gpu"].index
    )
    assert_close(fast(*args), first)


def test_arguments_and_results_alone_may_be_pinned():
    step, args, first, _ = case("mlp")
    assert_close(parallelize(step, *args, machine="cpu:8", constrain=False)(*args), first)


def test_shapes_are_enough_to_plan():
    step, args, first, _ = case("mlp")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    fast = parallelize(step, *shapes, machine="cpu:8")
    assert_close(fast(*fast.shard(args)), first)


def test_donation_is_kept():
    step, args, first, _ = case("mlp")
    fast = parallelize(jax.jit(step, donate_argnums=0), *args, machine="cpu:8", solver="fsdp")
    given = fast.shard(jax.tree.map(jnp.copy, args))
    assert_close(fast(*given), first)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given[0]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given[1:]))
    assert "aliasing_output" in fast.lower(*args).as_text() or "buffer_donor" in fast.lower(*args).as_text()


def test_unused_and_scalar_arguments_and_constants_work():
    table = jnp.arange(32.0).reshape(8, 4)

    def step(state, unused, x):
        y = jnp.tanh(x @ table) * state["scale"]
        return {"scale": state["scale"] * 0.5}, {"y": y, "seen": x, "constant": jnp.zeros(8)}

    args = {"scale": jnp.float32(2)}, jnp.ones(3), steps.normal(16, 8)
    assert_close(parallelize(step, *args, machine="cpu:8")(*args), step(*args))


def test_every_kind_of_control_flow_is_walked():
    def step(w, x, key):
        def body(i, h):
            return jax.lax.cond(i % 2 == 0, lambda h: jnp.tanh(h @ w), lambda h: h + 1, h)

        h = jax.lax.fori_loop(0, 3, body, x)
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.where(keep, h, 0).sum(0)

    args = steps.normal(16, 16, scale=0.3), steps.normal(32, 16), jax.random.PRNGKey(0)
    assert_close(parallelize(step, *args, machine="cpu:8")(*args), step(*args))


def test_a_machine_with_too_many_devices_is_refused():
    step, args, _, _ = case("mlp")
    with pytest.raises(PlanError, match="64 devices, but there are 8"):
        parallelize(step, *args, machine="h100x64")


def test_explain_prints_plan_mesh_and_shardings():
    step, args, _, _ = case("mlp")
    text = parallelize(step, *args, machine="cpu:8", solver="data").explain()
    assert "over 8 workers" in text and "mesh: worker.0:2" in text and "results:" in text


@pytest.mark.parametrize("name", ["mlp", "scanned"])
def test_plans_are_programs_in_shardys_dialect(name):
    mlir = pytest.importorskip("jax._src.interpreters.mlir")
    step, args, _, _ = case(name)
    text = parallelize(step, *args, machine="cpu:8").plan.to_sdy()
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(text)
        assert module.operation.verify()
        # JAX's own print of the parsed module.
        printed = str(module)
    assert printed.count("sdy.sharding_constraint") == text.count("= sdy.sharding_constraint") > 20
    assert "sdy.mesh @mesh" in printed
