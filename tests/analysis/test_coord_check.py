"""Slopes of the coordinate check, on tables that follow known powers of width."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis.coord_check import slopes
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
