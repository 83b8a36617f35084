"""The check of our networks: what is checked is the trial that trains, and rules have the right verdicts."""

import dataclasses

import pytest
import torch
from torch import nn

from mup_tpu.analysis.diagnosis import layer_exponents
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import lint
from mup_tpu.parametrize.trials import check_trial, trained
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, Scaling
from mup_tpu.training.members import member_loss
from mup_tpu.training.pack import Pack


@pytest.mark.parametrize(
    "own",
    [
        {"weight_decay": 0.1, "grad_clip": 0.01},
        {"optimizer": "sgd", "tied": False},
        {"optimizer": "muon", "architecture": "llama"},
        {"architecture": "moe", "base_depth": 1, "parametrization": "completep"},
    ],
    ids=str,
)
def test_the_checked_module_trains_as_a_member_of_a_pack_does(own, tiny, dataset):
    changes = {"width": 64, "parametrization": "mup", "seed": 3, "precision": "float64", **own}
    trial = tiny.replace(warmup=0.0, schedule="constant", steps=3, **changes)
    pack = Pack([trial], dataset.vocab_size, get_device("cpu"))
    network, optimizers = trained(trial, dataset.vocab_size)
    loss = member_loss(network, dataset.vocab_size, "float64", torch.device("cpu"))
    for step in range(3):
        batch = torch.from_numpy(dataset.train_batch(step))
        pack.step(batch)
        network.zero_grad()
        loss(dict(network.named_parameters()), dict(network.named_buffers()), batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    named = dict(network.named_parameters())
    for name, expected in pack.member_parameters(0).items():
        torch.testing.assert_close(named[name].detach(), expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"optimizer": "sgd", "learning_rate": 0.1, "grad_clip": 0.0, "tied": False},
        {"architecture": "llama", "qk_norm": True},
        {"architecture": "moe"},
    ],
    ids=str,
)
def test_mup_and_completep_pass_along_the_width_and_sp_does_not(tiny, own):
    trial = tiny.replace(**{"learning_rate": 2.0**-8, **own})
    right = ("mup",) if own else ("mup", "completep")
    check = check_trial(trial, {"width": (32, 64, 128)}, ("sp", *right), seeds=1, steps=2)
    passed = {rule for rule, report in check.reports.items() if report.passes}
    assert passed == {*right}, check.sentences
    steepest: dict[str, float] = {}
    for (rule, _, _), fit in layer_exponents(check.table).items():
        steepest[rule] = max(steepest.get(rule, fit.value), fit.value)
    assert steepest["sp"] > 0.4 and max(steepest[rule] for rule in right) < 0.25


def test_along_the_depth_sp_grows_and_completep_does_not(tiny):
    trial = tiny.replace(learning_rate=2.0**-9, init_std=0.02, base_depth=1)
    check = check_trial(trial, {"depth": (1, 2, 4, 8)}, ("mup", "completep"), seeds=1, steps=2)
    mup, completep = check.reports.values()
    assert mup.causes == ["residual branch not scaled by depth"] and completep.passes
    assert {"h", "added", "blocks"} <= set(check.table["layer"])
    assert "distance from linearization ∝ depth^" in str(completep)


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        q = self.up(x).unsqueeze(1)
        y = nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1)
        return x + scale * self.down(torch.tanh(y))


def test_distance_from_linearization_is_that_of_reverse_mode_derivatives():
    """The expansion of each block around its init by the derivative of each of its outputs."""
    made, x = {}, torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def build(depth):
        made.setdefault(depth, (module := Deep(depth)))
        return module, torch.optim.SGD(module.parameters(), lr=0.3)

    report = lint(build, x, lambda m, x: m(x).square().mean(), widths=[1, 2], scale="depth", seeds=1, steps=2)
    torch.manual_seed(0)
    fresh, off, linear = Deep(2), [], []
    for before, after in zip(fresh.blocks, made[2].blocks, strict=True):
        weights = list(before.parameters())
        change = [a.detach() - b.detach() for a, b in zip(after.parameters(), weights, strict=True)]
        added = before(x, scale=0.5) - x
        rows = [torch.autograd.grad(out, weights, retain_graph=True) for out in added.flatten()]
        slope = torch.stack([sum((g * c).sum() for g, c in zip(row, change, strict=True)) for row in rows])
        linear.append((added.flatten() + slope).detach())
        off.append((after(x, scale=0.5) - x).flatten().detach() - linear[-1])
        x = before(x, scale=0.5).detach()
    measured = report.measured.query("quantity == 'linearization' and depth == 2")["rms"].item()
    assert measured == pytest.approx(float(torch.cat(off).norm() / torch.cat(linear).norm()), rel=1e-6)


@pytest.mark.parametrize(("scale", "column"), [("batch_size", "batch_size"), ("sequence_length", None)])
def test_a_scale_may_be_one_of_the_data(scale, column, tiny):
    check = check_trial(tiny, {scale: (2, 4, 8)}, ("mup",), seeds=1, steps=2)
    assert sorted(check.table[column or scale].unique()) == [2, 4, 8]
    assert set(check.table["quantity"]) == {"activation", "update"}


@pytest.mark.parametrize("scale", [{"seed": (0, 1)}, {"schedule": ("linear", "cosine")}])
def test_what_is_no_way_of_growing_is_refused(scale, tiny):
    (field,) = scale
    with pytest.raises(ConfigError, match=f"scale {field} of a coordinate check is no axis of growth"):
        check_trial(tiny, scale, ("mup",))


MATCHED = {"optimizer": "muon", "muon_scale": "match_rms_adamw"}


@pytest.mark.parametrize(
    ("own", "name", "flat"),
    [
        ({"optimizer": "muon"}, "mup", True),
        (MATCHED, "mup", True),
        (MATCHED, "adam's 1/m", False),
        ({"optimizer": "adamh"}, "mup", True),
        ({"optimizer": "muonh"}, "mup", True),
    ],
)
def test_updates_of_muon_and_hyperball_change_layers_alike_at_every_width_with_mup_s_factor_alone(
    own, name, flat, tiny, monkeypatch
):
    """Hidden matrices alone learn here. Those updates that are as large as AdamW's, and AdamH's, are to be
    scaled by 1/√m: with Adam's own 1/m what they change dies out with width."""
    mup = PARAMETRIZATIONS["mup"]

    def rule(parameter, infshape, growth):
        return Scaling(init=infshape.width_mult() ** -0.5, learning_rate=1 / infshape.width_mult())

    rules = {**mup.parameters, "muon_match_rms_adamw": rule, "adamh": rule}
    monkeypatch.setitem(PARAMETRIZATIONS, "adam's 1/m", dataclasses.replace(mup, parameters=rules))
    trial = tiny.replace(**own, learning_rate=2.0**-5, adamw_lr_ratio=1e-9)
    check = check_trial(trial, {"width": (32, 64, 128)}, (name,), seeds=1)
    # Attention's softmax and the readout, whose weights do not learn here, have exponents of their own.
    layers = ("c_fc", "mlp.c_proj", "h")
    fits = layer_exponents(check.table)
    exponents = [f.value for (_, q, layer), f in fits.items() if q == "update" and layer.startswith(layers)]
    assert len(exponents) == 6
    assert max(map(abs, exponents)) < 0.18 if flat else max(exponents) < -0.2, exponents
