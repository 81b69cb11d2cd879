"""Architectures and single ops as users write them, for scripts/torch_coverage.py. Each architecture is a function that
returns a module and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Submodules by name, and a forward function of them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


class OneOp(nn.Module):
    """A linear layer, an op, and another linear layer if the op's result ends in 8."""

    def __init__(self, op: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.op, self.before, self.after = op, nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.op(self.before(x))
        return self.after(y) if isinstance(y, Tensor) and y.is_floating_point() and y.dim() and y.shape[-1] == 8 else y


X = lambda *shape: torch.randn(*shape)  # noqa: E731


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    """Grouped-query attention with rotary positions and SwiGLU."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, groups * self.size), nn.Linear(width, groups * self.size)
        self.o, self.gate, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)
        self.n1, self.n2 = RMSNorm(width), RMSNorm(width)

    def rotate(self, x: Tensor) -> Tensor:
        s, d = x.shape[-2:]
        angle = torch.arange(s, device=x.device, dtype=x.dtype)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape
        y = self.n1(x)
        q = self.q(y).view(n, s, self.heads, -1).transpose(1, 2)
        k, v = (f(y).view(n, s, self.groups, -1).transpose(1, 2) for f in (self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (self.rotate(k), v))
        y = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, s, -1))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Mixture(nn.Module):
    """Top-2 routing with one pass per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4, bias=False), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 16)
        weight, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out.index_add_(0, token, expert(flat[token]) * weight[token, slot].unsqueeze(-1))
        return out.view_as(x)


class Graph(nn.Module):
    """Messages along edges, summed at nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            message = layer(x)[edges[0]]
            x = torch.zeros(len(x), message.shape[1], dtype=x.dtype).index_add(0, edges[1], message).relu()
        return x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 1)
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down(x))
        return self.out(torch.cat([a, self.up(F.silu(self.norm(self.mid(a))))], 1))


class Diffusion(nn.Module):
    """A denoiser that draws its noise and its time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = UNet(), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.rand(len(x), 1, dtype=x.dtype)
        noise = torch.randn_like(x)
        level = t[:, :, None, None]
        return F.mse_loss(self.net((1 - level) * x + level * noise + self.time(t)[..., None, None]), noise)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.mu, self.var, self.dec = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enc(x).relu()
        mu, var = self.mu(h), self.var(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * var)
        return F.mse_loss(self.dec(z), x) - 0.5 * (1 + var - mu.pow(2) - var.exp()).mean()


class Quantized(nn.Module):
    """A codebook with the straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.code, self.dec = nn.Linear(16, 8), nn.Embedding(12, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.enc(x)
        nearest = torch.cdist(z, self.code.weight).argmin(-1)
        q = self.code(nearest)
        return F.mse_loss(self.dec(z + (q - z).detach()), x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


class Deq(nn.Module):
    """A fixed point found without gradients, then one step with."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                new = torch.tanh(self.w(z) * 0.3 + self.u(x))
                if (new - z).abs().max() < 1e-3:
                    break
                z = new
        return torch.tanh(self.w(z) * 0.3 + self.u(x))


class StateSpace(nn.Module):
    """A recurrence over time in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Parameter(torch.rand(8)), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h, out, u = x.new_zeros(len(x), 8), [], self.b(x)
        for t in range(x.shape[1]):
            h = torch.sigmoid(self.a) * h + u[:, t]
            out.append(self.c(h))
        return torch.stack(out, 1)


class Pointer(nn.Module):
    """Attention over inputs with a mask of lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.query = nn.LSTM(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, 32)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        score = self.query(y[:, -1:]) @ y.transpose(1, 2)
        hidden = torch.arange(x.shape[1])[None] >= length[:, None]
        return score.squeeze(1).masked_fill(hidden, -1e9).log_softmax(-1)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        at = torch.arange(len(a))
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.t(), at)) / 2


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t() * 0.5


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a + checkpoint(self.f, b, use_reentrant=False)
        return torch.cat([a, b + checkpoint(self.g, a, use_reentrant=False)], -1)


class Hyper(nn.Module):
    """Weights that another network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(4, 16 * 8)
        self.code = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.code).view(8, 16)).tanh()


class Early(nn.Module):
    """Layers that are skipped at random, and a branch on a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.3:
                continue
            x = x + layer(x).relu()
            if x.mean() > 100:
                break
        return self.head(x)


class Spectral(nn.Module):
    """Products with weights in frequency space."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 2))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(x) * torch.view_as_complex(self.weight.contiguous())
        return self.out(torch.fft.irfft(f, n=16)) + x


class Transducer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(16, 16, num_layers=2), nn.Linear(16, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.head(self.net(x.transpose(0, 1))[0]).log_softmax(-1)
        n = x.shape[0]
        return F.ctc_loss(y, labels, torch.full((n,), x.shape[1]), torch.full((n,), labels.shape[1]))


def _mlp() -> Any:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)), (X(8, 16),)


def _spectral_norm() -> Any:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    return nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.LeakyReLU(), weight_norm(nn.Linear(16, 4))), (X(8, 16),)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "mlp": _mlp,
    "mixer": lambda: (
        Net(lambda m, x: m.b(m.a(x.transpose(1, 2)).transpose(1, 2)).mean(1), a=nn.Linear(8, 8), b=nn.Linear(16, 4)),
        (X(4, 8, 16),),
    ),
    "rotary decoder": lambda: (nn.Sequential(Rotary(), Rotary()), (X(4, 8, 16),)),
    "mixture of experts": lambda: (Mixture(), (X(4, 8, 16),)),
    "graph network": lambda: (Graph(), (X(12, 8), torch.randint(0, 12, (2, 30)))),
    "unet": lambda: (UNet(), (X(4, 3, 16, 16),)),
    "diffusion": lambda: (Diffusion(), (X(4, 3, 16, 16),)),
    "vae": lambda: (Vae(), (X(8, 16),)),
    "vq-vae": lambda: (Quantized(), (X(8, 16),)),
    "deep equilibrium": lambda: (Deq(), (X(8, 16),)),
    "state space": lambda: (StateSpace(), (X(4, 6, 16),)),
    "pointer": lambda: (Pointer(), (X(4, 6, 16), torch.tensor([6, 3, 2, 5]))),
    "contrastive": lambda: (Siamese(), (X(8, 16), X(8, 16))),
    "low rank": lambda: (LowRank(), (X(8, 16),)),
    "reversible": lambda: (Reversible(), (X(8, 16),)),
    "hypernetwork": lambda: (Hyper(), (X(8, 16),)),
    "layer drop": lambda: (Early(), (X(8, 16),)),
    "spectral": lambda: (Spectral(), (X(8, 16),)),
    "ctc": lambda: (Transducer(), (X(4, 8, 16), torch.randint(1, 6, (4, 3)))),
    "spectral norm": _spectral_norm,
    "transformer": lambda: (nn.Transformer(16, 4, 1, 1, 32, batch_first=True), (X(4, 6, 16), X(4, 5, 16))),
    "encoder, time first": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2), (X(6, 4, 16),)),
    "lstm": lambda: (Net(lambda m, x: m.b(m.a(x)[0][:, -1]), a=nn.LSTM(16, 16, 2, batch_first=True), b=nn.Linear(16, 4)), (X(4, 6, 16),)),
    "seq2seq gru": lambda: (
        Net(lambda m, x, y: m.b(y, m.a(x)[1])[0], a=nn.GRU(16, 16), b=nn.GRU(16, 16)), (X(6, 4, 16), X(5, 4, 16))
    ),
    "conv3d": lambda: (nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()), (X(4, 2, 6, 6, 6),)),
    "wavenet": lambda: (
        Net(
            lambda m, x: m.out(torch.tanh(m.f(F.pad(x, (2, 0)))) * torch.sigmoid(m.g(F.pad(x, (2, 0))))),
            f=nn.Conv1d(4, 8, 2, dilation=2), g=nn.Conv1d(4, 8, 2, dilation=2), out=nn.Conv1d(8, 4, 1),
        ),
        (X(4, 4, 12),),
    ),
    "super resolution": lambda: (nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Upsample(scale_factor=2)), (X(4, 3, 8, 8),)),
    "set": lambda: (
        Net(lambda m, x: m.b(torch.cat([m.a(x).amax(1), m.a(x).mean(1), m.a(x).logsumexp(1)], -1)), a=nn.Linear(16, 8), b=nn.Linear(24, 4)),
        (X(4, 6, 16),),
    ),
    "embedding bag": lambda: (
        Net(lambda m, ids: m.b(m.a(ids).sum(1)), a=nn.Embedding(20, 8, padding_idx=0), b=nn.Linear(8, 4)), (torch.randint(0, 20, (4, 6)),)
    ),
    "dict of heads": lambda: (
        Net(lambda m, x: {"class": m.a(x), "box": (m.b(x).sigmoid(), x.shape[0])}, a=nn.Linear(16, 4), b=nn.Linear(16, 4)), (X(8, 16),)
    ),
}  # fmt: skip

LABELS = torch.arange(8).repeat(4, 1)
OPS: dict[str, Callable[[Tensor], Any]] = {
    **{name: getattr(F, name) for name in (
        "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
        "relu6", "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink", "relu",
    )},
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(-1),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(3, -1).values,
    "argmax gather": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
    "max": lambda x: x.max(1).values,
    "median": lambda x: x.median(-1).values,
    "var": lambda x: x.var(-1),
    "std_mean": lambda x: torch.std_mean(x, (1, 2)),
    "norm": lambda x: x.norm(dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "prod": lambda x: x.prod(-1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(2, 1),
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "tile": lambda x: x.tile(2, 1, 1),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "index": lambda x: x[:, torch.tensor([0, 2, 5])],
    "index_put": lambda x: x.clone().index_put((torch.tensor([0, 1]),), torch.zeros(8, 8, dtype=x.dtype)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero branch": lambda x: x[(x > 0).any(-1)],
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(4, 8, 8, dtype=torch.long), x),
    "where scalar": lambda x: torch.where(x > 0, x, 0.0),
    "einsum three": lambda x: torch.einsum("bij,bjk,bkl->bil", x, x, x),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "baddbmm": lambda x: torch.baddbmm(x, x, x),
    "outer": lambda x: torch.outer(x[0, 0], x[0, 1]),
    "kron": lambda x: torch.kron(x[0], x[1]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "inverse": lambda x: torch.linalg.inv(x + 5 * torch.eye(8, dtype=x.dtype)),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x) * 1j),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "reflect pad": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "circular pad": lambda x: F.pad(x, (1, 1), mode="circular"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
    "huber": lambda x: F.huber_loss(x, x.detach() + 1),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).to(x.dtype)),
    "label smoothing": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1),
    "class weights": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=torch.rand(8, dtype=x.dtype) + 0.5),
    "triplet": lambda x: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]),
    "cosine_similarity": lambda x: F.cosine_similarity(x[:, :1], x, dim=-1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, True),
    "dropout2d": lambda x: F.dropout1d(x, 0.3),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 8).to(x.dtype) * x,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "searchsorted": lambda x: x * torch.searchsorted(torch.arange(8.0, dtype=x.dtype), x.detach()),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "erfinv": lambda x: torch.erfinv(x.tanh() * 0.9),
    "in place": lambda x: x.clone().mul_(2).add_(1).clamp_(min=0),
    "write a slice": lambda x: _write(x),
    "vmap": lambda x: torch.vmap(lambda row: row.softmax(-1) @ row)(x),
}  # fmt: skip


def _write(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0
    y[:, 1] += x[:, 2]
    return y
