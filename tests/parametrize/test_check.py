"""The coordinate check of modules that nobody here wrote, and what it says of those with a mistake."""

import json

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet
from transformers import GPT2Config, GPT2LMHeadModel

from mup_tpu.analysis.coord_check import slopes
from mup_tpu.cli import main
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import assert_mup, coord_check
from mup_tpu.plots import coordinate_check_figure


def steepest(table, rule: str, quantity: str = "update") -> float:
    fitted = slopes(table)
    chosen = fitted[(fitted["parametrization"] == rule) & (fitted["quantity"] == quantity)]
    return float(chosen["slope"].max())


def gpt2(width: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=width, n_layer=2, n_head=width // 16, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def language_loss(module, tokens):
    return module(tokens, labels=tokens).loss


TOKENS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_stock_gpt2_is_flat_in_mup_and_not_in_sp():
    check = coord_check(gpt2, TOKENS, language_loss, widths=[32, 64, 128, 256], base_width=32, lr=2**-7)
    assert steepest(check.table, "mup") < 0.1
    assert steepest(check.table, "sp") > 0.7
    of_mup, of_sp = check.sentences
    assert of_mup.startswith("mup: no layer grows with width")
    assert "sp: the first layer that grows is transformer.h.0.attn.c_attn (hidden)" in of_sp
    assert len(coordinate_check_figure(check.table).axes) == 4
    block = ["c_attn 0", "attn.c_proj 0", "c_fc 0", "mlp.c_proj 0", "h 0"]
    layers = list(dict.fromkeys(check.table["layer"]))
    assert [layer for layer in layers if layer.endswith(" 0")] == block


class WideResNet(ResNet):
    """torchvision's, of any width in all of its layers; its own width_per_group widens some."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(BasicBlock, [1, 1, 1, 1], num_classes=5)
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(8 * width, 5)

    def _make_layer(self, block, planes, *args, **kwargs):
        self.inplanes = self.width if planes == 64 else self.inplanes
        return super()._make_layer(block, self.width * planes // 64, *args, **kwargs)


@pytest.mark.slow
def test_a_stock_resnet_is_flat_with_sgd_and_mup():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 5, (16,), generator=generator)
    check = coord_check(
        WideResNet, images, lambda module, x: nn.functional.cross_entropy(module(x), labels),
        widths=[8, 16, 32, 64], base_width=8, lr=0.05, optimizer="sgd", steps=3,
    )  # fmt: skip
    assert steepest(check.table, "mup") < 0.15
    of_mup, of_sp = check.sentences
    assert of_mup.startswith("mup: no layer grows")
    assert "the first layer that grows is fc (readout)" in of_sp
    assert "its outputs are × 1, where μP has × 0.125 at width 64" in of_sp


class Net(nn.Module):
    """Two hidden layers, with a mistake if one is asked for."""

    def __init__(self, width: int, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.inner = nn.Linear(8, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.hidden(torch.relu(self.inner(x))))
        if self.mistake == "sum":
            x = x + x.sum(-1, keepdim=True)
        if self.mistake == "around":
            return nn.functional.linear(x, self.head.weight, self.head.bias)
        return self.head(x)


X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(0))


def check_of(build, **more):
    options = {"widths": [32, 128, 512, 2048], "base_width": 32, "lr": 2**-7, "rules": ["mup"]} | more
    return coord_check(build, X, lambda module, x: nn.functional.cross_entropy(module(x), Y), **options)


def test_sp_lacks_the_hidden_matrixs_learning_rate():
    (said,) = check_of(Net, rules=["sp"]).sentences
    assert said.startswith("sp: the first layer that grows is hidden (hidden), ")
    assert "its learning rate is × 1, where μP has × 0.0156 at width 2048" in said


def test_with_sgd_what_grows_behind_is_told():
    (said,) = check_of(Net, rules=["sp"], optimizer="sgd", lr=0.5).sentences
    assert "the first layer that grows is hidden" in said
    assert "its own factors are μP's, but head has others: its outputs are × 1, where μP has × 0.0156" in said


def test_an_unscaled_readout_lacks_the_factor_of_its_logits():
    (said,) = check_of(Net, rules=["mup_unscaled_readout"]).sentences
    assert said.startswith("mup_unscaled_readout: the first layer that grows is head (readout), activation ∝")
    assert "at init: its outputs are × 1, where μP has × 0.0156 at width 2048" in said


def test_a_constant_init_grows_at_init():
    def build(width):
        module = Net(width)
        nn.init.normal_(module.hidden.weight, std=0.1)
        return module

    (said,) = check_of(build, rules=["sp"]).sentences
    assert "at init: its init σ is × 1, where μP has × 0.125 at width 2048" in said
    assert check_of(build).sentences[0].startswith("mup: no layer grows")


def test_a_sum_over_the_width_is_not_a_missing_factor():
    (said,) = check_of(lambda width: Net(width, "sum"), probes=["hidden", "head"]).sentences
    assert said.startswith("mup: the first layer that grows is head")
    assert "all factors are μP's, so look at its forward pass" in said


def test_divergence_is_told():
    (said,) = check_of(Net, lr=1e30, optimizer="sgd").sentences
    assert said == "mup: width 32 diverges within 4 steps; check with a smaller lr"


def test_the_same_seeds_measure_the_same():
    assert check_of(Net).table.equals(check_of(Net).table)


@pytest.mark.parametrize(
    ("build", "more", "said"),
    [
        (
            lambda w: Net(w, "around"),
            {},
            "readout 'head' is not called.*roles={'head': 'by hand'}",
        ),
        (Net, {"widths": [32, 32]}, r"widths \[32, 32\] are fewer than two"),
        (Net, {"optimizer": "lion"}, "optimizer 'lion' is not one of adamw, sgd"),
        (Net, {"probes": ["layers.*"]}, "match no submodule; there are inner, hidden, head"),
    ],
)
def test_one_sentence_says_what_is_wrong(build, more, said):
    with pytest.raises(ConfigError, match=said):
        check_of(build, **more)


def test_only_what_is_probed_is_measured():
    check = check_of(Net, probes=["hid*"])
    assert set(check.table["layer"]) == {"hidden"}


def test_done_by_hand_a_readout_may_be_gone_around():
    check = check_of(lambda w: Net(w, "around"), roles={"head": "by hand"})
    assert "head" not in set(check.table["layer"])


def net_loss(module, x):
    return nn.functional.cross_entropy(module(x), Y)


class Twice(nn.Module):
    """A model that divides by the width ratio itself, in front of hidden layers or behind the readout."""

    def __init__(self, width: int, hidden: bool, readout: bool) -> None:
        super().__init__()
        self.m, self.hidden, self.readout = width / 64, hidden, readout
        self.embedding = nn.Embedding(64, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens):
        m = self.m if self.hidden else 1.0
        x = torch.relu(self.first(self.embedding(tokens) / m))
        x = torch.relu(self.second(x / m))
        return self.head(x) / (self.m if self.readout else 1.0)


def next_token_loss(module, tokens):
    return nn.functional.cross_entropy(module(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    ("hidden", "readout", "roles", "sentence"),
    [
        (True, True, {}, r"dies is first \(hidden\), activation ∝ width\^-0.* at init: .* applied twice"),
        (False, True, {}, r"dies is the output, update ∝ width\^-0.* divide its logits .* itself"),
        (False, True, {"head": "by hand"}, ""),
        (False, False, {}, ""),
    ],
)
def test_factors_that_are_applied_twice_let_layers_die(hidden, readout, roles, sentence):
    def check():
        return assert_mup(
            lambda width: Twice(width, hidden, readout), TOKENS, next_token_loss, roles=roles,
            widths=[64, 128, 256, 512], base_width=64, lr=2**-6,
        )  # fmt: skip

    if not sentence:
        assert check().failures == {}
        return
    with pytest.raises(AssertionError, match=f"^mup: the first layer that {sentence}"):
        check()


def test_a_module_is_asserted_to_be_in_mup():
    assert not assert_mup(Net, X, net_loss, base_width=32).failures
    with pytest.raises(AssertionError, match="mup: the first layer that grows is head"):
        assert_mup(lambda width: Net(width, "sum"), X, net_loss, base_width=32)


SOURCE = """
import torch
from torch import nn

def build(width):
    hidden = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), hidden, nn.ReLU(), nn.Linear(width, 3))

def batch():
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(0))

def loss(module, x):
    return module(x).square().mean() + module(x).sum(-1).mean()
"""


def test_a_command_fails_where_a_layer_grows(tmp_path, monkeypatch, capsys):
    (tmp_path / "checked.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    main(["check", "--module", "checked:build", "--num-seeds", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (
        found["passes"] == {"mup": True}
        and found["widths"] == [64, 128, 256, 512, 1024]
        and found["seeds"] == 2
    )
    words = ["check", "--module", "checked:build", "--num-seeds", "2", "--compare", "sp"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--json"])
    said = capsys.readouterr()
    assert end.value.code == 1 and "error: sp: " in said.err and "grows" in said.err
    assert json.loads(said.out)["growing"]["sp"]["low"] > 0
    for name, sentence in (("none:build", "cannot be imported"), ("checked:no", "has no no"), ("x", "form")):
        with pytest.raises(SystemExit) as end:
            main(["check", "--module", name])
        assert end.value.code == 2 and sentence in capsys.readouterr().err
