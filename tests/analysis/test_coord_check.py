"""Slopes of the coordinate check, on tables that follow known powers of width."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis.coord_check import conclusions, scale_of, slopes
from mup_tpu.errors import TableError


def measured(exponents, widths=(64, 128, 256, 512), steps=(0, 1, 2), seeds=2) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "parametrization": "mup", "width": w, "seed": s, "step": t, "layer": layer,
                "quantity": "activation", "rms": (1 + 0.1 * s) * 3.0 * w ** (e * t / max(steps)),
            }
            for layer, e in exponents.items() for w in widths for t in steps for s in range(seeds)
        ]
    )  # fmt: skip


def test_slope_is_the_exponent_at_the_last_step():
    fitted = slopes(measured({"logits": 0.5, "mlp 0": -0.25})).set_index("layer")
    assert fitted.loc["logits", "slope"] == pytest.approx(0.5)
    assert fitted.loc["mlp 0", "slope"] == pytest.approx(-0.25)
    assert (fitted["low"] <= fitted["slope"]).all()
    assert (fitted["slope"] <= fitted["high"]).all()


def test_slope_at_an_earlier_step():
    assert slopes(measured({"logits": 0.5}), step=0)["slope"].iloc[0] == pytest.approx(0.0, abs=1e-9)


def test_a_layer_of_zeros_has_no_slope():
    table = measured({"logits": 0.5}).assign(rms=0.0)
    assert np.isnan(slopes(table)["slope"].iloc[0])


def test_layers_keep_their_order_in_the_network():
    assert slopes(measured({"z": 0.0, "a": 0.1}))["layer"].tolist() == ["z", "a"]


def test_tables_that_cannot_be_fitted():
    with pytest.raises(TableError, match="at least 2 widths, the table has 1"):
        slopes(measured({"logits": 0.5}, widths=(64,)))
    with pytest.raises(TableError, match="no column 'rms'"):
        slopes(measured({"logits": 0.5}).drop(columns="rms"))


def along_depth(exponents) -> pd.DataFrame:
    """A layer's size and blocks' distance from linearization as powers of depth, by name of a rule."""
    rows = []
    for name, (size, distance) in exponents.items():
        table = measured({"last residual": size, "logits": 0.0}, widths=(2, 4, 8, 16))
        distances = measured({"block": distance}, widths=(2, 4, 8, 16)).assign(quantity="linearization")
        rows.append(pd.concat([table, distances]).assign(parametrization=name))
    return pd.concat(rows, ignore_index=True).rename(columns={"width": "depth"})


def test_along_the_depth_it_says_what_grows_and_whether_blocks_turn_lazy():
    table = along_depth({"mup": (1.0, 0.1), "half": (0.0, -1.0)})
    assert scale_of(table) == "depth"
    half, mup = conclusions(table)
    assert half.parametrization == "half" and half.passes and half.linearization[0].is_lazy
    assert half.linearization[0].value == pytest.approx(-1.0)
    assert not mup.passes and mup.linearization[0].is_lazy is False
    fastest = mup.fastest
    assert (fastest.quantity, fastest.layer, fastest.value) == (
        "activation",
        "last residual",
        pytest.approx(1),
    )
    with pytest.raises(TableError, match="at least 2 depths, the table has 1"):
        slopes(table[table["depth"] == 2])


def test_laziness_that_the_interval_leaves_open_is_said_so():
    table = along_depth({"mup": (0.0, -0.3)})
    noise = np.where(table["seed"] == 0, 1.0, 3.0) * np.where(table["depth"] % 3 == 1, 1.5, 1.0)
    (mup,) = conclusions(table.assign(rms=table["rms"] * noise))
    assert mup.linearization[0].is_lazy is None


def test_a_table_of_several_scales_is_refused():
    table = measured({"logits": 0.5}).rename(columns={"width": "depth"}).assign(batch_size=4)
    with pytest.raises(TableError, match="several scales: 'depth', 'batch_size'"):
        slopes(table)
