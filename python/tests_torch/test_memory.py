"""The plan's peak memory is that of the step that runs."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from launch import launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first process's measurements, by case."""
    return launch("memory.py", 2, pathlib.Path(tmp_path_factory.mktemp("found")))


@pytest.mark.parametrize(
    "case",
    [
        "blocks data",
        "blocks fsdp",
        "blocks data, recomputed",
        "blocks fsdp, recomputed",
        "blocks data, micro-batches",
        "blocks data, 16 bits",
        "blocks fsdp, 16 bits",
        "layers data",
        "layers megatron",
    ],
)
def test_peak_memory_is_predicted_within_a_tenth(found: dict[str, Any], case: str) -> None:
    assert found[case]["predicted"] == pytest.approx(found[case]["measured"], rel=0.1)


def test_with_memory_to_spare_batches_of_gradients_are_kept_and_nothing_else(found: dict[str, Any]) -> None:
    result = found["blocks data, memory to spare"]
    tight = found["blocks data"]["measured"]
    assert tight < result["measured"] <= result["predicted"] * 1.1 + result["gradients"]
