"""One list of columns: every field of a trial has one; rows of earlier versions get those that came since."""

import dataclasses
from pathlib import Path

from mup_tpu.config import PARTS, Trial, columns
from mup_tpu.store import load_runs

RESULTS = Path(__file__).parents[2] / "results"


def test_every_field_of_a_trial_has_a_column_that_holds_its_value():
    row, trial = columns.configured(Trial()), Trial()
    for part, field in ((part, f.name) for part, cls in PARTS.items() for f in dataclasses.fields(cls)):
        (column,) = (c for c in columns.CONFIGURED.values() if (c.part, c.field) == (part, field))
        value = row[column.name]
        assert isinstance(value, column.type) and value == getattr(getattr(trial, part), field)


def test_titles_say_the_unit_and_other_peoples_columns_their_name():
    assert columns.title("flops") == "compute (FLOP)"
    assert columns.title("batch_size") == "batch size (sequences)"
    assert columns.title("d_model") == "d_model"
    assert columns.write("lr", 2**-7) == columns.write("learning_rate", 2**-7) == "2^-7"
    assert columns.write("weight_decay", 0.1) == "0.1"


def test_head_size_is_the_configured_one_and_the_actual_one_has_a_column_of_its_own():
    runs = load_runs(RESULTS / "ablations" / "growing_head_size")
    assert set(runs["head_size"]) == {32}
    assert (runs["actual_head_size"] == runs["width"] // 2).all()
