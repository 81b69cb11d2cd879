"""Measurements under JAX: machines, matrix products, and plans."""

import json

import jax
import numpy as np
import pytest
import steps

import shardwright
from shardwright import _trial
from shardwright.jax import _probe, parallelize, probe, profile


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_probe, "_MESSAGES", (1 << 12, 1 << 14))
    monkeypatch.setattr(_probe, "_SIDES", (32, 256))


def test_a_probed_machine_can_be_planned_for(quick, tmp_path):
    machine, costs = tmp_path / "machine.toml", tmp_path / "costs.json"
    machine.write_text(probe(jax.devices()[:4]))
    costs.write_text(profile(jax.devices()[:4]))
    assert json.loads(costs.read_text())["device"] == "probed"
    # Five kinds of collectives among 2 and among 4 devices.
    assert machine.read_text().count("[[measured]]") == 10
    plan = shardwright.plan("mlp:batch=64,hidden=256", machine=str(machine), costs=str(costs))
    assert plan.devices == 4 and plan.step_seconds > 0
    # Host devices do not compute while they move data.
    assert "overlap = false" in machine.read_text()


def test_the_fastest_plan_is_kept():
    step, args = steps.CASES["mlp"]()
    fast = parallelize(step, *args, machine="cpu:4", measure=True, donate_argnums=0)
    assert list(fast.measured) == ["auto", "auto, arguments alone", "data", "2x2", "1x4"]
    assert all(0 < seconds < 60 for seconds in fast.measured.values())
    assert "the fastest kept" in fast.explain()
    want = jax.jit(step)(*args)
    np.testing.assert_allclose(fast(*fast.shard(args))[1], want[1], rtol=1e-4)


def test_close_candidates_run_again_and_hopeless_ones_do_not():
    times = {"a": [2.0, 1.9], "b": [1.9, 1.8], "c": [9.0]}
    limits = []

    def seconds(name, hopeless):
        limits.append((name, hopeless))
        return times[name].pop(0)

    best, measured = _trial.fastest(((name, name) for name in times), seconds)
    assert best == "b" and measured == {"a": 1.9, "b": 1.8, "c": 9.0}
    assert [name for name, _ in limits] == ["a", "b", "c", "a", "b"]
    assert limits[1][1] == 4.0 and limits[2][1] == 3.8


def test_steps_with_random_keys_are_measured():
    def step(w, key):
        return w + jax.random.normal(key, w.shape)

    fast = parallelize(step, np.ones((8, 8), np.float32), jax.random.key(0), machine="cpu:2", measure=True)
    assert all(0 < seconds < 60 for seconds in fast.measured.values())
