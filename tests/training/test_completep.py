"""Steps of deep models under rules for depth, against GPT-2 and torch.optim written out plainly here."""

import math

import pytest
import torch
from torch.nn import functional

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.training.pack import Pack

VOCAB, T, LR, DECAY, EPS = 40, 16, 0.01, 0.1, 1e-3
M_N, M_L = 2.0, 4.0
TRIAL = Trial().replace(
    width=64, base_width=32, head_size=16, depth=8, base_depth=2, tied=False, sequence_length=T, batch_size=4,
    learning_rate=LR, weight_decay=DECAY, eps=EPS, beta1=0.8, beta2=0.9, grad_clip=0.0, schedule="constant",
    warmup=0.0, steps=3, precision="float64", alpha_in=1.5, alpha_out=0.7, init_std=0.2,
)  # fmt: skip


def gpt2(w: dict[str, torch.Tensor], tokens: torch.Tensor, residual: float, logits: float) -> torch.Tensor:
    """Logits: pre-norm blocks on rows of (inputs, outputs) matrices, as the paper has them."""

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    b, t = tokens.shape
    x = 1.5 * (w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:t])
    future = torch.full((t, t), -math.inf, dtype=x.dtype).triu(1)
    for i in range(8):
        block = f"transformer.h.{i}"
        q, k, v = (
            part.view(b, t, 4, 16).transpose(1, 2)
            for part in linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(64, -1)
        )
        scores = (q @ k.transpose(-1, -2) / 16**0.5 + future).softmax(-1)
        mixed = (scores @ v).transpose(1, 2).reshape(b, t, 64)
        x = x + residual * linear(mixed, f"{block}.attn.c_proj")
        hidden = functional.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate="tanh")
        x = x + residual * linear(hidden, f"{block}.mlp.c_proj")
    return 0.7 * logits * norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


def completep(name: str, alpha: float) -> dict[str, float]:
    """Dey et al. 2025, Table 1, of one parameter."""
    if ".h." not in name:
        decay = DECAY if name.endswith(("wte.weight", "wpe.weight", "lm_head.weight")) else 0.0
        return {"lr": LR, "weight_decay": decay, "eps": EPS}
    group = {"lr": LR * M_L ** (alpha - 1), "weight_decay": 0.0, "eps": EPS / M_N * M_L**-alpha}
    if name.endswith(".weight") and ".ln_" not in name:
        group |= {"lr": group["lr"] / M_N, "weight_decay": DECAY * M_N}
    return group


def completedp(name: str) -> dict[str, float]:
    """Mlodozeniec et al. 2025, Table 1: what differs from CompleteP with α = 1."""
    group = completep(name, 1.0)
    if name.endswith(("wte.weight", "wpe.weight")):
        group |= {"eps": EPS / M_N}
    if name == "lm_head.weight":
        group |= {"lr": LR / M_N, "weight_decay": DECAY * M_N, "eps": EPS}
    return group


def umup(name: str) -> dict[str, float]:
    """Blake et al. 2024, Table 2, by growth: init has no factor, the forward pass has `forward_factor`'s,
    learning rates are × 1/√fan-in of hidden matrices, × 1/√fan-out of embeddings, and in blocks × 1/√depth.
    Decay is independent of them. ε follows the gradient, which the forward factor multiplies."""
    rate, forward = M_L**-0.5 if ".h." in name else 1.0, forward_factor(name)
    if name.endswith(("wte.weight", "wpe.weight")):
        rate = M_N**-0.5
    decay = DECAY / rate if completep(name, 0.5)["weight_decay"] else 0.0
    group = {"lr": LR * rate, "weight_decay": decay, "eps": EPS * forward}
    if forward != 1:
        group |= {"lr": group["lr"] * forward, "weight_decay": decay / forward}
    return group


def forward_factor(name: str) -> float:
    """Factor of u-μP on a weight in the forward pass; the readout's is that on the logits."""
    return M_N**-0.5 if ".h." in name and name.endswith(".weight") and ".ln_" not in name else 1.0


RULES = {
    "umup": (umup, M_L**-0.5, 1 / M_N),
    "completep": (lambda name: completep(name, 1.0), 1 / M_L, 1 / M_N),
    "completep_half": (lambda name: completep(name, 0.5), M_L**-0.5, 1 / M_N),
    "completep_zero": (lambda name: completep(name, 0.0), 1.0, 1 / M_N),
    "completedp": (completedp, 1 / M_L, 1.0),
}
"""By parametrization: a parameter's group, and the factors on residual branches and logits."""


@pytest.mark.parametrize(
    ("parametrization", "execution"),
    [*((rule, "loop") for rule in RULES), ("completep", "vmap"), ("umup", "vmap")],
)
def test_steps_of_a_deep_model_are_those_of_the_paper_s_table(parametrization, execution):
    group, residual, logits = RULES[parametrization]
    trial = TRIAL.replace(parametrization=parametrization)
    pack = Pack([trial], VOCAB, get_device("cpu"), execution)
    names = list(pack.declaration.parameters)
    # Complete(d)P's readout starts m times smaller where ours has a factor behind it; u-μP's matrices start
    # √m times larger, with a factor behind them where ours have none.
    smaller = {"lm_head.weight": M_N} if parametrization == "completedp" else {}
    behind = {n: forward_factor(n) for n in names} if parametrization == "umup" else {}
    smaller |= behind
    plain = {
        n: (pack.member_parameters(0)[n].detach().clone() / smaller.get(n, 1.0)).requires_grad_()
        for n in names
    }
    optimizer = torch.optim.AdamW(
        [{"params": [plain[n]], **group(n)} for n in names], betas=(0.8, 0.9), fused=False
    )
    for step in range(3):
        tokens = torch.randint(0, VOCAB, (4, T + 1), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ours = float(pack.read(pack.step(tokens))[0])
        weights = {n: w * behind.get(n, 1.0) for n, w in plain.items()}
        out = gpt2(weights, tokens[:, :-1], residual, logits)
        loss = functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        assert ours == pytest.approx(float(loss.detach()), rel=1e-10), step
    for n in names:
        torch.testing.assert_close(
            pack.member_parameters(0)[n].detach(),
            plain[n].detach() * smaller.get(n, 1.0),
            rtol=1e-8,
            atol=1e-10,
            msg=lambda m, n=n: f"{n}: {m}",
        )
