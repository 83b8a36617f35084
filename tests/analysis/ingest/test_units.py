"""Losses in bits: told from the column's name, converted, or refused with what is needed."""

import math

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import analyze, check_table
from mup_tpu.analysis.ingest.table_values import LossUnit
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of


def runs(column="loss", per_nat=1.0):
    """Runs at three widths whose valley is half a hundredth of a nat deep at an octave, in any unit."""
    rows = [
        {"width": width, "lr": 2.0**x, column: per_nat * (3 + 0.02 * (x + 7 + shift) ** 2), "seed": seed}
        for width, shift in ((64, 0.0), (128, 0.5), (256, 1.0))
        for x in range(-11, -3)
        for seed in (0, 1)
    ]
    table = pd.DataFrame(rows)
    table[column] += per_nat * np.random.default_rng(0).normal(0, 0.001, len(table))
    return table


def test_bits_per_byte_are_told_from_the_name_and_judged_as_nat_per_token():
    in_nat = analyze(runs()).results[0]
    table = check_table(runs("val_bpb", 1 / (math.log(2) * 4.5)), unit=LossUnit(bytes_per_token=4.5))
    found = analyze(table).results[0]
    assert found.headline_regret.value == pytest.approx(in_nat.headline_regret.value, rel=1e-3)
    assert found.verdict.decision == in_nat.verdict.decision
    assert any("val_bpb is in bits per byte" in note for note in notes_of(table))


def test_bits_per_byte_without_the_bytes_of_a_token_are_refused():
    with pytest.raises(TableError, match="val_bpb is in bits per byte.*give --bytes-per-token"):
        check_table(runs("val_bpb"))
    assert check_table(runs("val_bpb"), unit=LossUnit("nat")).runs["loss"].min() > 2.9


@pytest.mark.parametrize(
    ("unit", "sentence"),
    [
        ({"name": "dit"}, "loss_unit 'dit' is not one of auto, nat, bit, bpb"),
        ({"bytes_per_token": -1.0}, "bytes_per_token -1 is not allowed: it must be a finite number above 0"),
    ],
)
def test_units_that_are_none_are_one_sentence(unit, sentence):
    with pytest.raises(TableError, match=sentence):
        LossUnit(**unit)


def test_bits_a_token_are_asked_for_or_told():
    in_bits = runs(per_nat=1 / math.log(2))
    assert check_table(in_bits, unit=LossUnit("bit")).runs["loss"].min() == pytest.approx(3, abs=0.01)
    assert check_table(runs()).notes == ()
