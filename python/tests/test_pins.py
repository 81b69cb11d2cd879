"""Shardings of arguments that the user gives are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_parallelize import assert_close

from shardwright import PlanError
from shardwright.jax import parallelize


def grid(*shape):
    return Mesh(np.asarray(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])


def loss(params, x, y):
    h = jax.nn.relu(x @ params["in"])
    return jnp.mean((h @ params["out"] - y) ** 2)


def case():
    params = {"in": steps.normal(32, 128, scale=0.2), "out": steps.normal(128, 16, scale=0.1)}
    return params, steps.normal(64, 32), steps.normal(64, 16)


@pytest.mark.parametrize("jitted", [False, True])
def test_shardings_of_a_users_mesh_are_kept(jitted):
    mesh, args = grid(4, 2), case()
    wanted = ({"in": NamedSharding(mesh, P(None, "model")), "out": NamedSharding(mesh, P(("data", "model")))}, None, None)
    step = steps.sgd(loss)
    if jitted:
        fast = parallelize(jax.jit(step, in_shardings=wanted), *args, machine="cpu:8")
    else:
        fast = parallelize(step, *args, machine="cpu:8", in_shardings=wanted)
    for name, sharding in wanted[0].items():
        assert fast.in_shardings[0][name].is_equivalent_to(sharding, 2)
        # The state of the next step stays where it is.
        assert fast.out_shardings[0][name].is_equivalent_to(sharding, 2)
    got = fast(*args)
    assert_close(got, step(*args))
    assert_close(fast(got[0], *args[1:]), step(step(*args)[0], *args[1:]))


def test_an_eval_step_shares_the_layout_of_a_train_step():
    args = case()
    train = parallelize(steps.sgd(loss), *args, machine="cpu:8", solver="fsdp")
    assert any(axes for axes in train.in_shardings[0]["in"].spec)
    evaluate = parallelize(loss, *args, machine="cpu:8", in_shardings=(train.in_shardings[0], None, None))
    for name, sharding in train.in_shardings[0].items():
        assert evaluate.in_shardings[0][name].is_equivalent_to(sharding, 2)
    params, _ = train(*args)
    assert_close(evaluate(params, *args[1:]), loss(params, *args[1:]))


def test_a_batch_may_be_constrained_to_be_whole():
    args = case()
    free = parallelize(loss, *args, machine="cpu:8", solver="exact")
    whole = parallelize(loss, *args, machine="cpu:8", in_shardings=(P(), P(), P()))
    assert all(not any(s.spec) for s in jax.tree.leaves(whole.in_shardings))
    assert_close(whole(*args), loss(*args))
    # The limit costs something, or nothing would be gained by splitting.
    assert whole.plan.objective >= free.plan.objective


@pytest.mark.parametrize(
    "shardings, message",
    [
        ((P("nowhere"), None, None), "the machine's axes are worker.0"),
        ((None, None), "2 entries"),
        ((None, P("worker.0", None, None), None), "has 2 dimensions"),
        ((None, P(("worker.1", "worker.0")), None), "another order"),
        (({"in": P()}, None, None), "does not match the arguments"),
    ],
)
def test_shardings_that_cannot_be_kept_are_refused(shardings, message):
    with pytest.raises(PlanError, match=message):
        parallelize(loss, *case(), machine="cpu:8", in_shardings=shardings)


def test_a_mesh_of_other_devices_is_refused():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    with pytest.raises(PlanError, match="not on the devices of the step"):
        parallelize(loss, *case(), machine="cpu:8", in_shardings=(None, NamedSharding(mesh, P("data")), None))
