"""A training script in the manner of nanoGPT, with μP in three marked lines; the last line is the loss.

python examples/nanogpt.py --width 256 --lr 0.004
mup-tpu sweep examples/nanogpt.toml --until-settled
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mup_tpu.parametrize import parametrize  # μP

HEAD_SIZE, LAYERS, CONTEXT, VOCABULARY = 16, 2, 64, 256


class Attention(nn.Module):
    """Causal attention of heads that grow in number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_head = width // HEAD_SIZE
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix values over earlier tokens."""
        B, T, C = x_BTC.shape
        heads = [x.view(B, T, self.n_head, -1).transpose(1, 2) for x in self.c_attn(x_BTC).split(C, dim=2)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention and an MLP, each on a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Decoder of bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next byte, nat."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train, and print the loss on all of the text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2**-7)
    parser.add_argument("--rule", default="mup")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", default=str(Path(__file__).parents[1] / "docs" / "rules.md"))
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()

    mup = parametrize(GPT, width=args.width, base_width=64, rule=args.rule)  # μP
    model = mup.init_(GPT(args.width))  # μP
    optimizer = torch.optim.AdamW(mup.param_groups(model, lr=args.lr, weight_decay=0.1))  # μP
    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (16,))
        loss = loss_of(model, torch.stack([text[i : i + CONTEXT + 1] for i in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    starts = range(0, len(text) - CONTEXT - 1, CONTEXT)
    with torch.no_grad():
        print(loss_of(model, torch.stack([text[i : i + CONTEXT + 1] for i in starts])).item())


if __name__ == "__main__":
    main()
