"""What a capture tells about ops that cannot be split, branches, and modules that do not run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import PlanError
from shardwright.torch import parallelize
from shardwright.torch._capture import capture


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.rfft(self.fc(x)).abs()
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        self.fc = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(self.odd(x))
        return torch.linalg.inv(self.fc.weight[:, :4]) @ y.t()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if y.sum() > 0:
            return y
        return -y


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).view(3, 7)


def captured(module: nn.Module, *inputs: Any) -> Any:
    return capture(module, inputs, {}, None)


def test_every_op_that_cannot_be_split_is_named_with_its_line() -> None:
    found = captured(Net(), torch.randn(2, 8))
    line = inspect.getsourcelines(Odd.forward)[1] + 1
    assert any(f"test_errors.py:{line}: x = torch.fft.rfft" in w and "fft" in w for w in found.warnings)
    assert [op.kind for op in found.graph.ops].count("opaque") >= 2


def test_a_branch_on_values_is_planned_as_the_example_takes_it() -> None:
    found = captured(Branch(), torch.randn(2, 4))
    assert any("branches are planned as the example takes them" in w for w in found.warnings)
    assert [op.name for op in found.graph.ops][:2] == ["fc", "fc.add_bias"]


def test_a_module_that_does_not_run_names_its_line() -> None:
    with pytest.raises(PlanError) as caught:
        captured(Short(), torch.randn(2, 4))
    message = str(caught.value)
    assert "Short does not run on the example inputs" in message
    assert "test_errors.py" in message and "view(3, 7)" in message


def test_a_capture_leaves_the_module_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Branch())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    captured(module, torch.randn(8, 4))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(module[0].weight.data) is torch.Tensor


def test_processes_are_required() -> None:
    with pytest.raises(PlanError, match="torchrun"):
        parallelize(Branch(), (torch.randn(2, 4),))
