"""Predicted collectives and memory against XLA's compiled program."""

from collections import Counter

import foreign_calls  # noqa: F401
import foreign_libraries  # noqa: F401
import foreign_models  # noqa: F401
import foreign_others  # noqa: F401
import foreign_programs  # noqa: F401
import jax
import pytest
import steps
from foreign_steps import FOREIGN

from shardwright.jax import Verification, parallelize, verify_plan
from shardwright.jax._hlo import collectives

MESH = {"a": 2, "b": 2, "c": 2}


def test_every_form_of_replica_groups_is_read():
    text = """HloModule m
%add (x: f32[], y: f32[]) -> f32[] {
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}
%cond (p: (s32[], f32[8])) -> pred[] {
}
ENTRY %main (p0: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %g = f32[16,4]{1,0} all-gather(%p0), channel_id=2, replica_groups=[4,2]<=[2,2,2]T(1,2,0), dimensions={0}
  %s = (f32[4]{0}, bf16[2,2]{1,0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add
  %c = f32[2]{0} reduce-scatter(%p0), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %n = f32[4,4]{1,0} all-reduce(%p0), replica_groups=mesh['x'=1,'y'=2,'z'=4], device_ids=([4,2]T(1,0)) {'y'}, to_apply=%add
  %o = f32[4,8]{1,0} all-reduce(%p0), replica_groups=mesh['x'=8] {'x':(2)2}, to_apply=%add
  %m = f32[4]{0} collective-permute(%p0), source_target_pairs={{0,2},{2,0},{1,1}}
}
"""
    found = {(c.kind, c.axes, c.bytes, c.count) for c in collectives(text, MESH)}
    assert found == {
        ("all-reduce", ("c",), 32, 3),
        ("all-gather", ("a",), 256, 1),
        ("all-reduce", ("b", "c"), 16, 1),
        ("all-reduce", ("b", "c"), 8, 1),
        ("all-reduce", ("c",), 64, 1),
        ("all-reduce", ("b",), 128, 1),
        ("reduce-scatter", ("a", "b", "c"), 64, 1),
        ("collective-permute", ("b",), 16, 1),
    }


def test_widened_and_renamed_collectives_count_as_agreement():
    a, b = ("a",), ("a", "b")
    scatter, permute, gather = ("reduce-scatter", a, 64), ("collective-permute", b, 32), ("all-gather", a, 8)
    compiled = Counter({("all-reduce", a, 128): 2, ("collective-permute", a, 32): 1, ("all-gather", a, 16): 1})
    found = Verification(Counter({scatter: 2, permute: 1, gather: 1}), compiled, Counter(), 1, 1, 1, narrow={scatter})
    assert {name: dict(keys) for name, keys in found.matches.items()} == {"widened": {scatter: 2}, "permuted": {permute: 1}}
    # A gather of 32-bit numbers is not widened: it was sent, and not predicted.
    assert found.unpredicted == {("all-gather", a, 16): 1}
    assert found.agreement == (2 * 64 + 32) / (2 * 64 + 32 + 8 + 16)


@pytest.mark.parametrize(
    "name, solver, least",
    [("mlp", "data", 0.99), ("mlp", "fsdp", 0.99), ("mlp", "exact", 0.9), ("cnn", "fsdp", 0.99), ("scanned", "fsdp", 0.95)],
)
def test_xla_sends_the_predicted_bytes(name, solver, least):
    step, args = steps.CASES[name]()
    fast = parallelize(step, *args, machine="cpu:8", solver=solver)
    verification = verify_plan(fast, *args)
    assert verification.agreement >= least, verification.table()
    assert "by XLA" in verification.table()


# What XLA once divided in another way, or resharded by another route.
FOLLOWED = {
    "private_gradients": "a product reads what a transpose of its operand reads",
    "nnx_convolutions": "transposes around convolutions have layouts of their own",
    "attention_grouped_causal_window": "two reshapes are one op of the plan",
    "recommendation": "a stack is several operations",
    "optax_apply_if_finite": "truth values are reduced as numbers",
    "integer_products": "8-bit integers are planned as 32-bit ones",
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_xla_follows_plans_of_foreign_steps(name):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    step, args = FOREIGN[name]()
    found = verify_plan(parallelize(step, *args, machine="cpu:8", time=10), propagated=False)
    assert found.compiled and found.agreement >= 0.95, found.table()


def test_differences_say_whether_a_call_or_a_repetition_sends_them():
    inside, again = ("collective-permute", ("a",), 32), ("all-gather", ("a",), 8)
    found = Verification(
        Counter({again: 1}), Counter({inside: 1, again: 3}), Counter(), 1, 1, 1,
        sources={inside: {"jit(f)/shard_map/ppermute"}, again: {"jit(f)/while/body/sharding_constraint"}},
        calls=frozenset({"shard_map"}),
    )  # fmt: skip
    assert found.differences == {"calls": (0, 32), "sent again": (0, 16)}


LARGE = {
    "mlp": lambda: steps.mlp(2048, 1024),
    "cnn": lambda: steps.cnn(256),
    "scanned": lambda: steps.scanned(32, 128, 256, 8, 3),
    "moe": lambda: steps.moe(2048, 256, 512, 8),
}


@pytest.mark.parametrize(
    "name, solver", [("mlp", "data"), ("mlp", "fsdp"), ("cnn", "data"), ("scanned", "data"), ("moe", "megatron")]
)
def test_xla_allocates_the_predicted_memory(name, solver):
    step, args = LARGE[name]()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    kept = verify_plan(parallelize(step, *shapes, machine="cpu:8", solver=solver), *shapes)
    assert kept.predicted_peak_bytes == pytest.approx(kept.compiled_peak_bytes, rel=0.15)


def test_donated_arguments_are_not_held_twice():
    step, args = steps.mlp(2048, 1024)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    given = verify_plan(parallelize(step, *shapes, machine="cpu:8", solver="fsdp", donate_argnums=0), *shapes)
    kept = verify_plan(parallelize(step, *shapes, machine="cpu:8", solver="fsdp"), *shapes)
    assert given.predicted_peak_bytes < kept.predicted_peak_bytes
    assert given.predicted_peak_bytes == pytest.approx(given.compiled_peak_bytes, rel=0.15)
