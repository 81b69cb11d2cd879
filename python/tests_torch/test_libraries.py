"""Libraries around PyTorch train planned modules as they train others. A library that is not installed is skipped."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The processes' results, by case. They start once for all tests."""
    return launch("libraries.py", 2, tmp_path_factory.mktemp("found"))


def test_generation_and_saved_weights_are_those_of_one_process(found: dict[str, Any]) -> None:
    result = found["generate"]
    assert result["same"] and result["length"] > 4
    assert result["difference"] == 0


def installed(result: dict[str, Any]) -> dict[str, Any]:
    if "missing" in result:
        pytest.skip(f"{result['missing']} is not installed")
    return result


def test_adapters_are_trained_and_the_rest_stays_frozen(found: dict[str, Any]) -> None:
    result = installed(found["lora"])
    assert result["difference"] < 1e-5
    assert result["trained"][0] == result["trained"][1] > 0
    assert result["frozen"] > 0


@pytest.mark.parametrize("case", ["trainer", "lightning"])
def test_other_loops_train_as_on_one_process(found: dict[str, Any], case: str) -> None:
    result = installed(found[case])
    assert result["difference"] < 1e-5
    assert result["moved"] > 1e-3
