"""The coordinate check of modules that nobody here wrote, and what it says of those with a mistake."""

import json

import pytest
import torch
import transformers as hf
from torch import nn

from mup_tpu.analysis.diagnosis import layer_exponents
from mup_tpu.cli import main
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import assert_mup, coord_check
from mup_tpu.plots import coordinate_check_figure


def steepest(table, rule: str, quantity: str = "update") -> float:
    fits = layer_exponents(table)
    return max(fit.value for (of_rule, q, _), fit in fits.items() if (of_rule, q) == (rule, quantity))


def gpt2(width: int) -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=width, n_layer=2, n_head=width // 16, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def language_loss(module, tokens):
    return module(tokens, labels=tokens).loss


TOKENS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


def test_a_stock_gpt2_is_flat_in_mup_and_not_in_sp():
    check = coord_check(
        gpt2, TOKENS, language_loss, widths=[32, 64, 128], base_width=32, lr=2**-7, steps=2, seeds=1
    )
    assert steepest(check.table, "mup") < 0.15
    assert steepest(check.table, "sp") > 0.7
    of_mup, of_sp = check.sentences
    assert of_mup.startswith("mup: no layer grows with width")
    assert of_sp.startswith("sp: ") and "learning rate not scaled" in check.reports["sp"].causes
    assert len(coordinate_check_figure(check.table).axes) == 4
    block = ["c_attn 0", "attn.c_proj 0", "c_fc 0", "mlp.c_proj 0", "h 0"]
    layers = list(dict.fromkeys(check.table["layer"]))
    assert [layer for layer in layers if layer.endswith(" 0")] == block


def test_a_stock_resnet_is_flat_with_sgd_and_mup():
    from torchvision.models.resnet import BasicBlock, ResNet

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

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 5, (16,), generator=generator)
    check = coord_check(
        WideResNet, images, lambda module, x: nn.functional.cross_entropy(module(x), labels),
        widths=[8, 16, 32], base_width=8, lr=0.05, optimizer="sgd", steps=2, seeds=1,
    )  # fmt: skip
    assert steepest(check.table, "mup") < 0.2
    of_mup, of_sp = check.sentences
    assert of_mup.startswith("mup: no layer grows")
    assert "SGD's learning rate not scaled" in of_sp


class Net(nn.Module):
    """Two hidden layers, with a mistake if one is asked for."""

    def __init__(self, width: int, mistake: str = "", m: float = 1.0) -> None:
        super().__init__()
        self.mistake, self.m = mistake, m
        self.inner, self.hidden = nn.Linear(8, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inner(x) / (self.m if self.mistake == "all" else 1.0))
        if self.mistake == "sum":
            x = x + x.sum(-1, keepdim=True)
        x = torch.relu(self.hidden(x / self.m if self.mistake in ("hidden", "all") else x))
        if self.mistake == "around":
            return nn.functional.linear(x, self.head.weight, self.head.bias)
        return self.head(x) / (self.m if self.mistake in ("logits", "all") else 1.0)


X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(0))


def net_loss(module, x):
    return nn.functional.cross_entropy(module(x), Y)


def check_of(build, **more):
    options = {"widths": [32, 128, 512], "base_width": 32, "lr": 2**-7, "rules": ["mup"], "seeds": 1} | more
    return coord_check(build, X, net_loss, **options)


def constant(width):
    module = Net(width)
    nn.init.normal_(module.hidden.weight, std=0.1)
    return module


def with_mistake(name):
    return lambda width: Net(width, name, width / 32)


MUON = {"lr": 2**-6, "widths": [16, 32, 64], "base_width": 16, "seeds": 2}


@pytest.mark.parametrize(
    ("build", "more", "cause"),
    [
        (Net, {}, ""),
        (constant, {}, ""),
        (Net, {"rules": ["sp"]}, "learning rate not scaled"),
        (Net, {"rules": ["sp"], "optimizer": "sgd", "lr": 0.5}, "SGD's learning rate not scaled"),
        (Net, {"rules": ["mup_unscaled_readout"]}, "readout's 1/m missing"),
        (Net, {"rules": ["mup_lost_multipliers"]}, "learning rate not scaled"),
        (Net, {"rules": ["mup_hidden_embedding"]}, "embedding treated as hidden"),
        (constant, {"rules": ["sp"]}, "init not scaled"),
        (with_mistake("sum"), {}, "forward factor grows with width"),
        (with_mistake("hidden"), {}, "applied twice"),
        (with_mistake("logits"), {}, "readout's 1/m applied twice"),
        (with_mistake("all"), {}, "applied twice"),
        (with_mistake("logits"), {"roles": {"head": "by hand"}}, ""),
        (Net, MUON | {"optimizer": "muon"}, ""),
        (Net, MUON | {"optimizer": "muon_match_rms_adamw", "rules": ["sp"]}, "readout's 1/m missing"),
        (Net, {"lr": 1e30, "optimizer": "sgd"}, "diverges"),
    ],
)
def test_the_cause_of_what_grows_or_dies_is_named(build, more, cause):
    check = check_of(build, **more)
    ((rule, report),) = check.reports.items()
    assert report.causes[:1] == [cause] * bool(cause), report
    assert report.passes == (not cause)
    sentence = check.sentences[0]
    assert sentence.startswith(f"{rule}: ")
    assert cause in sentence if cause else "no layer grows with width, and none dies" in sentence


def test_under_sgd_what_a_learning_rate_without_m_hides_is_named_too():
    """In SP the readout's gradient is m times μP's and counts twice; its learning rate lacks × m."""
    report = check_of(Net, rules=["sp"], optimizer="sgd", lr=0.5).reports["sp"]
    assert report.fits["head.weight", "effect", 1].value > 0.5
    row = report.table().loc["head.weight"]
    assert (row["verdict"], row["cause"]) == ("grows", "readout's 1/m missing")


def test_a_long_check_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr("mup_tpu.parametrize.check._QUIET_S", 0.0)
    check = check_of(Net, steps=1, widths=[32, 64, 128, 256], seconds=1000.0)
    assert "mup, width 128: " in capsys.readouterr().err
    assert {*check.table["width"]} == {32, 64, 128, 256}, "the last was expected to end in time"


def test_the_same_seeds_measure_the_same():
    assert check_of(Net, steps=1, seeds=2).table.equals(check_of(Net, steps=1, seeds=2).table)


@pytest.mark.parametrize(
    ("build", "more", "sentence"),
    [
        (with_mistake("around"), {}, "readout 'head' is not called.*roles={'head': 'by hand'}"),
        (Net, {"widths": [32, 32]}, r"widths \[32, 32\] are fewer than two"),
        (Net, {"optimizer": "lion"}, "torch has no lion: lint a build that returns its module and lion"),
        (Net, {"rules": "mup"}, r"coord_check compares a list of rules: give rules=\['mup'\]"),
        (Net, {"rule": "mup"}, r"give rules=\['mup'\]"),
    ],
)
def test_one_sentence_says_what_is_wrong(build, more, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_of(build, **more)


def test_called_by_hand_a_readout_may_be_gone_around():
    check = check_of(with_mistake("around"), roles={"head": "by hand"})
    assert "head" not in set(check.table["layer"])


def test_a_module_is_asserted_to_be_in_mup():
    widths = [32, 128, 512]
    assert assert_mup(Net, X, net_loss, base_width=32, widths=widths, seeds=1).passes
    with pytest.raises(AssertionError, match="learning rate not scaled"):
        assert_mup(Net, X, net_loss, widths=widths, seeds=1)  # as it is: without a rule


SOURCE = """
import torch
from torch import nn

def build(width=32):
    hidden = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), hidden, nn.ReLU(), nn.Linear(width, 3))

def batch(batch_size=32):
    return torch.randn(batch_size, 8, generator=torch.Generator().manual_seed(0))

def loss(module, x):
    return module(x).square().mean() + module(x).sum(-1).mean()
"""


def test_a_command_fails_where_a_layer_grows(tmp_path, monkeypatch, capsys):
    (tmp_path / "checked.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["check", "checked:build", "--num-seeds", "1", "--scale", "32,128,512", "--json"]
    main([*words, "--compare", "mup"])
    result = json.loads(capsys.readouterr().out)
    assert (result["passes"], result["sizes"], result["seeds"]) == ({"mup": True}, [32, 128, 512], 1)
    with pytest.raises(SystemExit) as end:
        main(words)
    output = capsys.readouterr()
    assert end.value.code == 1 and "not passed: as trained" in output.err
    result = json.loads(output.out)
    (of_module,) = result["rules"].values()
    assert "learning rate not scaled" in of_module["causes"]
    row = next(row for row in of_module["parameters"] if row["parameter"] == "2.weight")
    assert (row["role"], row["shape"], row["wide"]) == ("hidden", [32, 32], [512, 512])
    assert (row["verdict"], row["learning rate"]) == ("grows", 0.0)
    main([*words[:4], "--scale", "batch_size=8,16,32", "--results", "out"])
    assert "no layer grows with batch_size" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "out").rglob("*.*")}
    assert written == {"coord_check.parquet", "build.png", "build.svg"}
    for given, sentence in (
        (["none:build"], "cannot be imported"),
        (["checked:no"], "has no no"),
        (["checked:build", "--scale", "heads=2,4"], "neither build nor batch has a parameter 'heads'"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["check", *given])
        assert end.value.code == 2 and sentence in capsys.readouterr().err
