"""Errors list all unsupported ops at once, each with its module and line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import PlanError
from shardwright.torch import parallelize
from shardwright.torch._capture import capture
from shardwright.torch._translate import Translator


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


def translated(module: nn.Module, *inputs: Any) -> Any:
    return Translator(capture(module, inputs, {}, None), module, "net").run()


def test_every_unsupported_op_is_named_with_its_module_and_line() -> None:
    with pytest.raises(PlanError) as caught:
        translated(Net(), torch.randn(2, 8))
    message = str(caught.value)
    assert message.startswith("2 ops of Net cannot be planned")
    assert "fft" in message and "in module `odd`" in message
    line = inspect.getsourcelines(Odd.forward)[1] + 1
    assert f"test_errors.py:{line}: x = torch.fft.rfft" in message
    assert "linalg" in message and "torch.linalg.inv" in message
    assert "docs/torch.md" in message


def test_a_graph_break_names_its_line() -> None:
    with pytest.raises(PlanError) as caught:
        translated(Branch(), torch.randn(2, 4))
    message = str(caught.value)
    assert "Branch cannot be captured as one graph" in message
    assert "test_errors.py" in message and "torch.cond" in message


def test_processes_are_required() -> None:
    with pytest.raises(PlanError, match="torchrun"):
        parallelize(Branch(), (torch.randn(2, 4),))
