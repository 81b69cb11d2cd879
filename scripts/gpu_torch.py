"""The zoo's models in PyTorch, and the measurement of their training steps. Used by scripts/bench_gpu.py.

Every model is the zoo's, layer by layer: queries, keys and values by a linear layer each, fused attention, tied logits where the
zoo ties them. `forward` returns the loss, computed in f32. Weights of `bf16` and `mixed` are bf16; `mixed` keeps an f32 master copy and f32
moments.
"""

from __future__ import annotations

import gc
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

WARM, STEPS = 4, 10


def options(spec: str) -> tuple[str, dict[str, str]]:
    """A zoo spec's name and options."""
    name, _, rest = spec.partition(":")
    return name, dict(pair.split("=") for pair in rest.split(",") if pair)


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, bias, causal, dropout=0.0, theta=None):
        super().__init__()
        self.heads, self.kv_heads, self.causal, self.dropout = heads, kv_heads, causal, dropout
        self.size = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=bias)
        self.k = nn.Linear(hidden, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(hidden, kv_heads * self.size, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.theta = theta

    def turn(self, x, tables):
        cos, sin = tables
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x, tables=None, memory=None):
        n, s, _ = x.shape
        memory = x if memory is None else memory
        q = self.q(x).view(n, s, self.heads, self.size)
        k = self.k(memory).view(n, s, self.kv_heads, self.size)
        v = self.v(memory).view(n, s, self.kv_heads, self.size)
        if tables is not None:
            q, k = self.turn(q, tables), self.turn(k, tables)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).reshape(n, s, -1))


class Mlp(nn.Module):
    def __init__(self, hidden, inner, act):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(hidden, inner), nn.Linear(inner, hidden), act

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Gated(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def loss_of(logits, labels, wide):
    if wide:
        logits = logits.float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class Gpt(nn.Module):
    def __init__(self, o, wide):
        super().__init__()
        layers, hidden, heads = (int(o.get(k, d)) for k, d in [("layers", 12), ("hidden", 768), ("heads", 12)])
        self.vocab, self.seq = int(o.get("vocab", 50257)), int(o.get("seq", 1024))
        self.wide = wide
        self.wte, self.wpe = nn.Embedding(self.vocab, hidden), nn.Parameter(0.02 * torch.randn(self.seq, hidden))
        nn.init.normal_(self.wte.weight, std=0.02)
        gelu = nn.GELU("tanh")
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"ln1": nn.LayerNorm(hidden), "attn": Attention(hidden, heads, heads, True, True),
                           "ln2": nn.LayerNorm(hidden), "mlp": Mlp(hidden, 4 * hidden, gelu)}) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)

    def inputs(self, batch, device):
        return [torch.randint(0, self.vocab, (batch, self.seq), device=device) for _ in range(2)]

    def forward(self, tokens, labels):
        x = self.wte(tokens) + self.wpe
        for block in self.blocks:
            x = x + block["attn"](block["ln1"](x))
            x = x + block["mlp"](block["ln2"](x))
        return loss_of(F.linear(self.ln_f(x), self.wte.weight), labels, self.wide)


class Llama(nn.Module):
    def __init__(self, o, wide):
        super().__init__()
        read = lambda key, default: int(o.get(key, default))
        layers, hidden, heads, kv = read("layers", 16), read("hidden", 2048), read("heads", 32), read("kv_heads", 8)
        inner, self.vocab, self.seq = read("ffn", 8192), read("vocab", 128256), read("seq", 2048)
        self.wide, self.size = wide, hidden // heads
        self.embedding = nn.Embedding(self.vocab, hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.logits = None if o.get("tied", "yes") == "yes" else nn.Linear(hidden, self.vocab, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm1": nn.RMSNorm(hidden, 1e-5), "attn": Attention(hidden, heads, kv, False, True),
                           "norm2": nn.RMSNorm(hidden, 1e-5), "mlp": Gated(hidden, inner)}) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, 1e-5)

    def inputs(self, batch, device):
        half = torch.arange(self.size // 2, device=device) / (self.size // 2)
        angle = torch.arange(self.seq, device=device)[:, None, None] * 500000.0 ** -half
        dtype = self.embedding.weight.dtype
        self.tables = (angle.cos().to(dtype), angle.sin().to(dtype))
        return [torch.randint(0, self.vocab, (batch, self.seq), device=device) for _ in range(2)]

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block["attn"](block["norm1"](x), self.tables)
            x = x + block["mlp"](block["norm2"](x))
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.logits is None else self.logits(x)
        return loss_of(logits, labels, self.wide)


class Bert(nn.Module):
    def __init__(self, o, wide):
        super().__init__()
        layers, hidden, heads = (int(o.get(k, d)) for k, d in [("layers", 12), ("hidden", 768), ("heads", 12)])
        inner, self.vocab, self.seq = int(o.get("ffn", 3072)), int(o.get("vocab", 30522)), int(o.get("seq", 512))
        rate, self.wide = float(o.get("dropout", 0.1)), wide
        self.word, self.kind = nn.Embedding(self.vocab, hidden), nn.Embedding(2, hidden)
        nn.init.normal_(self.word.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(self.seq, hidden))
        norm = lambda: nn.LayerNorm(hidden, 1e-12)
        self.norm, self.drop = norm(), nn.Dropout(rate)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(hidden, heads, heads, True, False, rate), "norm1": norm(),
                           "mlp": Mlp(hidden, inner, nn.GELU()), "norm2": norm()}) for _ in range(layers))
        self.transform, self.mlm_norm = nn.Linear(hidden, hidden), norm()
        self.bias = nn.Parameter(torch.zeros(self.vocab))
        self.pooler, self.next = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def inputs(self, batch, device):
        ids = lambda limit, *shape: torch.randint(0, limit, shape, device=device)
        return [ids(self.vocab, batch, self.seq), ids(2, batch, self.seq), ids(self.vocab, batch, self.seq), ids(2, batch)]

    def forward(self, tokens, kinds, labels, following):
        x = self.drop(self.norm(self.word(tokens) + self.kind(kinds) + self.position))
        for block in self.blocks:
            x = block["norm1"](x + self.drop(block["attn"](x)))
            x = block["norm2"](x + self.drop(block["mlp"](x)))
        y = self.mlm_norm(F.gelu(self.transform(x)))
        masked = loss_of(F.linear(y, self.word.weight, self.bias), labels, self.wide)
        return masked + loss_of(self.next(torch.tanh(self.pooler(x[:, 0]))), following, self.wide)


class Vit(nn.Module):
    def __init__(self, o, wide, layers, hidden, heads, patch):
        super().__init__()
        self.wide, tokens = wide, (224 // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.cls, self.position = nn.Parameter(torch.zeros(1, hidden)), nn.Parameter(0.02 * torch.randn(tokens, hidden))
        norm = lambda: nn.LayerNorm(hidden, 1e-12)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm1": norm(), "attn": Attention(hidden, heads, heads, True, False),
                           "norm2": norm(), "mlp": Mlp(hidden, 4 * hidden, nn.GELU())}) for _ in range(layers))
        self.norm, self.logits = norm(), nn.Linear(hidden, 1000)

    def inputs(self, batch, device):
        dtype = self.cls.dtype
        return [torch.randn(batch, 3, 224, 224, device=device, dtype=dtype), torch.randint(0, 1000, (batch,), device=device)]

    def forward(self, x, labels):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], 1) + self.position
        for block in self.blocks:
            x = x + block["attn"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        return loss_of(self.logits(self.norm(x)[:, 0]), labels, self.wide)


class Images(nn.Module):
    def __init__(self, body, classifier, wide, size=224):
        super().__init__()
        self.body, self.classifier, self.wide, self.size = body, classifier, wide, size

    def inputs(self, batch, device):
        weight = next(self.parameters())
        x = torch.randn(batch, 3, self.size, self.size, device=device, dtype=weight.dtype)
        return [x, torch.randint(0, 1000, (batch,), device=device)]

    def forward(self, x, labels):
        return loss_of(self.classifier(self.body(x).flatten(1)), labels, self.wide)


def vgg16(o, wide):
    layers, c = [], 3
    for width, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(count):
            layers += [nn.Conv2d(c, width, 3, padding=1), nn.ReLU(inplace=True)]
            c = width
        layers.append(nn.MaxPool2d(2))
    rate = float(o.get("dropout", 0.5))
    fc = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(rate), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
          nn.Dropout(rate), nn.Linear(4096, 1000)]
    return Images(nn.Sequential(*layers), nn.Sequential(*fc), wide)


class Bottleneck(nn.Module):
    def __init__(self, c, width, stride, project):
        super().__init__()
        conv = lambda a, b, k, s=1: nn.Conv2d(a, b, k, s, k // 2, bias=False)
        self.conv1, self.bn1 = conv(c, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.short = nn.Sequential(conv(c, 4 * width, 1, stride), nn.BatchNorm2d(4 * width)) if project else None

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.short is None else self.short(x)), inplace=True)


def resnet(o, wide):
    blocks = {"50": [3, 4, 6, 3], "152": [3, 8, 36, 3]}.get(o.get("depth"), [3, 4, 23, 3])
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    c = 64
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Bottleneck(c, 64 << stage, 2 if stage and not i else 1, i == 0))
            c = 256 << stage
    return Images(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), nn.Linear(c, 1000), wide)


class MlpModel(nn.Module):
    def __init__(self, o, wide):
        super().__init__()
        self.wide, self.input = wide, int(o.get("input", 784))
        hidden, layers, c = int(o.get("hidden", 1024)), [], self.input
        for _ in range(int(o.get("layers", 3))):
            layers += [nn.Linear(c, hidden), nn.ReLU()]
            c = hidden
        self.body = nn.Sequential(*layers, nn.Linear(hidden, 10))

    def inputs(self, batch, device):
        dtype = next(self.parameters()).dtype
        return [torch.randn(batch, self.input, device=device, dtype=dtype), torch.randint(0, 10, (batch,), device=device)]

    def forward(self, x, labels):
        return loss_of(self.body(x), labels, self.wide)


class Dlrm(nn.Module):
    def __init__(self, o, wide):
        super().__init__()
        self.count, self.rows = int(o.get("tables", 8)), int(o.get("rows", 1_000_000))
        dim = int(o.get("dim", 64))
        layer = lambda a, b: nn.Sequential(nn.Linear(a, b), nn.ReLU())
        self.bottom = nn.Sequential(layer(64, 512), layer(512, 512), layer(512, dim))
        self.tables = nn.ModuleList(nn.Embedding(self.rows, dim) for _ in range(self.count))
        self.top = nn.Sequential(layer(dim * (self.count + 1), 1024), layer(1024, 1024), layer(1024, 1024), nn.Linear(1024, 1))

    def inputs(self, batch, device):
        dtype = next(self.parameters()).dtype
        ids = torch.randint(0, self.rows, (self.count, batch), device=device)
        return [torch.randn(batch, 64, device=device, dtype=dtype), ids, torch.randint(0, 2, (batch, 1), device=device)]

    def forward(self, x, ids, labels):
        features = [self.bottom(x)] + [table(ids[i]) for i, table in enumerate(self.tables)]
        y = self.top(torch.cat(features, 1))
        return F.binary_cross_entropy_with_logits(y, labels.to(y.dtype))


class Transformer(nn.Module):
    """Encoder and decoder with norms after the residuals, and one table for source, target and logits."""

    def __init__(self, o, wide):
        super().__init__()
        layers, hidden, heads = (int(o.get(k, d)) for k, d in [("layers", 6), ("hidden", 512), ("heads", 8)])
        inner, self.vocab, self.seq = int(o.get("ffn", 2048)), int(o.get("vocab", 37000)), int(o.get("seq", 256))
        rate, self.wide, self.scale = float(o.get("dropout", 0.1)), wide, hidden**0.5
        self.table = nn.Embedding(self.vocab, hidden)
        nn.init.normal_(self.table.weight, std=hidden**-0.5)
        self.register_buffer("position", torch.randn(self.seq, hidden))
        self.drop = nn.Dropout(rate)

        def block(cross):
            parts = {"attn": Attention(hidden, heads, heads, True, cross, rate), "norm1": nn.LayerNorm(hidden),
                     "mlp": Mlp(hidden, inner, nn.ReLU()), "norm3": nn.LayerNorm(hidden)}
            if cross:
                parts |= {"cross": Attention(hidden, heads, heads, True, False, rate), "norm2": nn.LayerNorm(hidden)}
            return nn.ModuleDict(parts)

        self.encoder = nn.ModuleList(block(False) for _ in range(layers))
        self.decoder = nn.ModuleList(block(True) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def inputs(self, batch, device):
        return [torch.randint(0, self.vocab, (batch, self.seq), device=device) for _ in range(3)]

    def forward(self, source, target, labels):
        embed = lambda ids: self.drop(self.table(ids) * self.scale + self.position)
        x = embed(source)
        for block in self.encoder:
            x = block["norm1"](x + self.drop(block["attn"](x)))
            x = block["norm3"](x + self.drop(block["mlp"](x)))
        memory, x = self.encoder_norm(x), embed(target)
        for block in self.decoder:
            x = block["norm1"](x + self.drop(block["attn"](x)))
            x = block["norm2"](x + self.drop(block["cross"](x, memory=memory)))
            x = block["norm3"](x + self.drop(block["mlp"](x)))
        return loss_of(F.linear(self.decoder_norm(x), self.table.weight), labels, self.wide)


class Experts(nn.Module):
    """Tokens sent to the slots of their experts by index, and back."""

    def __init__(self, hidden, inner, experts, top_k, capacity):
        super().__init__()
        self.experts, self.top_k, self.capacity = experts, top_k, capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        weight = lambda a, b: nn.Parameter(0.02 * torch.randn(experts, a, b))
        self.gate, self.up, self.down = weight(hidden, inner), weight(hidden, inner), weight(inner, hidden)

    def forward(self, x):
        n, s, c = x.shape
        weight, chosen = self.router(x).float().topk(self.top_k, -1)
        weight = weight.softmax(-1).to(x.dtype)
        slots = min(s, max(1, -int(-self.capacity * self.top_k * s // self.experts)))
        flat = chosen.flatten(1)
        order = F.one_hot(flat, self.experts).cumsum(1).gather(2, flat[..., None])[..., 0] - 1
        kept = order < slots
        # The last slot takes what has no place.
        at = torch.where(kept, flat * slots + order, self.experts * slots)
        token = torch.arange(s, device=x.device).repeat_interleave(self.top_k).expand(n, -1)
        source = torch.full((n, self.experts * slots + 1), s, device=x.device).scatter(1, at, token)[:, :-1]
        rows = torch.cat([x, x.new_zeros(n, 1, c)], 1)
        work = rows.gather(1, source[..., None].expand(-1, -1, c)).view(n, self.experts, slots, c)
        work = work.transpose(0, 1).reshape(self.experts, n * slots, c)
        done = torch.bmm(F.silu(torch.bmm(work, self.gate)) * torch.bmm(work, self.up), self.down)
        done = done.view(self.experts, n, slots, c).transpose(0, 1).reshape(n, -1, c)
        done = torch.cat([done, done.new_zeros(n, 1, c)], 1)
        back = done.gather(1, at[..., None].expand(-1, -1, c)).view(n, s, self.top_k, c)
        return (back * weight[..., None]).sum(2)


class Moe(Llama):
    def __init__(self, o, wide):
        defaults = {"layers": "12", "hidden": "768", "heads": "12", "kv_heads": "4", "ffn": "2048", "vocab": "32000", "seq": "1024",
                    "tied": "no"}
        o = {**defaults, **o}
        super().__init__({**o, "ffn": "1"}, wide)
        for block in self.blocks:
            block["mlp"] = Experts(int(o["hidden"]), int(o["ffn"]), int(o.get("experts", 8)), int(o.get("top_k", 2)),
                                   float(o.get("capacity", 1.25)))


class Rnnlm(nn.Module):
    def __init__(self, o, wide):
        super().__init__()
        layers, hidden = int(o.get("layers", 2)), int(o.get("hidden", 2048))
        self.vocab, self.seq, self.wide = int(o.get("vocab", 100_000)), int(o.get("seq", 40)), wide
        self.embedding, self.lstm = nn.Embedding(self.vocab, hidden), nn.LSTM(hidden, hidden, layers)
        self.logits = nn.Linear(hidden, self.vocab)

    def inputs(self, batch, device):
        return [torch.randint(0, self.vocab, (self.seq, batch), device=device) for _ in range(2)]

    def forward(self, tokens, labels):
        return loss_of(self.logits(self.lstm(self.embedding(tokens))[0]), labels, self.wide)


def alexnet(o, wide):
    layers, c = [], 3
    for width, k, stride, pad, pooled in [(64, 11, 4, 2, 1), (192, 5, 1, 2, 1), (384, 3, 1, 1, 0), (256, 3, 1, 1, 0), (256, 3, 1, 1, 1)]:
        layers += [nn.Conv2d(c, width, k, stride, pad), nn.ReLU(inplace=True)] + [nn.MaxPool2d(3, 2)] * pooled
        c = width
    rate = float(o.get("dropout", 0.5))
    fc = [nn.Dropout(rate), nn.Linear(9216, 4096), nn.ReLU(inplace=True), nn.Dropout(rate), nn.Linear(4096, 4096),
          nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
    return Images(nn.Sequential(*layers), nn.Sequential(*fc), wide)


class DenseLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(c), nn.Conv2d(c, 128, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(128), nn.Conv2d(128, 32, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(F.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(F.relu(self.norm2(y), inplace=True))], 1)


def densenet(o, wide):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    c, blocks = 64, [6, 12, 24, 16]
    for block, count in enumerate(blocks):
        for _ in range(count):
            layers.append(DenseLayer(c))
            c += 32
        if block + 1 < len(blocks):
            layers += [nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, c // 2, 1, bias=False), nn.AvgPool2d(2)]
            c //= 2
    layers += [nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return Images(nn.Sequential(*layers), nn.Linear(c, 1000), wide)


def torchvision(o, wide):
    import torchvision.models

    return Images(getattr(torchvision.models, o["name"])(weights=None), nn.Identity(), wide)


class Unet(nn.Module):
    """Pairs of convolutions with batch norm, down four levels and up again, with a class per pixel."""

    def __init__(self, o, wide):
        super().__init__()
        self.wide, self.size, self.classes = wide, int(o.get("image", 256)), 21
        widths = [int(o.get("width", 64)) << i for i in range(5)]

        def pair(a, b):
            unit = lambda a, b: [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
            return nn.Sequential(*unit(a, b), *unit(b, b))

        self.down = nn.ModuleList(pair(a, b) for a, b in zip([3, *widths], widths))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:]))
        self.up = nn.ModuleList(pair(2 * a, a) for a in widths[:-1])
        self.logits = nn.Conv2d(widths[0], self.classes, 1)

    def inputs(self, batch, device):
        dtype = next(self.parameters()).dtype
        x = torch.randn(batch, 3, self.size, self.size, device=device, dtype=dtype)
        return [x, torch.randint(0, self.classes, (batch, self.size, self.size), device=device)]

    def body(self, x):
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([kept[level], self.wider[level](x)], 1))
        return self.logits(x)

    def forward(self, x, labels):
        return F.cross_entropy(self.body(x), labels)


VITS = {"vit-b16": (12, 768, 12, 16), "vit-l16": (24, 1024, 16, 16), "vit-h14": (32, 1280, 16, 14)}
FAMILIES = {"gpt": Gpt, "llama": Llama, "bert": Bert, "vgg16": vgg16, "resnet101": resnet, "mlp": MlpModel, "dlrm": Dlrm,
            "transformer": Transformer, "moe": Moe, "rnnlm": Rnnlm, "alexnet": alexnet, "densenet121": densenet,
            "torchvision": torchvision, "unet": Unet}
TRANSFORMERS = {"gpt", "llama", "bert", "transformer", "moe", *VITS}


def build(spec: str, precision: str, device: str) -> nn.Module:
    name, o = options(spec)
    wide = precision in ("mixed", "bf16")
    with torch.device(device):
        model = Vit(o, wide, *VITS[name]) if name in VITS else FAMILIES[name](o, wide)
    return model.to(torch.float32 if precision in ("f32", "tf32") else torch.bfloat16).train()


class Forward(nn.Module):
    """A model of images without its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model.body(x)
        return self.model.classifier(y.flatten(1)) if hasattr(self.model, "classifier") else y


def export(spec, precision, path):
    """Writes the forward pass as ONNX, with batch norms in training mode and any batch."""
    model = build(spec, precision, "cpu")
    x = model.inputs(2, "cpu")[0]
    torch.onnx.export(Forward(model).train(), (x,), path, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
                      dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("batch")}}, external_data=False, optimize=False)


class Step:
    """One training step; called again and again."""

    def __init__(self, spec, precision, engine, device, batch, recompute_loss=False):
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        self.model = build(spec, precision, device)
        self.inputs = self.model.inputs(batch, device)
        self.run = torch.compile(self.model) if engine == "torch-compile" else self.model
        self.params = [p for p in self.model.parameters()]
        fused = device == "cuda"
        weights = self.params
        self.master = None
        if precision == "mixed":
            self.master = [p.detach().float().requires_grad_() for p in self.params]
            weights = self.master
        if options(spec)[0] in TRANSFORMERS:
            self.optimizer = torch.optim.Adam(weights, lr=1e-4, fused=fused)
        else:
            self.optimizer = torch.optim.SGD(weights, lr=1e-3, fused=fused)

    def __call__(self):
        for p in self.params:
            p.grad = None
        self.run(*self.inputs).backward()
        if self.master is None:
            self.optimizer.step()
            return
        with torch.no_grad():
            for p, m in zip(self.params, self.master):
                m.grad = None if p.grad is None else p.grad.float()
                p.grad = None
            self.optimizer.step()
            torch._foreach_copy_([p.detach() for p in self.params], [m.detach() for m in self.master])
            for m in self.master:
                m.grad = None


def kernels(step, limit=60):
    """The kernels of a step: name, number of launches, microseconds; the slowest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    table = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total = table.get(event.name, (0, 0.0))
            table[event.name] = (count + 1, total + event.device_time)
    rows = sorted(((name[:120], count, round(total, 1)) for name, (count, total) in table.items()), key=lambda r: -r[2])
    return {"kernels": sum(r[1] for r in rows), "busy_ms": sum(r[2] for r in rows) / 1e3, "rows": rows[:limit]}


def measure(case, once=False, device="cuda"):
    """Median step time and peak memory of a case."""
    step = Step(case["model"], case["precision"], case["engine"], device, case["batch"])
    begin = time.perf_counter()
    step()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - begin
    if once:
        step()
        return {"first_s": round(first, 1)}
    for _ in range(WARM):
        step()
    result = {"first_s": round(first, 1), "parameters": sum(p.numel() for p in step.params)}
    if not cuda:
        begin = time.perf_counter()
        step()
        return {**result, "step_ms": (time.perf_counter() - begin) * 1e3}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events, host = [torch.cuda.Event(enable_timing=True)], []
    events[0].record()
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        host.append((time.perf_counter() - begin) * 1e3)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    result |= {
        "step_ms": statistics.median(times), "fastest_ms": min(times), "slowest_ms": max(times),
        # The first steps are issued before the queue is full: the host's own time.
        "host_ms": min(host),
        "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
        "in_use": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
    }
    result["profile"] = kernels(step)
    return result


def release():
    """Frees what a case held."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
