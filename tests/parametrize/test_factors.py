"""Factors for a module of anybody's, against mup's package, the table of docs/rules.md and our own GPT-2."""

import copy
import math

import mup
import pytest
import torch
import transformers as hf
from torch import nn

from mup_tpu.config import Trial
from mup_tpu.models import forward_scaling, parameter_scalings
from mup_tpu.parametrize import parametrize
from mup_tpu.rules.parametrization import PARAMETRIZATIONS

BASE = 32


class Net(nn.Module):
    """A little of everything: embedding, convolution, norm, linear layers with biases, a readout."""

    def __init__(self, width: int, readout: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.local = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = readout(width, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.local(x.mT).mT
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def mups(width: int) -> Net:
    """The same as users of the package mup have it."""
    module = Net(width, mup.MuReadout)
    return mup.set_base_shapes(module, Net(BASE, mup.MuReadout), delta=Net(2 * BASE, mup.MuReadout))


def settings(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, tuple[float, float]]:
    """(learning rate, weight decay) of each parameter, by name."""
    by_id = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: by_id[id(p)] for name, p in module.named_parameters()}


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_init_logits_groups_and_training_are_those_of_mups_package(name, width):
    torch.manual_seed(0)
    theirs = mups(width).double()
    torch.manual_seed(0)
    scaled = parametrize(Net, width=width, base_width=BASE, optimizer=name)
    ours = scaled.init_(Net(width)).double()
    for (part, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=0, msg=part)
    ours.load_state_dict(theirs.state_dict())  # from here on without the rounding of float32
    make = {"adamw": (torch.optim.AdamW, mup.MuAdamW), "sgd": (torch.optim.SGD, mup.MuSGD)}[name]
    found = settings(make[0](scaled.param_groups(ours, lr=0.1, weight_decay=0.2), lr=1.0), ours)
    expected = settings(make[1](theirs.parameters(), lr=0.1, weight_decay=0.2), theirs)
    for part, (lr, decay) in expected.items():
        decays = scaled.parameters[part].decays  # of biases and norms we have none
        assert found[part] == pytest.approx((lr, decay if decays else 0.0)), part
    optimizers = (
        make[0](scaled.param_groups(ours, lr=0.01)),
        make[1](theirs.parameters(), lr=0.01, weight_decay=0.0),
    )
    tokens, targets = torch.randint(0, 11, (4, 7)), torch.randint(0, 5, (4, 7))
    for _ in range(5):
        logits = ours(tokens), theirs(tokens)
        torch.testing.assert_close(*logits, rtol=1e-11, atol=1e-12)
        for optimizer, of in zip(optimizers, logits, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(of.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()


def conv1d_net(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2 * width), hf.Conv1D(width, 2 * width), nn.Linear(width, 5))


def test_a_matrix_that_is_stored_inputs_first_goes_by_its_inputs():
    scaled = parametrize(conv1d_net, width=128, base_width=BASE)
    assert scaled.parameters["1.weight"].fan_in == 256
    assert scaled.scalings["1.weight"].learning_rate == 1 / 4


def gpt2(growing: str, tied: bool):
    def build(width: int, depth: int = 2) -> nn.Module:
        heads = width // 16 if growing == "heads" else 2
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=40, n_positions=16, n_embd=width, n_layer=depth, n_head=heads,
                tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip

    return build


BRANCHES = dict.fromkeys(("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"), "branch")


@pytest.mark.parametrize("rule", PARAMETRIZATIONS)
@pytest.mark.parametrize(("growing", "tied"), [("heads", True), ("head_size", False)])
def test_a_stock_gpt2_has_the_factors_of_our_own(rule, growing, tied):
    trial = Trial().replace(
        width=128, base_width=32, head_size=16, depth=3, base_depth=1, tied=tied, growing_dimension=growing,
        parametrization=rule,
    )  # fmt: skip
    scaled = parametrize(
        gpt2(growing, tied), width=128, base_width=32, depth=3, base_depth=1, rule=rule, roles=BRANCHES
    )
    expected = parameter_scalings(trial, 40, 16)
    assert scaled.scalings.keys() == expected.keys()
    for name, own in scaled.scalings.items():
        for field in ("init", "learning_rate", "weight_decay", "eps"):
            known = pytest.approx(getattr(expected[name], field), rel=1e-5)
            assert getattr(own, field) == known, (name, field)
    forward = forward_scaling(trial)
    by_place = {factor.place: factor for factor in scaled.forward}
    assert by_place["input"].module == "lm_head"
    assert by_place["input"].factor == forward.logits
    assert by_place["output"].factor == forward.residual
    if growing == "head_size":
        assert by_place["scaling"].scaling == pytest.approx(64**-0.5 * forward.attention)


@pytest.mark.parametrize("rule", ["mup", "completep", "sp"])
def test_a_stock_gpt2_starts_as_large_as_our_own(rule):
    """σ is 0.02 at the base; residual projections are smaller by √(2·depth), in CompleteP of the base's."""
    scaled = parametrize(
        gpt2("heads", True), width=128, base_width=32, depth=6, base_depth=2, rule=rule, roles=BRANCHES
    )
    torch.manual_seed(0)
    module = scaled.init_(gpt2("heads", True)(128, 6))
    hidden = 0.02 if rule == "sp" else 0.02 / 2
    depth = 2 if rule == "completep" else 6
    stds = {name: p.std().item() for name, p in module.named_parameters()}
    assert stds["transformer.wte.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["transformer.h.3.attn.c_attn.weight"] == pytest.approx(hidden, rel=0.05)
    assert stds["transformer.h.3.mlp.c_proj.weight"] == pytest.approx(hidden / (2 * depth) ** 0.5, rel=0.05)


def test_common_mistakes_have_the_factors_of_the_table_of_rules():
    n = 4.0  # docs/rules.md: growth of the width; init, learning rate, weight decay
    expected = {
        "mup_hidden_embedding": {"wte": (n**-0.5, 1 / n, n), "h.0.mlp.c_fc": (n**-0.5, 1 / n, n)},
        "mup_lost_multipliers": {"wte": (1, 1, 1), "h.0.mlp.c_fc": (n**-0.5, 1, 1)},
    }
    for rule, rows in expected.items():
        table = parametrize(gpt2("heads", False), width=128, base_width=32, rule=rule).table()
        for part, factors in rows.items():
            row = table.loc[f"transformer.{part}.weight", ["init", "learning_rate", "weight_decay"]]
            assert tuple(row) == pytest.approx(factors), (rule, part)


def test_the_printed_table_shows_every_factor_of_every_parameter():
    rows = parametrize(Net, width=16 * BASE, base_width=BASE).table()
    heading, _, *lines = repr(rows).splitlines()
    columns = "role shape m init learning_rate weight_decay eps forward"
    assert " ".join(heading.split()) == columns
    assert rows["forward"].to_dict() == dict.fromkeys(rows.index, 1.0) | {"head.weight": 1 / 16}
    assert [line.split()[0] for line in lines] == list(rows.index)
    assert "..." not in repr(rows)


def test_at_the_base_nothing_changes():
    scaled = parametrize(Net, width=BASE, base_width=BASE)
    module = Net(BASE)
    before = copy.deepcopy(module.state_dict())
    scaled.init_(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not module.head._forward_pre_hooks
    assert {g["lr_factor"] for g in scaled.param_groups(module, lr=1.0)} == {1.0}


@pytest.mark.parametrize(
    "init",
    [
        lambda w: nn.init.xavier_uniform_(w),
        lambda w: nn.init.kaiming_normal_(w),
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.orthogonal_(w),
        lambda w: nn.init.normal_(w, std=0.02).mul_(w.shape[0] ** -0.25),
        lambda w: w.copy_(torch.randn(w.shape) / math.sqrt(w.shape[1])),
    ],
    ids=["xavier", "kaiming", "truncated", "orthogonal", "odd", "randn"],
)
def test_whatever_the_init_a_hidden_matrix_starts_as_the_bases_over_root_m(init):
    def build(width: int) -> nn.Module:
        module = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width, bias=False), nn.Linear(width, 2))
        with torch.no_grad():
            init(module[1].weight)
        return module

    torch.manual_seed(0)
    base = build(256)
    wide = parametrize(build, width=1024, base_width=256).init_(build(1024))
    ratio = wide[1].weight.square().mean().sqrt() / base[1].weight.square().mean().sqrt()
    assert ratio.item() == pytest.approx(0.5, rel=0.02)


def test_a_vector_of_several_values_is_no_draw_and_stays():
    class Decays(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner, self.decays = nn.Linear(width, width), nn.Parameter(torch.arange(1.0, width + 1))

    scaled = parametrize(Decays, width=64, base_width=16, roles={"decays": "bias"})
    assert torch.equal(scaled.init_(Decays(64)).decays, torch.arange(1.0, 65))
