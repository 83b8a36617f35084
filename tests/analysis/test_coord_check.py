"""Exponents of coordinate checks, on tables that follow known powers of width."""

import pandas as pd
import pytest

from mup_tpu.analysis.diagnosis import exponents, layer_exponents, laziness
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


def test_exponents_are_those_after_the_last_step():
    fits = layer_exponents(measured({"logits": 0.5, "mlp 0": -0.25}))
    assert list(fits) == [("mup", "activation", "logits"), ("mup", "activation", "mlp 0")]
    for fit, value in zip(fits.values(), (0.5, -0.25), strict=True):
        assert fit.value == pytest.approx(value) and fit.low <= fit.value <= fit.high


def test_a_layer_of_zeros_has_no_exponent():
    assert not layer_exponents(measured({"logits": 0.5}).assign(rms=0.0))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda table: table[table["width"] == 64], "at least 2 widths, the table has 1"),
        (lambda table: table.drop(columns="rms"), "no column 'rms'"),
        (lambda table: table.assign(batch_size=4), "one scale, this one has 'width', 'batch_size'"),
    ],
)
def test_tables_that_cannot_be_fitted(change, sentence):
    with pytest.raises(TableError, match=sentence):
        layer_exponents(change(measured({"logits": 0.5})))


@pytest.mark.parametrize(
    ("exponent", "scatter", "words"),
    [(-1.0, 0.0, "turn lazy"), (0.1, 0.0, "do not turn lazy"), (-0.4, 0.5, "may turn lazy")],
)
def test_a_check_along_the_depth_says_whether_blocks_turn_lazy(exponent, scatter, words):
    table = measured({"blocks": exponent}, (2, 4, 8, 16), steps=(4,)).rename(columns={"width": "depth"})
    noise = 1 + scatter * (table["depth"] % 3 == 1)
    table = table.assign(quantity="linearization", rms=table["rms"] * noise)
    assert f"blocks {words}: distance" in laziness(exponents(table, "depth"), "depth")
