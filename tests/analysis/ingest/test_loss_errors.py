"""Tables of means: their standard errors are found, and set how much an optimum is known."""

import pandas as pd
import pytest

from mup_tpu.analysis import analyze, load_table
from mup_tpu.words.reasons import notes as notes_of

RUNS = pd.DataFrame(
    [(w, 2.0**e, 3 - w / 640 + 0.05 * (e + 8) ** 2) for w in (64, 128, 256) for e in range(-10, -5)],
    columns=["width", "lr", "val_loss"],
)


def table_of(runs, tmp_path):
    runs.to_csv(tmp_path / "runs.csv", index=False)
    return load_table(tmp_path / "runs.csv")


@pytest.mark.parametrize("sign", ["±", " ± ", "+/-", " +- "])
def test_errors_behind_a_sign_are_the_losses_own(sign, tmp_path):
    cells = [f"{loss:.4f}{sign}{0.002 * (1 + i % 2)}" for i, loss in enumerate(RUNS["val_loss"])]
    table = table_of(RUNS.assign(val_loss=cells), tmp_path)
    assert table.runs["loss"].tolist() == pytest.approx(RUNS["val_loss"].tolist())
    assert table.runs["loss_error"].tolist() == pytest.approx([0.002 * (1 + i % 2) for i in range(15)])
    assert any("standard errors of its means" in note for note in notes_of(table))


def test_a_diverged_mean_has_no_error(tmp_path):
    cells = [f"{loss:.4f} ± 0.002" for loss in RUNS["val_loss"]]
    table = table_of(RUNS.assign(val_loss=[*cells[:-1], "inf"]), tmp_path)
    assert table.runs["loss"].tolist()[-1] == float("inf")


@pytest.mark.parametrize("loss", ["val_loss", "eval_loss", "loss"])
def test_columns_of_errors_and_of_deviations_with_their_counts_are_the_same(loss, tmp_path):
    runs = RUNS.rename(columns={"val_loss": loss})
    deviations = table_of(runs.assign(**{f"{loss}_std": 0.01, "n_seeds": 4}), tmp_path)
    assert deviations.runs["loss_error"].tolist() == pytest.approx([0.005] * 15)
    note = f"the standard error of {loss} is {loss}_std over the square root of n_seeds"
    assert note in notes_of(deviations)
    for name in (f"{loss}_se", "stderr"):
        assert table_of(runs.assign(**{name: 0.005}), tmp_path).runs["loss_error"].tolist() == [0.005] * 15
    both = table_of(runs.assign(**{"stderr": 9.0, f"{loss}_se": 0.005}), tmp_path)
    assert both.runs["loss_error"].tolist() == [0.005] * 15, "the loss's name comes before none"


def test_larger_errors_make_wider_intervals(tmp_path):
    narrow, wide = (
        analyze(table_of(RUNS.assign(val_loss_se=error), tmp_path)).results[0].optima[0]
        for error in (0.001, 0.02)
    )
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_a_deviation_of_an_unknown_number_of_runs_is_not_used(tmp_path):
    table = table_of(RUNS.assign(val_loss_std=0.01), tmp_path)
    assert table.runs["loss_error"].isna().all()
    assert any("val_loss_std is not used: its number of runs is needed" in note for note in notes_of(table))
