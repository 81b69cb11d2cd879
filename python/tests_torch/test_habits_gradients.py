"""Gradients of gradients, other weights and penalties are those of one process; what cannot work is refused."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The processes' results, by case. They start once for all tests."""
    return launch("habits_gradients.py", 2, tmp_path_factory.mktemp("found"))


SOLVERS = ["data", "fsdp", "megatron"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_gradients_are_differentiated_again(found: dict[str, Any], solver: str) -> None:
    result = found[f"twice {solver}"]
    assert result["gradients"] < 1e-5
    assert ("classes are split" in result["refused"]) == (solver == "megatron")


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_loss_outside_of_the_module_has_a_penalty_on_weights(found: dict[str, Any], solver: str) -> None:
    result = found[f"penalty {solver}"]
    assert result["loss"] < 1e-5 and result["gradients"] < 1e-5


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_pass_with_other_weights_has_their_values_and_gradients(found: dict[str, Any], solver: str) -> None:
    result = found[f"other weights {solver}"]
    assert result["loss"] < 1e-5 and result["gradients"] < 1e-5
    assert result["kept"] < 1e-6, "postponed gradients are not lost"


@pytest.mark.parametrize("solver", SOLVERS)
def test_inference_mode(found: dict[str, Any], solver: str) -> None:
    result = found[f"inference {solver}"]
    assert result["values"] < 1e-5 and result["gradients"] < 1e-6


@pytest.mark.parametrize("solver", SOLVERS)
def test_writes_into_weights_and_other_references_to_them(found: dict[str, Any], solver: str) -> None:
    result = found[f"written table {solver}"]
    assert result["weights"] < 1e-5
    assert result["warned"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_keep_hooks_and_attributes_and_early_optimizers_are_refused(found: dict[str, Any], solver: str) -> None:
    result = found[f"kept weights {solver}"]
    assert result["gradients"] < 1e-6 and result["weights"] < 1e-6
    assert result["attribute"] and "after parallelize" in result["refused"]
    assert result["copied"] > 0, "a full state is a copy"


def test_containers_are_indexed_and_what_cannot_work_is_refused(found: dict[str, Any]) -> None:
    result = found["containers"]
    assert (result["length"], result["kinds"], result["first"]) == (2, ["Linear", "ReLU"], "Linear")
    assert not result["without"] and result["true"]
    assert "full_state_dict" in result["pickled"]
    assert "torch.autograd.grad" in result["transformed"] and "habits_gradients.py" in result["transformed"]
