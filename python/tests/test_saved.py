"""Plans that are made apart from the devices: saved, loaded, and held to their step."""

import jax
import jax.numpy as jnp
import pytest
import steps
from test_parallelize import assert_close

import shardwright
from shardwright import DoesNotFit, PlanError
from shardwright.jax import parallelize, plan


def test_a_saved_plan_runs_its_step(tmp_path):
    step, args = steps.mlp()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    made = plan(step, *shapes, machine="cpu:8", solver="fsdp")
    made.save(tmp_path / "plan.json")
    fast = parallelize(step, *args, plan=tmp_path / "plan.json")
    assert fast.plan.configs() == made.configs()
    assert_close(fast(*args), step(*args))
    assert_close(parallelize(step, *args, plan=shardwright.Plan.load(tmp_path / "plan.json"))(*args), step(*args))


def test_a_plan_with_stand_ins_runs_its_step():
    def step(x, w):
        return jnp.linalg.slogdet(x.T @ x + jnp.eye(16))[1] + jax.scipy.special.gammaln(1 + jnp.abs(x @ w)).sum()

    args = steps.normal(32, 16), steps.normal(16, 16)
    made = plan(step, *args, machine="cpu:8")
    assert_close(parallelize(step, *args, plan=made)(*args), step(*args))


def test_a_plan_of_another_step_is_refused():
    step, args = steps.mlp()
    made = plan(step, *args, machine="cpu:8", solver="data")
    other, other_args = steps.mlp(batch=32)
    with pytest.raises(PlanError, match="another step"):
        parallelize(other, *other_args, plan=made)
    fast = parallelize(step, *args, plan=made)
    with pytest.raises(PlanError, match="another step"):
        fast(*other_args)
    with pytest.raises(PlanError, match="not of a JAX step"):
        parallelize(step, *args, plan=shardwright.plan("mlp", machine="cpu:8"))


def test_a_machine_that_is_not_there_can_be_planned_for():
    step, args = steps.mlp()
    assert plan(step, *args, machine="h100x64").devices == 64


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_memory_limits_bound_the_compiled_program(share):
    step, args = steps.mlp(batch=256, width=256)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    free = parallelize(step, *shapes, machine="cpu:8", solver="exact", memory="none")
    limit = int(free.first.compiled_bytes() * share)
    try:
        fast = parallelize(step, *shapes, machine="cpu:8", solver="exact", memory=limit)
    except DoesNotFit as error:
        assert "XLA needs" in str(error)
    else:
        assert fast.first.compiled_bytes() <= limit
        assert_close(fast(*args), step(*args))
