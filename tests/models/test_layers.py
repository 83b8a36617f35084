"""A norm in a fast form, against torch's own; test_networks.py has all forms in networks, with gradients."""

import pytest
import torch

from mup_tpu.config import Trial
from mup_tpu.devices import get_device
from mup_tpu.models import layers
from mup_tpu.models.layers import _LayerNorm
from mup_tpu.training import members
from mup_tpu.training.pack import Pack


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_one_pass_norm_takes_rows_far_from_zero_and_rows_of_one_value(offset):
    x_ND = offset + torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    weight_D, bias_D = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.layer_norm(x_ND.double(), (32,), weight_D.double(), bias_D.double())
    torch.testing.assert_close(
        _LayerNorm.apply(x_ND, weight_D, bias_D, 1e-5)[0].double(), exact, rtol=2e-3, atol=1e-3
    )
    one_value_ND = torch.full((3, 32), 1e4, requires_grad=True)
    assert _LayerNorm.apply(one_value_ND, weight_D, bias_D, 1e-5)[0].isfinite().all()


VOCAB = 300
TRIAL = Trial().replace(
    width=32,
    base_width=32,
    head_size=16,
    depth=1,
    batch_size=4,
    sequence_length=64,
    steps=3,
    learning_rate=0.02,
)


def losses(trial, execution):
    """Losses of three steps and of an evaluation."""
    pack = Pack([trial, trial.replace(seed=1)], VOCAB, get_device("cpu"), execution)
    batches = torch.randint(VOCAB, (3, 4, 65), generator=torch.Generator().manual_seed(0))
    return torch.stack([*map(pack.step, batches), pack.evaluate(batches)])


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("bf16", 2e-3)])
@pytest.mark.parametrize(("execution", "tied"), [("loop", True), ("vmap", False)])
def test_parts_of_the_logits_train_as_all_of_them(execution, tied, precision, tolerance, monkeypatch):
    trial = TRIAL.replace(precision=precision, tied=tied)
    whole = losses(trial, execution)
    for module in (layers, members):
        monkeypatch.setattr(module, "AT_ONCE", VOCAB * 130)  # two parts, the second smaller
    torch.testing.assert_close(losses(trial, execution), whole, rtol=0, atol=tolerance)


VOCAB, T = 40, 8
