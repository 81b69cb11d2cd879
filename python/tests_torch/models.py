"""Modules to train. Each function returns a module, its inputs and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.fc1(x))
        x = self.drop(self.norm(x + torch.relu(self.fc2(x))))
        return self.out(x)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.act(self.bn1(self.conv1(x))), 2)
        x = x + self.act(self.bn2(self.conv2(x)))
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x)


def mlp() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    return Mlp(), (torch.randn(16, 32), torch.randint(0, 16, (16,))), {}, functional.cross_entropy


def cnn() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    return Cnn(), (torch.randn(16, 4, 8, 8), torch.randint(0, 8, (16,))), {}, nn.CrossEntropyLoss()


def gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    ids = torch.randint(0, 64, (8, 16))
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids.clone()}, None


MODELS = {"mlp": mlp, "cnn": cnn, "gpt2": gpt2}


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a module's result."""
    return output if isinstance(output, torch.Tensor) else output.loss


class Attention(nn.Module):
    """PyTorch's attention with a mask and an integer argument."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, heads: int = 4) -> torch.Tensor:
        n, s, c = x.shape
        q, k, v = (part.view(n, s, heads, c // heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(n, s, c))
