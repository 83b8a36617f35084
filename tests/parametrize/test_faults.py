"""Modules on which the linter once named a wrong cause, was silent, or ended in a traceback."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import lint, parametrize

WIDTHS = (32, 64, 128)
TOKENS = torch.randint(0, 23, (8, 11), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Language model in μP by hand; `fault` names a departure."""

    def __init__(self, width: int, fault: str = "") -> None:
        super().__init__()
        self.m, self.fault, self.size = width / 32, fault, 8
        self.emb, self.n1, self.n2 = nn.Embedding(23, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 23, bias=False)
        if fault == "stacked":
            self.experts = nn.Parameter(torch.empty(2, width, width))
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                is_hidden = not name.startswith(("emb", "head"))
                nn.init.normal_(p, std=(0.18 * self.m**-0.5) if is_hidden else 0.2)
        if "head's init" in fault:
            self.head.weight.data *= self.m**-0.5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        if self.fault == "stacked":
            x = x + torch.einsum("btw,ewh->bth", self.n2(x), self.experts)
        x = torch.tanh(x) if self.fault == "recurrent" else self.n2(x)
        return self.head(x) / (1.0 if "no 1/m" in self.fault else self.m)


def groups(module: nn.Module, lr: float = 2**-8) -> list[dict]:
    """Return a group a parameter, with 1/m on the learning rate of hidden matrices."""
    return [
        {"params": [p], "lr": lr / (module.m if p.dim() >= 2 and not n.startswith(("emb", "head")) else 1)}
        for n, p in module.named_parameters()
        if p.requires_grad
    ]


def adamw(of, lr=2**-8):
    return torch.optim.AdamW(of, lr, weight_decay=0.0)


def loss(module, tokens):
    return cross_entropy(module(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def right(width, fault=""):
    module = Model(width, fault)
    return module, adamw(groups(module))


def head_by_rate(width):
    """1/m on the readout's rate in place of its logits, which asks for σ ∝ 1/m."""
    module = Model(width, "no 1/m, head's init")
    *others, head = groups(module)
    return module, adamw([*others, head | {"lr": head["lr"] / module.m}])


def muon(width, fault=""):
    module = Model(width, fault)
    hidden = [m.weight for m in (module.q, module.k, module.v, module.out)]
    rest = [p for p in module.parameters() if not any(p is of for of in hidden)]
    return module, torch.optim.Muon(hidden, lr=0.01), adamw(rest, lr=2**-8)


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, width = inner.requires_grad_(False), inner.weight.shape[1]
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))


def lora(width):
    module = Model(width).requires_grad_(False)
    module.q, module.v = Adapter(module.q), Adapter(module.v)
    rates = [(p, 1 / module.m if ".a." in n else 1) for n, p in module.named_parameters() if p.requires_grad]
    return module, adamw([{"params": [p], "lr": 2**-8 * rate} for p, rate in rates])


def bf16(width):
    module = Model(width).to(torch.bfloat16)
    return module, adamw(groups(module, 2**-13))


class Gru(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.m = width / 32
        self.emb, self.rnn, self.head = nn.Embedding(23, width), nn.GRU(width, width), nn.Linear(width, 23)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.18 * self.m**-0.5)
        nn.init.normal_(self.rnn.weight_hh_l0, std=0.4)  # the fault
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, tokens):
        return self.head(self.rnn(self.emb(tokens).transpose(0, 1))[0].transpose(0, 1)) / self.m


def gru(width):
    module = Gru(width)
    return module, adamw(groups(module))


class Sign(torch.optim.Optimizer):
    """Update rule whose groups have no lr."""

    def __init__(self, groups, scale=1.0):
        super().__init__([{"params": g["params"], "rate": g["lr"] * scale} for g in groups], {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["rate"])


def by_sign(width, scale=1.0):
    module = Model(width)
    return module, Sign(groups(module), scale)


check = functools.partial(lint, widths=WIDTHS, seeds=1, steps=2, progress=lambda doing, share: None)


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (right, ""),
        (lora, ""),
        (by_sign, ""),
        (functools.partial(right, fault="stacked"), ""),
        (gru, "init not scaled"),
        (bf16, "updates lost to rounding"),
        (functools.partial(muon, fault="no 1/m"), "readout's 1/m missing"),
        (functools.partial(right, fault="head's init"), "readout's init not scaled"),
        (head_by_rate, "readout's init not scaled"),
    ],
    ids=["right", "lora", "sign", "stacked", "gru", "bf16", "muon", "head", "head by rate"],
)
def test_the_first_cause_is_the_right_one(build, cause):
    report = check(build, TOKENS, loss)
    assert report.passes == (not cause), report
    assert not cause or report.causes[0] == cause, report
    if cause:
        assert str(report).count(cause) == 1 + str(report.table()).count(cause)  # a sentence once
        assert "all is flat" in report.sentence


def test_a_key_s_bias_has_no_gradient_but_rounding_and_needs_no_word():
    report = check(right, TOKENS, loss)
    row = report.table().loc["k.bias"]
    assert (row["verdict"], row["cause"]) == ("not judged", "not trained")
    assert "k.bias" not in report.sentence and report.table().loc["q.bias", "verdict"] == "follows"


@pytest.mark.parametrize(
    ("build", "loss", "sentence"),
    [
        (functools.partial(by_sign, scale=0.0), loss, "emb.weight .token embedding. is unknown: not updated"),
        (
            right,
            lambda module, x: loss(module, x) * 0,
            "emb.weight .token embedding. is unknown: no gradient",
        ),
    ],
)
def test_what_is_not_known_does_not_pass(build, loss, sentence):
    report = check(build, TOKENS, loss)
    assert not report.passes
    assert re.search(sentence, report.sentence), report.sentence


def exits(width):
    raise SystemExit(0)


ONE = Model(32)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (exits, r"build\(32\) fails \(SystemExit: 0\)"),
        (lambda width: nn.LazyLinear(width), r"build\(32\) returns a module with lazy parameters"),
        (lambda width: nn.ReLU(), r"build\(32\) returns a ReLU without parameters"),
        (lambda width: (m := Model(width), torch.optim.LBFGS(m.parameters())), r"step\(\) of LBFGS fails"),
        (lambda width: ONE, "returns the same module twice"),
    ],
    ids=["exits", "lazy", "empty", "lbfgs", "same"],
)
def test_what_cannot_be_checked_is_one_sentence(build, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(build, TOKENS, loss, seeds=2)


@pytest.mark.parametrize(("role", "said"), [("readout", "inner matrix treated as readout"), ("hidden", "")])
def test_a_matrix_to_a_fixed_size_that_layers_follow_is_hidden(role, said):
    def build(width):
        narrow = (nn.Linear(width, 16, bias=False), nn.Linear(16, width), nn.GELU())
        return nn.Sequential(nn.Embedding(23, width), nn.LayerNorm(width), *narrow, nn.Linear(width, 23))

    def trained(width):
        mup = parametrize(build, width=width, base_width=32, roles={"2.weight": role})
        module = mup.init_(build(width))
        return module, torch.optim.AdamW(mup.param_groups(module, lr=2**-8))

    report = lint(trained, TOKENS, loss, widths=WIDTHS, steps=2)
    assert report.passes == (not said)
    first = report.findings[0]
    assert not said or (first.name, first.cause) == ("2.weight", said)
    assert "roles={'its name': 'hidden'}" in str(report) or not said
