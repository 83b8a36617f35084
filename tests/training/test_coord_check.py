"""The coordinate check on real training: against a direct measurement, and its verdict on SP and μP."""

import pandas as pd
import pytest
import torch

from mup_tpu.analysis.coord_check import by_setting, slopes
from mup_tpu.devices import get_device
from mup_tpu.errors import StoreError
from mup_tpu.models.weights import export_stock
from mup_tpu.training.coord_check import measure
from mup_tpu.training.pack import Pack


@pytest.fixture(scope="module")
def measured(tiny, dataset):
    trial = tiny.replace(steps=4, warmup=0.0, schedule="constant", learning_rate=2.0**-7)
    *_, table = measure(trial, dataset, (32, 64, 128, 256), ("sp", "mup"), 2)
    return table


def test_logits_at_init_are_those_of_the_exported_stock_model(measured, tiny, dataset, tmp_path):
    from transformers import GPT2LMHeadModel

    trial = tiny.replace(width=64, parametrization="mup", seed=1)
    pack = Pack([trial], dataset.vocab_size, get_device("cpu"))
    export_stock(trial, pack.member_parameters(0), dataset.vocab_size, trial.data.sequence_length, tmp_path)
    stock = GPT2LMHeadModel.from_pretrained(tmp_path)
    probe_BT = torch.from_numpy(dataset.validation_batches(1))[0, :, :-1]
    with torch.no_grad():
        out = stock(probe_BT, output_hidden_states=True)
    cell = measured.query("parametrization == 'mup' and width == 64 and seed == 1 and step == 0")
    rms = cell.query("quantity == 'activation'").set_index("layer")["rms"]
    assert rms["logits"] == pytest.approx(out.logits.square().mean().sqrt().item(), rel=1e-4)
    assert rms["residual 0"] == pytest.approx(out.hidden_states[1].square().mean().sqrt().item(), rel=1e-4)


def test_every_layer_is_measured_at_every_step(measured):
    layers = ["embedding", "attention 0", "mlp 0", "residual 0", "final norm", "logits"]
    assert set(layers) <= set(measured["layer"])
    assert sorted(measured["step"].unique()) == [0, 1, 2, 3, 4]
    assert (measured.query("quantity == 'update'")["step"] > 0).all()


def test_what_is_stored_is_not_measured_again_and_other_options_are_refused(measured, tiny, dataset):
    trial = tiny.replace(steps=4, warmup=0.0, schedule="constant", learning_rate=2.0**-7)
    stored = measured[measured["width"] == 32]
    said = []
    *_, table = measure(trial, dataset, (32, 64), ("sp", "mup"), 2, stored, said.append)
    assert said == ["width 64, sp", "width 64, mup"]
    pd.testing.assert_frame_equal(table, measured[measured["width"] <= 64].reset_index(drop=True))
    with pytest.raises(StoreError, match="adamw, tied True, but with other options"):
        next(measure(trial.replace(learning_rate=0.5), dataset, (32,), ("mup",), 1, stored))
    *_, table = measure(trial.replace(tied=False), dataset, (32, 64), ("mup",), 1, stored)
    parts = by_setting(table)
    assert set(parts) == {"adamw_tied", "adamw_untied"}
    assert len(parts["adamw_tied"]) == len(stored)


@pytest.mark.slow
def test_mup_slopes_lie_near_zero_or_below_and_sp_s_do_not(measured):
    fitted = slopes(measured)
    largest = fitted.groupby("parametrization")["slope"].max()
    assert largest["mup"] < 0.15
    assert largest["sp"] > 0.3
