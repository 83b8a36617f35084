"""`lint` on architectures that it was not made on: 60 faults and 30 right models, each scaled by hand.

python benchmarks/lint_held_out.py                   the table of `benchmarks/lint_held_out.md`
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


def loss(module: nn.Module, batch: Any) -> Tensor:
    cast = next(module.parameters()).dtype
    batch = tuple(t.to(cast) if t.is_floating_point() else t for t in batch)
    result: Tensor = module.loss(batch)  # type: ignore[operator]
    return result


def check(kind: type[Net], changes: Mapping[str, Any], seed: int = 0, **options: Any) -> Any:
    options = {"widths": WIDTHS, "progress": lambda doing, share: None} | options
    return lint(build(kind, changes, seed), BATCHES[kind](seed), loss, **options)


def main(part: Annotated[str, tyro.conf.Positional] = "", seed: int = 0, seeds: int = 2) -> None:
    """Print a row a model.

    Args:
        part: part of "architecture: name" of the models to try; their reports are printed too.
        seed: first seed of init and batch.
        seeds: number of seeds of the init.
    """
    torch.set_num_threads(1)
    caught = named = alarms = 0
    spent: dict[bool, list[float]] = {True: [], False: []}
    print("| model | right first causes | caught | first cause | CPU s |\n|---|---|---|---|---|")
    for name, kind, changes, causes in [*FAULTS, *((n, k, c, set()) for n, k, c in RIGHT)]:
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
        right, is_in = " or ".join(sorted(causes)) or "right", "yes" if is_caught else "no"
        print(f"| {title} | {right} | {is_in} | {mark} | {cpu:.1f} |", flush=True)
        if part:
            print(report)
    print(f"\n{caught} of {len(FAULTS)} caught, {named} with the right first cause, "
          f"{alarms} false alarms of {len(RIGHT)}")  # fmt: skip
    for is_muon, seconds in spent.items():
        if seconds:
            mean, most = sum(seconds) / len(seconds), max(seconds)
            print(f"{'Muon' if is_muon else 'others'}: {mean:.1f} CPU s a model, most {most:.1f}")


if __name__ == "__main__":
    tyro.cli(main)
