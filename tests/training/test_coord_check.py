"""The coordinate check on real training: against a direct measurement, and its verdict on SP and μP."""

import dataclasses

import pandas as pd
import pytest
import torch

from mup_tpu.analysis.coord_check import by_setting, slopes
from mup_tpu.config import field_column
from mup_tpu.devices import get_device
from mup_tpu.errors import ConfigError, StoreError
from mup_tpu.models.weights import export_stock
from mup_tpu.rules.parametrization import PARAMETRIZATIONS, Scaling
from mup_tpu.training.coord_check import measure
from mup_tpu.training.pack import Pack


@pytest.fixture(scope="module")
def measured(tiny):
    trial = tiny.replace(steps=4, warmup=0.0, schedule="constant", learning_rate=2.0**-7)
    *_, table = measure(trial, {"width": (32, 64, 128)}, ("sp", "mup"), 2)
    return table


def test_logits_at_init_are_those_of_the_exported_stock_model(measured, tiny, dataset, tmp_path):
    from transformers import GPT2LMHeadModel

    trial = tiny.replace(width=64, parametrization="mup", seed=1)
    pack = Pack([trial], dataset.vocab_size, get_device("cpu"))
    export_stock(
        trial, pack.member_parameters(0), dataset.vocab_size, trial.data.sequence_length, 0, tmp_path
    )
    stock = GPT2LMHeadModel.from_pretrained(tmp_path)
    probe_BT = torch.from_numpy(dataset.validation_batches(1))[0, :, :-1]
    with torch.no_grad():
        out = stock(probe_BT, output_hidden_states=True)
    cell = measured.query("parametrization == 'mup' and width == 64 and seed == 1 and step == 0")
    rms = cell.query("quantity == 'activation'").set_index("layer")["rms"]
    assert rms["logits"] == pytest.approx(out.logits.square().mean().sqrt().item(), rel=1e-4)
    assert rms["residual 0"] == pytest.approx(out.hidden_states[1].square().mean().sqrt().item(), rel=1e-4)


def test_what_is_stored_is_not_measured_again_and_other_options_are_refused(measured, tiny):
    trial = tiny.replace(steps=4, warmup=0.0, schedule="constant", learning_rate=2.0**-7)
    stored = measured[measured["width"] == 32]
    said = []
    *_, table = measure(trial, {"width": (32, 64)}, ("sp", "mup"), 2, stored, lambda *of: said.append(of))
    assert list(dict.fromkeys(pack for pack, _ in said)) == ["width 64, sp", "width 64, mup"]
    assert [share for _, share in said] == pytest.approx([i / 10 for i in range(10)])  # 2 packs, 4 steps
    pd.testing.assert_frame_equal(table, measured[measured["width"] <= 64].reset_index(drop=True))
    with pytest.raises(StoreError, match="adamw, tied True, but with other options"):
        next(measure(trial.replace(learning_rate=0.5), {"width": (32,)}, ("mup",), 1, stored))
    *_, table = measure(trial.replace(tied=False), {"width": (32, 64)}, ("mup",), 1, stored)
    parts = by_setting(table)
    assert set(parts) == {"adamw_tied", "adamw_untied"}
    assert len(parts["adamw_tied"]) == len(stored)


@pytest.mark.slow
def test_mup_slopes_lie_near_zero_or_below_and_sp_s_do_not(measured):
    fitted = slopes(measured)
    largest = fitted.groupby("parametrization")["slope"].max()
    assert largest["mup"] < 0.15
    assert largest["sp"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [{"architecture": "llama", "qk_norm": True}, {"architecture": "moe"}], ids=str
)
def test_llama_is_flat_along_the_width_under_mup_and_completep_and_not_in_sp(tiny, own):
    """Its gated MLP multiplies two products, each of which grows as width in SP: 2 together."""
    trial = tiny.replace(steps=4, warmup=0.0, schedule="constant", learning_rate=2.0**-9, **own)
    scale = {"width": (32, 64, 128)}
    *_, table = measure(trial, scale, ("sp", "mup", "completep"), 1)
    largest = slopes(table).groupby("parametrization")["slope"].max()
    assert largest["mup"] < 0.2 and largest["completep"] < 0.2
    assert largest["sp"] > 1.5


def deep(tiny):
    return tiny.replace(steps=3, warmup=0.0, schedule="constant", learning_rate=2.0**-7, precision="float64")


@pytest.fixture(scope="module")
def by_depth(tiny):
    *_, table = measure(deep(tiny), {"depth": (1, 2, 4)}, ("sp", "mup"), 2)
    return table


def states(trial, vocab_size, batches):
    """A trial's weights before and after a few steps."""
    pack = Pack([trial], vocab_size, get_device("cpu"), "loop")
    weights = [{name: p.clone() for name, p in pack.member_parameters(0).items()}]
    for batch in batches:
        pack.step(torch.from_numpy(batch))
    return [*weights, {name: p.clone() for name, p in pack.member_parameters(0).items()}]


def stock_outputs(trial, weights, dataset, folder):
    """Streams between the blocks of the exported stock model, and its blocks, in float64."""
    from transformers import GPT2LMHeadModel

    export_stock(trial, weights, dataset.vocab_size, trial.data.sequence_length, 0, folder)
    stock = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").double()
    for block, own in zip(stock.transformer.h, range(trial.model.depth), strict=True):
        prefix = f"transformer.h.{own}."  # what was exported is float32
        block.load_state_dict({n.removeprefix(prefix): p for n, p in weights.items() if n.startswith(prefix)})
    probe_BT = torch.from_numpy(dataset.validation_batches(1))[0, :, :-1]
    streams = []
    hooks = [b.register_forward_pre_hook(lambda m, x: streams.append(x[0])) for b in stock.transformer.h]
    hooks.append(stock.transformer.ln_f.register_forward_pre_hook(lambda m, x: streams.append(x[0])))
    with torch.no_grad():
        stock(probe_BT)
    for hook in hooks:
        hook.remove()
    return streams, list(stock.transformer.h)


def test_along_the_depth_blocks_are_measured_as_the_stock_model_computes_them(
    by_depth, tiny, dataset, tmp_path
):
    """What blocks add, its change, and the stream behind the last, from the stock class of transformers."""
    trial = deep(tiny).replace(depth=4, base_depth=1, parametrization="sp", seed=1)
    weights = states(trial, dataset.vocab_size, [dataset.train_batch(step) for step in range(3)])
    found = [stock_outputs(trial, w, dataset, tmp_path / f"{i}")[0] for i, w in enumerate(weights)]
    added = [
        torch.stack([after - before for before, after in zip(streams, streams[1:], strict=False)])
        for streams in found
    ]
    cell = by_depth.query("parametrization == 'sp' and depth == 4 and seed == 1 and step == 3")
    rms = cell.set_index(["quantity", "layer"])["rms"]
    for key, tensor in (
        (("activation", "block"), added[1]),
        (("update", "block"), added[1] - added[0]),
        (("activation", "last residual"), found[1][-1]),
        (("update", "last residual"), found[1][-1] - found[0][-1]),
    ):
        assert rms[key] == pytest.approx(tensor.square().mean().sqrt().item(), rel=1e-5), key


def test_distance_from_linearization_is_that_of_reverse_mode_derivatives(by_depth, tiny, dataset, tmp_path):
    """The expansion of the stock class's blocks, a coordinate at a time, as Dey et al. make it."""
    trial = deep(tiny).replace(depth=2, base_depth=1, parametrization="sp", seed=0)
    before, after = states(trial, dataset.vocab_size, [dataset.train_batch(step) for step in range(3)])
    streams, blocks = stock_outputs(trial, before, dataset, tmp_path)
    chosen = torch.randperm(streams[0].numel(), generator=torch.Generator().manual_seed(0))[:300]
    off, linear = [], []
    for i, block in enumerate(blocks):
        change = {n: after[f"transformer.h.{i}.{n}"] - p.detach() for n, p in block.named_parameters()}
        added = block(streams[i])
        added = (added[0] if isinstance(added, tuple) else added) - streams[i]
        values = []
        for c in chosen:
            slopes_at = torch.autograd.grad(added.flatten()[c], list(block.parameters()), retain_graph=True)
            values.append(sum((g * d).sum() for g, d in zip(slopes_at, change.values(), strict=True)))
        first_order = added.flatten()[chosen].detach() + torch.stack(values)
        with torch.no_grad():
            for name, p in block.named_parameters():
                p.add_(change[name])
            moved = block(streams[i])
            moved = (moved[0] if isinstance(moved, tuple) else moved) - streams[i]
        off.append(moved.flatten()[chosen] - first_order)
        linear.append(first_order)
    expected = torch.stack(off).norm() / torch.stack(linear).norm()
    cell = by_depth.query(
        "parametrization == 'sp' and depth == 2 and seed == 0 and step == 3 and quantity == 'linearization'"
    )
    # 300 of 8 192 coordinates a block: their ratio scatters by a few percent.
    assert cell["rms"].item() == pytest.approx(expected.item(), rel=0.1)
    assert cell["layer"].item() == "block"


def test_a_scale_has_its_smallest_point_as_base_and_may_be_one_of_the_data(tiny):
    for scale in ({"batch_size": (1, 2, 4)}, {"steps": (4, 8, 16)}):
        *_, table = measure(deep(tiny), scale, ("mup",), 1)
        ((field, values),) = scale.items()
        assert sorted(table[field_column(field)].unique()) == sorted(values)
        assert table["step"].max() == 3
        assert set(table["quantity"]) == {"activation", "update"}
    assert slopes(table)["slope"].notna().all()


@pytest.mark.parametrize("scale", [{"seed": (0, 1)}, {"schedule": ("linear", "cosine")}])
def test_what_is_no_way_of_growing_is_refused(scale, tiny):
    (field,) = scale
    with pytest.raises(ConfigError, match=f"scale {field} of a coordinate check is no axis of growth"):
        next(measure(tiny, scale, ("mup",), 1))


def test_a_check_along_another_scale_is_not_mixed_with_a_stored_one(measured, tiny):
    with pytest.raises(StoreError, match="along another scale than depth is stored there"):
        next(measure(deep(tiny), {"depth": (1, 2)}, ("mup",), 1, measured))


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
    scaled by 1/√m: with Adam's own 1/m what they change dies out with width, without a factor it grows."""
    mup = PARAMETRIZATIONS["mup"]
    for other, power in (("no factor", 0), ("adam's 1/m", 1)):

        def rule(parameter, infshape, growth, power=power):
            m = infshape.width_mult()
            return Scaling(init=m**-0.5, learning_rate=m**-power)

        rules = {**mup.parameters, "muon_match_rms_adamw": rule, "adamh": rule}
        monkeypatch.setitem(PARAMETRIZATIONS, other, dataclasses.replace(mup, parameters=rules))  # type: ignore[arg-type]
    trial = tiny.replace(
        steps=4, warmup=0.0, schedule="constant", **own, learning_rate=2.0**-5, adamw_lr_ratio=1e-9
    )
    *_, table = measure(trial, {"width": (32, 64, 128)}, (name,), 1)
    found = slopes(table).query("quantity == 'update'").set_index("layer")["slope"]
    # Attention's softmax and the readout, whose weights do not learn here, have exponents of their own.
    exponents = found[[layer for layer in found.index if layer.startswith(("mlp", "residual"))]]
    assert len(exponents) == 4
    if flat:
        assert exponents.abs().max() < 0.15, exponents
    elif name == "no factor":
        assert exponents.min() > 0.3, exponents
    else:
        assert exponents.max() < -0.3, exponents
