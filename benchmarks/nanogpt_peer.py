"""A trial as elsewhere: a process of its own, an eager GPT-2 of nanoGPT's structure.

    python benchmarks/nanogpt_peer.py --tokens FOLDER --width 64 --learning-rates 0.004 --steps 300

Several rates are trained one after another, as by a worker that stays.

Fused QKV, SDPA, GELU, pre-norm, tied readout, torch.optim.AdamW (fused), clipping at 1, warm-up and cosine:
karpathy/nanoGPT's model.py and train.py as facts, written anew and plain. It reads the same token cache and
evaluates as often as the sweep it is compared with. It stands for EleutherAI/nanoGPT-mup, whose own train.py
has the same structure.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(d, dim=2)
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """nanoGPT's model without dropout."""

    def __init__(self, vocab: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.readout.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.readout(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    """Train each rate, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=Path, required=True)
    for name, kind, default in (
        ("width", int, 64), ("depth", int, 2), ("head-size", int, 32), ("length", int, 128),
        ("batch", int, 16), ("steps", int, 300), ("seed", int, 0), ("eval-batches", int, 8),
        ("threads", int, 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2.0**-8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    for rate in o.learning_rates:
        print(json.dumps(trained(rate, o)))


def trained(rate: float, o: argparse.Namespace) -> dict[str, float | None]:
    """Train one trial; return its losses."""
    torch.manual_seed(o.seed)
    train, held_out = (np.load(o.tokens / f"{s}.npy", mmap_mode="r") for s in ("train", "validation"))
    generator = np.random.default_rng(o.seed)

    def batch(tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        starts = generator.integers(0, len(tokens) - o.length - 1, o.batch)
        both = torch.from_numpy(np.stack([tokens[s : s + o.length + 1] for s in starts]).astype(np.int64))
        both = both.to(o.device)
        return both[:, :-1], both[:, 1:]

    model = GPT(256, o.length, o.width, o.depth, o.width // o.head_size).to(o.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    warmup = max(1, o.steps // 10)
    losses = []
    for step in range(o.steps):
        done = (step - warmup) / max(1, o.steps - warmup)
        share = (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        with torch.autocast(o.device, torch.bfloat16, enabled=o.bf16):
            loss = model(*batch(train))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            losses.append(loss.item())
    with torch.no_grad(), torch.autocast(o.device, torch.bfloat16, enabled=o.bf16):
        final = sum(model(*batch(held_out)).item() for _ in range(o.eval_batches)) / o.eval_batches
    return {"loss": final, "train": losses[-1] if losses else None}


if __name__ == "__main__":
    main()
