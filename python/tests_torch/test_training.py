"""Four processes train to the same losses, weights and buffers as one process, under every plan."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from launch import launch

import shardwright

WORLD = 4
SOLVERS = ["exact", "data", "megatron", "fsdp"]
MODELS = ["mlp", "cnn", "gpt2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The processes' results, by case. They start once for all tests."""
    return launch("worker.py", WORLD, tmp_path_factory.mktemp("found"))


@pytest.mark.parametrize("case", [*(f"{model} {solver}" for model in MODELS for solver in SOLVERS), "mlp untied"])
def test_losses_and_weights_are_those_of_one_process(found: dict[str, Any], case: str) -> None:
    result = found[case]
    assert result["losses"][0] != pytest.approx(result["losses"][-1], rel=1e-3), "the loss changes"
    assert result["together"] == pytest.approx(result["losses"], abs=2e-5)
    assert result["difference"] < 2e-5


@pytest.mark.parametrize("model", MODELS)
def test_weights_have_the_planned_layouts(found: dict[str, Any], model: str) -> None:
    assert found[f"{model} data"]["sharded"] == 0
    fsdp = found[f"{model} fsdp"]
    assert fsdp["sharded"] == fsdp["weights"]
    assert "Shard(dim=0)" in fsdp["explained"] and "mesh: " in fsdp["explained"]


@pytest.mark.parametrize("model", MODELS)
def test_nodes_without_exchanges_run_as_one_aten_op(found: dict[str, Any], model: str) -> None:
    result = found[f"{model} data"]
    assert result["calls"] < result["ops"]


@pytest.mark.parametrize("case", [f"{model} {solver}" for model in MODELS for solver in SOLVERS])
def test_every_call_runs_on_shards(found: dict[str, Any], case: str) -> None:
    assert found[case]["gathered"] == {}


def volume(traffic: dict[str, list[int]]) -> int:
    """Bytes; an all-reduce counts as a reduce-scatter and an all-gather."""
    return sum(size * (2 if kind == "all-reduce" else 1) for kind, (_, size) in traffic.items())


@pytest.mark.parametrize("case", [f"{model} {solver}" for model in MODELS for solver in SOLVERS])
def test_issued_collectives_are_the_predicted_ones(found: dict[str, Any], case: str) -> None:
    issued, predicted = found[case]["issued"], found[case]["predicted"]
    # Running statistics are replicated: two gathers of 16 channels for each norm whose channels are split.
    statistics = {"cnn exact": 4 * 64, "cnn megatron": 2 * 64}.get(case, 0)
    assert volume(issued) == volume(predicted) + statistics
    # A sum before a reshape may be planned as a reduce-scatter and an all-gather.
    if case not in ("cnn exact", "cnn megatron", "cnn data", "gpt2 fsdp"):
        assert issued == predicted


def test_plans_are_measured_and_the_fastest_is_kept(found: dict[str, Any]) -> None:
    result = found["measured"]
    assert list(result["measured"]) == ["exact", "data", "2x2", "1x4"]
    assert all(0 < seconds < 60 for seconds in result["measured"].values())
    assert "the fastest kept" in result["explained"]
    # Trials ran on copies: the module's own weights are trained, from their initial values.
    assert result["own"]
    assert result["together"] == pytest.approx(result["losses"], abs=2e-5)
    assert result["difference"] < 2e-5


def test_all_processes_get_the_same_machine_file(found: dict[str, Any], tmp_path: pathlib.Path) -> None:
    text = found["measured"]["machine"]
    assert found["measured"]["same"]
    # Five kinds of collectives among 2 and among 4 processes.
    assert text.count("[[measured]]") == 10 and "overlap = false" in text
    file = tmp_path / "machine.toml"
    file.write_text(text)
    plan = shardwright.plan("mlp:batch=64,hidden=256", machine=str(file))
    assert plan.devices == WORLD and plan.step_seconds > 0


def test_weight_gradients_are_reduced_in_batches_and_accumulate(found: dict[str, Any]) -> None:
    result = found["accumulated"]
    assert result["difference"] < 1e-5
    assert sum(result["sent"]) == 2 * result["elements"], "each once, in each pass"
    assert 4 <= len(result["sent"]) <= 10, "more than one batch, and fewer than one per weight"


def test_a_state_is_kept_and_loaded_under_another_plan(found: dict[str, Any]) -> None:
    kept = found["kept"]
    assert kept["names"] and kept["dtensors"]
    assert kept["by_hand"] == pytest.approx(kept["loss"], abs=1e-5)
    assert kept["checkpoint"] == pytest.approx(kept["loss"], abs=1e-5)
    assert kept["difference"] == 0


def test_a_module_is_evaluated(found: dict[str, Any]) -> None:
    assert found["evaluated"]["type"] == "ShardTensor"
    assert found["evaluated"]["difference"] < 1e-5


@pytest.mark.parametrize("case", ["staged mlp", "staged fsdp", "staged interleaved", "staged zb-v", "staged dualpipe-v"])
def test_a_pipeline_trains_as_one_process_does(found: dict[str, Any], case: str) -> None:
    result = found[case]
    assert result["losses"][1] == pytest.approx(result["losses"][0], abs=2e-6)
    assert result["difference"] < 2e-6
    assert 0 < result["own"][0] < result["own"][1], "a process has the weights of its stage"
    assert result["sharded"] > 0 or case != "staged fsdp"
    turned = case in ("staged zb-v", "staged dualpipe-v")
    assert result["stages"] == ([0, 3] if turned else [0, 2] if case == "staged interleaved" else [0])
    assert "model.step" in result["forward"]
    assert "4 micro-batches do not divide 6 samples" in result["uneven"]


def test_pipelines_that_cannot_run_are_refused(found: dict[str, Any]) -> None:
    assert "schedule zb-h1: this PyTorch runs modules by gpipe, 1f1b, interleaved" in found["refused"]["schedule"]
    assert "`transformer.wte.weight` is used in stages 1 and 2" in found["refused"]["tied"]


def test_refused_calls_name_the_cause(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "8 devices, but there are 4 processes" in refused["machine"]
    assert "1" in refused["memory"] and refused["memory"] != "nothing"
