"""More models for scripts/torch_coverage.py: Hugging Face's newer families, speech, two towers, and architectures as users write
them. Each builder returns a module and its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Families of decoders from small configs, beside those of the coverage script.
DECODERS = (
    "gemma3_text smollm3 granitemoe gpt_oss phimoe glm4 glm4_moe olmoe jamba falcon_h1 lfm2 qwen3_next mamba2 rwkv deepseek_v2 cohere2 "
    "olmo3 ernie4_5_moe"
).split()
ENCODERS = "modernbert roformer fnet nystromformer esm".split()

#: Sizes of families whose small configs do not fit together otherwise.
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"head_dim": 4, "qk_head_dim": 8, "num_key_value_heads": 4, "qk_rope_head_dim": 4},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}  # fmt: skip


class TimedBlock(nn.Module):
    """Two convolutions, shifted and scaled by an embedding of time."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, 2 * after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
        y = self.conv2(F.dropout(F.silu(self.norm2(y) * (1 + scale) + shift), 0.1, self.training))
        return y + self.skip(x)


class Pixels(nn.Module):
    """Attention among the pixels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(4, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, 3, 2, c // 2, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(n, c, h, w))


class Denoiser(nn.Module):
    """A U-Net with time embeddings and attention, as diffusion models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down1, self.down2 = TimedBlock(8, 8, 32), TimedBlock(8, 16, 32)
        self.shrink, self.grow = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.middle, self.up = Pixels(16), TimedBlock(16, 8, 32)

    def forward(self, x: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(8, dtype=x.dtype) * -(math.log(1e4) / 8))
        angles = steps[:, None].to(x.dtype) * frequencies
        t = self.time(torch.cat((angles.sin(), angles.cos()), -1))
        kept = torch.cos(steps.to(x.dtype) / 1000 * math.pi / 2)[:, None, None, None]
        a = self.down1(self.first(kept * x + (1 - kept**2).sqrt() * noise), t)
        b = self.middle(self.down2(self.shrink(a), t))
        b = self.grow(F.interpolate(b, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(self.up(torch.cat((a, b), 1), t)), noise)


class Switch(nn.Module):
    """Experts with a capacity: tokens that find no place are passed on. Dispatch and combination are products."""

    def __init__(self, width: int = 16, experts: int = 4, capacity: int = 6) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(width, experts, bias=False), capacity
        self.up, self.down = nn.Parameter(torch.randn(experts, width, 32) * 0.1), nn.Parameter(torch.randn(experts, 32, width) * 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        chances = self.router(tokens).softmax(-1)
        gate, expert = chances.max(-1)
        chosen = F.one_hot(expert, chances.shape[-1]).to(x.dtype)
        place = (chosen.cumsum(0) - 1) * chosen
        fits = chosen * (place < self.capacity)
        slots = F.one_hot(place.sum(-1).long().clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
        dispatch = fits[:, :, None] * slots[:, None, :]
        inside = torch.einsum("tec,td->ecd", dispatch, tokens)
        made = torch.einsum("ecf,efd->ecd", F.gelu(torch.einsum("ecd,edf->ecf", inside, self.up)), self.down)
        balance = (chosen.mean(0) * chances.mean(0)).sum() * chances.shape[-1]
        out = torch.einsum("tec,ecd->td", dispatch * gate[:, None, None], made)
        return (tokens + out).view_as(x), balance


class Cells(nn.Module):
    """A gated recurrence with a matrix memory, written as a loop, and attention over its states."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix, self.gates, self.score = nn.Linear(width, 3 * width), nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, s, c = x.shape
        memory, norm, states = x.new_zeros(n, c, c), x.new_zeros(n, c), []
        for t in range(s):
            q, k, v = self.mix(x[:, t]).chunk(3, -1)
            keep, take = self.gates(x[:, t]).sigmoid().unsqueeze(-1).unbind(1)
            memory = keep[..., None] * memory + take[..., None] * (v[:, :, None] * k[:, None, :])
            norm = keep * norm + take * k
            states.append(torch.bmm(memory, q[..., None]).squeeze(-1) / (norm * q).sum(-1, keepdim=True).abs().clamp(min=1.0))
        y = torch.stack(states, 1)
        return (self.score(y).softmax(1) * y).sum(1)


class GraphAttention(nn.Module):
    """Attention along edges, with a softmax over the edges of each node."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.lift, self.out = heads, nn.Linear(width, heads * width), nn.Linear(heads * width, width)
        self.source, self.target = nn.Parameter(torch.randn(heads, width)), nn.Parameter(torch.randn(heads, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        a, b = edges
        h = self.lift(x).view(len(x), self.heads, -1)
        score = F.leaky_relu((h * self.source).sum(-1)[a] + (h * self.target).sum(-1)[b], 0.2)
        most = torch.full((len(x), self.heads), -1e9, dtype=x.dtype).scatter_reduce(0, b[:, None].expand_as(score), score.detach(), "amax")
        weight = (score - most[b]).exp()
        total = torch.zeros_like(most).index_add(0, b, weight)
        sent = h[a] * (weight / total[b])[..., None]
        return self.out(torch.zeros_like(h).index_add(0, b, sent).flatten(1)).relu()


class Conformer(nn.Module):
    """Half feed-forward steps around attention and a depthwise convolution, on frames of sound."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Conv1d(1, width, 10, stride=5), nn.GELU(), nn.GroupNorm(width, width), nn.Conv1d(width, width, 4, stride=2))
        self.feed = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, width)) for _ in range(2))
        self.attention, self.norm = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True), nn.LayerNorm(width)
        self.wide, self.depth, self.batch = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 5, padding=2, groups=width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        x = self.frames(sound[:, None]).transpose(1, 2)
        x = x + 0.5 * self.feed[0](x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + F.silu(self.batch(self.depth(F.glu(self.wide(x.transpose(1, 2)), 1)))).transpose(1, 2)
        x = x + 0.5 * self.feed[1](x)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        n, s = len(sound), x.shape[1]
        return F.ctc_loss(scores, labels, torch.full((n,), s), torch.full((n,), labels.shape[1]))


class Ranked(nn.Module):
    """Tables of features, their products in pairs, and a deep part beside a wide one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(32, 8) for _ in range(4))
        self.dense, self.top, self.wide = nn.Linear(5, 8), nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1)), nn.EmbeddingBag(64, 1, mode="sum")

    def forward(self, numbers: Tensor, ids: Tensor, crossed: Tensor, clicked: Tensor) -> Tensor:
        x = self.dense(numbers).relu()
        rows = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(5, 5, -1)
        score = self.top(torch.cat((x, pairs[:, i, j]), 1)) + self.wide(crossed)
        return F.binary_cross_entropy_with_logits(score.squeeze(1), clicked)


def _speech(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        config = transformers.AutoConfig.for_model(
            kind, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16), conv_kernel=(10, 3),
            conv_stride=(5, 2), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=12, pad_token_id=0,
            mask_time_prob=0.0, layerdrop=0.0, num_feat_extract_layers=2,
        )  # fmt: skip
        return transformers.AutoModelForCTC.from_config(config), {"input_values": torch.randn(4, 400), "labels": torch.randint(1, 12, (4, 5))}

    return build


def _towers() -> Any:
    import transformers

    text = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "eos_token_id": 2}
    image = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
    ids = torch.randint(3, 90, (4, 8))
    return transformers.CLIPModel(config), {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16), "return_loss": True}


MORE: dict[str, Callable[[], Any]] = {
    "denoising u-net": lambda: (Denoiser(), (torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.randint(0, 1000, (4,)))),
    "experts with a capacity": lambda: (Switch(), (torch.randn(4, 8, 16),)),
    "matrix memory": lambda: (Cells(), (torch.randn(4, 6, 16),)),
    "graph attention": lambda: (GraphAttention(), (torch.randn(12, 8), torch.randint(0, 12, (2, 40)))),
    "conformer": lambda: (Conformer(), (torch.randn(4, 400), torch.randint(1, 6, (4, 5)))),
    "ranking": lambda: (
        Ranked(),
        (torch.randn(8, 5), torch.randint(0, 32, (8, 4)), torch.randint(0, 64, (8, 3)), torch.randint(0, 2, (8,)).to(torch.get_default_dtype())),
    ),
    "wav2vec2": _speech("wav2vec2"),
    "hubert": _speech("hubert"),
    "clip": _towers,
}
