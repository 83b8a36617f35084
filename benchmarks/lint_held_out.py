"""`lint` on architectures that it was not made on: 60 faults and 30 right models, each scaled by hand.

python benchmarks/lint_held_out.py                   the table of `benchmarks/lint_held_out.md`
python benchmarks/lint_held_out.py --later           a second set, of 22 others
python benchmarks/lint_held_out.py "GRU"             those with this in their name, with the reports

Faults and right causes were written down before the method that is judged here.
"""

from __future__ import annotations

import copy
import fnmatch
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

from mup_tpu.parametrize import lint

BASE, WIDTHS, VOCAB, T = 32, (32, 64, 128, 256), 23, 10
Factor = Callable[[float], float]


def one(m: float) -> float:
    return 1.0


def root(m: float) -> float:
    return m**0.5


def inverse_root(m: float) -> float:
    return m**-0.5


def inverse(m: float) -> float:
    return 1 / m


def inverse_square(m: float) -> float:
    return m**-2


def proportional(m: float) -> float:
    return m


class Net(nn.Module):
    """Module with factors by hand; `o` has those that differ from μP, by place, as functions of m."""

    inputs: tuple[str, ...] = ()  # patterns of matrices of which only outputs grow
    outputs: tuple[str, ...] = ()  # patterns of matrices of which only inputs grow; their logits are × 1/m
    still: tuple[str, ...] = ()  # patterns of parameters without a growing axis
    zero: tuple[str, ...] = ()  # patterns of matrices that start at 0

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__()
        self.m, self.o = width / BASE, o

    def f(self, place: str, usual: Factor = one) -> float:
        return self.o.get(place, usual)(self.m)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        out = self(x)
        return (
            F.cross_entropy(out.flatten(0, -2), y.flatten())
            if not y.is_floating_point()
            else F.mse_loss(out, y)
        )


def heads_of(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


class Mixer(Net):
    """MLP-Mixer: tokens are mixed by matrices that do not grow."""

    inputs, outputs, still = ("patch.weight",), ("head.weight",), ("blocks.*.tokens.*",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.patch, self.head, self.norm = nn.Linear(12, width), nn.Linear(width, VOCAB), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "n1": nn.LayerNorm(width), "n2": nn.LayerNorm(width),
                "tokens": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
                "up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width),
            }) for _ in range(2)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x) * self.f("embed")
        for b in self.blocks:
            x = x + b["tokens"](b["n1"](x).mT).mT * self.f("tokens")
            x = x + b["down"](F.gelu(b["up"](b["n2"](x))) * self.f("hidden")) * self.f("branch")
        return self.head(self.norm(x).mean(1)) * self.f("logits", inverse)


class GRU(Net):
    """Language model of a recurrent cell of torch."""

    inputs, outputs = ("emb.weight",), ("head.weight",)
    kind: type[nn.RNNBase] = nn.GRU

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.rnn = nn.Embedding(VOCAB, width), self.kind(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(x) * self.f("embed"))[0]) * self.f("logits", inverse)


class LSTM(GRU):
    """The same of another cell."""

    kind = nn.LSTM


class ConvNet(Net):
    """Residual network of convolutions with batch norm."""

    inputs, outputs = ("stem.weight",), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)])
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.f("embed")
        for norm, conv in self.blocks:
            x = x + conv(F.relu(norm(x)) * self.f("hidden")) * self.f("branch")
        x = x.mean((2, 3)) if "pool" not in self.o else x.sum((2, 3)) * self.f("pool")
        return self.head(x) * self.f("logits", inverse)


class Perceiver(Net):
    """Latents, a parameter of the root, that look at inputs through attention."""

    inputs, outputs = ("latents", "embed.weight"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.latents = nn.Parameter(torch.randn(5, width))
        self.embed, self.head = nn.Linear(12, width), nn.Linear(width, VOCAB)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.n1, self.n2, self.n3, self.n4 = (nn.LayerNorm(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.n1(self.embed(x) * self.f("embed")), self.latents.expand(len(x), -1, -1)
        q, k, v = (heads_of(t, 8) for t in (self.q(self.n2(z)), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(q, k, v, scale=0.35 * self.f("attention"))
        z = z + self.out(y.transpose(1, 2).flatten(2)) * self.f("branch")
        z = z + self.down(F.gelu(self.up(self.n3(z))) * self.f("hidden"))
        return self.head(self.n4(z).mean(1)) * self.f("logits", inverse)


class Stacked(Net):
    """Mixture of experts whose matrices are stacked parameters of the root."""

    inputs, outputs = ("emb.weight",), ("head.weight", "router.weight")

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.n1, self.n2, self.router = nn.RMSNorm(width), nn.RMSNorm(width), nn.Linear(width, 4, bias=False)
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, width, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        h = self.n1(x)
        shares = (self.router(h) * self.f("router", inverse)).softmax(-1)
        y = torch.einsum("btw,ewh->bteh", h, self.w1)
        y = torch.einsum("bteh,ehw->btew", F.silu(y) * self.f("hidden"), self.w2)
        x = x + (y * shares.unsqueeze(-1)).sum(2) * self.f("branch")
        return self.head(self.n2(x)) * self.f("logits", inverse)


class TwoTowers(Net):
    """Two towers, of an image and its text, whose projections to logits are parameters of the root."""

    inputs, outputs = ("left.0.weight", "right.0.weight"), ("proj_*",)
    still = ("temperature",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.left, self.right = (
            nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
            for _ in range(2)
        )
        self.proj_left, self.proj_right = (nn.Parameter(torch.randn(16, width)) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        a = self.left(x[:, 0]) @ self.proj_left.mT * self.f("logits", inverse)
        b = self.right(x[:, 1]) @ self.proj_right.mT * self.f("logits", inverse)
        return F.cross_entropy((a + b) * self.temperature.exp(), torch.arange(len(x)))


class DiT(Net):
    """Diffusion transformer: modulation and the last layer start at 0."""

    inputs, outputs, zero = (
        ("patch.weight", "time.0.weight"),
        ("final.weight",),
        ("mod.weight", "final.weight"),
    )

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.patch, self.final = nn.Linear(12, width), nn.Linear(width, 12)
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.mod, self.norm = nn.Linear(width, 4 * width), nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.linspace(0, 1, len(x)).unsqueeze(-1) * torch.arange(8)
        c = self.time(t.cos()).unsqueeze(1) * self.f("condition")
        shift, scale, g1, g2 = self.mod(F.silu(c)).chunk(4, -1)
        x = self.patch(x) * self.f("embed")
        h = self.norm(x) * (1 + scale) + shift
        q, k, v = (heads_of(t, 8) for t in self.qkv(h).chunk(3, -1))
        x = x + (1 + g1) * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + (1 + g2) * self.down(F.gelu(self.up(self.norm(x))) * self.f("hidden")) * self.f("branch")
        return self.final(self.norm(x)) * self.f("logits", inverse)


class Translator(Net):
    """Encoder and decoder of torch.nn.MultiheadAttention, with one tied embedding."""

    inputs = ("emb.weight", "pos")

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        heads = width // 8 if "heads" not in o else 4
        self.emb, self.pos = nn.Embedding(VOCAB, width), nn.Parameter(torch.randn(T, width))
        self.enc, self.dec, self.cross = (
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(3)
        )
        self.n1, self.n2, self.n3, self.n4 = (nn.LayerNorm(width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.emb(x) + self.pos) * self.f("embed")
        h = self.n1(x)
        memory = x + self.enc(h, h, h, need_weights=False)[0]
        y = x.roll(1, 1)
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        h = self.n2(y)
        y = y + self.dec(h, h, h, need_weights=False, attn_mask=mask)[0] * self.f("branch")
        y = y + self.cross(self.n3(y), memory, memory, need_weights=False)[0]
        y = y + self.down(F.relu(self.up(y)) * self.f("hidden"))
        return F.linear(self.n4(y), self.emb.weight) * self.f("logits", inverse)


class Retention(Net):
    """Linear attention with decays, gated, of heads that grow in size."""

    inputs, outputs = ("emb.weight",), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.q, self.k, self.v, self.g, self.out = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.n1, self.n2, self.n3 = (nn.RMSNorm(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        h = self.n1(x)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(h), self.k(h), self.v(h)))
        distance = torch.arange(T).unsqueeze(1) - torch.arange(T)
        scores = q @ k.mT * 0.25 * self.f("scores", inverse) * (0.8**distance).tril()
        y = (scores @ v).transpose(1, 2).flatten(2)
        x = x + self.out(self.n2(y + self.f("skip", one) * v.transpose(1, 2).flatten(2)) * F.silu(self.g(h)))
        return self.head(self.n3(x)) * self.f("logits", inverse)


class Autoencoder(Net):
    """MLP with a bottleneck of four units, which is neither the first nor the last layer."""

    inputs, outputs = ("a.weight", "d.weight"), ("f_.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.a, self.b, self.c = nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.d, self.e, self.f_ = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        z = self.c(F.relu(self.b(F.relu(self.a(x)))) * self.f("hidden")) * self.f("code")
        return self.f_(F.relu(self.e(F.relu(self.d(z) * self.f("embed"))))) * self.f("logits", inverse)


class Graph(Net):
    """Message passing on a graph, with a learned edge bias and a readout of the mean over nodes."""

    inputs, outputs = ("node.weight",), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.node, self.head = nn.Linear(12, width), nn.Linear(width, VOCAB)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.selves = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        near = (torch.arange(4).unsqueeze(0) - torch.arange(4).unsqueeze(1)).abs() <= 1
        near = (near / near.sum(-1, keepdim=True)).to(x.dtype)
        x = self.node(x) * self.f("embed")
        for message, itself, norm in zip(self.messages, self.selves, self.norms, strict=True):
            x = norm(x + F.relu(near @ message(x * self.f("hidden")) * self.f("branch") + itself(x)))
        return self.head(x.mean(1)) * self.f("logits", inverse)


class Lora(Net):
    """Frozen MLP with low-rank adapters, of which the optimizer has nothing else."""

    inputs, outputs = ("first.weight", "*.up"), ("head.weight",)
    zero = ("*.up",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.first, self.head = nn.Linear(12, width), nn.Linear(width, VOCAB, bias=False)
        self.frozen = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.adapters = nn.ModuleList(
            nn.ParameterDict({"down": torch.randn(4, width), "up": torch.zeros(width, 4)}) for _ in range(2)
        )
        for p in [*self.frozen.parameters(), *self.first.parameters(), self.head.weight]:
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for layer, adapter in zip(self.frozen, self.adapters, strict=True):
            x = F.relu(layer(x) + x @ adapter["down"].mT @ adapter["up"].mT * self.f("adapter"))
        return self.head(x.mean(1)) * self.f("logits", inverse)


class Waves(Net):
    """Coordinate network of sines, as of radiance fields, with a skip that joins the input again."""

    inputs, outputs = ("first.weight", "again.weight"), ("last.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.first, self.again, self.last = nn.Linear(12, width), nn.Linear(12, width), nn.Linear(width, 12)
        self.h1, self.h2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.h1(torch.sin(self.first(x) * self.f("embed"))))
        h = torch.sin(self.h2(h * self.f("hidden")) + self.again(x))
        return self.last(h) * self.f("logits", inverse)


class Recommender(Net):
    """Users and items whose vectors' product is the score: no matrix reads out."""

    inputs = ("users.weight", "items.weight")

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.users, self.items = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
        self.tower, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        user = self.norm(self.users(x) + F.gelu(self.tower(self.users(x) * self.f("hidden"))))
        return user @ self.items.weight.mT * self.f("logits", inverse)


class Unet(Net):
    """One-dimensional U-Net: strided and transposed convolutions with group norm and a skip."""

    inputs, outputs = ("enter.weight",), ("leave.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.enter, self.leave = nn.Conv1d(3, width, 3, padding=1), nn.Conv1d(width, 3, 3, padding=1)
        self.down, self.up = (
            nn.Conv1d(width, 2 * width, 4, 2, 1),
            nn.ConvTranspose1d(2 * width, width, 4, 2, 1),
        )
        self.middle = nn.Conv1d(2 * width, 2 * width, 1)
        self.n1, self.n2 = nn.GroupNorm(4, width), nn.GroupNorm(4, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.f("embed")
        h = self.n2(self.down(F.silu(x)))
        h = h + F.silu(self.middle(h * self.f("hidden")))
        return self.leave(F.silu(self.n1(self.up(h) + x))) * self.f("logits", inverse)


class Latent(Net):
    """Attention whose keys and values come from a fixed low rank, with norms of queries and keys."""

    inputs, outputs = ("emb.weight", "kv_up.weight"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv_down, self.kv_up = nn.Linear(width, 6, bias=False), nn.Linear(6, 2 * width, bias=False)
        self.qn, self.kn, self.n1, self.n2 = (
            nn.RMSNorm(8),
            nn.RMSNorm(8),
            nn.RMSNorm(width),
            nn.RMSNorm(width),
        )
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        h = self.n1(x)
        k, v = self.kv_up(self.kv_down(h) * self.f("code")).chunk(2, -1)
        q, k, v = (heads_of(t, 8) for t in (self.q(h), k, v))
        y = F.scaled_dot_product_attention(self.qn(q), self.kn(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2)) * self.f("branch")
        x = x + self.down(F.silu(self.gate(self.n2(x))) * self.up(x) * self.f("hidden"))
        return self.head(F.rms_norm(x, x.shape[-1:])) * self.f("logits", inverse)


class Highway(Net):
    """Highway network: gates choose between a layer and its input."""

    inputs, outputs = ("first.weight",), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.first, self.head = nn.Linear(12, width), nn.Linear(width, VOCAB)
        self.layers, self.gates = (nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.f("embed")
        for layer, gate in zip(self.layers, self.gates, strict=True):
            share = torch.sigmoid(gate(x * self.f("gate")))
            x = share * torch.tanh(layer(x * self.f("hidden"))) + (1 - share) * x
        return self.head(x.mean(1)) * self.f("logits", inverse)


class Hyena(Net):
    """Gated long convolutions: a filter of its own for each channel, a parameter of the root."""

    inputs, outputs = ("emb.weight", "filters"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.filters, self.norm = nn.Parameter(torch.randn(width, T)), nn.LayerNorm(width)
        self.proj, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        q, k, v = self.proj(self.norm(x)).chunk(3, -1)
        lag = (torch.arange(T).unsqueeze(1) - torch.arange(T)).clamp(min=0)
        kernel = self.filters[:, lag].tril()
        y = torch.einsum("bsw,wts->btw", k * v, kernel) * self.f("filter")
        return self.head(x + self.out(q * y) * self.f("branch")) * self.f("logits", inverse)


class GAT(Net):
    """Graph attention: scores are sums of two terms, by vectors of each head; heads grow in number."""

    inputs, outputs = ("node.weight", "left", "right"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.node, self.head = nn.Linear(12, width), nn.Linear(width, VOCAB)
        self.value, self.itself = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.left, self.right = (nn.Parameter(torch.randn(width // 8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.node(x) * self.f("embed")
        v = heads_of(self.value(x * self.f("hidden")), 8)
        left, right = ((v * a.unsqueeze(1)).sum(-1) for a in (self.left, self.right))
        scores = F.leaky_relu(left.unsqueeze(-1) + right.unsqueeze(-2)) * self.f("scores")
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head(F.elu(self.itself(x) + y * self.f("branch")).mean(1)) * self.f("logits", inverse)


class Universal(Net):
    """Transformer whose one block is applied three times, with an embedding of the step."""

    inputs, outputs = ("emb.weight", "steps.weight"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.steps = nn.Embedding(VOCAB, width), nn.Embedding(3, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        for step in range(3):
            x = x + self.steps.weight[step]
            q, k, v = (heads_of(t, 8) for t in self.qkv(self.n1(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2)) * self.f("branch")
            x = x + self.down(F.gelu(self.up(self.n2(x))) * self.f("hidden"))
        return self.head(self.n3(x)) * self.f("logits", inverse)


class Flow(Net):
    """Normalizing flow of two coupling layers, whose networks end in finite outputs each."""

    inputs, outputs = ("nets.*.0.weight",), ("nets.*.4.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 12)
            )
            for _ in range(2)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = batch[0].chunk(2, -1)
        logdet = torch.zeros(())
        for net in self.nets:
            scale, shift = (net(a) * self.f("logits", inverse)).chunk(2, -1)
            b, logdet = (b + shift) * torch.tanh(scale).exp(), logdet + torch.tanh(scale).mean()
            a, b = b, a
        return (a.square() + b.square()).mean() / 2 - logdet


class VAE(Net):
    """Variational autoencoder: two heads give mean and variance of a code of four."""

    inputs, outputs = ("enter.weight", "decode.weight"), ("mean.weight", "variance.weight", "leave.weight")

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.enter, self.encoder = nn.Linear(12, width), nn.Linear(width, width)
        self.mean, self.variance = nn.Linear(width, 4), nn.Linear(width, 4)
        self.decode, self.decoder, self.leave = (
            nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 12),
        )  # fmt: skip

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = F.relu(self.encoder(F.relu(self.enter(x) * self.f("embed")) * self.f("hidden")))
        mean, variance = (head(h) * self.f("code", inverse) for head in (self.mean, self.variance))
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1))
        z = mean + noise * (variance / 2).exp()
        out = self.leave(F.relu(self.decoder(F.relu(self.decode(z))))) * self.f("logits", inverse)
        return F.mse_loss(out, y) + 0.1 * (variance.exp() + mean.square() - variance).mean()


class Triplet(Net):
    """Metric learning: the mean square distance over the width, and no readout."""

    inputs = ("first.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.first, self.second, self.third = (
            nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, width),
        )  # fmt: skip

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = F.gelu(self.second(F.gelu(self.first(batch[0]) * self.f("embed")) * self.f("hidden")))
        anchor, near, far = self.third(h)[:, :3].unbind(1)
        distances = [(anchor - other).square().mean(-1) * self.f("distance") for other in (near, far)]
        return F.softplus(distances[0] - distances[1] + 1).mean()


class PointNet(Net):
    """Sets of points: a network of each, the greatest over the set, a network behind it."""

    inputs, outputs = ("first.weight",), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.first, self.second, self.third = (
            nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, width),
        )  # fmt: skip
        self.n1, self.n2, self.head = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.n1(self.second(F.relu(self.first(x) * self.f("embed")) * self.f("hidden"))))
        h = F.relu(self.n2(self.third(h.amax(1) * self.f("pool"))))
        return self.head(h) * self.f("logits", inverse)


class MobileNet(Net):
    """Depthwise and pointwise convolutions with squeeze and excitation, and group norm."""

    inputs, outputs = ("stem.weight", "depth.weight"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, VOCAB)
        self.depth = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.point, self.n1, self.n2 = (
            nn.Conv2d(width, width, 1, bias=False), nn.GroupNorm(4, width), nn.GroupNorm(4, width),
        )  # fmt: skip
        self.squeeze, self.excite = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.f("embed")
        h = F.relu(self.n1(self.depth(x)))
        share = torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3)))) * self.f("excite")))
        x = x + self.n2(self.point(h * share[..., None, None] * self.f("hidden")))
        return self.head(x.mean((2, 3))) * self.f("logits", inverse)


class ConvNeXt(Net):
    """Depthwise convolution, MLP and a gain of each channel on the branch, which starts small."""

    inputs, outputs = ("stem.weight", "depth.weight"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.stem, self.head = nn.Conv2d(3, width, 2, 2), nn.Linear(width, VOCAB)
        self.depth, self.norm, self.last = (
            nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width), nn.LayerNorm(width),
        )  # fmt: skip
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.stem(x) * self.f("embed")).permute(0, 2, 3, 1)
        h = self.norm(self.depth(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        x = x + self.gamma * self.down(F.gelu(self.up(h)) * self.f("hidden")) * self.f("branch")
        return self.head(self.last(x.mean((1, 2)))) * self.f("logits", inverse)


class Pointer(Net):
    """Pointer network: additive attention over the inputs is the output."""

    inputs, outputs = ("emb.weight",), ("score.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.rnn = nn.Embedding(VOCAB, width), nn.RNN(width, width, batch_first=True)
        self.keys, self.queries = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h, _ = self.rnn(self.emb(x) * self.f("embed"))
        mixed = self.keys(h).unsqueeze(1) + self.queries(h * self.f("hidden")).unsqueeze(2)
        scores = self.score(torch.tanh(mixed)).squeeze(-1) * self.f("logits", inverse)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten() % T)


class Bert(Net):
    """Encoder with a tied head of tokens and a second head behind a pooler."""

    inputs, outputs = ("emb.weight", "pos.weight", "segment.weight"), ("second.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.size = 8 if "heads" not in o else width // 4
        self.emb, self.pos, self.segment = (nn.Embedding(n, width) for n in (VOCAB, T, 2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.n0, self.n1, self.n2, self.n3 = (nn.LayerNorm(width) for _ in range(4))
        self.transform, self.pooler = nn.Linear(width, width), nn.Linear(width, width)
        self.second = nn.Linear(width, 2)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        x = self.n0(self.emb(x) + self.pos.weight + self.segment((torch.arange(T) > T // 2).long()))
        q, k, v = (heads_of(layer(x), self.size) for layer in (self.q, self.k, self.v))
        y_ = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.n1(x + self.out(y_) * self.f("branch"))
        x = self.n2(x + self.down(F.gelu(self.up(x)) * self.f("hidden")))
        logits = F.linear(self.n3(F.gelu(self.transform(x))), self.emb.weight) * self.f("logits", inverse)
        pooled = self.second(torch.tanh(self.pooler(x[:, 0]))) * self.f("second", inverse)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + F.cross_entropy(pooled, y[:, 0] % 2)


class ActorCritic(Net):
    """One trunk with a head of actions and a head of values."""

    inputs, outputs = ("first.weight",), ("policy.weight", "value.weight")

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.first, self.second, self.third = (
            nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, width),
        )  # fmt: skip
        self.policy, self.value = nn.Linear(width, 5), nn.Linear(width, 1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = torch.tanh(self.second(torch.tanh(self.first(x[:, 0]) * self.f("embed")) * self.f("hidden")))
        h = torch.tanh(self.third(h))
        value = self.value(h).squeeze(-1) * self.f("value", inverse)
        actions = self.policy(h) * self.f("logits", inverse)
        returns = x[:, 1].mean(-1) + 1
        chosen = actions.log_softmax(-1).gather(-1, y.unsqueeze(-1) % 5).squeeze(-1)
        return (value - returns).square().mean() - (chosen * (returns - value.detach())).mean()


class Albert(Net):
    """Embedding of eight with a matrix to the width; one block is applied twice."""

    inputs, outputs, still = ("widen.weight",), ("head.weight",), ("emb.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.widen = nn.Embedding(VOCAB, 8), nn.Linear(8, width)
        self.mixer, self.up, self.down = (
            nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width),
        )  # fmt: skip
        self.n1, self.n2, self.n3 = (nn.RMSNorm(width) for _ in range(3))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(self.emb(x) * 3) * self.f("embed")
        for _ in range(2):
            h = self.mixer(self.n1(x)).cumsum(1) / torch.arange(1, T + 1).unsqueeze(1)
            x = x + h * self.f("branch")
            x = x + self.down(F.silu(self.up(self.n2(x))) * self.f("hidden"))
        return self.head(self.n3(x)) * self.f("logits", inverse)


class Fourier(Net):
    """Fourier neural operator: complex matrices of the lowest frequencies."""

    inputs, outputs = ("lift.weight",), ("leave.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.lift, self.leave = nn.Conv1d(3, width, 1), nn.Conv1d(width, 3, 1)
        self.spectral = nn.Parameter(torch.randn(width, width, 3, dtype=torch.cfloat))
        self.local = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.lift(x) * self.f("embed"))
        low = torch.fft.rfft(x, norm="ortho")[..., :3] * self.f("hidden")
        low = torch.einsum("bik,oik->bok", low, self.spectral)
        h = torch.fft.irfft(low, n=x.shape[-1], norm="ortho") * self.f("branch")
        return self.leave(F.gelu(h + self.local(x))) * self.f("logits", inverse)


class Slots(Net):
    """Slot attention: one head as large as the width, slots compete, a GRU cell updates them."""

    inputs, outputs = ("slots", "enter.weight"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.slots, self.enter = nn.Parameter(torch.randn(3, width)), nn.Linear(12, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, VOCAB)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, slots = self.n1(self.enter(x) * self.f("embed")), self.slots.expand(len(x), -1, -1)
        logits = self.k(x) @ self.q(self.n2(slots)).mT * 0.2 * self.f("attention", inverse)
        shares = logits.softmax(-1)
        updates = (shares / shares.sum(1, keepdim=True)).mT @ self.v(x)
        slots = self.cell((updates * self.f("hidden")).flatten(0, 1), slots.flatten(0, 1))
        return self.head(self.n3(slots.unflatten(0, (len(x), -1))).mean(1)) * self.f("logits", inverse)


class GAU(Net):
    """Gated attention unit: one head of eight, squared rectified scores, gains of queries and keys."""

    inputs, outputs, still = ("emb.weight",), ("head.weight",), ("gain",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.uv, self.z = nn.Linear(width, 4 * width), nn.Linear(width, 8)
        self.out, self.n1, self.n2 = nn.Linear(2 * width, width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.gain = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        h = self.n1(x)
        u, v = F.silu(self.uv(h)).chunk(2, -1)
        z = F.silu(self.z(h))
        scores = F.relu((z * self.gain[0]) @ (z * self.gain[1]).mT + 1).square().tril()
        x = x + self.out(u * (scores / T @ v) * self.f("hidden")) * self.f("branch")
        return self.head(self.n2(x)) * self.f("logits", inverse)


class Window(Net):
    """Attention with a bias of each distance and head, as in windows of images; heads grow in number."""

    inputs, outputs = ("patch.weight", "distances"), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.patch, self.head = nn.Linear(12, width), nn.Linear(width, VOCAB)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distances = nn.Parameter(torch.randn(7, width // 8))
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x) * self.f("embed")
        q, k, v = (heads_of(t, 8) for t in self.qkv(self.n1(x)).chunk(3, -1))
        bias = self.distances[torch.arange(4).unsqueeze(1) - torch.arange(4) + 3].permute(2, 0, 1)
        y = (q @ k.mT * 8**-0.5 * self.f("attention") + bias).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2) * self.f("hidden")) * self.f("branch")
        return self.head(self.n2(x).mean(1)) * self.f("logits", inverse)


class Switch(Net):
    """Mixture whose experts are modules of a list; each token has one."""

    inputs, outputs = ("emb.weight",), ("head.weight", "router.weight")

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.n1, self.n2, self.router = nn.RMSNorm(width), nn.RMSNorm(width), nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) * self.f("embed")
        h = self.n1(x)
        share, chosen = (self.router(h) * self.f("router", inverse)).softmax(-1).max(-1, keepdim=True)
        y = torch.stack([expert(h * self.f("hidden")) for expert in self.experts], -2)
        y = y.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, y.shape[-1])).squeeze(-2)
        x = x + share * 3 * y * self.f("branch")
        return self.head(self.n2(x)) * self.f("logits", inverse)


class Bag(Net):
    """Bag of words: the mean of embeddings, and an MLP."""

    inputs, outputs = ("bag.weight",), ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.bag = nn.EmbeddingBag(VOCAB, width, mode="mean")
        self.hidden, self.norm, self.head = (
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, VOCAB),
        )  # fmt: skip

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = F.relu(self.norm(self.hidden(self.bag(x) * self.f("embed"))))
        return F.cross_entropy(self.head(h) * self.f("logits", inverse), y[:, 0])


class Tagger(Net):
    """Bidirectional LSTM whose emissions go into a conditional random field."""

    inputs, outputs, still = ("emb.weight",), ("emit.weight",), ("transitions",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.emb, self.rnn = (
            nn.Embedding(VOCAB, width),
            nn.LSTM(width, width, bidirectional=True, batch_first=True),
        )
        self.emit, self.transitions = nn.Linear(2 * width, 5), nn.Parameter(torch.randn(5, 5))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch[0], batch[1] % 5
        e = self.emit(self.rnn(self.emb(x) * self.f("embed"))[0]) * self.f("logits", inverse)
        score, total = e[:, 0].gather(-1, y[:, :1]).squeeze(-1), e[:, 0]
        for t in range(1, T):
            total = (total.unsqueeze(-1) + self.transitions).logsumexp(1) + e[:, t]
            score = (
                score
                + self.transitions[y[:, t - 1], y[:, t]]
                + e[:, t].gather(-1, y[:, t : t + 1]).squeeze(-1)
            )
        return (total.logsumexp(-1) - score).mean() / T


class Experience(Net):
    """Decision transformer: states, actions and returns have embeddings of their own; one head acts."""

    inputs = ("state.weight", "action.weight", "reward.weight", "time")
    outputs = ("head.weight",)

    def __init__(self, width: int, o: Mapping[str, Any]) -> None:
        super().__init__(width, o)
        self.state, self.action = nn.Linear(6, width), nn.Embedding(VOCAB, width)
        self.reward, self.time = nn.Linear(1, width), nn.Parameter(torch.randn(4, 1, width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n0, self.n1, self.n2 = (nn.LayerNorm(width) for _ in range(3))
        self.up, self.down, self.head = (
            nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, VOCAB),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        taken = (x[..., 7].abs() * 7).long() % VOCAB
        steps = [self.reward(x[..., 6:7]), self.state(x[..., :6]) * self.f("embed"), self.action(taken)]
        h = self.n0(torch.stack(steps, 2) + self.time).flatten(1, 2)
        q, k, v = (heads_of(t, 8) for t in self.qkv(self.n1(h)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=8**-0.5 * self.f("attention"))
        h = h + self.out(y.transpose(1, 2).flatten(2)) * self.f("branch")
        h = h + self.down(F.gelu(self.up(self.n2(h))) * self.f("hidden"))
        return self.head(h[:, 1::3].mean(1)) * self.f("logits", inverse)


class Lion(torch.optim.Optimizer):
    """Update by the sign of the gradient; its groups need no lr."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["rate"])


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def build(kind: type[Net], changes: Mapping[str, Any], seed: int = 0) -> Callable[[int], Any]:
    """Return a build of the linter: μP by hand, with some changes.

    Changes are `f` (factors of the forward pass by place), `sigma` and `rates` (by pattern of a name, in
    place of the rule's), `optimizer`, `lr`, `eps`, `decay` (constant λ), `after` (of module and optimizers).
    """
    sigma, rates = changes.get("sigma", {}), changes.get("rates", {})
    family = changes.get("optimizer", "adamw")

    def at(width: int) -> Any:
        m = width / BASE
        torch.manual_seed(torch.initial_seed() + seed)
        module, larger = kind(width, changes.get("f", {})), kind(2 * width, {})
        groups = []
        for name, p in module.named_parameters():
            is_still = matches(name, module.still) or p.shape == larger.get_parameter(name).shape
            is_input, is_output = matches(name, module.inputs), matches(name, module.outputs)
            is_hidden = p.dim() >= 2 and not (is_input or is_output or is_still)
            rate = 1.0 if is_still else (1 / m if is_hidden else 1.0)
            if family in ("sgd", "momentum"):
                rate = 1.0 if is_hidden or is_still else m
            if family == "muon":
                rate = 1.0
            if kind is Lora and ".down" in name:
                rate = rate if family != "adamw" else 1 / m
            std = m**-0.5 if is_hidden else 1.0
            for pattern, factor in rates.items():
                rate = factor(m) if fnmatch.fnmatchcase(name, pattern) else rate
            for pattern, factor in sigma.items():
                std = factor(m) if fnmatch.fnmatchcase(name, pattern) else std
            base = {True: 0.5, False: 0.18}[is_input]
            with torch.no_grad():
                if p.dim() >= 2 and (not matches(name, module.zero) or fnmatch_any(name, sigma)):
                    p.normal_(0.0, base * std)
                elif matches(name, module.zero) or "bias" in name:
                    p.zero_()
                elif fnmatch_any(name, sigma):
                    p.mul_(std)
            if p.requires_grad or "all" in changes:
                groups.append(
                    {"params": [p], "lr": changes.get("lr", LRS[family]) * rate, "hidden": is_hidden}
                )
        for group in groups:
            group["weight_decay"] = changes.get("decay", 0.0) * (
                1 if "coupled" in changes else LRS[family] / group["lr"]
            )
        made = OPTIMIZERS[family](groups, changes)
        return changes.get("after", lambda module, optimizers: (module, optimizers))(module, made)

    return at


def fnmatch_any(name: str, patterns: Mapping[str, Any]) -> bool:
    return matches(name, tuple(patterns))


def muon(groups: list[dict[str, Any]], changes: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    is_muon = [g["hidden"] and g["params"][0].dim() == 2 for g in groups]
    matrices = [g for g, muon in zip(groups, is_muon, strict=True) if muon]
    rest = [g for g, muon in zip(groups, is_muon, strict=True) if not muon]
    for group in rest:  # stacked experts and kernels
        group["lr"] *= BASE / group["params"][0].shape[-1] if group["hidden"] else 1.0
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest)]


LRS = {
    "adamw": 2**-8,
    "sgd": 0.05,
    "momentum": 0.02,
    "muon": 2**-7,
    "lion": 2**-9,
    "nadam": 2**-8,
    "rmsprop": 2**-9,
    "adagrad": 2**-7,
    "adamax": 2**-8,
}
OPTIMIZERS: dict[str, Callable[[Any, Mapping[str, Any]], list[torch.optim.Optimizer]]] = {
    "adamw": lambda groups, c: [
        torch.optim.AdamW(groups, eps=c.get("eps", 1e-8), betas=c.get("betas", (0.9, 0.999)))
    ],
    "sgd": lambda groups, c: [torch.optim.SGD(groups)],
    "momentum": lambda groups, c: [torch.optim.SGD(groups, momentum=0.9)],
    "lion": lambda groups, c: [Lion([{"params": g["params"], "rate": g["lr"]} for g in groups])],
    "nadam": lambda groups, c: [torch.optim.NAdam(groups)],
    "rmsprop": lambda groups, c: [torch.optim.RMSprop(groups)],
    "adagrad": lambda groups, c: [torch.optim.Adagrad(groups)],
    "adamax": lambda groups, c: [torch.optim.Adamax(groups)],
    "muon": muon,
}


def in_bf16(module: nn.Module, optimizers: list[Any]) -> Any:
    # In place: the optimizer keeps its parameters, now without a master copy
    return module.to(torch.bfloat16), optimizers


def without(*patterns: str) -> Callable[..., Any]:
    """Leave parameters out of the optimizer."""

    def leave_out(module: nn.Module, optimizers: list[Any]) -> Any:
        gone = {id(p) for name, p in module.named_parameters() if matches(name, patterns)}
        for optimizer in optimizers:
            optimizer.param_groups = [g for g in optimizer.param_groups if id(g["params"][0]) not in gone]
        return module, optimizers

    return leave_out


def of_a_copy(module: nn.Module, optimizers: list[Any]) -> Any:
    return copy.deepcopy(module), optimizers


def clipped(limit: float) -> Callable[..., Any]:
    def clip(module: nn.Module, optimizers: list[Any]) -> Any:
        def hook(*of: Any) -> None:
            nn.utils.clip_grad_value_(module.parameters(), limit)

        optimizers[0].register_step_pre_hook(hook)
        return module, optimizers

    return clip


def overwritten(rate: float) -> Callable[..., Any]:
    def overwrite(module: nn.Module, optimizers: list[Any]) -> Any:
        def hook(optimizer: Any, *of: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rate

        optimizers[0].register_step_pre_hook(hook)
        return module, optimizers

    return overwrite


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(VOCAB, (8, T + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]


def pictures(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(16, *shape, generator=generator), torch.randint(VOCAB, (16,), generator=generator)

    return make


def regression(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, *shape, generator=torch.Generator().manual_seed(seed))
        return x, torch.tanh(x.flip(-1)) + 0.3

    return make


BATCHES: dict[type[Net], Callable[[int], Any]] = {
    Mixer: pictures(4, 12),
    GRU: tokens,
    LSTM: tokens,
    ConvNet: pictures(3, 6, 6),
    Perceiver: pictures(7, 12),
    Stacked: tokens,
    TwoTowers: pictures(2, 12),
    DiT: regression(4, 12),
    Translator: tokens,
    Retention: tokens,
    Autoencoder: regression(12),
    Graph: pictures(4, 12),
    Lora: pictures(4, 12),
    Waves: regression(12),
    Recommender: tokens,
    Unet: regression(3, 16),
    Latent: tokens,
}
LATER: dict[type[Net], Callable[[int], Any]] = {
    Highway: pictures(4, 12),
    Hyena: tokens,
    GAT: pictures(4, 12),
    Universal: tokens,
    Flow: regression(12),
    VAE: regression(12),
    Triplet: pictures(3, 12),
    PointNet: pictures(4, 12),
    MobileNet: pictures(3, 6, 6),
    ConvNeXt: pictures(3, 6, 6),
    Pointer: tokens,
    Bert: tokens,
    ActorCritic: pictures(2, 12),
    Albert: tokens,
    Fourier: regression(3, 16),
    Slots: pictures(7, 12),
    GAU: tokens,
    Window: pictures(4, 12),
    Switch: tokens,
    Bag: tokens,
    Tagger: tokens,
    Experience: pictures(4, 12),
}

RATE, TWICE, GROWS = "learning rate not scaled", "applied twice", "forward factor grows with width"
DIVIDED, BIGGER = "learning rate divided twice", "learning rate grows with width"
EMBEDDING, READOUT, NORM = (
    "embedding treated as hidden",
    "readout treated as hidden",
    "norm or bias treated as hidden",
)
MISSING, AGAIN, START = "readout's 1/m missing", "readout's 1/m applied twice", "readout's init not scaled"
INIT, INIT_TWICE, INIT_GROWS = "init not scaled", "init divided twice", "init grows with width"
SGD, MUON, GROUPS = (
    "SGD's learning rate not scaled",
    "Muon's learning rate has Adam's 1/m",
    "optimizer's groups made before parametrize",
)
ROUNDED = "updates lost to rounding"

# The spectral norm of a step of torch's Muon is 1; of a matrix with few outputs it should fall as 1/√m.
LOW_RANK = {"kv_down.weight": inverse_root}
MATRICES = ("qkv.weight", "out.weight", "up.weight", "down.weight", "mod.weight", "time.2.weight")
# Name, architecture, changes, and the causes that are right
FAULTS: list[tuple[str, type[Net], dict[str, Any], set[str]]] = [
    ("one learning rate", Mixer, {"rates": {"*": one}}, {RATE}),
    ("logits without 1/m", Mixer, {"f": {"logits": one}}, {MISSING}),
    ("σ of channel matrices constant", Mixer, {"sigma": {"*.up.weight": one, "*.down.weight": one}}, {INIT}),
    ("patches' output × √m", Mixer, {"f": {"embed": root}}, {GROWS}),
    (
        "norms and biases / m",
        Mixer,
        {"rates": {"*norm*": inverse, "*.n?.*": inverse, "*bias": inverse}},
        {NORM},
    ),
    ("one learning rate", GRU, {"rates": {"*": one}}, {RATE}),
    ("σ of weight_hh constant", GRU, {"sigma": {"*weight_hh*": one}}, {INIT}),
    ("σ of weight_ih ∝ 1/m", GRU, {"sigma": {"*weight_ih*": inverse}}, {INIT_TWICE}),
    ("hidden rate / m²", GRU, {"rates": {"rnn.weight*": inverse_square}}, {DIVIDED}),
    (
        "extra 1/√m in the head's σ",
        GRU,
        {"sigma": {"head.weight": inverse_root}, "f": {"logits": inverse_root}},
        {MISSING, START},
    ),
    ("rate of weight_hh constant", LSTM, {"rates": {"*weight_hh*": one}}, {RATE}),
    ("embedding's rate / m", LSTM, {"rates": {"emb.weight": inverse}}, {EMBEDDING}),
    ("SGD with one rate", LSTM, {"optimizer": "sgd", "lr": 0.5, "rates": {"*": one}}, {SGD}),
    ("one rate for all convolutions", ConvNet, {"rates": {"blocks.*.1.weight": one}}, {RATE}),
    ("stem as a hidden layer", ConvNet, {"rates": {"stem.weight": inverse}}, {EMBEDDING}),
    ("1/m in front of convolutions", ConvNet, {"f": {"hidden": inverse}}, {TWICE}),
    ("logits × 1/m²", ConvNet, {"f": {"logits": inverse_square}}, {AGAIN}),
    ("SGD, head's rate constant", ConvNet, {"optimizer": "sgd", "rates": {"head.weight": one}}, {SGD}),
    (
        "momentum with Adam's rule",
        ConvNet,
        {"optimizer": "momentum", "rates": {"*": one, "blocks.*.1.weight": inverse}},
        {SGD, DIVIDED},
    ),
    ("σ of latents ∝ 1/√m", Perceiver, {"sigma": {"latents": inverse_root}}, {EMBEDDING}),
    ("latents' rate / m", Perceiver, {"rates": {"latents": inverse}}, {EMBEDDING}),
    ("attention × √m", Perceiver, {"f": {"attention": root}}, {"attention logits grow"}),
    ("branch × √m", Perceiver, {"f": {"branch": root}}, {GROWS}),
    ("ε of 0.03", Perceiver, {"eps": 0.03}, {"ε not scaled"}),
    ("experts' rate constant", Stacked, {"rates": {"w?": one}}, {RATE}),
    ("experts' σ constant", Stacked, {"sigma": {"w?": one}}, {INIT}),
    ("experts left out of the optimizer", Stacked, {"after": without("w1", "w2")}, {GROUPS}),
    (
        "head's 1/m missing under Muon",
        Latent,
        {"optimizer": "muon", "f": {"logits": one}, "rates": LOW_RANK},
        {MISSING},
    ),
    ("embedding's σ ∝ 1/√m", Stacked, {"sigma": {"emb.weight": inverse_root}}, {EMBEDDING}),
    ("projections without 1/m", TwoTowers, {"f": {"logits": one}}, {MISSING, GROWS}),
    ("hidden rate ∝ 1/√m", TwoTowers, {"rates": {"*.2.weight": inverse_root}}, {RATE}),
    ("optimizer of a copy", TwoTowers, {"after": of_a_copy}, {GROUPS}),
    ("final layer without 1/m", DiT, {"f": {"logits": one}}, {MISSING}),
    ("modulation's rate constant", DiT, {"rates": {"mod.weight": one}}, {RATE}),
    ("time's hidden σ ∝ √m", DiT, {"sigma": {"time.2.weight": root}}, {INIT}),
    ("1/m on the MLP's branch", DiT, {"f": {"branch": inverse}}, {TWICE}),
    ("Muon with 1/m", DiT, {"optimizer": "muon", "rates": dict.fromkeys(MATRICES, inverse)}, {MUON}),
    ("heads grow in size at 1/√d", Translator, {"f": {"heads": one}}, {"attention 1/√d"}),
    ("tied logits without 1/m", Translator, {"f": {"logits": one}}, {MISSING, "weight tied across roles"}),
    (
        "tied σ ∝ 1/√m",
        Translator,
        {"sigma": {"emb.weight": inverse_root, "pos": inverse_root}},
        {EMBEDDING, "weight tied across roles"},
    ),
    (
        "tied rate / m",
        Translator,
        {"rates": {"emb.weight": inverse}},
        {EMBEDDING, "weight tied across roles"},
    ),
    ("decay coupled", Translator, {"decay": 0.1, "coupled": True}, {"decay coupled"}),
    (
        "queries' rate / m²",
        Retention,
        {"rates": {"q.weight": inverse_square, "k.weight": inverse_square}},
        {DIVIDED},
    ),
    ("scores of heads that grow × √m", Retention, {"f": {"scores": root}}, {GROWS}),
    ("Lion with one rate", Retention, {"optimizer": "lion", "rates": {"*": one}}, {RATE}),
    (
        "bottleneck as a readout without 1/m",
        Autoencoder,
        {"sigma": {"c.weight": one}, "rates": {"c.weight": one}},
        {INIT, RATE},
    ),
    (
        "outputs without 1/m, σ ∝ 1/√m, rate 1/m",
        Autoencoder,
        {"f": {"logits": one}, "sigma": {"f_.weight": inverse_root}, "rates": {"f_.weight": inverse}},
        {START},
    ),
    ("sum of messages × √m", Graph, {"f": {"branch": root}}, {GROWS}),
    ("scheduler overwrites all rates", Graph, {"after": overwritten(2**-8)}, {RATE}),
    ("readout treated as hidden", Graph, {"rates": {"head.weight": inverse}}, {READOUT}),
    (
        "clipping at a constant value under SGD",
        Graph,
        {"optimizer": "sgd", "after": clipped(1e-5)},
        {"clipping before scaling"},
    ),
    ("adapters' down at one rate", Lora, {"rates": {"*.down": one}}, {RATE}),
    ("adapters' up / m", Lora, {"rates": {"*.up": inverse}}, {EMBEDDING}),
    ("NAdam with one rate", Waves, {"optimizer": "nadam", "rates": {"*": one}}, {RATE}),
    ("first layer's σ ∝ √m", Waves, {"sigma": {"first.weight": root}}, {INIT_GROWS}),
    ("scores without 1/m", Recommender, {"f": {"logits": one}}, {MISSING, GROWS}),
    ("σ of items ∝ 1/√m", Recommender, {"sigma": {"items.weight": inverse_root}}, {EMBEDDING}),
    ("bf16 weights without a master copy", Graph, {"after": in_bf16, "lr": 2**-12}, {ROUNDED}),
    ("RMSprop, hidden rate constant", Unet, {"optimizer": "rmsprop", "rates": {"*.weight": one}}, {RATE}),
    ("low rank's rate constant", Latent, {"rates": {"kv_down.weight": one}}, {RATE}),
]

RIGHT: list[tuple[str, type[Net], dict[str, Any]]] = [
    *(("AdamW", kind, {}) for kind in BATCHES),
    ("SGD", LSTM, {"optimizer": "sgd"}),
    ("SGD", ConvNet, {"optimizer": "sgd"}),
    ("momentum", Graph, {"optimizer": "momentum"}),
    ("Muon", Mixer, {"optimizer": "muon"}),
    ("Muon", Latent, {"optimizer": "muon", "rates": LOW_RANK}),
    ("Lion, groups without lr", Stacked, {"optimizer": "lion"}),
    ("NAdam", Waves, {"optimizer": "nadam"}),
    ("Adagrad", Perceiver, {"optimizer": "adagrad"}),
    ("Adamax", Recommender, {"optimizer": "adamax"}),
    ("decay λ·m", Translator, {"decay": 0.1}),
    (
        "head σ and rate ∝ 1/m, no factor",
        GRU,
        {"f": {"logits": one}, "sigma": {"head.weight": inverse}, "rates": {"head.weight": inverse}},
    ),
    ("head starts at 0", Retention, {"sigma": {"head.weight": lambda m: 0.0}}),
    (
        "embedding frozen",
        Graph,
        {"after": lambda module, o: (module.node.requires_grad_(False) and module, o)},
    ),
]

# A second set, of other architectures, written when the first was solved
LATER_FAULTS: list[tuple[str, type[Net], dict[str, Any], set[str]]] = [
    ("one learning rate", Highway, {"rates": {"*": one}}, {RATE}),
    ("gates' rate constant", Highway, {"rates": {"gates.*.weight": one}}, {RATE}),
    ("gates' σ ∝ 1/m", Highway, {"sigma": {"gates.*.weight": inverse}}, {INIT_TWICE}),
    ("gates' input × √m", Highway, {"f": {"gate": root}}, {GROWS}),
    ("filters' rate / m", Hyena, {"rates": {"filters": inverse}}, {EMBEDDING}),
    ("σ of filters ∝ 1/√m", Hyena, {"sigma": {"filters": inverse_root}}, {EMBEDDING}),
    ("projection's rate constant", Hyena, {"rates": {"proj.weight": one}}, {RATE}),
    ("branch × 1/m", Hyena, {"f": {"branch": inverse}}, {TWICE}),
    ("heads' vectors' rate / m", GAT, {"rates": {"left": inverse, "right": inverse}}, {EMBEDDING}),
    ("logits without 1/m", GAT, {"f": {"logits": one}}, {MISSING}),
    ("scores × √m", GAT, {"f": {"scores": root}}, {GROWS, "attention logits grow"}),
    ("hidden σ constant", Universal, {"sigma": {"up.weight": one, "down.weight": one}}, {INIT}),
    ("hidden rate / m²", Universal, {"rates": {m: inverse_square for m in MATRICES}}, {DIVIDED}),
    ("steps' rate / m", Universal, {"rates": {"steps.weight": inverse}}, {EMBEDDING}),
    ("logits × 1/m²", Universal, {"f": {"logits": inverse_square}}, {AGAIN}),
    ("SGD with one rate", Universal, {"optimizer": "sgd", "rates": {"*": one}}, {SGD}),
    ("outputs of couplings without 1/m", Flow, {"f": {"logits": one}}, {MISSING, GROWS}),
    ("hidden rate constant", Flow, {"rates": {"nets.*.2.weight": one}}, {RATE}),
    ("outputs as hidden, 1/m too", Flow, {"rates": {"nets.*.4.weight": inverse}}, {READOUT, DIVIDED}),
    ("decoder's input as hidden", VAE, {"rates": {"decode.weight": inverse}}, {EMBEDDING}),
    ("encoder's σ constant", VAE, {"sigma": {"encoder.weight": one}}, {INIT}),
    ("outputs × 1/m²", VAE, {"f": {"logits": inverse_square}}, {AGAIN}),
    ("sum over the width in place of its mean", Triplet, {"f": {"distance": proportional}}, {GROWS, MISSING}),
    ("last matrix as a readout", Triplet,
     {"sigma": {"third.weight": one}, "rates": {"third.weight": one}}, {INIT, RATE}),
    ("second matrix's rate ∝ 1/√m", Triplet, {"rates": {"second.weight": inverse_root}}, {RATE}),
    ("norms and biases / m", PointNet, {"rates": {"n?.*": inverse, "*bias": inverse}}, {NORM}),
    ("first matrix as hidden", PointNet, {"rates": {"first.weight": inverse}}, {EMBEDDING}),
    ("pool × √m", PointNet, {"f": {"pool": root}}, {GROWS}),
    ("depthwise kernels' rate / m", MobileNet, {"rates": {"depth.weight": inverse}}, {EMBEDDING}),
    ("pointwise rate constant", MobileNet, {"rates": {"point.weight": one}}, {RATE}),
    ("σ of the excitation ∝ √m", MobileNet, {"sigma": {"excite.weight": root}}, {INIT}),
    ("momentum, head's rate constant", MobileNet,
     {"optimizer": "momentum", "rates": {"head.weight": one}}, {SGD}),
    ("channels' gain ∝ 1/√m", ConvNeXt, {"sigma": {"gamma": inverse_root}}, {TWICE}),
    ("channels' gain's rate / m", ConvNeXt, {"rates": {"gamma": inverse}}, {NORM}),
    ("stem's output × √m", ConvNeXt, {"f": {"embed": root}}, {GROWS}),
    ("scores without 1/m", Pointer, {"f": {"logits": one}}, {MISSING}),
    ("queries' rate / m²", Pointer, {"rates": {"queries.weight": inverse_square}}, {DIVIDED}),
    ("score's rate / m, 1/m too", Pointer, {"rates": {"score.weight": inverse}}, {READOUT}),
    ("recurrent σ constant", Pointer, {"sigma": {"rnn.weight_hh*": one}}, {INIT}),
    ("second head without 1/m", Bert, {"f": {"second": one}}, {MISSING}),
    ("pooler's rate constant", Bert, {"rates": {"pooler.weight": one}}, {RATE}),
    ("four heads at 1/√d", Bert, {"f": {"heads": one}}, {"attention 1/√d"}),
    ("tied logits without 1/m", Bert, {"f": {"logits": one}}, {MISSING, "weight tied across roles"}),
    ("value's head without 1/m", ActorCritic, {"f": {"value": one}}, {MISSING}),
    ("policy's rate / m", ActorCritic, {"rates": {"policy.weight": inverse}}, {READOUT}),
    ("widening matrix as hidden", Albert, {"rates": {"widen.weight": inverse}}, {EMBEDDING}),
    ("decay coupled", Albert, {"decay": 0.1, "coupled": True}, {"decay coupled"}),
    ("Muon with 1/m", Albert,
     {"optimizer": "muon", "rates": dict.fromkeys(("mixer.weight", *MATRICES), inverse)}, {MUON}),
    ("complex matrices' rate constant", Fourier, {"rates": {"spectral": one}}, {RATE}),
    ("complex matrices' σ constant", Fourier, {"sigma": {"spectral": one}}, {INIT}),
    ("attention 1/√d", Slots, {"f": {"attention": inverse_root}}, {"attention 1/√d"}),
    ("cell's recurrent rate constant", Slots, {"rates": {"cell.weight_hh": one}}, {RATE}),
    ("slots' rate / m", Slots, {"rates": {"slots": inverse}}, {EMBEDDING}),
    ("keys' rate constant", GAU, {"rates": {"z.weight": one}}, {RATE}),
    ("ε of 0.03", GAU, {"eps": 0.03}, {"ε not scaled"}),
    ("distances' rate / m", Window, {"rates": {"distances": inverse}}, {EMBEDDING}),
    ("experts' second rate constant", Switch, {"rates": {"experts.*.2.weight": one}}, {RATE}),
    ("one expert left out of the optimizer", Switch, {"after": without("experts.1.*")}, {GROUPS}),
    ("reverse direction's rates constant", Tagger, {"rates": {"rnn.weight*_reverse": one}}, {RATE}),
    ("rewards' embedding as hidden", Experience, {"rates": {"reward.weight": inverse}}, {EMBEDDING}),
]  # fmt: skip

LATER_RIGHT: list[tuple[str, type[Net], dict[str, Any]]] = [
    *(("AdamW", kind, {}) for kind in LATER),
    ("SGD", Highway, {"optimizer": "sgd"}),
    ("momentum", MobileNet, {"optimizer": "momentum"}),
    ("Muon", Universal, {"optimizer": "muon"}),
    ("Lion, groups without lr", Tagger, {"optimizer": "lion"}),
    ("Adagrad", Bag, {"optimizer": "adagrad"}),
    ("decay λ·m", Bert, {"decay": 0.1}),
    ("score σ and rate ∝ 1/m, no factor", Pointer,
     {"f": {"logits": one}, "sigma": {"score.weight": inverse}, "rates": {"score.weight": inverse}}),
    ("policy starts at 0", ActorCritic, {"sigma": {"policy.weight": lambda m: 0.0}}),
]  # fmt: skip


def loss(module: nn.Module, batch: Any) -> Tensor:
    cast = next(p.dtype for p in module.parameters() if p.is_floating_point())
    batch = tuple(t.to(cast) if t.is_floating_point() else t for t in batch)
    result: Tensor = module.loss(batch)  # type: ignore[operator]
    return result


def check(kind: type[Net], changes: Mapping[str, Any], seed: int = 0, **options: Any) -> Any:
    options = {"widths": WIDTHS, "progress": lambda doing, share: None} | options
    return lint(build(kind, changes, seed), (BATCHES | LATER)[kind](seed), loss, **options)


def main(
    part: Annotated[str, tyro.conf.Positional] = "", seed: int = 0, seeds: int = 2, later: bool = False
) -> None:
    """Print a row a model.

    Args:
        part: part of "architecture: name" of the models to try; their reports are printed too.
        seed: first seed of init and batch.
        seeds: number of seeds of the init.
        later: try the second set.
    """
    torch.set_num_threads(1)
    faults, right = (LATER_FAULTS, LATER_RIGHT) if later else (FAULTS, RIGHT)
    caught = named = alarms = 0
    spent: dict[bool, list[float]] = {True: [], False: []}
    print("| model | right first causes | caught | first cause | CPU s |\n|---|---|---|---|---|")
    for name, kind, changes, causes in [*faults, *((n, k, c, set()) for n, k, c in right)]:
        title = f"{kind.__name__}: {name}"
        if part.lower() not in title.lower():
            continue
        began = time.process_time()
        try:
            report: Any = check(kind, changes, seed, seeds=seeds)
            first = next((f.cause for f in report.findings if f.cause), "–")
            is_caught, said = not report.passes, first if not report.passes or causes else "–"
        except Exception as error:
            report, first, is_caught, said = "", "", False, f"{type(error).__name__}: {str(error)[:60]}"
        cpu = time.process_time() - began
        spent[changes.get("optimizer") == "muon"].append(cpu)
        is_right = first in causes
        caught, named = caught + (is_caught and bool(causes)), named + (is_right and is_caught)
        alarms += (is_caught or not report) and not causes
        mark = (
            ("✓" if is_right and is_caught else f"**{said}**")
            if causes
            else ("–" if not is_caught and report else f"**{said}**")
        )
        wanted, is_in = " or ".join(sorted(causes)) or "right", "yes" if is_caught else "no"
        print(f"| {title} | {wanted} | {is_in} | {mark} | {cpu:.1f} |", flush=True)
        if part:
            print(report)
    print(f"\n{caught} of {len(faults)} caught, {named} with the right first cause, "
          f"{alarms} false alarms of {len(right)}")  # fmt: skip
    for is_muon, seconds in spent.items():
        if seconds:
            mean, most = sum(seconds) / len(seconds), max(seconds)
            print(f"{'Muon' if is_muon else 'others'}: {mean:.1f} CPU s a model, most {most:.1f}")


if __name__ == "__main__":
    tyro.cli(main)
