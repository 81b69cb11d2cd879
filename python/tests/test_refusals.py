"""What cannot be planned is refused with the line of the user's code, or with the name of the argument."""

import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import PartitionSpec as P
from test_parallelize import assert_close

from shardwright import PlanError
from shardwright.jax import parallelize, plan


def args():
    return steps.normal(64, 32), steps.normal(32, 16)


def refused(step, offset, *given, message="", error=PlanError, **options):
    """The step is refused, with the line that is so far from its first one."""
    line = step.__code__.co_firstlineno + offset
    with pytest.raises(error) as found:
        parallelize(step, *(given or args()), machine="cpu:8", **options)
    text = "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])
    assert f"test_refusals.py:{line}" in text, text
    assert message in text, text


def test_ordered_effects_are_refused_on_several_devices():
    def printing(x, w):
        h = x @ w
        jax.debug.print("seen {}", h.sum(), ordered=True)
        return h.sum()

    def in_a_loop(x, w):
        def body(h, _):
            jax.debug.callback(lambda v: None, h.mean(), ordered=True)
            return h * 2, None

        return jax.lax.scan(body, x @ w, None, length=2)[0].sum()

    refused(printing, 2, message="ordered effects are possible on one device only")
    refused(in_a_loop, 2, message="ordered effects")
    x, w = args()
    assert_close(parallelize(printing, x, w, machine="cpu:1")(x, w), printing(x, w))


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes of errors came with Python 3.11")
def test_errors_of_a_trace_name_the_line_and_the_argument():
    def branching(x, w):
        if w.sum() > 0:
            return x @ w
        return x

    def mismatched(x, w):
        return w @ x @ w @ w

    refused(branching, 1, error=jax.errors.TracerBoolConversionError, message="plain[1] is argument 1")
    refused(mismatched, 1, error=TypeError, message="cannot be traced")


def test_rules_that_do_not_fit_their_call_are_refused():
    def step(x, w):
        return jax.ffi.ffi_call("their_kernel", jax.ShapeDtypeStruct((64, 16), jnp.float32))(x @ w).sum()

    refused(step, 1, rules={"their_kernel": "n d q -> n d"}, message="the rule of `their_kernel`")


@pytest.mark.parametrize("memory", [[1], "much", 80, float("nan")])
def test_sizes_that_are_none_are_explained(memory):
    with pytest.raises(PlanError, match="memory|much"):
        parallelize(lambda x, w: (x @ w).sum(), *args(), machine="cpu:8", memory=memory)


def test_axes_that_the_machine_lacks_are_named_once():
    with pytest.raises(PlanError) as found:
        parallelize(lambda x, w: (x @ w).sum(), *args(), machine="cpu:8", in_shardings=(P("nope"), None))
    assert str(found.value).count("in_shardings") == 1 and "worker.0" in str(found.value)


def test_a_plan_runs_an_equal_step_of_another_name():
    def first(x, w):
        return jnp.tanh(x @ w).sum()

    def second(x, w):
        return jnp.tanh(x @ w).sum()

    given = plan(first, *args(), machine="cpu:8")
    x, w = args()
    assert_close(parallelize(second, x, w, plan=given)(x, w), second(x, w))
    with pytest.raises(PlanError, match="the plan is of another step"):
        parallelize(lambda x, w: (x @ w).sum(), x, w, plan=given)
