"""What happens to a module after it is parametrized: copies, casts, compilation, sharding, state dicts."""

import copy
import pickle

import pytest
import torch
from torch import nn

from mup_tpu.errors import ConfigError
from mup_tpu.parametrize import parametrize

WIDTH, BASE = 64, 16


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def scaled():
    return parametrize(Net, width=WIDTH, base_width=BASE)


def fresh() -> Net:
    torch.manual_seed(0)
    return scaled().init_(Net(WIDTH))


def rates(module: nn.Module) -> list[tuple[float, float, int]]:
    """(learning rate, weight decay, number of parameters) of each group."""
    groups = scaled().param_groups(module, lr=1.0, weight_decay=0.1)
    return [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups]


X = torch.linspace(-1, 1, 12).reshape(4, 3)
RATES = [(1.0, 0.1, 2), (1.0, 0.0, 5), (0.25, pytest.approx(0.4), 1)]


def test_the_groups():
    assert rates(fresh()) == RATES


def test_copies_pickles_and_casts_compute_with_the_factors():
    module, y = fresh(), fresh()(X)
    for other in (
        copy.deepcopy(module),
        copy.deepcopy(module).to("cpu", torch.float64).float(),
        pickle.loads(pickle.dumps(module)),
    ):
        torch.testing.assert_close(other(X), y)
        assert rates(other) == RATES
    plain = Net(WIDTH)
    plain.load_state_dict(module.state_dict())
    assert not torch.allclose(plain(X), y)


def test_the_state_dict_is_that_of_the_module_as_built():
    module = fresh()
    assert module.state_dict().keys() == Net(WIDTH).state_dict().keys()
    other = scaled().forward_(Net(WIDTH))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(X), module(X))


def test_forward_factors_twice_are_those_once():
    module = fresh()
    assert torch.equal(scaled().forward_(copy.deepcopy(module))(X), module(X))


def test_the_logits_factor_goes_before_the_readouts_bias():
    module = fresh()
    features = module.layers[:-1](X)
    readout = module.layers[-1]
    torch.testing.assert_close(module(X), features @ readout.weight.T / 4 + readout.bias)


def test_a_module_that_got_memory_later_is_drawn_at_the_rules_size():
    with torch.device("meta"):
        module = Net(1024)
    wide = parametrize(Net, width=1024, base_width=256)
    torch.manual_seed(0)
    wide.init_(module.to_empty(device="cpu"), std=0.1)
    assert module.layers[2].weight.std().item() == pytest.approx(0.1 / 2, rel=0.01)
    assert module.layers[4].weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert not module.layers[2].bias.any()
    assert torch.equal(module.layers[3].weight, torch.ones(1024))
    assert module.layers[4]._forward_pre_hooks


def test_a_second_init_is_refused():
    mup, module = scaled(), Net(WIDTH)
    mup.init_(module)
    with pytest.raises(ConfigError, match="would scale them twice"):
        mup.init_(module)


def test_schedules_of_torch_keep_the_factors():
    optimizer = torch.optim.AdamW(scaled().param_groups(fresh(), lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5 * g["lr_factor"] for g in optimizer.param_groups]


def test_groups_of_a_module_without_init_and_forward_factors_are_refused():
    """Learning rates alone are half of a rule: logits then grow as the root of the width."""
    mup = scaled()
    with pytest.raises(ConfigError, match="lacks the init and the forward factors of rule 'mup'"):
        mup.param_groups(Net(WIDTH), lr=1.0)
    with pytest.raises(ConfigError, match="before param_groups; a baked one does not train"):
        mup.param_groups(mup.bake_(fresh()), lr=1.0)
    other = parametrize(Net, width=WIDTH, base_width=BASE, rule="sp").init_(Net(WIDTH))
    with pytest.raises(ConfigError, match="by rule 'sp' for width 64, and these groups are for rule 'mup'"):
        mup.param_groups(other, lr=1.0)
    assert mup.param_groups(mup.forward_(Net(WIDTH)), lr=1.0)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.middle = nn.Linear(3, width), nn.Linear(width, width)
        self.experts = nn.Parameter(torch.randn(4, width, width) / width**0.5)
        self.head = nn.Linear(width, 2)


def test_groups_of_muon_are_torchs_for_matrices_and_adamws_for_the_rest():
    """Matrices at η, or η/√m by rms; stacked experts, which torch's Muon refuses, by AdamW at η/m."""
    for optimizer, rate in (("muon", 1.0), ("muon_match_rms_adamw", 0.5)):
        mup = parametrize(Experts, width=WIDTH, base_width=BASE, optimizer=optimizer)
        module = mup.init_(Experts(WIDTH))
        names = {id(p): name for name, p in module.named_parameters()}
        groups = mup.param_groups(module, lr=0.1, adamw_lr=0.01, weight_decay=0.1)
        of = {names[id(p)]: (g["use_muon"], g["lr"]) for g in groups for p in g["params"]}
        assert of.pop("middle.weight") == (True, pytest.approx(0.1 * rate))
        assert of.pop("experts") == (False, pytest.approx(0.01 / 4))
        assert set(of.values()) == {(False, 0.01)}
        torch.optim.Muon([g for g in groups if g["use_muon"]])
        torch.optim.AdamW([g for g in groups if not g["use_muon"]])
    lion = parametrize(Net, width=WIDTH, base_width=BASE, optimizer="lion")
    groups = lion.param_groups(lion.init_(Net(WIDTH)), lr=1.0)
    assert {g["lr"] for g in groups} == {1.0, 0.25} and not any("eps" in g for g in groups)
