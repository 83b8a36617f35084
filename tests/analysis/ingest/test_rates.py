"""Of a learning rate that was set and one that was logged, the former is used."""

import numpy as np
import pandas as pd
import pytest

from mup_tpu.analysis import check_table
from mup_tpu.errors import TableError
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [
        {"n_embd": w, "learning_rate": 2.0**x, "seed": s, "val/loss": 3 - w / 640 + 0.05 * (x + 8) ** 2}
        for w in (64, 128, 256)
        for x in range(-10, -5)
        for s in (0, 1)
    ]
)
RATE = RUNS["learning_rate"]
NAMES = [f"w{w}_lr{lr:.1e}_s{s}" for w, lr, s in zip(RUNS["n_embd"], RATE, RUNS["seed"], strict=True)]


def rates(table: pd.DataFrame) -> list[float]:
    return sorted(check_table(table).runs["x"].round(1).unique())


@pytest.mark.parametrize(
    "logged",
    [
        {"lr": RATE / 10},  # nanoGPT: the last value of a schedule down to a tenth
        {"train/lr": RATE / 10},
        {"train/lr": RATE * np.where(RUNS["n_embd"] > 64, 0.1, 0.3)},
        {"lr": RATE},
        {"optim.lr": RATE * 1.0000001},
    ],
    ids=["lr", "train/lr", "runs of other lengths", "a copy", "a rounded copy"],
)
def test_a_schedule_s_value_beside_the_rate_that_was_set(logged):
    assert rates(RUNS.assign(**logged)) == [-10, -9, -8, -7, -6]


def test_the_rate_that_is_not_used_is_noted():
    notes = notes_of(check_table(RUNS.assign(lr=RATE / 10)))
    assert "the learning rate is learning_rate, not lr (--tune chooses another)" in notes


@pytest.mark.parametrize("name", ["max_lr", "peak_lr", "config/lr"])
def test_a_peak_and_a_configured_rate_are_used_whatever_else_there_is(name):
    other = RATE * np.where(RUNS["n_embd"] > 64, 0.1, 0.3)
    assert rates(RUNS.rename(columns={"learning_rate": name}).assign(lr=other)) == [-10, -9, -8, -7, -6]


def test_two_rates_of_which_either_may_be_meant_are_shown_with_three_rows():
    other = np.where(RUNS["n_embd"] > 64, RATE * 2, RATE / 2)
    with pytest.raises(TableError) as error:
        check_table(RUNS.assign(lr=other))
    assert str(error.value) == (
        "columns learning_rate and lr may both be the learning rate (row 0: 0.000976562 and 0.000488281, "
        "row 2: 0.00195312 and 0.000976562, row 4: 0.00390625 and 0.00195312): say which with --tune"
    )


def test_a_rate_in_the_names_of_runs_is_what_was_set():
    """Names round: 9.8e-04 is 2^-10."""
    logged = RUNS.drop(columns=["learning_rate", "seed"]).assign(name=NAMES, lr=RATE / 10)
    assert rates(logged) == [-10, -9, -8, -7, -6]
    assert rates(logged.assign(lr=RATE)) == [-10, -9, -8, -7, -6]
    with pytest.raises(TableError, match="column lr and the names of the runs .* may both be the learning"):
        check_table(logged.assign(lr=RATE * 3))
