"""How often `lint` names the right cause: ways to get μP wrong, each built into three architectures by hand.

python benchmarks/lint_faults.py                    all faults and right models (20 minutes)
python benchmarks/lint_faults.py "embedding"        those with this in their name

Factors are written into the modules here, without `parametrize`, as in other people's code.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

from mup_tpu.parametrize import lint

BASE, WIDTHS, VOCAB, T = 32, (32, 64, 128, 256), 29, 12
HEADS = 2  # heads grow in size, from 16


@dataclass
class Recipe:
    """Factors of a model by hand, as functions of m = width / base; the defaults are μP for Adam."""

    sigma: dict[str, Callable[[float], float]] = field(default_factory=dict)
    """By part of a parameter's name, in place of the rule's factor on σ."""
    rates: dict[str, Callable[[float], float]] = field(default_factory=dict)
    """By part of a parameter's name, in place of the rule's factor on the learning rate."""
    logits: Callable[[float], float] = lambda m: 1 / m
    attention: Callable[[float], float] = lambda d: 4 / d  # 1/√d at the base
    embedding: Callable[[float], float] = lambda m: 1.0  # factor on the embedding's output
    hidden: Callable[[float], float] = lambda m: 1.0  # factor in front of the MLP's last matrix
    branch: Callable[[float], float] = lambda m: 1.0  # factor on the MLP's branch
    final: Callable[[Tensor], Tensor] = lambda x: x  # in front of the readout
    norm: str = ""
    tied: bool = False
    fixed_inner: bool = False  # the MLP's inner size stays
    heads: int = HEADS
    heads_grow: bool = False  # in number, with the width
    fixed_keys: bool = False  # keys and values have one size
    optimizer: str = "adamw"
    lr: float = 2**-8
    eps: float = 1e-8
    decay: float = 0.0
    scaled_decay: bool = True
    clip: float = 0.0
    after: Callable[[nn.Module, torch.optim.Optimizer], Any] = lambda module, optimizer: None
    depth: int = 2
    branches: float = 1.0


class L2Norm(nn.Module):
    """Norm of the vector, without its root of the width."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class Attention(nn.Module):
    """Attention, fused or by hand, whose fields have names of their author."""

    def __init__(self, width: int, r: Recipe, fused: bool, causal: bool) -> None:
        super().__init__()
        self.H, self.r, self.causal = (width // 16 if r.heads_grow else r.heads), r, causal
        self.kv = BASE if r.fixed_keys else width
        self.fused = fused and not r.fixed_keys
        if self.fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.wq = nn.Linear(width, self.kv, bias=False)
            self.wk = nn.Linear(width, self.kv, bias=False)
            self.wv = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, N, width = x.shape
        q, k, v = self.qkv(x).split(width, -1) if self.fused else (self.wq(x), self.wk(x), self.wv(x))
        q, k, v = (t.view(B, N, self.H, -1).transpose(1, 2) for t in (q, k, v))
        scale = self.r.attention(q.shape[-1])
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        else:
            weights = q * scale @ k.mT
            if self.causal:
                weights = weights.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf)
            y = weights.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(B, N, width))


class Block(nn.Module):
    """Block with an MLP, gated or not."""

    def __init__(self, width: int, r: Recipe, norm: type[nn.Module], gated: bool, causal: bool) -> None:
        super().__init__()
        m, inner = width / BASE, 2 * (BASE if r.fixed_inner else width)
        make = (lambda width: L2Norm()) if r.norm == "l2" else norm
        self.n1, self.attn = make(width), Attention(width, r, not gated, causal)
        self.n2, self.up, self.down = make(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Linear(width, inner) if gated else None
        self.factors = r.hidden(m), r.branch(m) * r.branches

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factors[1] * self.attn(self.n1(x))
        h = self.n2(x)
        h = F.silu(self.gate(h)) * self.up(h) if self.gate is not None else F.gelu(self.up(h))
        return x + self.factors[1] * self.down(self.factors[0] * h)


class Model(nn.Module):
    """GPT (fused queries, SDPA), Llama (gated, RMSNorm, softmax by hand) or ViT (patches, pooled)."""

    def __init__(self, kind: str, width: int, r: Recipe) -> None:
        super().__init__()
        self.kind, self.r, self.m = kind, r, width / BASE
        if kind == "vit":
            self.patch = nn.Conv2d(3, width, 4, 4)
            self.pos = nn.Embedding(4, width)
        else:
            self.tok = nn.Embedding(VOCAB, width)
            self.pos = nn.Embedding(T, width)
        norm = nn.RMSNorm if kind == "llama" else nn.LayerNorm
        blocks = [Block(width, r, norm, kind == "llama", kind != "vit") for _ in range(r.depth)]
        self.blocks, self.norm = nn.ModuleList(blocks), norm(width)
        self.readout = nn.Linear(width, VOCAB, bias=False)
        if r.tied and kind != "vit":
            self.readout.weight = self.tok.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.patch(batch).flatten(2).mT if self.kind == "vit" else self.tok(batch)
        x = (x + self.pos.weight[: x.shape[1]]) * self.r.embedding(self.m)
        for block in self.blocks:
            x = block(x)
        x = self.r.final(self.norm(x))
        return self.readout(x.mean(1) if self.kind == "vit" else x) * self.r.logits(self.m)


class Lion(torch.optim.Optimizer):
    """Update by the sign of the gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"])


HIDDEN = ("qkv", "wq", "wk", "wv", "out", "up", "gate", "down")


def build(kind: str, r: Recipe, seed: int = 0) -> Callable[[int], tuple[Any, ...]]:
    def at(width: int) -> tuple[Any, ...]:
        m = width / BASE
        torch.manual_seed(torch.initial_seed() + seed)
        module = Model(kind, width, r)
        groups = []
        for name, p in module.named_parameters():
            is_hidden = p.dim() >= 2 and any(f".{part}." in name for part in HIDDEN)
            outside = (r.fixed_inner and ".down." in name) or (r.fixed_inner and "up.bias" in name)
            sgd = r.optimizer == "sgd"
            hidden_rate = {"sgd": 1.0, "muon": 1.0}.get(r.optimizer, 1 / m)
            rate = hidden_rate if is_hidden and not outside else (m if sgd else 1.0)
            std = 0.15 * (m**-0.5 if is_hidden and not outside else 1.0)
            for part, factor in r.rates.items():
                rate = factor(m) if part in name else rate
            for part, factor in r.sigma.items():
                std = 0.15 * factor(m) if part in name else std
            if p.dim() >= 2:
                nn.init.normal_(p, std=std)
            elif "sigma:norm" in r.norm and name.endswith("weight"):
                nn.init.constant_(p, m**-0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
            decay = r.decay * (1 / rate if r.scaled_decay else 1.0)
            groups.append({"params": [p], "lr": r.lr * rate, "weight_decay": decay, "hidden": is_hidden})
        if r.optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=r.lr, eps=r.eps)
        elif r.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=r.lr)
        elif r.optimizer == "lion":
            optimizer = Lion(groups, lr=r.lr)
        else:
            matrices = [g for g in groups if g["hidden"]]
            rest = [g for g in groups if not g["hidden"]]
            return module, torch.optim.Muon(matrices, lr=r.lr), torch.optim.AdamW(rest, lr=r.lr)
        if r.clip:
            limit = r.clip

            def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
                nn.utils.clip_grad_norm_(module.parameters(), limit)

            optimizer.register_step_pre_hook(clip)
        return r.after(module, optimizer) or (module, optimizer)

    return at


def one_rate(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def overwrite(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 2**-8

    optimizer.register_step_pre_hook(overwrite)


def without_hidden(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = [g for g in optimizer.param_groups if not g["hidden"]]


def reinit_down(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, p in module.named_parameters():
        if "down.weight" in name:
            nn.init.normal_(p, std=0.15)


def frozen(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, p in module.named_parameters():
        p.requires_grad_("down" not in name)


def change(key: str, factor: Callable[[float], float]) -> Callable[..., None]:
    """Return a function that multiplies a setting of the hidden matrices' groups."""

    def multiply(module: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if group["hidden"]:
                group[key] *= factor(module.m)

    return multiply


LR, TWICE = "learning rate not scaled", "applied twice"
EMBEDDING, READOUT = "embedding treated as hidden", "readout treated as hidden"
NORM, MISSING = "norm or bias treated as hidden", "readout's 1/m missing"
GROWS = "forward factor grows with width"
DEPTH = "residual branch not scaled by depth"


def every(factor: Callable[[float], float], parts: tuple[str, ...] = HIDDEN) -> dict[str, Callable]:
    return {f".{part}.weight": factor for part in parts}


def one(m: float) -> float:
    return 1.0


EMBEDDINGS = ("tok.", "patch.", "pos.")
# Name, changes of the recipe, and the causes that are right
FAULTS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("all logits and learning rates divided by m again (gpt-neox#956)",
     {"rates": every(lambda m: m**-2), "logits": lambda m: m**-2},
     {"learning rate divided twice", "readout's 1/m applied twice"}),
    ("learning rate of all parameters divided by m (gpt-neox#1087)",
     {"rates": {"": lambda m: 1 / m}}, {EMBEDDING, READOUT, NORM}),
    ("one learning rate for all parameters (mup#23)", {"rates": {"": one}}, {LR}),
    ("base shapes of the same width: every m is 1 (mup#55)",
     {"rates": {"": one}, "logits": one, "sigma": every(one)}, {LR, MISSING, "init not scaled"}),
    ("scheduler overwrites the groups' learning rates (mup#71)", {"after": one_rate}, {LR}),
    ("readout without 1/m (llm.c#650)", {"logits": one}, {MISSING}),
    ("embedding's learning rate divided by m (Megatron#3177)",
     {"rates": {e: lambda m: 1 / m for e in EMBEDDINGS}}, {EMBEDDING}),
    ("readout's learning rate divided by m, logits too (Megatron#3715)",
     {"rates": {"readout": lambda m: 1 / m}}, {READOUT}),
    ("attention 1/√d, heads grow in size", {"attention": lambda d: d**-0.5}, {"attention 1/√d"}),
    ("attention without a scale", {"attention": one}, {"attention 1/√d"}),
    ("attention divided twice", {"attention": lambda d: 16 / d**2}, {"attention divided twice"}),
    ("hidden learning rate ∝ 1/√m", {"rates": every(lambda m: m**-0.5)}, {LR}),
    ("hidden learning rate ∝ 1/m²", {"rates": every(lambda m: m**-2)}, {"learning rate divided twice"}),
    ("hidden learning rate ∝ m", {"rates": every(lambda m: m), "lr": 2**-12},
     {LR, "learning rate grows with width"}),
    ("embeddings, norms and biases × m, as under SGD",
     {"rates": {e: lambda m: m for e in (*EMBEDDINGS, "norm", "n1", "n2", "bias")}},
     {"learning rate grows with width"}),
    ("norms' and biases' learning rate divided by m",
     {"rates": {e: lambda m: 1 / m for e in ("norm", "n1", "n2", "bias")}}, {NORM}),
    ("positions' learning rate divided by m", {"rates": {"pos.": lambda m: 1 / m}}, {EMBEDDING}),
    ("readout's learning rate × m", {"rates": {"readout": lambda m: m}}, {"learning rate grows with width"}),
    ("attention's matrices left out of the hidden group",
     {"rates": every(one, ("qkv", "wq", "wk", "wv", "out"))}, {LR}),
    ("the MLP's last matrix left out of the hidden group", {"rates": every(one, ("down",))}, {LR}),
    ("optimizer of another copy of the module", {"after": lambda module, o: (copy.deepcopy(module), o)},
     {"optimizer's groups made before parametrize"}),
    ("hidden matrices missing from the optimizer", {"after": without_hidden},
     {"optimizer's groups made before parametrize"}),
    ("a matrix is frozen", {"after": frozen}, {"not trained"}),
    ("hidden σ constant", {"sigma": every(one)}, {"init not scaled"}),
    ("hidden σ ∝ 1/m", {"sigma": every(lambda m: 1 / m)}, {"init divided twice"}),
    ("hidden σ ∝ √m", {"sigma": every(lambda m: m**0.5)}, {"init not scaled"}),
    ("one matrix drawn again after the rule's init", {"after": reinit_down}, {"init not scaled"}),
    ("the branches' last matrices σ constant", {"sigma": every(one, ("out", "down"))}, {"init not scaled"}),
    ("embeddings' σ ∝ 1/√m", {"sigma": {e: lambda m: m**-0.5 for e in EMBEDDINGS}}, {EMBEDDING}),
    ("readout without 1/m, learning rate 1/m, σ ∝ 1/√m",
     {"sigma": {"readout": lambda m: m**-0.5}, "rates": {"readout": lambda m: 1 / m}, "logits": one},
     {"readout's init not scaled"}),
    ("readout × 1/√m", {"logits": lambda m: m**-0.5}, {MISSING}),
    ("readout × 1/m²", {"logits": lambda m: m**-2}, {"readout's 1/m applied twice"}),
    ("readout × m", {"logits": lambda m: m}, {MISSING, GROWS}),
    ("embedding's output × √width", {"embedding": lambda m: m**0.5}, {GROWS}),
    ("embedding's output × 1/m", {"embedding": lambda m: 1 / m}, {TWICE}),
    ("factor 1/m in front of a hidden matrix", {"hidden": lambda m: 1 / m}, {TWICE}),
    ("factor 1/m on branches", {"branch": lambda m: 1 / m}, {TWICE}),
    ("factor √m on branches", {"branch": lambda m: m**0.5}, {GROWS}),
    ("norm of the vector in place of its root mean square", {"norm": "l2"}, {TWICE}),
    ("norms' gains start at 1/√m", {"norm": "sigma:norm"}, {TWICE}),
    ("a sum over the width", {"final": lambda x: x + x.square().sum(-1, keepdim=True)}, {GROWS, MISSING}),
    ("inner size stays, its last matrix as hidden",
     {"fixed_inner": True, "rates": every(lambda m: 1 / m, ("down",))}, {EMBEDDING}),
    ("inner size stays, its first matrix as a readout",
     {"fixed_inner": True, "rates": every(one, ("up", "gate"))}, {LR}),
    ("keys of a fixed size, with a readout's learning rate",
     {"fixed_keys": True, "attention": lambda d: 0.25, "rates": every(one, ("wq", "wk"))}, {LR}),
    ("tied, logits without 1/m", {"tied": True, "logits": one},
     {MISSING, "weight tied across roles"}),
    ("tied, σ ∝ 1/√m", {"tied": True, "sigma": {"tok.": lambda m: m**-0.5, "pos.": lambda m: m**-0.5}},
     {"weight tied across roles", EMBEDDING}),
    ("tied, learning rate 1/m", {"tied": True, "rates": {"tok.": lambda m: 1 / m}},
     {"weight tied across roles"}),
    ("ε larger than the gradients", {"eps": 0.1}, {"ε not scaled"}),
    ("decay coupled to a learning rate with 1/m", {"decay": 0.1, "scaled_decay": False}, {"decay coupled"}),
    ("SGD with one learning rate", {"optimizer": "sgd", "lr": 0.02, "rates": {"": one}},
     {"SGD's learning rate not scaled"}),
    ("SGD with Adam's rule", {"optimizer": "sgd", "lr": 0.02,
     "rates": {"": one} | every(lambda m: 1 / m)},
     {"SGD's learning rate not scaled", "learning rate divided twice"}),
    ("SGD with hidden matrices × m", {"optimizer": "sgd", "lr": 0.005, "rates": every(lambda m: m)},
     {LR, "learning rate grows with width"}),
    ("Muon with Adam's 1/m", {"optimizer": "muon", "rates": every(lambda m: 1 / m)},
     {"Muon's learning rate has Adam's 1/m"}),
    ("Lion with one learning rate", {"optimizer": "lion", "rates": {"": one}}, {LR}),
    # Written after the method
    ("the MLP's first matrices left out of the hidden group", {"rates": every(one, ("up", "gate"))}, {LR}),
    ("queries' learning rate ∝ 1/m²", {"rates": every(lambda m: m**-2, ("wq", "qkv"))},
     {"learning rate divided twice"}),
    ("embeddings' σ ∝ √m", {"sigma": {e: lambda m: m**0.5 for e in EMBEDDINGS}}, {"init grows with width"}),
    ("weight decay of hidden matrices × 1/m",
     {"decay": 0.1, "after": change("weight_decay", lambda m: m**-2)}, {"decay coupled"}),
    ("ε of hidden matrices × m²", {"eps": 1e-5, "after": change("eps", lambda m: m**2)}, {"ε not scaled"}),
    ("SGD, norms and biases at one learning rate",
     {"optimizer": "sgd", "lr": 0.02, "rates": {e: one for e in ("norm", "n1", "n2", "bias")}},
     {"SGD's learning rate not scaled"}),
    ("SGD, readout at one learning rate", {"optimizer": "sgd", "lr": 0.02, "rates": {"readout": one}},
     {"SGD's learning rate not scaled"}),
    ("Lion with 1/m²", {"optimizer": "lion", "rates": every(lambda m: m**-2)},
     {"learning rate divided twice"}),
    ("Muon, embeddings' learning rate divided by m",
     {"optimizer": "muon", "rates": {e: lambda m: 1 / m for e in EMBEDDINGS}}, {EMBEDDING}),
    ("readout's input × 1/√m", {"final": lambda x: x * (BASE / x.shape[-1]) ** 0.5},
     {TWICE, "readout's 1/m applied twice"}),
    ("tied, learning rate × m", {"tied": True, "rates": {"tok.": lambda m: m}},
     {"learning rate grows with width"}),
]  # fmt: skip

RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW, heads grow in number", {"attention": lambda d: 0.25, "heads_grow": True}),
    ("AdamW, tied", {"tied": True}),
    ("AdamW, readout starts at 0", {"sigma": {"readout": lambda m: 0.0}}),
    ("AdamW, queries start at 0", {"sigma": every(lambda m: 0.0, ("wq",))}),
    ("AdamW, readout without 1/m, σ and learning rate ∝ 1/m",
     {"logits": one, "sigma": {"readout": lambda m: 1 / m}, "rates": {"readout": lambda m: 1 / m}}),
    ("AdamW, decay λ·m", {"decay": 0.1}),
    ("AdamW, clipped", {"clip": 0.1}),
    ("SGD", {"optimizer": "sgd", "lr": 0.02}),
    ("Muon and AdamW", {"optimizer": "muon"}),
    ("Lion", {"optimizer": "lion"}),
    ("inner size stays", {"fixed_inner": True}),
    ("keys of a fixed size", {"fixed_keys": True, "attention": lambda d: 0.25}),
]  # fmt: skip


def batch_of(kind: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return torch.randn(16, 3, 8, 8, generator=generator)
    return torch.randint(VOCAB, (8, T), generator=generator)


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    logits = module(batch)
    if logits.dim() == 2:
        return F.cross_entropy(logits, torch.arange(len(batch)) % VOCAB)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def check(kind: str, changes: dict[str, Any], seed: int = 0, **options: Any) -> Any:
    recipe = replace(Recipe(), **changes)
    options = {"widths": WIDTHS, "progress": lambda doing, share: None} | options
    return lint(build(kind, recipe, seed), batch_of(kind, seed), loss, **options)


def main(
    part: Annotated[str, tyro.conf.Positional] = "", seed: int = 0, seeds: int = 2, right_only: bool = False
) -> None:
    """Print a row a fault, and a line a right model.

    Args:
        part: part of the names of faults and right models to try.
        seed: first seed of init and batch.
        seeds: number of seeds of the init.
        right_only: leave out the faults.
    """
    options: dict[str, Any] = {"seeds": seeds, "seed": seed}
    torch.set_num_threads(1)
    began, right, total, rows = time.perf_counter(), 0, 0, []
    for name, changes, causes in FAULTS if not right_only else ():
        row = []
        # torch's Muon orthogonalizes in bfloat16, slowly on CPUs.
        options["widths"] = WIDTHS[:3] if changes.get("optimizer") == "muon" else WIDTHS
        for kind in ("gpt", "llama", "vit"):
            if part not in name or (changes.get("tied") and kind == "vit"):
                row.append("–")
                continue
            report = check(kind, changes, **options)
            first = next((f.cause for f in report.findings if f.cause), "nothing")
            total, right = total + 1, right + (first in causes)
            row.append("✓" if first in causes else f"**{first}**")
        rows.append(f"| {name} | {' or '.join(sorted(causes))} | {' | '.join(row)} |")
        if part in name:
            print(rows[-1], flush=True)
    false = []
    options["widths"] = WIDTHS
    for name, changes in RIGHT:
        for kind in ("gpt", "llama", "vit"):
            if part in name and not (changes.get("tied") and kind == "vit"):
                report = check(kind, changes, **options)
                print(f"right: {name}, {kind}: {'✓' if report.passes else report.sentence}", flush=True)
                false += [] if report.passes else [f"{kind}: {name}"]
    print(f"\n{right} of {total} with the right cause first; false alarms: {false}; "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
